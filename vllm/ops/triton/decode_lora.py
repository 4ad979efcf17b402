"""What LoRA adapters add to the products of a decode step, inside the kernels of these products.

A product's first programs multiply the rows by the adapters' `a` (each of them a share of the inputs and a tile of rows
of all adapters that the step uses, one behind the other), while the others read the weight; when these have their sums,
they wait for the small ones, which are long there, and add `b` times them. Programs begin in the order of their
numbers, and the first ones wait for nobody, so that the others can wait for them. What the first ones leave holds zeros
where a row has another adapter, so that all adapters of a tile are one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait, num_threads

from vllm.ops.lora import LowRank

# Inputs that one program multiplies, or more if that would take too many programs: each holds up one that reads the
# weight, and there are hardly more of these than processors (times of a step on an H200: 512 and 16 took 0.16 ms more).
_SHARE = 2048
_MOST_SHARES = 4
MOST_RANK = 128  # of adapters
_LARGEST_TILE = 64  # rows of `a`
_COLUMNS = MOST_RANK  # of `b` in one product
_LARGEST_LOOK_UP = 1 << 14  # slots times rows that are compared at once


def _shares(w: LowRank) -> int:
    """Pieces that the inputs are cut into: by the layer alone, so that sums are the same in any batch."""
    return max(1, min(_MOST_SHARES, w.a.shape[2] // _SHARE))


def _padded_rows(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def room(w: LowRank, rows: int) -> int:
    """Numbers that the first product leaves."""
    shares = _shares(w)
    return (1 + (shares if shares > 1 else 0)) * _padded_rows(rows) * min(len(w.a), rows) * w.a.shape[1]


def _tile(w: LowRank, rows: int) -> int:
    """Rows of `a` that one program multiplies."""
    return min(_LARGEST_TILE, max(16, triton.next_power_of_2(min(len(w.a), rows) * w.a.shape[1])))


def _tiles(w: LowRank, rows: int) -> int:
    return triton.cdiv(min(len(w.a), rows) * w.a.shape[1], _tile(w, rows))


def counters(w: LowRank, rows: int) -> int:
    """Numbers in `Change.ready`."""
    return 1 + _tiles(w, rows)


@dataclass(frozen=True, slots=True)
class Change:
    """A product's adapters. rows: [rows] int32, each row's adapter, -1 for none.   order: [1 + slots] int32, how many
    adapters the rows have, and which.   small: room for the first product, fp32.   ready: [counters] int32, zeros
    before the product: how many tiles of the first product are there, and of each how many shares.
    """

    weights: LowRank
    rows: Tensor
    order: Tensor
    small: Tensor
    ready: Tensor

    def arguments(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """What `shrink_rows` and `expand_rows` take, as arguments and constants of a kernel."""
        w, rows = self.weights, self.rows.shape[0]
        slots, outputs, rank = w.b.shape
        padded, most = max(16, triton.next_power_of_2(rank)), min(slots, rows)
        second, third = (*(first for first, _ in w.parts[1:]), outputs, outputs)[:2]
        const = {
            "LORA": _tiles(w, rows) * _shares(w), "MOST": most, "RANK": rank, "RP": padded, "PARTS": len(w.parts),
            "SECOND": second, "THIRD": third, "SHARES": _shares(w), "TILE": _tile(w, rows),
            "COLUMNS": min(_COLUMNS, triton.next_power_of_2(most) * padded), "OUTPUTS": outputs,
            "NARROW": w.b.dtype == torch.float16,
        }  # fmt: skip
        return (w.a, w.b, w.ranks, self.rows, self.order, self.small, self.ready), const


def no_change() -> tuple[tuple[None, ...], dict[str, Any]]:
    """As `Change.arguments` for a product without adapters."""
    names = ("LORA", "MOST", "RANK", "RP", "PARTS", "SECOND", "THIRD", "SHARES", "TILE", "COLUMNS", "OUTPUTS", "NARROW")
    return (None,) * 7, dict.fromkeys(names, 0)


@triton.jit
def prefetch_rows(rows, first, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Bring columns [first, first + COLUMNS) of ROWS rows of a matrix into the L2. One piece a thread, so
    that each is asked for once.

    rows: [ROWS] pointers to the beginnings of the rows.
    """
    PIECES: tl.constexpr = num_threads() // ROWS
    SIZE: tl.constexpr = COLUMNS // PIECES  # numbers in a piece
    BYTES: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    at = rows[:, None] + first + tl.arange(0, PIECES)[None, :] * SIZE
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [at, tl.full([ROWS, PIECES], SIZE * BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def columns_of_b(first, order, ranks, COLUMNS: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr):
    """(adapter, place among the step's adapters, row of `a` and whether there is such a row, and it is not zeros) of
    COLUMNS columns of `b`, the step's adapters one behind the other. Nothing that runs beside the step changes what
    this reads, so nobody has to wait for a kernel before.
    """
    c = first + tl.arange(0, COLUMNS)
    place = c // RP
    r = c % RP
    there = place < tl.load(order)
    slot = tl.load(order + 1 + place, mask=there, other=0)
    used = there & (tl.load(ranks + slot, mask=there, other=0) > 0)
    if RANK == RP:  # noqa: SIM108
        used = tl.max_constancy(used, RP)
    else:
        used = used & (r < RANK)
    return slot, place, r, used


@triton.jit
def shrink_rows(
    program, x, a, ranks, adapters, order, small, ready, M, K: tl.constexpr, BM: tl.constexpr, MOST: tl.constexpr,
    RANK: tl.constexpr, PARTS: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, FORESEE: tl.constexpr,
):  # fmt: skip
    """Program number `program` of the first product, a tile of rows of the step's adapters over a share of the inputs;
    nothing if there are so few. small[0, j] = a[adapter, its row] x[row] where the row has that adapter, else 0; the
    shares behind it.
    """
    HEIGHT: tl.constexpr = PARTS * RANK
    SHARE: tl.constexpr = ((K + SHARES - 1) // SHARES + BK - 1) // BK * BK
    STRIDE: tl.constexpr = MOST * HEIGHT * BM
    share = program % SHARES
    tile = program // SHARES
    count = tl.load(order)
    if tile * TILE < count * HEIGHT:
        j = tile * TILE + tl.arange(0, TILE)
        place = tl.minimum(j // HEIGHT, count - 1)  # what is not there is read like the last one, and not kept
        slot = tl.load(order + 1 + place)
        live = (j < count * HEIGHT) & (tl.load(ranks + slot) > 0)
        m = tl.arange(0, BM)
        chosen = tl.load(adapters + m, mask=m < M, other=-1)
        rows = a + slot.to(tl.int64) * (HEIGHT * K) + (j % HEIGHT).to(tl.int64) * K
        if PDL:
            if FORESEE and K % SHARE == 0:
                prefetch_rows(rows, share * SHARE, SHARE, TILE)
            gdc_wait()
        if tl.max(live.to(tl.int32), 0) > 0:
            acc = tl.zeros([TILE, BM], tl.float32)
            for start in tl.range(share * SHARE, tl.minimum(share * SHARE + SHARE, K), BK, num_stages=STAGES):
                k = start + tl.arange(0, BK)
                in_k = k < K
                w = tl.load(rows[:, None] + k[None, :], mask=live[:, None] & in_k[None, :], other=0.0)
                inputs = x + m.to(tl.int64)[None, :] * K + k[:, None]
                xt = tl.load(inputs, mask=(m < M)[None, :] & in_k[:, None], other=0.0)
                acc = tl.dot(w, xt.to(w.dtype), acc, input_precision="ieee")
            acc = tl.where(slot[:, None] == chosen[None, :], acc, 0.0)
            at = small + j[:, None] * BM + m[None, :]
            if SHARES == 1:
                tl.store(at, acc, mask=live[:, None])
            else:
                tl.store(at + (1 + share) * STRIDE, acc, mask=live[:, None])
        tl.debug_barrier()
        if SHARES > 1:  # the last to arrive adds the shares up, in fixed order
            before = tl.atomic_add(ready + 1 + tile, 1, sem="acq_rel")
            if before == SHARES - 1:
                at = small + j[:, None] * BM + m[None, :]
                total = tl.zeros([TILE, BM], tl.float32)
                for s in tl.static_range(SHARES):
                    total += tl.load(at + (1 + s) * STRIDE, mask=live[:, None], other=0.0, cache_modifier=".cg")
                tl.store(at, total, mask=live[:, None])
                tl.debug_barrier()
                tl.atomic_add(ready, 1, sem="acq_rel")
        else:
            tl.atomic_add(ready, 1, sem="acq_rel")


@triton.jit
def _await_rows(count, ready, HEIGHT: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr):
    """Until the first product is there, of `count` adapters."""
    tiles = (count * HEIGHT + TILE - 1) // TILE
    if ASM:  # every thread looks for itself
        asm: tl.constexpr = "ld.acquire.gpu.global.s32 $0, [$1];"
        there = tl.inline_asm_elementwise(asm, "=r,l", [ready], dtype=tl.int32, is_pure=False, pack=1)
        while there < tiles:
            there = tl.inline_asm_elementwise(asm, "=r,l", [ready], dtype=tl.int32, is_pure=False, pack=1)
    else:
        while tl.atomic_add(ready, 0, sem="acquire") < tiles:
            pass


@triton.jit
def _small_rows(small, place, r, m, used, part, factor, HEIGHT: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr):
    """What the first product left for some columns of `b`, times what it is still to be multiplied by."""
    at = small + (place * HEIGHT + part * RANK + r)[:, None] * BM + m[None, :]
    return tl.load(at, mask=used[:, None], other=0.0, cache_modifier=".cg") * factor[None, :]


@triton.jit
def _expand_columns(
    acc, factor, slot, place, r, used, count, n, here, m, b, small, ready, part, BM: tl.constexpr, RANK: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`expand_rows` for some columns of `b`, as of `columns_of_b`. count: adapters of the step."""
    HEIGHT: tl.constexpr = PARTS * RANK
    if tl.max(used.to(tl.int32), 0) > 0:
        rows = b + (slot.to(tl.int64) * (OUTPUTS * RANK) + r)[None, :] + n[:, None].to(tl.int64) * RANK
        w = tl.load(rows, mask=here[:, None] & used[None, :], other=0.0)
        _await_rows(count, ready, HEIGHT, TILE, ASM)
        total = _small_rows(small, place, r, m, used, part, factor, HEIGHT, RANK, BM)
        acc = tl.dot(w, total.to(w.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def expand_rows(
    acc, factor, slot, place, r, used, count, n, here, m, b, ranks, order, small, ready, part, BM: tl.constexpr,
    MOST: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [outputs, rows] + b[adapter] (factor * small) for the outputs `here`, which belong to `part`.

    factor: [rows], what the first product is still to be multiplied by.   slot, place, r, used, count: the first
    columns of `b`, and the step's adapters, which were looked up before anything had to be waited for.
    """
    acc = _expand_columns(
        acc, factor, slot, place, r, used, count, n, here, m, b, small, ready, part, BM, RANK, PARTS, TILE, OUTPUTS,
        ASM,
    )  # fmt: skip
    if MOST * RP > COLUMNS:
        for first in range(COLUMNS, count * RP, COLUMNS):
            slot, place, r, used = columns_of_b(first, order, ranks, COLUMNS, RANK, RP)
            acc = _expand_columns(
                acc, factor, slot, place, r, used, count, n, here, m, b, small, ready, part, BM, RANK, PARTS, TILE,
                OUTPUTS, ASM,
            )  # fmt: skip
    return acc


@triton.jit
def prefetch_b(b, ranks, order, first, RANK: tl.constexpr, OUTPUTS: tl.constexpr, BN: tl.constexpr):
    """Ask for what `expand_rows` will read of BN outputs from `first` on. One piece a thread."""
    BYTES: tl.constexpr = b.dtype.element_ty.primitive_bitwidth // 8
    count = tl.load(order)
    for begin in range(0, count, num_threads()):
        place = begin + tl.arange(0, num_threads())
        there = place < count
        slot = tl.load(order + 1 + place, mask=there, other=0)
        used = there & (tl.load(ranks + slot, mask=there, other=0) > 0)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [
                b + (slot.to(tl.int64) * OUTPUTS + first) * RANK,
                tl.full([num_threads()], BN * RANK * BYTES, tl.int32),
                used.to(tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def add_parts(
    acc, factor, slot, place, r, used, count, n, in_n, m, b, ranks, order, small, ready, BM: tl.constexpr,
    MOST: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr, SECOND: tl.constexpr,
    THIRD: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`expand_rows` for every part that some of the outputs n belong to."""
    for part in range(PARTS):
        begin = tl.where(part == 0, 0, tl.where(part == 1, SECOND, THIRD))
        end = tl.where(part == PARTS - 1, OUTPUTS, tl.where(part == 0, SECOND, THIRD))
        here = in_n & (n >= begin) & (n < end)
        if tl.max(here.to(tl.int32), 0) > 0:
            acc = expand_rows(
                acc, factor, slot, place, r, used, count, n, here, m, b, ranks, order, small, ready, part, BM, MOST,
                RANK, RP, PARTS, TILE, COLUMNS, OUTPUTS, ASM,
            )  # fmt: skip
    return acc


@triton.jit
def _look_up_kernel(
    slots, column, rows, order, ready, count, products, BLOCK: tl.constexpr, SLOTS: tl.constexpr, SP: tl.constexpr
):
    """One program: the adapter of each row, which there are, and no product begun."""
    each = tl.arange(0, SP)
    present = tl.zeros([SP], tl.int32)
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        slot = tl.load(slots + i, mask=i < count, other=-1)
        adapter = tl.load(column + slot, mask=slot >= 0, other=-1)
        tl.store(rows + i, adapter, mask=i < count)
        present = tl.maximum(present, tl.max((each[:, None] == adapter[None, :]).to(tl.int32), 1))
    tl.store(order + tl.cumsum(present, 0), each, mask=(present > 0) & (each < SLOTS))
    tl.store(order, tl.sum(present, 0))
    for first in range(0, products, 256):
        i = first + tl.arange(0, 256)
        tl.store(ready + i, tl.zeros([256], tl.int32), mask=i < products)


def look_up(slots: Tensor, column: Tensor, rows: Tensor, order: Tensor, ready: Tensor) -> None:
    """rows[i] = column[slots[i]], -1 for a slot of -1; order as of `Change`; ready = 0. All int32."""
    count, products, adapters = rows.shape[0], ready.shape[0], order.shape[0] - 1
    padded = triton.next_power_of_2(adapters)
    block = max(16, min(256, _LARGEST_LOOK_UP // padded))
    _look_up_kernel[(1,)](
        slots, column, rows, order, ready, count, products, BLOCK=block, SLOTS=adapters, SP=padded, num_warps=4
    )
