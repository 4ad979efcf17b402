"""What the first requests of an engine core wait for, after so many idle seconds in which it may prepare itself.

    python -m benchmarks.h200.cold_core /tmp/models/qwen3-0.6b --idle 1.5

Four prompts of 256 tokens one after the other, drawn and greedy in turn; then sixteen at once. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any


def prepare(engine: Any, seconds: float) -> dict[str, Any]:
    """Let the core do what it does in idle moments."""
    import torch

    end = time.perf_counter() + seconds
    pieces, longest, more = 0, 0.0, True
    while (begin := time.perf_counter()) < end:
        more = more and engine.prepare()
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        pieces, longest = pieces + more, max(longest, took)
        time.sleep(0.005 if took < 1e-3 else 0.0)
    return {"pieces": pieces, "longest_piece_ms": round(longest * 1e3, 1), "left": more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--idle", type=float, default=1.5, help="seconds between the start and the first request")
    args = parser.parse_args()
    begin = time.perf_counter()
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.core import EngineCore
    from vllm.step.messages import CoreRequest

    engine_args = EngineArgs(
        model=args.model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096
    )
    engine = EngineCore(engine_args.create_engine_config())
    result: dict[str, Any] = {"idle": args.idle, "ready_s": round(time.perf_counter() - begin, 2)}
    result |= prepare(engine, args.idle)
    rng = random.Random(1)

    def run(names: list[str], lengths: list[int], tokens: int, temperature: float) -> tuple[float, float, float]:
        """Milliseconds to the first token, to the end, and the longest between two steps that brought something."""
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        prompts = [rng.choices(range(100, 30000), k=length) for length in lengths]
        begin = last = time.perf_counter()
        engine.add_requests([CoreRequest(n, p, params, seed=3) for n, p in zip(names, prompts, strict=True)])
        first, gap = 0.0, 0.0
        while engine.has_unfinished():
            if engine.step():
                now = time.perf_counter()
                first, gap, last = first or now - begin, max(gap, now - last), now
        return first * 1e3, (time.perf_counter() - begin) * 1e3, gap * 1e3

    alone = [run([str(i)], [256], 16, 0.0 if i % 2 else 0.8) for i in range(4)]
    _, whole, gap = run([f"m{i}" for i in range(16)], [200 + 5 * i for i in range(16)], 32, 0.0)
    result |= {
        "ttft_ms": [round(first, 1) for first, _, _ in alone],
        "16_tokens_ms": [round(end, 1) for _, end, _ in alone],
        "sixteen_s": round(whole * 1e-3, 3),
        "longest_gap_ms": round(gap, 1),
    }
    print(json.dumps(result))
    engine.shutdown()


if __name__ == "__main__":
    main()
