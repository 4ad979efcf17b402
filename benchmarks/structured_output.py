"""What a grammar costs per token: guided against free decoding of equally many tokens, in turns, on the demo model.

    python -m benchmarks.structured_output [--batch 1 32] [--rounds 9] [--backend guidance]

Prints, per batch size, the median of the paired ratios (guided / free) of the time per output token and its quartiles,
as it passes and as CPU time of all threads (on a busy machine look at the latter; masks of many rows are computed
beside the forward pass, which saves none of it). Grammars are compiled before the clock runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams

TOKENS = 128
# Long enough that no text ends before it has as many tokens as the free ones.
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mood": {"enum": ["happy", "sad", "tired"]},
        },
        "required": ["name", "age", "mood"],
        "additionalProperties": False,
    },
}


def seconds_per_token(llm: LLM, batch: int, params: SamplingParams) -> tuple[float, float]:
    """Time that passes, and CPU time."""
    prompts: list[Any] = [f"People, as JSON, number {i}:" for i in range(batch)]
    started = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started[0], time.process_time() - started[1]
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    if counts != [TOKENS] * batch:
        raise RuntimeError(f"Expected {TOKENS} tokens of each, got {counts}.")
    return seconds[0] / TOKENS, seconds[1] / TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", default="guidance")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    llm = LLM(args.model, enable_prefix_caching=False)
    common: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
    free = SamplingParams(**common)
    guided = SamplingParams(
        **common, guided_decoding=GuidedDecodingParams(json=SCHEMA, backend=f"{args.backend}:no-fallback")
    )
    for batch in args.batch:
        pairs = []
        for i in range(args.rounds + 1):
            order = (free, guided) if i % 2 else (guided, free)
            times = {id(params): seconds_per_token(llm, batch, params) for params in order}
            if i:  # the first one warms up
                pairs.append((times[id(free)], times[id(guided)]))
        for i, clock in enumerate(("time", "CPU time")):
            ratios = sorted(g[i] / f[i] for f, g in pairs)
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"batch {batch}, {clock}: free {1e3 * statistics.median(f[i] for f, _ in pairs):.3f} ms, guided "
                f"{1e3 * statistics.median(g[i] for _, g in pairs):.3f} ms per token of each; ratio {middle:.3f} "
                f"(quartiles {low:.3f} to {high:.3f}, {len(ratios)} pairs)"
            )


if __name__ == "__main__":
    main()
