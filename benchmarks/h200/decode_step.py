"""The fused decode step alone, in one CUDA graph, greedy, with random weights: milliseconds by model and rows.

    python -m benchmarks.h200.decode_step --models /tmp/models/phi-2,/tmp/models/gemma2-9b --out step.json
    python -m benchmarks.h200.decode_step --models /tmp/models/phi-2 --cases 1x2000 --add --out step.json

--cases: rows x tokens of context.   floor_ms: reading once what a step of so many rows reads (of experts: as many as
its tokens can choose) and the cached keys, at the bandwidth that the same run measured.   --profile: also the kernels
of a step of so many rows.   --parts: what the step would save without each kind of kernel, which counts what kernels
hide of each other, as a profile does not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.quantized import KINDS
from benchmarks.h200.shapes import commit
from benchmarks.h200.timing import capture, ceilings, device_ms
from benchmarks.h200.tune_decode import Bench
from vllm.ops.triton.decode_latent import LatentDecode
from vllm.ops.triton.precompile import precompile
from vllm.worker import decode_program
from vllm.worker.decode_program import DecodeProgram
from vllm.worker.decode_weights import Linear, MoeWeights, ProgramWeights


def bytes_read(w: ProgramWeights, rows: int, context: int) -> int:
    """Of weights and cached keys and values, each once."""

    def size(*parts: Linear) -> int:
        weights = [part.weight for part in parts]
        return sum(w.numel() * w.element_size() if isinstance(w, torch.Tensor) else w.num_bytes for w in weights)

    total = size(Linear(w.head))
    for layer in w.layers:
        ffn, attention = layer.ffn, layer.attention
        total += size(layer.qkv, layer.o)
        total += rows * context * attention.cache[0].nbytes // attention.cache.shape[-2]  # a block's tokens
        if isinstance(attention, LatentDecode):
            total += attention.kv_b.nbytes
        if isinstance(ffn, MoeWeights):
            experts = len(ffn.down)
            share = 1 - (1 - ffn.top_k / experts) ** rows  # of the experts, if all are equally likely
            stacks = (ffn.gate_up, ffn.down)
            read = sum(w.nbytes if isinstance(w, torch.Tensor) else w.num_bytes for w in stacks)
            total += size(ffn.router) + int(share * read)
            if ffn.shared is not None:
                total += size(ffn.shared.up, ffn.shared.down)
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


def kinds(program: DecodeProgram) -> dict[int, str]:
    """The names of a program's products, by their ids."""
    found = {id(program._head): "head"}
    for p in program._products:
        named = {"qkv": p.qkv, "o": p.o, "up": p.up, "down": p.down, "router": p.router}
        found |= {id(product): name for name, product in named.items() if product is not None}
    return found


@contextmanager
def without(name: str, program: DecodeProgram) -> Iterator[None]:
    """Steps leave out a product, or a function that `decode_program` calls, but for its first call."""
    names, kept = kinds(program), []
    target = "run_product" if name in names.values() else name
    original = getattr(decode_program, target)

    def run(*args: Any, **options: Any) -> Any:
        if target != name and names.get(id(args[0])) != name:
            return original(*args, **options)
        if not kept:
            kept.append(original(*args, **options))
        return kept[0]

    setattr(decode_program, target, run)
    try:
        yield
    finally:
        setattr(decode_program, target, original)


FUNCTIONS = ("decode_attention", "join_rows", "rise", "fall", "routed_mlp")


def shares(bench: Bench, program: DecodeProgram, ms: float) -> dict[str, float]:
    """Milliseconds that the step would save without each kind of kernel."""
    found = {}
    for name in (*dict.fromkeys(kinds(program).values()), *FUNCTIONS):
        with without(name, program):
            graph = capture(lambda: program.run(bench.table, token_ids=bench.ids))
        found[name] = ms - device_ms(graph.replay, reps=15, warm=3)
    return {name: saved for name, saved in found.items() if abs(saved) > 0.003 * ms}


def measure(
    folder: str, case: tuple[int, int], weights: str, cache: str, profiled: bool, parts: bool
) -> tuple[float, int, list[tuple[str, int, float]], dict[str, float]]:
    """Milliseconds of the step, the bytes that it must read, its kernels and its parts if they are wanted."""
    bench = Bench(folder, *case, "cuda", weights, cache)
    program = bench.program()
    with torch.inference_mode():
        graph = capture(lambda: program.run(bench.table, token_ids=bench.ids))
        ms = device_ms(graph.replay, reps=30, warm=5)
        size = bytes_read(program.weights, *case)
        saved = shares(bench, program, ms) if parts else {}
        return ms, size, profile(graph.replay) if profiled else [], saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="folders, separated by commas")
    parser.add_argument("--cases", default="1x256,32x256,256x256")
    parser.add_argument("--weights", default="plain", choices=("plain", *KINDS))
    parser.add_argument("--cache", default="auto", choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"))
    parser.add_argument("--profile", default="", help="numbers of rows")
    parser.add_argument("--parts", default="", help="numbers of rows")
    parser.add_argument("--add", action="store_true", help="to what the file has already")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    sizes = [tuple(int(n) for n in case.split("x")) for case in args.cases.split(",")]
    cases = [(m, rows, context) for m in args.models.split(",") for rows, context in sizes]

    def dry(folder: str, rows: int, context: int) -> None:
        bench = Bench(folder, rows, context, "meta", args.weights, args.cache)
        bench.program().run(bench.table, token_ids=bench.ids)

    compiling = precompile([lambda c=c: dry(*c) for c in cases], [], 90)  # type: ignore[misc]
    print(f"compiled in {compiling.wait():.1f} s", flush=True)
    found = ceilings()
    result: dict = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).isoformat("T", "seconds"),
    }
    result |= {"torch": torch.__version__, "commit": commit(), "ceilings": found, "steps": {}}
    if args.add:
        result["steps"] = json.loads(Path(args.out).read_text())["steps"]
    torch.cuda.empty_cache()
    profiled, parted = ([int(n) for n in text.split(",") if n] for text in (args.profile, args.parts))
    stored = "".join(f"/{kind}" for kind in (args.weights, args.cache) if kind not in ("plain", "auto"))
    for folder, rows, context in cases:
        case, wanted = (rows, context), (rows in profiled, rows in parted)
        ms, size, kernels, saved = measure(folder, case, args.weights, args.cache, *wanted)
        floor = size / found["read_GBs"] / 1e6
        step = {"ms": ms, "floor_ms": floor, "fraction": floor / ms}
        step |= ({"kernels": kernels} if kernels else {}) | ({"saved_ms_without": saved} if saved else {})
        result["steps"][f"{Path(folder).name}/{rows}/{context}{stored}"] = step
        print(f"{Path(folder).name:20} {rows:4} x {context:6}{stored} {ms:8.3f} ms {floor / ms:6.2f}", flush=True)
        for name, count, us in kernels[:10]:
            print(f"    {us:9.1f} us {count:5} x {us / count:7.2f}  {name}", flush=True)
        if saved:
            print("    without:", {name: round(value, 3) for name, value in saved.items()}, flush=True)
        torch.cuda.empty_cache()
        Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
