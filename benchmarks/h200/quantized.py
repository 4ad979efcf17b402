"""Products with 4- and 8-bit weights on a GPU, beside bf16 and beside what reading the weight takes.

    python -m benchmarks.h200.quantized [--shapes 8b|small] [--rows 1 8 32 64 256 2048] [--tune tilings.json]

Each line: microseconds of a product inside a CUDA graph (weights in turn, so that none stays in the cache), and the
share of the memory's bandwidth at which the packed weight was read.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch
import triton

from benchmarks.h200.timing import graph_ms
from vllm.ops.linear import linear
from vllm.ops.quantized_weights import InputQuant, round_to_groups
from vllm.ops.triton import quantized, register
from vllm.ops.triton.decode_linear import GATED, RESIDUAL, STORE, Product, Stream, Weight, run_product
from vllm.ops.triton.decode_parts import Tiling
from vllm.ops.triton.float8 import Float8Weight
from vllm.ops.triton.one_row import takes_row
from vllm.ops.triton.packed_experts import PackedStack
from vllm.ops.triton.packed_few import takes_few
from vllm.ops.triton.packed_linear import PackedWords, WidePacked, wide_packed_product
from vllm.ops.triton.precompile import precompile

SHAPES = {
    "8b": [("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336)],
    "small": [("qkv", 1152, 896), ("gate_up", 9728, 896), ("down", 896, 4864)],
}
BANDWIDTH = 4.8e12  # bytes a second of an H200
COPIES_BYTES = 512 << 20  # of each weight together, more than the caches hold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256, 2048])
    parser.add_argument("--tune", default="", help="try tilings of the decode step's products, and write them here")
    parser.add_argument("--kinds", nargs="+", default=["int4", "fp8"])
    args = parser.parse_args()
    if args.tune:
        compile_ahead(args.rows, SHAPES[args.shapes], args.kinds)
        result = {}
        for kind in args.kinds:
            for name, n, k in SHAPES[args.shapes]:
                for rows in args.rows:
                    if rows > 64 and kind == "float8":  # torch's own products
                        continue
                    outputs = n // 2 if MODES[name] == GATED else n
                    found = (
                        tune_wide(name, rows, n, k, kind)
                        if rows > 64
                        else tune(name, rows, outputs, k, MODES[name], kind)
                    )
                    result[f"{kind}/{name}/{rows}"] = [(us, asdict(t)) for us, t in found]
                    with open(args.tune, "w") as f:
                        json.dump(result, f)
        return
    register()
    torch.manual_seed(0)
    for name, n, k in SHAPES[args.shapes]:
        dense = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        formats = {"bf16": (dense, n * k * 2)}
        for label, bits, group in (("w4 g128", 4, 128), ("w4 g32", 4, 32), ("w8 g128", 8, 128)):
            packed = quantized.pack(round_to_groups(dense.float(), bits, group, symmetric=bits == 4), torch.bfloat16)
            formats[label] = (packed, packed.num_bytes)
        for rows in args.rows:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            figures = []
            for label, (weight, size) in formats.items():
                count = max(1, COPIES_BYTES // size) if rows <= 64 else 1
                copies = [_copy(weight) for _ in range(min(count, 16))]
                multiply = linear if label == "bf16" else quantized.multiply

                def run(copies: list = copies, multiply=multiply, x: torch.Tensor = x) -> None:
                    for copy in copies:
                        multiply(x, copy)

                seconds = graph_ms(run) / 1e3 / len(copies)
                figures.append(f"{label} {seconds * 1e6:8.1f} us {100 * size / BANDWIDTH / seconds:3.0f} %")
                del copies
            print(f"{name:8} {n} x {k} rows {rows:5}: " + "   ".join(figures), flush=True)


def tilings(rows: int, outputs: int, gated: bool) -> list[Tiling]:
    """Those worth a try: of the kernel for slices, up to 64 rows, and of the other."""
    found, depth = [], min(64, max(8, triton.next_power_of_2(rows)))
    for width, slices in ((16, 4), (32, 4), (64, 2)) if rows <= 64 else ():
        if width * depth * (2 if gated else 1) > 4096:
            continue
        tiles = -(-outputs // width)
        splits = [split for split in (1, 2, 4, 8) if split == 1 or 200 < tiles * split < 700]
        found += [
            Tiling(True, width, depth, slices, split, stages, ahead=slices) for split in splits[:2] for stages in (2, 3)
        ]
    for width, warps in ((64, 4), (128, 8)) if 8 < rows <= 64 else ():
        depth = max(16, rows)
        tiles = -(-outputs // width) * -(-rows // depth)
        splits = [split for split in (1, 2, 4, 8) if split == 1 or 200 < tiles * split < 700]
        found += [
            Tiling(False, width, depth, warps, split, stages, ahead=2) for split in splits[-2:] for stages in (2, 3)
        ]
    return found


def hopper_tilings(rows: int, weight: Weight, mode: int) -> list[Tiling]:
    """Those of the kernels that only Hopper GPUs have."""
    gated = mode == GATED
    if rows == 1:
        return [
            Tiling(True, (8 if gated else 16) * units, 1, warps, stages=stages, late=late, registers=registers)
            for units in (1, 2)
            for warps, stages, registers in (
                (2, 4, 80), (4, 2, 80), (4, 2, 96), (4, 3, 80), (4, 3, 96), (4, 4, 96), (4, 4, 128), (4, 6, 80),
                (4, 6, 96), (8, 2, 64), (8, 2, 80), (8, 2, 96), (8, 2, 128), (8, 3, 64), (8, 3, 96), (8, 3, 128),
                (8, 4, 96), (8, 4, 128), (8, 6, 96),
            )
            for late in ((0, 1) if mode == STORE else (0,))
            if takes_row(weight)
        ]  # fmt: skip
    if isinstance(weight, torch.Tensor):
        return []
    if not takes_few(rows, weight, mode):
        return []
    tiles = weight.shape[0] // 64 // (2 if gated else 1)
    return [
        Tiling(False, outputs, max(16, triton.next_power_of_2(rows)), outputs // 16, split, stages, whole=True)
        for outputs in (64, 128)
        for split in (1, 2, 4, 8)
        for stages in (2, 3, 4, 6)
        if tiles * 64 % outputs == 0 and (split == 1 or tiles * split < 700)
    ]


def vector_tilings(gated: bool) -> list[Tiling]:
    """Those of one row with 8-bit floats."""
    return [
        Tiling(True, width, depth, warps, unroll=unroll, whole=True)
        for width, depth, warps in (
            (2, 2048, 4), (4, 1024, 4), (4, 2048, 4), (4, 2048, 8), (4, 4096, 8), (8, 1024, 4), (8, 2048, 8),
            (16, 1024, 8), (8, 4096, 8), (16, 512, 4), (2, 4096, 8), (2, 1024, 4),
        )
        for unroll in (1, 2)
        if not (gated and width * depth > 16384)
    ]  # fmt: skip


def wide_tilings(rows: int, outputs: int) -> list[WidePacked]:
    """The same of products of many rows."""
    found = []
    for tile_rows, width, words, warps, stages in (
        (128, 128, 32, 8, 3), (128, 128, 32, 8, 2), (128, 128, 32, 4, 2), (128, 128, 16, 8, 4), (256, 128, 32, 8, 3),
        (256, 128, 16, 8, 4), (256, 64, 32, 4, 2), (128, 64, 32, 4, 3), (128, 128, 64, 8, 2),
    ):  # fmt: skip
        tiles = -(-outputs // width) * -(-rows // tile_rows)
        found += [
            WidePacked(tile_rows, width, words, warps, split, stages)
            for split in (1, 2, 4)
            if split == 1 or 100 < tiles * split < 600
        ]
    return found


def tune_wide(label: str, rows: int, n: int, k: int, kind: str) -> list[tuple[float, WidePacked]]:
    """`tune` of products of many rows, beside the weight as plain numbers."""
    copies = 8
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weights = [random_words(n, k, kind, x.device) for _ in range(copies)]
    plain = [torch.empty(n, k, device="cuda", dtype=torch.bfloat16).uniform_(-0.02, 0.02) for _ in range(copies)]
    bf16 = graph_ms(lambda: [linear(x, w) for w in plain], reps=5) * 1e3 / copies
    found = []
    for t in wide_tilings(rows, n):
        try:
            us = graph_ms(lambda t=t: [wide_packed_product(x, w, None, x.dtype, t) for w in weights], reps=5)
            found.append((us * 1e3 / copies, t))
        except Exception as error:  # a tile that does not fit this chip
            print(f"    {t}: {type(error).__name__}", flush=True)
    found.sort(key=lambda pair: pair[0])
    print(f"{label} {kind} rows {rows}: bf16 {bf16:.1f} us", flush=True)
    for us, t in found[:4]:
        print(f"    {us:7.2f} us  {(t.rows, t.outputs, t.words, t.warps, t.split, t.stages)}", flush=True)
    return found


def tune(label: str, rows: int, n: int, k: int, mode: int, kind: str) -> list[tuple[float, Tiling]]:
    """Microseconds of a product by tiling, with programmatic launch, weights in turn; the best first."""
    gated = mode == GATED
    x, out = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (k, n))
    copies = 12
    weights = [random_weight(n * (2 if gated else 1), k, kind, x.device) for _ in range(copies)]
    tiles = n + 1
    best, found = torch.empty(rows, tiles, device="cuda"), []
    part = torch.empty(16 * max(64, rows) * n * 2, device="cuda")
    arrived = torch.zeros(tiles, dtype=torch.int32, device="cuda")
    s = Stream(rows, n, out, torch.empty_like(out), best, part, arrived, best, best.int(), best)
    weight = torch.ones(n, device="cuda", dtype=torch.bfloat16)
    usual = vector_tilings(gated) if kind == "float8" and rows == 1 else tilings(rows, n, gated)
    for t in usual + hopper_tilings(rows, weights[0], mode):
        if kind != "float8" and weights[0].words.shape[0] < t.split:
            continue
        products = [Product(w, None, mode, t, "silu" if gated else None) for w in weights]

        def run(products: list[Product] = products) -> None:
            for p in products:
                run_product(p, s, x, out, weight if mode == RESIDUAL else None, pdl=True)

        try:
            found.append((graph_ms(run, reps=5) * 1e3 / copies, t))
        except Exception as error:  # a tile that does not fit this chip
            print(f"    {t}: {type(error).__name__}", flush=True)
    found.sort(key=lambda pair: pair[0])
    size = weights[0].num_bytes
    print(f"{label} {kind} rows {rows}: floor {size / BANDWIDTH * 1e6:.1f} us", flush=True)
    for us, t in found[:4]:
        cut = (t.vector, t.rows, t.depth, t.warps, t.split, t.stages, t.ahead, t.unroll, t.whole, t.registers)
        print(f"    {us:7.2f} us  {cut}")
    return found


KINDS = ("int4", "int4/32", "int8", "fp8", "float8")


def random_weight(n: int, k: int, kind: str, device: torch.device) -> Weight:
    """A [n, k] weight as `random_words` makes it, or "float8": 8-bit floats with a scale for each output."""
    if kind != "float8":
        return random_words(n, k, kind, device)
    codes = torch.empty(n, k, dtype=torch.uint8, device=device)
    if device.type != "meta":
        codes.random_(0, 127)
    scales = torch.linspace(0.002, 0.003, n, device=device)
    return Float8Weight(codes.view(torch.float8_e4m3fn), scales, InputQuant("fp8"))


def random_words(n: int, k: int, kind: str, device: torch.device) -> PackedWords:
    """A packed [n, k] weight of the kind "int4", "int8" (groups of 128) or "fp8" (a scale for each output); "int4/32":
    with 32 words a block.
    """
    words = PackedWords.__new__(PackedWords)
    words.format, _, width = kind.partition("/")
    words.shape, words.order, words.offsets = torch.Size((n, k)), None, None
    size = int(width or 64)
    block = size * (4 if words.format == "int4" else 2)
    blocks = -(-k // block)
    words.group = blocks * block if words.format == "fp8" else 128
    words.words = torch.randint(-(1 << 15), (1 << 15) - 1, (blocks, n, size), dtype=torch.int16, device=device)
    words.scales = torch.full((blocks * block // words.group, n), 0.002, dtype=torch.float16, device=device)
    words.num_bytes = 2 * words.words.numel() + 2 * words.scales.numel()
    return words


def random_stack(experts: int, n: int, k: int, kind: str, device: torch.device) -> PackedStack:
    """The packed weights [n, k] of so many experts, of a kind of `random_words`."""
    one = random_words(n, k, kind, device)
    stack = object.__new__(PackedStack)
    stack.format, stack.group, stack.offsets, stack.dtype = one.format, one.group, None, torch.bfloat16
    stack.shape, stack.num_bytes = torch.Size((experts, n, k)), experts * one.num_bytes
    shape = (experts, *one.words.shape)
    stack.words = torch.randint(-(1 << 15), (1 << 15) - 1, shape, dtype=torch.int16, device=device)
    stack.scales = one.scales.expand(experts, -1, -1).contiguous()
    return stack


MODES = {"qkv": STORE, "o": RESIDUAL, "gate_up": GATED, "down": RESIDUAL}


def compile_ahead(rows: list[int], shapes: list[tuple[str, int, int]], kinds: list[str]) -> None:
    """Every variant that `tune` will launch, by many processes."""

    def dry(name: str, n: int, k: int, count: int, kind: str) -> None:
        mode = MODES[name]
        gated = mode == GATED
        meta, dtype = torch.device("meta"), torch.bfloat16
        words = random_weight(n, k, kind, meta)
        if count > 64:
            if kind == "float8":
                return
            for wide in wide_tilings(count, n):
                wide_packed_product(torch.empty(count, k, device=meta, dtype=dtype), words, None, dtype, wide)
            return
        outs = n // 2 if gated else n
        x, out = (torch.empty(count, size, device=meta, dtype=torch.bfloat16) for size in (k, outs))
        best, ints = torch.empty(count, 9, device=meta), torch.empty(9, dtype=torch.int32, device=meta)
        s = Stream(count, outs, out, out, best, best, ints, best, ints, best)
        usual = vector_tilings(gated) if kind == "float8" and count == 1 else tilings(count, outs, gated)
        for t in usual + hopper_tilings(count, words, mode):
            p = Product(words, None, mode, t, "silu" if gated else None)
            run_product(p, s, x, out, out if mode == RESIDUAL else None, pdl=True)

    runs = [
        lambda c=(name, n, k, count, kind): dry(*c)
        for name, n, k in shapes for count in rows for kind in kinds
    ]  # fmt: skip
    print(f"compiled in {precompile(runs, [], 90, processes=30).wait():.1f} s", flush=True)


def _copy(weight):
    if isinstance(weight, torch.Tensor):
        return weight.clone()
    fresh = object.__new__(type(weight))
    for slot in type(weight).__slots__:
        value = getattr(weight, slot)
        setattr(fresh, slot, value.clone() if isinstance(value, torch.Tensor) else value)
    return fresh


if __name__ == "__main__":
    main()
