"""The fused decode step alone, in one CUDA graph, greedy, with random weights: milliseconds by model and rows.

    python -m benchmarks.h200.decode_step --models /tmp/models/phi-2,/tmp/models/gemma2-9b --out step.json [--profile 1]

floor_ms: reading once what a step of so many rows reads (of experts: as many as its tokens can choose) and the cached
keys, at the bandwidth that the same run measured.   --profile: also the kernels of a step of so many rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.h200.quantized import KINDS
from benchmarks.h200.timing import capture, ceilings, device_ms
from benchmarks.h200.tune_decode import Bench
from vllm.ops.triton.precompile import precompile
from vllm.worker.decode_weights import Linear, MoeWeights, ProgramWeights


def bytes_read(w: ProgramWeights, rows: int, context: int) -> int:
    """Of weights and cached keys and values, each once."""

    def size(*parts: Linear) -> int:
        weights = [part.weight for part in parts]
        return sum(w.numel() * w.element_size() if isinstance(w, torch.Tensor) else w.num_bytes for w in weights)

    total = size(Linear(w.head))
    for layer in w.layers:
        ffn, cache = layer.ffn, layer.attention.cache
        total += size(layer.qkv, layer.o) + 2 * rows * context * cache.shape[2] * cache.shape[4] * cache.element_size()
        if isinstance(ffn, MoeWeights):
            experts = len(ffn.down)
            share = 1 - (1 - ffn.top_k / experts) ** rows  # of the experts, if all are equally likely
            total += size(ffn.router) + int(share * 2 * (ffn.gate_up.numel() + ffn.down.numel()))
        else:
            total += size(ffn.up, ffn.down)
    return total


def profile(run: Callable[[], object]) -> list[tuple[str, int, float]]:
    """(kernel, times, microseconds in all), the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    with trace(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    return [(e.key[:60], e.count, round(e.self_device_time_total, 1)) for e in events if e.self_device_time_total]


def measure(
    folder: str, rows: int, context: int, weights: str, cache: str, profiled: bool
) -> tuple[float, int, list[tuple[str, int, float]]]:
    """Milliseconds of the step, the bytes that it must read, and its kernels if they are wanted."""
    bench = Bench(folder, rows, context, "cuda", weights, cache)
    program = bench.program()
    with torch.inference_mode():
        graph = capture(lambda: program.run(bench.table, token_ids=bench.ids))
        ms = device_ms(graph.replay, reps=30, warm=5)
        return ms, bytes_read(program.weights, rows, context), profile(graph.replay) if profiled else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="folders, separated by commas")
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--weights", default="plain", choices=("plain", *KINDS))
    parser.add_argument("--cache", default="auto", choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"))
    parser.add_argument("--profile", default="", help="numbers of rows")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    cases = [(m, int(r)) for m in args.models.split(",") for r in args.rows.split(",")]

    def dry(folder: str, rows: int) -> None:
        bench = Bench(folder, rows, args.context, "meta", args.weights, args.cache)
        bench.program().run(bench.table, token_ids=bench.ids)

    compiling = precompile([lambda c=c: dry(*c) for c in cases], [], 90)  # type: ignore[misc]
    print(f"compiled in {compiling.wait():.1f} s", flush=True)
    found = ceilings()
    result: dict = {
        "device": torch.cuda.get_device_name(),
        "context": args.context,
        "weights": args.weights,
        "cache": args.cache,
    }
    result |= {"ceilings": found, "steps": {}}
    torch.cuda.empty_cache()
    profiled = [int(n) for n in args.profile.split(",") if n]
    for folder, rows in cases:
        ms, size, kernels = measure(folder, rows, args.context, args.weights, args.cache, rows in profiled)
        floor = size / found["read_GBs"] / 1e6
        result["steps"][f"{Path(folder).name}/{rows}"] = {"ms": ms, "floor_ms": floor, "kernels": kernels}
        print(f"{Path(folder).name:16} rows {rows:4}  {ms:8.3f} ms   floor {floor:7.3f}", flush=True)
        for name, count, us in kernels[:10]:
            print(f"    {us:9.1f} us {count:5} x {us / count:7.2f}  {name}", flush=True)
        torch.cuda.empty_cache()
        Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
