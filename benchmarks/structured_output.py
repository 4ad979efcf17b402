"""What a grammar costs per token: guided against free decoding of equally many tokens, in turns, on the demo model.

    python -m benchmarks.structured_output [--batch 1 32] [--rounds 9] [--backend guidance] [--served]

Prints, per batch size, the median of the paired ratios (guided / free) of the time per output token and its quartiles.
Offline: as it passes and as CPU time of all threads (on a busy machine look at the latter). Served: of streams, from
the first event with text to the last, as clients see it. Grammars are compiled before the clock runs; no two rounds
have the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from typing import Any

from benchmarks.attacks import serving
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


_NUMBERS = itertools.count(1, 64)


def seconds_per_token(llm: LLM, batch: int, params: SamplingParams) -> tuple[float, float]:
    """Time that passes, and CPU time."""
    first = next(_NUMBERS)  # no two rounds ask for the same
    prompts: list[Any] = [f"People, as JSON, number {first + i}:" for i in range(batch)]
    started = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started[0], time.process_time() - started[1]
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    if counts != [TOKENS] * batch:
        raise RuntimeError(f"Expected {TOKENS} tokens of each, got {counts}.")
    return seconds[0] / TOKENS, seconds[1] / TOKENS


async def stream(port: int, body: dict[str, Any]) -> float:
    """Seconds from the first event with text to the last one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    first = last = 0.0
    received = []
    while part := await reader.read(1 << 16):
        received.append(part)
        if b'"text"' in part:
            last = time.perf_counter()
            first = first or last
    writer.close()
    text = b"".join(received)
    if b" 200 " not in text.split(b"\r\n", 1)[0] or b'"finish_reason": "length"' not in text:
        raise RuntimeError(f"A stream did not bring {TOKENS} tokens: {text[:300]!r}")
    return last - first


async def streams(port: int, batch: int, more: dict[str, Any]) -> float:
    """Mean seconds per token after the first of equally many streams at once."""
    common = {"model": "demo", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True, **more}
    first = next(_NUMBERS)
    bodies = [{**common, "prompt": f"People, as JSON, number {first + i}:"} for i in range(batch)]
    return statistics.mean(await asyncio.gather(*(stream(port, body) for body in bodies))) / (TOKENS - 1)


def served(args: argparse.Namespace) -> None:
    """The ratios of streams from a server of the demo model."""
    guided = {"guided_json": SCHEMA, "guided_decoding_backend": f"{args.backend}:no-fallback"}
    with serving() as (port, _):
        for batch in args.batch:
            pairs = []
            for i in range(args.rounds + 1):
                order: list[dict[str, Any]] = [{}, guided] if i % 2 else [guided, {}]
                times = {bool(more): asyncio.run(streams(port, batch, more)) for more in order}
                if i:  # the first one warms up
                    pairs.append((times[False], times[True]))
            report(f"batch {batch}, served", pairs)


def report(what: str, pairs: list[tuple[float, float]]) -> None:
    """pairs: seconds per token, free and guided."""
    ratios = sorted(guided / free for free, guided in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{what}: free {1e3 * statistics.median(free for free, _ in pairs):.3f} ms, guided "
        f"{1e3 * statistics.median(guided for _, guided in pairs):.3f} ms per token of each; ratio {middle:.3f} "
        f"(quartiles {low:.3f} to {high:.3f}, {len(ratios)} pairs)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", default="guidance")
    parser.add_argument("--served", action="store_true", help="streams from a server")
    args = parser.parse_args()
    if args.served:
        served(args)
        return
    llm = LLM("demo", enable_prefix_caching=False)
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
            report(f"batch {batch}, {clock}", [(f[i], g[i]) for f, g in pairs])


if __name__ == "__main__":
    main()
