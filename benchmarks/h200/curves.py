"""How decoding and prompts grow with the context, and a step with the batch, through the engine core; steps whose
prompts would take too long alone (`decode_step`).

    python -m benchmarks.h200.curves --model /tmp/models/llama-3.1-8b --out curves.json
    python -m benchmarks.plot curves.json docs/images/h200

decode, prefill   by batch, then by tokens of context: milliseconds of a step behind prompts of that length, and seconds
                  until all of them have a first token; up to --tokens tokens in all
by_batch          milliseconds of a step behind prompts of 128 tokens
bare              of `decode`: steps measured alone, over a cache of random numbers, up to --bare tokens in all
Weights and prompts are random.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.core_step import Core
from benchmarks.h200.shapes import commit
from benchmarks.h200.tune_decode import Bench
from vllm import SamplingParams
from vllm.step.messages import CoreRequest

STEPS = 40  # after the first token of the last request; the middle of the last three quarters is taken


def together(core: Core, requests: int, tokens: int) -> tuple[float, float]:
    """Seconds until every request has its first token, and milliseconds of a step when all of them decode."""
    params = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
    batch = []
    for _ in range(requests):
        core.count += 1
        batch.append(CoreRequest(str(core.count), core.rng.choices(range(core.vocab), k=tokens), params, seed=1))
    waiting, times = {r.request_id for r in batch}, []
    begin = time.perf_counter()
    core.core.add_requests(batch)
    while waiting or len(times) <= STEPS:
        outputs = core.core.step()
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            if output.new_token_ids:
                waiting.discard(output.request_id)
        if not waiting and outputs:
            times.append(time.perf_counter())
    core.core.abort([r.request_id for r in batch])
    while core.core.has_unfinished():
        core.core.step()
    gaps = [b - a for a, b in zip(times[STEPS // 4 :], times[STEPS // 4 + 1 :], strict=False)]
    return times[0] - begin, statistics.median(gaps) * 1e3


def bare_step(folder: str, rows: int, tokens: int) -> float:
    """Milliseconds of the fused step of `rows` requests of so many tokens."""
    with torch.inference_mode():
        return Bench(folder, rows, tokens, "cuda").milliseconds(reps=15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--contexts", default="1024,2048,4096,8192,16384,32768,65536,129000")
    parser.add_argument("--tokens", type=int, default=270_000, help="of a batch, at most")
    parser.add_argument("--bare", type=int, default=540_000)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,96,128,192,256,384,512")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    contexts = [int(n) for n in args.contexts.split(",")]
    batches = [int(n) for n in args.batches.split(",") if n]
    core = Core(
        args.model, max_model_len=max(contexts) + 1024, max_num_seqs=max([*batches, 32]), enable_prefix_caching=False
    )
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "model": Path(args.model).name,
        "by_batch": {},
        "decode": {},
        "prefill": {},
        "bare": {},
    }
    together(core, max(batches, default=1), 128)  # what is first used by large steps is there
    for n in batches:
        result["by_batch"][n] = together(core, n, 128)[1]
        print(f"step of {n}: {result['by_batch'][n]:.3f} ms", flush=True)
        Path(args.out).write_text(json.dumps(result, indent=1))
    for rows in (int(n) for n in args.rows.split(",")):
        for context in contexts:
            if rows * context > args.tokens:
                continue
            seconds, ms = together(core, rows, context)
            if rows * context <= 40_000:  # what happens once would show
                seconds = min(seconds, together(core, rows, context)[0])
            result["decode"].setdefault(rows, {})[context] = ms
            result["prefill"].setdefault(rows, {})[context] = seconds
            print(f"{rows} x {context}: prompts {seconds:.3f} s, then steps of {ms:.3f} ms", flush=True)
            Path(args.out).write_text(json.dumps(result, indent=1))
    core.core.shutdown()
    del core
    gc.collect()
    torch.cuda.empty_cache()
    for rows in (int(n) for n in args.rows.split(",")):
        for context in (c for c in contexts if args.tokens < rows * c <= args.bare):
            result["decode"].setdefault(rows, {})[context] = ms = bare_step(args.model, rows, context)
            result["bare"].setdefault(rows, []).append(context)
            print(f"{rows} x {context}: a step alone {ms:.3f} ms", flush=True)
            torch.cuda.empty_cache()
            Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
