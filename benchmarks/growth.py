"""How cost grows: a step with the batch and with the context, scheduling with the requests, a lookup with the prompt.

    python -m benchmarks.growth --model FOLDER --out growth.json [--plot PREFIX] [--batches 1,2,4] [--contexts 1024]

step       milliseconds of a decode step of the engine core, from two lengths of answer: by batch size (contexts of 128
           tokens), and of one request by the length of its context
scheduler  microseconds per running request and step, as `benchmarks/scheduler.py` counts them
lookup     milliseconds until a prompt's cached prefix is found: nothing cached, all cached
memory     KiB that a request holds in the core, waiting and running (prompts of 512 tokens, 32 tokens generated)
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import tracemalloc
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.h200.core_step import Core
from benchmarks.plot import Line, chart
from benchmarks.scheduler import measure as measure_scheduler
from vllm.core.kv_manager import KVManager
from vllm.core.request import Request
from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.step.messages import CoreRequest
from vllm.step.result import StepResult

BLOCK = 16
LAYOUT = KVLayout.alike((KVGroup(KVKind.FULL, (0,)),), BLOCK, 1, 64, 2)
SHORT, LONG = 8, 40  # tokens of the two answers whose difference is timed
REPEATS = 3


def step_ms(core: Core, requests: int, context: int) -> float:
    """From the fastest of a few runs of both lengths."""
    core.run(requests, context, SHORT)
    long, short = (min(core.run(requests, context, out) for _ in range(REPEATS)) for out in (LONG, SHORT))
    return 1e3 * (long - short) / (LONG - SHORT)


def steps(model: str, batches: list[int], contexts: list[int]) -> dict[str, Any]:
    core = Core(model, enable_prefix_caching=False, max_model_len=max([*contexts, 128]) + 64)
    rows: dict[str, Any] = {"by_batch": {}, "by_context": {}}
    for batch in batches:
        rows["by_batch"][batch] = step_ms(core, batch, 128)
        print(f"step of {batch} requests: {rows['by_batch'][batch]:.2f} ms", flush=True)
    for context in contexts:
        rows["by_context"][context] = step_ms(core, 1, context)
        print(f"step behind {context} tokens: {rows['by_context'][context]:.2f} ms", flush=True)
    return rows


def lookup_ms(tokens: int) -> dict[str, float]:
    """Time of `attach_prefix` for a prompt of `tokens` tokens when nothing of it, and when all of it, is cached."""
    manager = KVManager(LAYOUT.policy, 2 * tokens // BLOCK + 8)
    times = []
    for number in range(2):
        message = CoreRequest(str(number), [i % 50_000 for i in range(tokens)], SamplingParams(), seed=0)
        request = Request(message, tokens + 16, 1, number)
        begin = time.perf_counter()
        manager.attach_prefix(request)
        times.append(1e3 * (time.perf_counter() - begin))
        manager.grow(request, tokens, [], [])
        manager.register_full_blocks(request, tokens)
        manager.settle()
    return {"nothing_cached": times[0], "all_cached": times[1]}


def memory_kib(requests: int = 500, prompt: int = 512, generated: int = 32) -> dict[str, float]:
    """What one more request costs the core's memory."""
    messages = [
        CoreRequest(str(i), [(i + j) % 50_000 + 300 for j in range(prompt)], SamplingParams(max_tokens=64), seed=i)
        for i in range(requests)
    ]
    limits = SchedulerLimits(requests, requests * prompt, 2048)
    tracemalloc.start()
    scheduler = Scheduler(limits, LAYOUT.policy, requests * 64)
    before = tracemalloc.get_traced_memory()[0]
    for message in messages:
        scheduler.add(message)
    waiting = tracemalloc.get_traced_memory()[0] - before
    for _ in range(generated):
        plan = scheduler.schedule()
        if plan is None:
            raise RuntimeError("Nothing was planned.")
        scheduler.apply(StepResult(plan.step_id, [5 if s else -1 for s in plan.sample.tolist()]))
    running = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"waiting": waiting / requests / 1024, "running": running / requests / 1024}


def plots(result: dict[str, Any]) -> dict[str, str]:
    """SVG images by name."""

    def line(name: str, points: dict[str, float]) -> Line:
        return Line(name, sorted((float(x), y) for x, y in points.items()))

    step, ms, model = result["step"], "milliseconds", result["model"]
    lookups = [line(name.replace("_", " "), points) for name, points in result["lookup_ms"].items()]
    scheduled = [line("microseconds per request", result["scheduler_us"])]
    return {
        "batch": chart(f"Decode step: {model}", "requests", ms, [line("128 tokens of context", step["by_batch"])]),
        "context": chart(f"Decode step: {model}", "tokens of context", ms, [line("one request", step["by_context"])]),
        "scheduler": chart("Scheduling a step", "running requests", "microseconds", scheduled),
        "lookup": chart("Looking a prompt up in the prefix cache", "tokens of the prompt", ms, lookups),
    }


def integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with config.json; weights are random")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", help="also draw PREFIX-batch.svg, -context.svg, -scheduler.svg and -lookup.svg")
    parser.add_argument("--batches", type=integers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=integers, default=[128, 1024, 4096])
    args = parser.parse_args()
    lengths = [1024, 4096, 16384, 65536, 131072]
    lookups = {n: lookup_ms(n) for n in lengths}
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "model": Path(args.model).name,
        "scheduler_us": {n: measure_scheduler(n, 100)["total_us_per_request"] for n in (1, 10, 100, 1000)},
        "lookup_ms": {kind: {n: lookups[n][kind] for n in lengths} for kind in ("nothing_cached", "all_cached")},
        "memory_kib": memory_kib(),
        "step": steps(args.model, args.batches, args.contexts),
    }
    for name in ("scheduler_us", "lookup_ms", "memory_kib"):
        print(name, result[name])
    args.out.write_text(json.dumps(result, indent=1))
    if args.plot is not None:
        for name, image in plots(json.loads(args.out.read_text())).items():
            Path(f"{args.plot}-{name}.svg").write_text(image)


if __name__ == "__main__":
    main()
