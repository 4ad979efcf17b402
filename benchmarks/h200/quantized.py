"""Products with 4- and 8-bit weights on a GPU, beside bf16 and beside what reading the weight takes.

    python -m benchmarks.h200.quantized [--shapes 8b|small] [--rows 1 8 32 64 256 2048]

Each line: microseconds of a product inside a CUDA graph (weights in turn, so that none stays in the cache), and the
share of the memory's bandwidth at which the packed weight was read.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.h200.timing import graph_ms
from vllm.ops.linear import linear
from vllm.ops.quantized_weights import round_to_groups
from vllm.ops.triton import quantized, register

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
    args = parser.parse_args()
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
