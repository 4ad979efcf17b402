"""Run as a program, outside of Triton's interpreter: compiles the products of one, several and many rows for a Hopper
GPU, of plain and packed weights, with each of what may follow them.

    python -m tests.ops.triton.compile_hopper_products

The language of those kernels has no interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton

from tests.ops.triton.compile_hopper_prefill import Compiled
from vllm.ops.triton import moe, one_row, packed_few, packed_many, plain_few
from vllm.ops.triton.decode_linear import GATED, RESIDUAL, STORE, Folded, Product, Stream, run_product
from vllm.ops.triton.float8 import Float8Weight
from vllm.ops.triton.packed_experts import PackedStack
from vllm.ops.triton.packed_linear import PackedWords
from vllm.ops.triton.precompile import _NoDevice

INPUTS, OUTPUTS = 4096, {STORE: 4096, GATED: 4096, RESIDUAL: 2560}


class FromTheStart(Compiled):
    """Of a kernel that counts places from where shared memory begins: what it allocates must begin there."""

    def __missing__(self, grid: tuple[int, ...]) -> Any:
        def compile_only(*args: Any, **options: Any) -> None:
            made = super(FromTheStart, self).__missing__(grid)(*args, **options)
            if f"+{(options['ROOM'] - 1) * 128}]" not in made.asm["ptx"]:
                raise RuntimeError("Not where it was meant to be.")

        return compile_only


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(rows: int) -> PackedWords:
    weight = PackedWords.__new__(PackedWords)  # (a weight on the meta device cannot be packed)
    weight.format, weight.shape, weight.group = "int4", torch.Size((rows, INPUTS)), 128
    weight.words = empty(INPUTS // 256, rows, 64, dtype=torch.int16)
    weight.scales = empty(INPUTS // 128, rows, dtype=torch.float16)
    weight.order = weight.offsets = None
    return weight


def stack(experts: int, rows: int) -> PackedStack:
    found = PackedStack.__new__(PackedStack)
    found.format, found.shape, found.group = "int4", torch.Size((experts, rows, INPUTS)), 128
    found.words = empty(experts, INPUTS // 256, rows, 64, dtype=torch.int16)
    found.scales = empty(experts, INPUTS // 128, rows, dtype=torch.float16)
    found.offsets = None
    return found


def product(
    weight: torch.Tensor | PackedWords | Float8Weight,
    mode: int,
    rows: int,
    dtype: torch.dtype,
    changes: dict[str, int] | None = None,
) -> None:
    """RESIDUAL: with a norm behind it; the others have one in front, and a bias or an activation."""
    if rows == 1:
        tiling = one_row.choose_row_tiling(weight, mode)
    elif isinstance(weight, torch.Tensor):
        tiling = plain_few.choose_plain_tiling(rows, weight, mode)
    else:
        tiling = packed_few.choose_few_tiling(rows, weight, mode)
    assert tiling is not None
    tiling = replace(tiling, **(changes or {}))
    outputs, residual = OUTPUTS[mode], mode == RESIDUAL
    squares = empty(rows, 64, dtype=torch.float32)
    stream = Stream(
        rows, outputs if residual else INPUTS, *(empty(rows, outputs, dtype=dtype) for _ in range(2)), squares,
        empty(1 << 20, dtype=torch.float32), empty(256, dtype=torch.int32), *[squares] * 3,
    )  # fmt: skip
    x = empty(rows, INPUTS, dtype=dtype)
    run_product(
        Product(weight, empty(outputs, dtype=dtype) if mode == STORE else None, mode, tiling,
                "silu" if mode == GATED else None, 0.5 if residual else 1.0),
        stream, x if residual else Folded(x, squares, 32, 1e-5), empty(rows, outputs, dtype=dtype),
        empty(outputs, dtype=dtype) if residual else None, True,
    )  # fmt: skip


def main() -> None:
    triton.runtime.driver.set_active(_NoDevice(90))
    plain_few._few_kernel = Compiled(plain_few._few_kernel)
    packed_few._few_kernel = Compiled(packed_few._few_kernel)
    packed_many._many_kernel = Compiled(packed_many._many_kernel)
    one_row._row_kernel = FromTheStart(one_row._row_kernel, "mma.sync")
    for mode, rows, dtype in ((STORE, 3, torch.float16), (GATED, 32, torch.bfloat16), (RESIDUAL, 17, torch.bfloat16)):
        outputs = OUTPUTS[mode] * (2 if mode == GATED else 1)
        words = packed(outputs)
        product(empty(outputs, INPUTS, dtype=dtype), mode, rows, dtype)
        if mode == STORE:
            product(empty(outputs, INPUTS, dtype=dtype), mode, rows, dtype, {"late": 3})
        if mode == GATED:
            product(empty(outputs, INPUTS, dtype=dtype), mode, rows, dtype, {"rows": 64, "stages": 2})
        codes = empty(outputs, INPUTS, dtype=torch.float8_e4m3fn)
        for weight in (words, Float8Weight(codes, empty(outputs, dtype=torch.float32), None)):
            product(weight, mode, 1, torch.float16)
            product(weight, mode, 1, torch.bfloat16)
            product(weight, mode, rows, dtype)
        act = "silu" if mode == GATED else None
        packed_many.many_rows_product(empty(200, INPUTS, dtype=dtype), words, dtype, act=act, pdl=True)
    experts = stack(6, 4096)
    tiles = moe.Sorted(*(empty(3 * 20 + 1, dtype=torch.int32) for _ in range(3)), 20)
    for tile_rows, act in ((64, "silu"), (128, "silu"), (128, None)):
        x, out = empty(500, INPUTS), empty(500, 4096 // (1 if act is None else 2))
        packed_many.experts_product(x, experts, tiles, tile_rows, out, act, True)
        packed_few.experts_product(x, experts, tiles, 16, out, act, True)


if __name__ == "__main__":
    main()
