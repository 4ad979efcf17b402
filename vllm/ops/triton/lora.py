"""Triton kernels of LoRA: a small product into the rank, and one out of it, for rows of any adapters.

Of few rows, each adapter on the device looks which are its own; of many, each block of rows looks for its adapters,
which are few, because a prompt's rows stand together. So nothing depends on what the host knows of them: these run in
CUDA graphs. Partial sums over the inputs are added in a fixed order, and the result of one of few rows does not depend
on the rows beside it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import lora as ops
from vllm.ops.lora import LowRank
from vllm.ops.triton.activation import KINDS, gated
from vllm.ops.triton.decode_parts import processors
from vllm.step.inputs import RowView

_ROWS = 16
_INPUTS, _OUTPUTS, _RANKS = 128, 128, 64
_MOST_SPLITS = 16
_MANY_ROWS = 128  # of more, each block of `_MANY` rows looks for all of its adapters, which are few
_MANY = 64
_WIDE_OUTPUTS = 64
_MANY_SPLITS, _WIDE = 4, 8192  # splits of many rows, twice as many of more inputs than that


@triton.jit
def _adapters_of(chosen, EACH: tl.constexpr, adapter):
    """(first, last) of the adapters that a program looks for: one of its own, or all that its rows may have."""
    first = adapter
    last = adapter
    if not EACH:
        first = tl.min(tl.where(chosen < 0, 1 << 30, chosen), 0)
        last = tl.max(chosen, 0)
    return first, last


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, adapters_ptr, partial_ptr, rows, x_stride, a_stride, inputs, RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EACH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, splits of the inputs, blocks of ranks x adapters, or 1 of them if not EACH):
    partial[split, row] = a[adapter] x[row] over the split, for the rows of that adapter.
    """
    BLOCKS: tl.constexpr = (RANKS + BLOCK_R - 1) // BLOCK_R
    split = tl.program_id(1)
    r = tl.program_id(2) % BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    chosen = tl.load(adapters_ptr + m, mask=m < rows, other=-1)
    first, last = _adapters_of(chosen, EACH, tl.program_id(2) // BLOCKS)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    for adapter in range(first, last + 1):
        mine = chosen == adapter
        if tl.max(mine.to(tl.int32), 0) > 0:
            total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            base = a_ptr + adapter * a_stride.to(tl.int64) + r.to(tl.int64)[None, :] * inputs
            for start in tl.range(0, SPLIT, BLOCK_K, num_stages=STAGES):
                k = split * SPLIT + start + tl.arange(0, BLOCK_K)
                inside = k < inputs
                x = tl.load(x_rows + k[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
                a = tl.load(base + k[:, None], mask=(r < RANKS)[None, :] & inside[:, None], other=0.0)
                total = tl.dot(x.to(a.dtype), a, total, input_precision="ieee")
            out = partial_ptr + (split * rows + m).to(tl.int64)[:, None] * RANKS + r[None, :]
            tl.store(out, total, mask=mine[:, None] & (r < RANKS)[None, :])


@triton.jit
def _expanded(
    total, partial_ptr, b_rows, mine, m, rows, here, part, RANK: tl.constexpr, RANK_PADDED: tl.constexpr,
    PARTS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """total [rows m, outputs] + (sum of partials) b^T for the rows `mine`. b_rows: [outputs] pointers."""
    r = tl.arange(0, RANK_PADDED)
    ranks = mine[:, None] & (r < RANK)[None, :]
    shrunk = tl.zeros((mine.shape[0], RANK_PADDED), tl.float32)
    for split in range(SPLITS):
        at = partial_ptr + (split * rows + m).to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + r[None, :]
        shrunk += tl.load(at, mask=ranks, other=0.0)
    b = tl.load(b_rows[None, :] + r[:, None], mask=here[None, :] & (r < RANK)[:, None], other=0.0)
    return tl.dot(shrunk.to(b.dtype), b, total, input_precision="ieee")


@triton.jit
def _expand_kernel(
    out_ptr, partial_ptr, b_ptr, adapters_ptr, parts_ptr, rows, out_stride, b_stride, RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, blocks of a part's outputs, parts x adapters): out[row] += b[adapter] (sum of partials),
    for the rows of that adapter.
    """
    part = tl.program_id(2) % PARTS
    begin, count = tl.load(parts_ptr + 2 * part), tl.load(parts_ptr + 2 * part + 1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    chosen = tl.load(adapters_ptr + m, mask=m < rows, other=-1)
    adapter = tl.program_id(2) // PARTS
    mine = chosen == adapter
    if (tl.program_id(1) * BLOCK_N < count) & (tl.max(mine.to(tl.int32), 0) > 0):
        here = n < count
        out = out_ptr + m.to(tl.int64)[:, None] * out_stride + (begin + n)[None, :]
        mask = mine[:, None] & here[None, :]
        before = tl.load(out, mask=mask, other=0.0)  # first, so that nothing waits for it
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        b_rows = b_ptr + adapter * b_stride.to(tl.int64) + (begin + n).to(tl.int64) * RANK
        total = _expanded(total, partial_ptr, b_rows, mine, m, rows, here, part, RANK, RANK_PADDED, PARTS, SPLITS)
        tl.store(out, before + total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _shrunk(partial_ptr, mine, m, rows, part, dtype: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr,
            PARTS: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """The sum of partials of one part, for the rows `mine`, zeros for the others."""
    r = tl.arange(0, RANK_PADDED)
    total = tl.zeros((mine.shape[0], RANK_PADDED), tl.float32)
    for split in range(SPLITS):
        at = partial_ptr + (split * rows + m).to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + r[None, :]
        total += tl.load(at, mask=mine[:, None] & (r < RANK)[None, :], other=0.0)
    return total.to(dtype)


@triton.jit
def _wide_kernel(
    y_ptr, out_ptr, partial_ptr, b_ptr, adapters_ptr, parts_ptr, rows, y_stride, out_stride, b_stride, limit,
    DIM: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, groups of a part's outputs, parts, or 1 of them if GATED): out[row] = y[row] + b[adapter]
    (sum of partials); GATED: y = [gate | up], and out = act(gate) * up of that. One adapter of the rows after the
    other, with its rows only; rows without one stay, or are the first.

    WHOLE: groups and parts are multiples of the blocks.
    """
    part = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    chosen = tl.load(adapters_ptr + m, mask=m < rows, other=-2)
    lowest: tl.constexpr = -1 if GATED else 0
    first = tl.min(tl.where(chosen < lowest, 1 << 30, chosen), 0)
    last = tl.max(chosen, 0)
    if GATED:
        begin = 0
        count = DIM
    else:
        begin = tl.load(parts_ptr + 2 * part)
        count = tl.load(parts_ptr + 2 * part + 1)
        if WHOLE:
            begin = tl.multiple_of(begin, BLOCK_N)
    start = tl.program_id(1) * GROUP
    end = tl.minimum(start + GROUP, count)
    r = tl.arange(0, RANK_PADDED)
    for adapter in range(first, last + 1):
        mine = chosen == adapter
        if (tl.max(mine.to(tl.int32), 0) > 0) & (start < end):
            b_rows = b_ptr + tl.maximum(adapter, 0) * b_stride.to(tl.int64) + r[:, None]
            dtype: tl.constexpr = b_ptr.dtype.element_ty
            adapted = mine & (adapter >= 0)
            small = _shrunk(partial_ptr, adapted, m, rows, part, dtype, RANK, RANK_PADDED, PARTS, SPLITS)
            if GATED:
                small_up = _shrunk(partial_ptr, adapted, m, rows, 1, dtype, RANK, RANK_PADDED, PARTS, SPLITS)
            for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
                n = n0 + tl.arange(0, BLOCK_N)
                if WHOLE:
                    mask = mine[:, None] & (n >= 0)[None, :]
                    b_mask = (r < RANK)[:, None] & (n >= 0)[None, :]
                else:
                    mask = mine[:, None] & (n < end)[None, :]
                    b_mask = (r < RANK)[:, None] & (n < end)[None, :]
                at = y_ptr + m.to(tl.int64)[:, None] * y_stride + (begin + n)[None, :]
                value = tl.load(at, mask=mask, other=0.0)
                b = tl.load(b_rows + (begin + n).to(tl.int64)[None, :] * RANK, mask=b_mask, other=0.0)
                value += tl.dot(small, b, input_precision="ieee").to(value.dtype)
                out = out_ptr + m.to(tl.int64)[:, None] * out_stride + (begin + n)[None, :]
                if GATED:
                    up = tl.load(at + DIM, mask=mask, other=0.0)
                    b_up = tl.load(b_rows + (DIM + n).to(tl.int64)[None, :] * RANK, mask=b_mask, other=0.0)
                    up += tl.dot(small_up, b_up, input_precision="ieee").to(up.dtype)
                    value = gated(value, up, limit, KIND, LIMITED)
                tl.store(out, value, mask=mask)


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


def _shrink(x: Tensor, a: Tensor, rows: RowView) -> Tensor:
    """Partial sums of a[adapter] x: [splits, rows, parts * rank] fp32, where rows have an adapter."""
    (count, inputs), ranks, many = x.shape, a.shape[1], x.shape[0] > _MANY_ROWS
    splits = min(_MOST_SPLITS, triton.cdiv(inputs, 2 * _INPUTS))  # by the layer alone: sums are the same in any batch
    block_m, block_r, each = _ROWS, min(_RANKS, _padded(ranks)), len(a)
    if many:
        most = _MANY_SPLITS * (1 if inputs <= _WIDE else 2)
        splits = max(1, min(most, 2 * processors() * _MANY // count))  # two programs on each processor
        block_m, each = _MANY, 1
    split = triton.cdiv(triton.cdiv(inputs, splits), _INPUTS) * _INPUTS
    splits = triton.cdiv(inputs, split)
    partial = torch.empty(splits, count, ranks, dtype=torch.float32, device=x.device)
    _shrink_kernel[(triton.cdiv(count, block_m), splits, triton.cdiv(ranks, block_r) * each)](
        x, a, rows.adapters, partial, count, x.stride(0), a.stride(0), inputs, RANKS=ranks, BLOCK_R=block_r,
        SPLIT=split, BLOCK_M=block_m, BLOCK_K=_INPUTS, EACH=not many, STAGES=3, num_warps=4,
    )  # fmt: skip
    return partial


def add_lora(out: Tensor, x: Tensor, matrices: LowRank, rows: RowView) -> None:
    """`vllm.ops.lora.add_lora` for CUDA. `rows.segments` may be empty: the rows' adapters are read on the device."""
    if x.stride(1) != 1 or out.stride(1) != 1:
        ops.add_lora.reference(out, x, matrices, rows)
        return
    if x.shape[0]:
        _expand(out, _shrink(x, matrices.a, rows), matrices.b, matrices.parts, rows)


def activate_gated_lora(
    y: Tensor, x: Tensor, matrices: LowRank, rows: RowView, kind: str, limit: float | None = None
) -> Tensor:
    """`vllm.ops.lora.activate_gated_lora` for CUDA: many rows are read and written once."""
    (count, width), b = y.shape, matrices.b
    dim = width // 2
    halves = matrices.parts == ((0, dim), (dim, dim))
    if count <= _MANY_ROWS or not halves or kind not in KINDS or x.stride(1) != 1 or y.stride(1) != 1:
        activated: Tensor = ops.activate_gated_lora.reference(y, x, matrices, rows, kind, limit)
        return activated
    partial = _shrink(x, matrices.a, rows)
    out = y.new_empty(count, dim)
    _expand_many(y, out, partial, b, matrices.parts, rows, dim, kind, limit)
    return out


def _expand_many(
    y: Tensor, out: Tensor, partial: Tensor, b: Tensor, parts: tuple[tuple[int, int], ...], rows: RowView,
    dim: int = 0, kind: str | None = None, limit: float | None = None,
) -> None:  # fmt: skip
    """out = y + what adapters add to its parts; with a kind, act(gate) * up of that, of `dim` outputs each."""
    blocks, widest = triton.cdiv(len(y), _MANY), dim or max(size for _, size in parts)
    pieces = triton.cdiv(widest, _WIDE_OUTPUTS)
    group = triton.cdiv(pieces, min(pieces, max(1, 2 * processors() // blocks))) * _WIDE_OUTPUTS
    whole = all(first % _WIDE_OUTPUTS == size % _WIDE_OUTPUTS == 0 for first, size in parts)
    _wide_kernel[(blocks, triton.cdiv(widest, group), len(parts) if kind is None else 1)](
        y, out, partial, b, rows.adapters, _part_table(parts, y.device), len(y), y.stride(0), out.stride(0),
        b.stride(0), limit or 0.0, DIM=dim, RANK=b.shape[2], RANK_PADDED=_padded(b.shape[2]), PARTS=len(parts),
        SPLITS=len(partial), GROUP=group, BLOCK_M=_MANY, BLOCK_N=_WIDE_OUTPUTS, STAGES=3, WHOLE=whole,
        GATED=kind is not None, KIND=KINDS[kind or "silu"], LIMITED=limit is not None, num_warps=4,
    )  # fmt: skip


def shrink_lora(x: Tensor, a: Tensor, rows: RowView) -> Tensor:
    """`vllm.ops.lora.shrink_lora` for CUDA."""
    return torch.where((rows.adapters >= 0)[:, None], _shrink(x.contiguous(), a, rows).sum(0), 0.0)


def expand_lora(out: Tensor, small: Tensor, b: Tensor, parts: tuple[tuple[int, int], ...], rows: RowView) -> None:
    """`vllm.ops.lora.expand_lora` for CUDA."""
    if out.stride(1) != 1:
        ops.expand_lora.reference(out, small, b, parts, rows)
    elif len(small):
        _expand(out, small.contiguous()[None], b, parts, rows)


def _expand(out: Tensor, partial: Tensor, b: Tensor, parts: tuple[tuple[int, int], ...], rows: RowView) -> None:
    splits, count, _ = partial.shape
    if count > _MANY_ROWS:
        _expand_many(out, out, partial, b, parts, rows)
        return
    widest = max(size for _, size in parts)
    table = _part_table(parts, out.device)
    _expand_kernel[(triton.cdiv(count, _ROWS), triton.cdiv(widest, _OUTPUTS), len(parts) * len(b))](
        out, partial, b, rows.adapters, table, count, out.stride(0), b.stride(0), RANK=b.shape[2],
        RANK_PADDED=_padded(b.shape[2]), PARTS=len(parts), SPLITS=splits, BLOCK_M=_ROWS, BLOCK_N=_OUTPUTS,
        num_warps=4,
    )  # fmt: skip


def add_embedding_lora(out: Tensor, ids: Tensor, matrices: LowRank, rows: RowView) -> None:
    """`vllm.ops.lora.add_embedding_lora` for CUDA; `rows.segments` may be empty."""
    count = ids.shape[0]
    if out.stride(1) != 1:
        ops.add_embedding_lora.reference(out, ids, matrices, rows)
        return
    _, vocabulary, rank = matrices.a.shape
    partial = torch.empty(1, count, rank, dtype=torch.float32, device=out.device)
    _gather_kernel[(count,)](
        ids, matrices.a, rows.adapters, partial, count, vocabulary, RANK=rank, RANK_PADDED=_padded(rank), num_warps=1
    )
    _expand(out, partial, matrices.b, matrices.parts, rows)


def register(device_type: str) -> None:
    ops.add_lora.register(device_type, add_lora)
    ops.shrink_lora.register(device_type, shrink_lora)
    ops.expand_lora.register(device_type, expand_lora)
    ops.activate_gated_lora.register(device_type, activate_gated_lora)
    ops.add_embedding_lora.register(device_type, add_embedding_lora)
