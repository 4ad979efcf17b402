"""Triton kernels of LoRA: a small product into the rank, and one out of it, for rows of any adapters.

Rows go in blocks of 16, and each adapter on the device looks which of a block are its own, so that nothing depends on
what the host knows of them: these run in CUDA graphs. Partial sums over the inputs are added in a fixed order, and a
row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import lora as ops
from vllm.step.inputs import RowView

_ROWS = 16
_INPUTS, _OUTPUTS = 128, 128
_MOST_SPLITS = 16
_MANY_ROWS = 512  # from which products of whole segments pay, where the host knows them


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, adapters_ptr, partial_ptr, rows, x_stride, a_stride, inputs, RANKS: tl.constexpr,
    RANKS_PADDED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, splits of the inputs, adapters): partial[split, row] = a[adapter] x[row] over the split,
    for the rows of that adapter.
    """
    split, adapter = tl.program_id(1), tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = tl.load(adapters_ptr + m, mask=m < rows, other=-1) == adapter
    if tl.max(mine.to(tl.int32), 0) > 0:
        r = tl.arange(0, RANKS_PADDED)
        total = tl.zeros((BLOCK_M, RANKS_PADDED), tl.float32)
        base = a_ptr + adapter.to(tl.int64) * a_stride
        for start in range(0, SPLIT, BLOCK_K):
            k = split * SPLIT + start + tl.arange(0, BLOCK_K)
            inside = k < inputs
            x = tl.load(
                x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :], mask=mine[:, None] & inside[None, :], other=0.0
            )
            a = tl.load(base + r[None, :] * inputs + k[:, None], mask=(r < RANKS)[None, :] & inside[:, None], other=0.0)
            total += tl.dot(x.to(a.dtype), a, input_precision="ieee")
        out = partial_ptr + (split * rows + m).to(tl.int64)[:, None] * RANKS + r[None, :]
        tl.store(out, total, mask=mine[:, None] & (r < RANKS)[None, :])


@triton.jit
def _expand_kernel(
    out_ptr, partial_ptr, b_ptr, adapters_ptr, parts_ptr, rows, out_stride, b_stride, RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, blocks of a part's outputs, parts x adapters): out[row] += b[adapter] (sum of partials),
    for the rows of that adapter.
    """
    part, adapter = tl.program_id(2) % PARTS, tl.program_id(2) // PARTS
    first, count = tl.load(parts_ptr + 2 * part), tl.load(parts_ptr + 2 * part + 1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.load(adapters_ptr + m, mask=m < rows, other=-1) == adapter
    if (tl.program_id(1) * BLOCK_N < count) & (tl.max(mine.to(tl.int32), 0) > 0):
        r = tl.arange(0, RANK_PADDED)
        ranks = mine[:, None] & (r < RANK)[None, :]
        shrunk = tl.zeros((BLOCK_M, RANK_PADDED), tl.float32)
        for split in range(SPLITS):
            at = partial_ptr + (split * rows + m).to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + r[None, :]
            shrunk += tl.load(at, mask=ranks, other=0.0)
        base = b_ptr + adapter.to(tl.int64) * b_stride
        b = tl.load(
            base + (first + n)[None, :] * RANK + r[:, None], mask=(n < count)[None, :] & (r < RANK)[:, None], other=0.0
        )
        total = tl.dot(shrunk.to(b.dtype), b, input_precision="ieee")
        out = out_ptr + m.to(tl.int64)[:, None] * out_stride + (first + n)[None, :]
        mask = mine[:, None] & (n < count)[None, :]
        before = tl.load(out, mask=mask, other=0.0)
        tl.store(out, before + total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gather_kernel(
    ids_ptr, a_ptr, adapters_ptr, partial_ptr, rows, vocabulary, RANK: tl.constexpr, RANK_PADDED: tl.constexpr
):
    """Grid (rows,): partial[row] = a[adapter of row, ids[row]]."""
    row = tl.program_id(0)
    r = tl.arange(0, RANK_PADDED)
    adapter = tl.load(adapters_ptr + row)
    at = (tl.maximum(adapter, 0).to(tl.int64) * vocabulary + tl.load(ids_ptr + row)) * RANK
    found = tl.load(a_ptr + at + r, mask=r < tl.where(adapter >= 0, RANK, 0), other=0.0)
    tl.store(partial_ptr + row.to(tl.int64) * RANK + r, found.to(tl.float32), mask=r < RANK)


@lru_cache(maxsize=4096)
def _part_table(parts: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(parts, dtype=torch.int32, device=device)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def add_lora(out: Tensor, x: Tensor, a: Tensor, b: Tensor, parts: Sequence[tuple[int, int]], rows: RowView) -> None:
    """`vllm.ops.lora.add_lora` for CUDA. `rows.segments` may be empty: the rows' adapters are read on the device."""
    count = x.shape[0]
    if (rows.segments and count > _MANY_ROWS) or x.stride(1) != 1 or out.stride(1) != 1:
        ops.add_lora.reference(out, x, a, b, parts, rows)
        return
    ranks, inputs = a.shape[1], a.shape[2]
    splits = min(_MOST_SPLITS, triton.cdiv(inputs, 2 * _INPUTS))  # by the layer alone: sums are the same in any batch
    split = triton.cdiv(triton.cdiv(inputs, splits), _INPUTS) * _INPUTS
    splits = triton.cdiv(inputs, split)
    partial = torch.empty(splits, count, ranks, dtype=torch.float32, device=x.device)
    _shrink_kernel[(triton.cdiv(count, _ROWS), splits, len(a))](
        x, a, rows.adapters, partial, count, x.stride(0), a.stride(0), inputs, RANKS=ranks,
        RANKS_PADDED=_padded(ranks), SPLIT=split, BLOCK_M=_ROWS, BLOCK_K=_INPUTS, num_warps=4,
    )  # fmt: skip
    _expand(out, partial, b, parts, rows)


def _expand(out: Tensor, partial: Tensor, b: Tensor, parts: Sequence[tuple[int, int]], rows: RowView) -> None:
    splits, count, _ = partial.shape
    widest = max(size for _, size in parts)
    table = _part_table(tuple(parts), out.device)
    _expand_kernel[(triton.cdiv(count, _ROWS), triton.cdiv(widest, _OUTPUTS), len(parts) * len(b))](
        out, partial, b, rows.adapters, table, count, out.stride(0), b.stride(0), RANK=b.shape[2],
        RANK_PADDED=_padded(b.shape[2]), PARTS=len(parts), SPLITS=splits, BLOCK_M=_ROWS, BLOCK_N=_OUTPUTS, num_warps=4,
    )  # fmt: skip


def add_embedding_lora(out: Tensor, ids: Tensor, a: Tensor, b: Tensor, rows: RowView) -> None:
    """`vllm.ops.lora.add_embedding_lora` for CUDA; `rows.segments` may be empty."""
    count = ids.shape[0]
    if (rows.segments and count > _MANY_ROWS) or out.stride(1) != 1:
        ops.add_embedding_lora.reference(out, ids, a, b, rows)
        return
    _, vocabulary, rank = a.shape
    partial = torch.empty(1, count, rank, dtype=torch.float32, device=out.device)
    _gather_kernel[(count,)](
        ids, a, rows.adapters, partial, count, vocabulary, RANK=rank, RANK_PADDED=_padded(rank), num_warps=1
    )
    _expand(out, partial, b, ((0, out.shape[1]),), rows)


def register(device_type: str) -> None:
    ops.add_lora.register(device_type, add_lora)
    ops.add_embedding_lora.register(device_type, add_embedding_lora)
