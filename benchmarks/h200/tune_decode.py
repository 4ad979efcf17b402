"""Find the tilings of the fused decode step: one kernel's at a time, each judged by the time of the whole step.

    python -m benchmarks.h200.tune_decode --model /tmp/models/qwen3-0.6b --rows 1,32 --context 256 --out tune.json

The winners are what `choose_tiling` and `choose_step_tiling` should answer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.quantized import KINDS, hopper_tilings, random_stack, random_weight, tilings
from benchmarks.h200.timing import capture, device_ms
from vllm.config.hf import HFConfig
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.kv_groups import layout_of
from vllm.model_executor.models.registry import ModelRegistry
from vllm.ops.triton.decode_linear import ARGMAX, GATED, RESIDUAL, STORE
from vllm.ops.triton.decode_parts import Tiling, has_warp_roles
from vllm.ops.triton.packed_linear import PackedWords
from vllm.ops.triton.precompile import precompile
from vllm.ops.triton.wide_linear import WideTiling
from vllm.worker.decode_program import MAX_ROWS, DecodeProgram, StepTiling, choose_step_tiling
from vllm.worker.decode_weights import LayerWeights, Linear, MlpWeights, ProgramWeights, read_weights
from vllm.worker.kv_memory import cache_dtype

BLOCK = 16


def vectors() -> list[Tiling]:
    return [
        Tiling(True, rows, depth, warps, unroll=unroll, whole=whole)
        for rows, depth, warps, unroll in (
            (1, 2048, 4, 2), (2, 512, 4, 2), (2, 1024, 4, 1), (2, 1024, 4, 2), (2, 2048, 4, 2), (4, 512, 4, 2),
            (4, 1024, 4, 1), (4, 1024, 4, 2), (4, 1024, 8, 1), (4, 2048, 8, 1), (8, 512, 4, 1), (8, 512, 4, 2),
            (8, 1024, 4, 1), (8, 1024, 8, 1), (8, 1024, 8, 2), (16, 512, 8, 1), (16, 1024, 8, 1), (32, 256, 8, 1),
            (8, 256, 4, 2), (16, 256, 4, 1), (16, 256, 4, 2), (16, 512, 8, 2), (16, 512, 4, 1),
        )
        for whole in (False, True)
    ]  # fmt: skip


def skinnies(splits: tuple[int, ...]) -> list[Tiling]:
    found = []
    for rows, depth, warps in (
        (16, 256, 4),
        (32, 128, 4),
        (32, 256, 4),
        (64, 64, 4),
        (64, 128, 4),
        (64, 256, 8),
        (128, 64, 4),
        (128, 128, 8),
    ):
        for stages in (3, 4, 6):
            if (rows + 16) * depth * 2 * stages > 200_000:
                continue
            found += [Tiling(False, rows, depth, warps, split, stages, ahead=a) for split in splits for a in (0, 512)]
    return found


def plains(rows: int, outputs: int, inputs: int, mode: int) -> list[Tiling]:
    """For several rows and plain weights on Hopper GPUs: a program or two a processor."""
    pair, padded = 2 if mode == GATED else 1, max(16, 1 << (rows - 1).bit_length())
    found = []
    for depth, split in ((64, 1), (64, 2), (64, 4), (128, 1), (128, 2), (128, 4)):
        if outputs % 64 or inputs % (depth * split):
            continue
        for room in (226 << 10, 113 << 10, 75 << 10):
            stages = min(inputs // split // depth, room // ((64 * pair + padded) * depth * 2))
            if stages >= 2:
                found += [Tiling(False, 64, depth, 4, split, stages, whole=True, late=late) for late in (0, 1, 2)]
            if mode == GATED and split == 1:  # of half as many outputs
                found += [Tiling(False, 32, depth, 4, 1, more, whole=True) for more in (stages, 2 * stages)]
    return list(dict.fromkeys(found))


def candidates(name: str, rows: int, w: ProgramWeights) -> list[Any]:
    """Tilings to try for one product."""
    layer, gated = w.layers[0], False
    if name in ("up", "down"):
        if not isinstance(layer.ffn, MlpWeights):
            return []
        part, gated = getattr(layer.ffn, name), name == "up" and layer.ffn.gated
    else:
        part = Linear(w.head) if name == "head" else getattr(layer, name)
    outputs, inputs = part.weight.shape[0] // (2 if gated else 1), part.weight.shape[1]
    mode = {"qkv": STORE, "up": GATED if gated else STORE, "head": ARGMAX}.get(name, RESIDUAL)
    hopper = hopper_tilings(rows, part.weight, mode) if has_warp_roles() else []
    if isinstance(part.weight, PackedWords):
        return tilings(rows, outputs, gated) + hopper
    splits = (1, 2, 4) if name in ("o", "down") else (1, 2) if name == "qkv" else (1,)
    tried = [t for t in skinnies(splits) if inputs % (t.depth * t.split) == 0]
    if gated:
        tried = [t for t in tried if outputs % t.rows == 0 and (2 * t.rows + 16) * t.depth * 2 * t.stages < 200_000]
    if rows == 1:
        tried = vectors()
    elif isinstance(part.weight, torch.Tensor) and rows <= MAX_ROWS and mode != ARGMAX and has_warp_roles():
        tried += plains(rows, outputs, inputs, mode)
    programs = [-(-outputs // t.rows) * t.split for t in tried]
    return [t for t, n in zip(tried, programs, strict=True) if n >= 48] + hopper


ATTENTION = [
    {"splits": s, "tile": t, "warps": n, "stages": g, "early": e, "ahead": a, "least": 0, "late": 0}
    for s in (1, 2, 4, 8, 16, 32, 64)
    for t, n, g, e, a in (  # fmt: skip
        (128, 4, 2, False, 0),
        (64, 4, 2, True, 0),
        (64, 4, 2, False, 0),
        (32, 1, 2, False, 0),
        (32, 1, 2, False, 64),
        (32, 1, 2, False, 128),
        (32, 1, 2, True, 0),
        (32, 1, 3, False, 0),
        (32, 2, 3, False, 0),
        (32, 2, 2, True, 0),
        (32, 2, 2, True, 64),
        (32, 4, 2, False, 0),
        (32, 4, 2, False, 64),
        (32, 4, 2, True, 0),
        (64, 2, 2, False, 0),
        (64, 4, 3, False, 0),
        (64, 2, 3, False, 0),
        (64, 4, 2, True, 64),
    )
] + [
    {"splits": s, "tile": t, "warps": n, "stages": g, "early": False, "ahead": 0, "least": least, "late": late}
    for s in (1, 2, 4, 8)
    for t, n, g in ((32, 1, 2), (32, 1, 4), (32, 4, 2), (64, 2, 2), (128, 4, 2))
    for least in (0, 128, 512)
    for late in (0, 2)
    if least or late
]
OF_BYTES = [  # of a cache of 8 bits
    {"splits": s, "tile": t, "warps": n, "stages": g, "early": False, "ahead": 0, "least": 0, "late": 0}
    for s in (1, 2, 4, 8)
    for t, n, g in (
        (128, 4, 2),
        (128, 4, 3),
        (128, 4, 4),
        (128, 8, 2),
        (128, 8, 3),
        (64, 4, 3),
        (64, 4, 4),
        (256, 8, 2),
    )
]
WIDE = [
    WideTiling(*tile)
    for tile in (
        (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 3), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3),
        (256, 64, 64, 8, 3),
    )
]  # fmt: skip
FEW = ("up", "down", "o", "qkv", "attention", "head")
MANY = ("wide_gate", "wide_head", "attention")


class Table:
    """As much of a slot table as the program reads."""

    def __init__(self, rows: int, context: int, groups: int, device: str) -> None:
        blocks = context // BLOCK + 2
        self.tokens = torch.randint(0, 1000, (rows, context + 32), dtype=torch.int32, device=device)
        table = torch.arange(1, rows * blocks + 1, dtype=torch.int32, device=device)
        if device != "meta":
            table = table[torch.randperm(len(table), device=device)]
        self.device_lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tables = [table.view(rows, blocks)] * groups  # with as many tensors as layers, nobody is in the way


def packed(w: ProgramWeights, kind: str) -> ProgramWeights:
    """The same step with random packed weights; kind: as of `random_words`."""

    def pack(part: Linear) -> Linear:
        return Linear(random_weight(*part.weight.shape, kind, part.weight.device), part.bias)

    def layer(old: LayerWeights) -> LayerWeights:
        ffn = old.ffn
        if isinstance(ffn, MlpWeights):
            ffn = replace(ffn, up=pack(ffn.up), down=pack(ffn.down))
        elif kind != "float8":
            stacks = {name: getattr(ffn, name) for name in ("gate_up", "down")}
            ffn = replace(ffn, **{name: random_stack(*w.shape, kind, w.device) for name, w in stacks.items()})
        return replace(old, qkv=pack(old.qkv), o=pack(old.o), ffn=ffn)

    return replace(w, layers=tuple(layer(old) for old in w.layers))


class Bench:
    weights: ProgramWeights | None

    def __init__(
        self, folder: str, rows: int, context: int, device: str, kind: str = "plain", cache: str = "auto"
    ) -> None:
        """kind: of the layers' weights, plain or as of `random_words`.   cache: as of kv_cache_dtype."""
        hf = HFConfig.load(Path(folder))
        family = ModelRegistry.resolve(hf.architectures)
        spec = family.decoder(hf)
        modules = None if family.modules is None else importlib.import_module(family.modules).MODULES
        if device == "meta":
            spec = replace(spec, blocks=tuple(dict.fromkeys(spec.blocks)))
        with torch.device(device):
            model = DecoderModel(
                spec, dtype=torch.bfloat16, max_positions=context + 64, device=torch.device(device), modules=modules
            )
        for p in model.parameters():
            p.data.normal_(std=0.02)
        layout = layout_of(model.traits, BLOCK)
        self.table = Table(rows, context, len(layout.groups), device)
        shape = (self.table.tables[0].numel() + 1, *layout.tensors[0].shape)
        blocks: Any = model.blocks
        for i, block in enumerate(blocks):
            block.attn.place = replace(block.attn.place, tensor=i)  # a tensor for each layer, also of several groups
        stored = cache_dtype(cache, "bfloat16")
        self.caches = [
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_().to(stored) for _ in spec.blocks
        ]
        self.model: DecoderModel | None = model
        self.weights = read_weights(model, self.caches)
        if kind != "plain" and self.weights is not None:
            self.weights, self.model = packed(self.weights, kind), None
        self.rows, self.width = rows, max(4096, context + 32)
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.positions = torch.full((rows,), context, dtype=torch.int32, device=device)
        self.ids = torch.empty(rows, dtype=torch.int32, device=device)

    def program(self, tiling: StepTiling | None = None) -> DecodeProgram:
        if self.weights is None:
            raise ValueError("The fused step does not cover this model.")
        return DecodeProgram(self.weights, self.rows, self.width, self.slots, self.positions, tiling=tiling)

    def milliseconds(self, tiling: StepTiling | None = None, reps: int = 9) -> float:
        try:
            program = self.program(tiling)
            graph = capture(lambda: program.run(self.table, token_ids=self.ids))
        except Exception as error:  # a tile that does not fit this chip
            print(f"    {type(error).__name__}: {str(error)[:80]}")
            return float("inf")
        return device_ms(graph.replay, reps=reps, warm=2)


def changes(name: str, rows: int, w: ProgramWeights) -> list[dict[str, Any]]:
    """What to try for one part of the step."""
    if name == "attention":
        cache = w.layers[0].attention.cache
        kv_heads, tried = cache.shape[2], OF_BYTES if cache.element_size() == 1 else ATTENTION
        return [change for change in tried if 256 <= change["splits"] * rows * kv_heads * 2 <= 4096]
    if name in MANY:
        ffn = w.layers[0].ffn
        if name == "wide_gate" and not (isinstance(ffn, MlpWeights) and ffn.gated and ffn.up.bias is None):
            return []
        outputs = ffn.up.weight.shape[0] // 2 if name == "wide_gate" and isinstance(ffn, MlpWeights) else 0
        fitting = [t for t in WIDE if outputs % t.outputs == 0 and not (outputs and t.outputs > 128)]
        return [{name: t} for t in (None, *fitting)]
    return [{name: t} for t in candidates(name, rows, w)]


def all_tilings(w: ProgramWeights, rows: int, width: int, parts: list[str]) -> list[StepTiling]:
    start = choose_step_tiling(w, rows, width)
    return [start] + [replace(start, **change) for name in parts for change in changes(name, rows, w)]


def parts_of(rows: int, wanted: str) -> list[str]:
    return [part for part in (FEW if rows <= MAX_ROWS else MANY) if not wanted or part in wanted.split(",")]


def dry(folder: str, rows: int, context: int, kind: str, parts: str, cache: str) -> None:
    bench = Bench(folder, rows, context, "meta", kind, cache)
    if bench.weights is None:
        raise ValueError("The fused step does not cover this model.")
    for tiling in all_tilings(bench.weights, rows, bench.width, parts_of(rows, parts)):
        bench.program(tiling).run(bench.table, token_ids=bench.ids)


def tune(folder: str, rows: int, context: int, kind: str, parts: str, cache: str, seconds: float) -> dict:
    bench = Bench(folder, rows, context, "cuda", kind, cache)
    if bench.weights is None:
        raise ValueError("The fused step does not cover this model.")
    best = choose_step_tiling(bench.weights, rows, bench.width)
    first = least = bench.milliseconds(best, 20)
    end = time.perf_counter() + seconds
    print(f"{folder} rows {rows} context {context}: default {first:.4f} ms", flush=True)
    for name in parts_of(rows, parts):
        tried = [replace(best, **change) for change in changes(name, rows, bench.weights)]
        times = []
        for tiling in tried:
            if time.perf_counter() > end:
                break
            times.append((bench.milliseconds(tiling), tiling))
        times.sort(key=lambda pair: pair[0])
        top = [(bench.milliseconds(t, 25), t) for _, t in times[:3]]
        if top and min(top, key=lambda pair: pair[0])[0] < least:
            least, best = min(top, key=lambda pair: pair[0])
        cut = (lambda t: [getattr(t, key) for key in ATTENTION[0]]) if name == "attention" else attrgetter(name)
        short = [(round(ms, 4), cut(t)) for ms, t in top]
        print(f"  {name:9} {len(times)} tried -> {least:.4f}   {short}", flush=True)
    return {"default_ms": first, "ms": least, "tiling": asdict(best)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="folders, separated by commas")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--weights", default="plain", choices=("plain", *KINDS))
    parser.add_argument("--cache", default="auto", choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"))
    parser.add_argument("--parts", default="", help="what to tune, separated by commas; everything by default")
    parser.add_argument("--seconds", type=float, default=60, help="per model and number of rows")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    cases = [
        (m, int(r), args.context, args.weights, args.parts, args.cache)
        for m in args.models.split(",")
        for r in args.rows.split(",")
    ]
    compiling = precompile([lambda c=c: dry(*c) for c in cases], [], 90)
    print(f"compiled in {compiling.wait():.1f} s", flush=True)
    result = {}
    for case in cases:
        folder, rows, context, kind, *_ = case
        result[f"{Path(folder).name}/{kind}/{rows}/{context}"] = tune(*case, args.seconds)
        torch.cuda.empty_cache()
        with open(args.out, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
