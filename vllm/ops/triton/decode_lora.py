"""What LoRA adapters add to the products of a decode step, inside the kernels of these products.

A product's first programs multiply the rows by the adapters' `a` (each of them a share of the inputs of one adapter),
while the others read the weight; when these have their sums, they wait for the small ones, which are long there, and
add `b` times them. Programs begin in the order of their numbers, and the first ones wait for nobody, so that the others
can wait for them. All adapters of a tile are one product, over columns that hold zeros for the rows of other adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait, num_threads

from vllm.ops.lora import LowRank

_SHARE = 1024  # inputs that one program multiplies, or more if that would take too many programs
_MOST_SHARES = 8
MOST_RANK = 128  # of adapters
_LARGEST_TILE = 64  # rows of `a`
_COLUMNS = MOST_RANK  # of `b` in one product


def _shares(w: LowRank) -> int:
    """Pieces that the inputs are cut into: by the layer alone, so that sums are the same in any batch."""
    return max(1, min(_MOST_SHARES, w.a.shape[2] // _SHARE))


def room(w: LowRank, rows: int) -> int:
    """Numbers that the first product leaves."""
    shares = _shares(w)
    return (1 + (shares if shares > 1 else 0)) * rows * w.a.shape[1]


def _tile(w: LowRank) -> int:
    """Rows of `a` that one program multiplies."""
    return min(_LARGEST_TILE, max(16, triton.next_power_of_2(w.a.shape[1])))


def counters(w: LowRank) -> int:
    """Numbers in `Change.ready`."""
    return 1 + len(w.a) * triton.cdiv(w.a.shape[1], _tile(w))


@dataclass(frozen=True, slots=True)
class Change:
    """A product's adapters. rows: [rows] int32, each row's adapter, -1 for none.   small: room for the first product,
    fp32.   ready: [counters] int32, zeros before the product: how many pieces of the first product are there, and of
    each how many shares.
    """

    weights: LowRank
    rows: Tensor
    small: Tensor
    ready: Tensor

    def arguments(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """What `shrink_rows` and `expand_rows` take, as arguments and constants of a kernel."""
        w = self.weights
        slots, outputs, rank = w.b.shape
        height, padded = w.a.shape[1], max(16, triton.next_power_of_2(rank))
        tile = _tile(w)
        columns = min(_COLUMNS, triton.next_power_of_2(slots) * padded)
        second, third = (*(first for first, _ in w.parts[1:]), outputs, outputs)[:2]
        const = {
            "LORA": slots * _shares(w) * triton.cdiv(height, tile), "SLOTS": slots, "RANK": rank, "RP": padded,
            "PARTS": len(w.parts), "SECOND": second, "THIRD": third, "SHARES": _shares(w), "TILE": tile,
            "COLUMNS": columns, "OUTPUTS": outputs, "SP": triton.next_power_of_2(slots),
        }  # fmt: skip
        return (w.a, w.b, w.ranks, self.rows, self.small, self.ready), const


def no_change(x: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """As `Change.arguments` for a product without adapters."""
    names = ("LORA", "SLOTS", "RANK", "RP", "PARTS", "SECOND", "THIRD", "SHARES", "TILE", "COLUMNS", "OUTPUTS", "SP")
    return (x,) * 6, dict.fromkeys(names, 0)


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
def adapters_of_rows(adapters, ranks, M, BM: tl.constexpr):
    """Each row's adapter, -1 for rows that the layer's adapters do not change. Nothing that runs beside the step
    changes these, so nobody has to wait for a kernel before.
    """
    m = tl.arange(0, BM)
    chosen = tl.load(adapters + m, mask=m < M, other=-1)
    height = tl.load(ranks + chosen, mask=chosen >= 0, other=0)
    return tl.where(height > 0, chosen, -1)


@triton.jit
def shrink_rows(
    program, x, a, chosen, small, ready, M, K: tl.constexpr, BM: tl.constexpr, RANK: tl.constexpr,
    PARTS: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
    FORESEE: tl.constexpr,
):  # fmt: skip
    """Program number `program` of the first product, over a share of the inputs, for the rows of one adapter; nothing
    if there are none. small[0, row] = a[adapter] x[row], the shares behind it.
    """
    HEIGHT: tl.constexpr = PARTS * RANK
    TILES: tl.constexpr = (HEIGHT + TILE - 1) // TILE
    SHARE: tl.constexpr = ((K + SHARES - 1) // SHARES + BK - 1) // BK * BK
    slot = program // (SHARES * TILES)
    share = program // TILES % SHARES
    j = program % TILES * TILE + tl.arange(0, TILE)
    in_j = j < HEIGHT
    m = tl.arange(0, BM)
    mine = chosen == slot
    if tl.max(mine.to(tl.int32), 0) > 0:
        base = a + slot.to(tl.int64) * (HEIGHT * K)
        if PDL:
            if FORESEE and K % SHARE == 0:
                prefetch_rows(base + tl.minimum(j, HEIGHT - 1).to(tl.int64) * K, share * SHARE, SHARE, TILE)
            gdc_wait()
        rows = base + j[:, None].to(tl.int64) * K
        acc = tl.zeros([TILE, BM], tl.float32)
        for start in tl.range(share * SHARE, tl.minimum(share * SHARE + SHARE, K), BK, num_stages=4):
            k = start + tl.arange(0, BK)
            in_k = k < K
            w = tl.load(rows + k[None, :], mask=in_j[:, None] & in_k[None, :], other=0.0)
            xt = tl.load(x + m.to(tl.int64)[None, :] * K + k[:, None], mask=mine[None, :] & in_k[:, None], other=0.0)
            acc = tl.dot(w, xt.to(w.dtype), acc, input_precision="ieee")
        at = small + m[None, :] * HEIGHT + j[:, None]
        keep = mine[None, :] & in_j[:, None]
        if SHARES > 1:  # the last to arrive adds the shares up, in fixed order
            tl.store(at + (1 + share) * M * HEIGHT, acc, mask=keep)
            tl.debug_barrier()
            before = tl.atomic_add(ready + 1 + slot * TILES + program % TILES, 1, sem="acq_rel")
            if before == SHARES - 1:
                total = tl.zeros([TILE, BM], tl.float32)
                for s in tl.static_range(SHARES):
                    total += tl.load(at + (1 + s) * M * HEIGHT, mask=keep, other=0.0, cache_modifier=".cg")
                tl.store(at, total, mask=keep)
                tl.debug_barrier()
                tl.atomic_add(ready, 1, sem="acq_rel")
        else:
            tl.store(at, acc, mask=keep)
            tl.debug_barrier()
            tl.atomic_add(ready, 1, sem="acq_rel")


@triton.jit
def await_rows(chosen, ready, EACH: tl.constexpr, SLOTS: tl.constexpr, SP: tl.constexpr):
    """Until the first product is there, of which every adapter that rows have takes EACH pieces. SP: at least SLOTS."""
    slot = tl.arange(0, SP)
    present = tl.max(((slot[:, None] == chosen[None, :]) & (slot < SLOTS)[:, None]).to(tl.int32), 1)
    programs = EACH * tl.sum(present, 0)
    if programs > 0:
        while tl.atomic_add(ready, 0, sem="acquire") < programs:
            pass


@triton.jit
def expand_rows(
    acc, factor, chosen, n, here, m, b, small, part, SLOTS: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """acc [outputs, rows] + b[adapter] (factor * small) for the outputs `here`, which belong to `part`.

    chosen, factor: [rows], as of `adapters_of_rows`, and what the first product is still to be multiplied by.
    """
    HEIGHT: tl.constexpr = PARTS * RANK
    for first in range(0, SLOTS * RP, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        slot = c // RP
        r = c % RP
        hit = (slot[:, None] == chosen[None, :]) & (r < RANK)[:, None]
        used = tl.max(hit.to(tl.int32), 1)
        if tl.max(used, 0) > 0:
            rows = b + (slot.to(tl.int64) * (OUTPUTS * RANK) + r)[None, :] + n[:, None].to(tl.int64) * RANK
            w = tl.load(rows, mask=here[:, None] & (used > 0)[None, :], other=0.0)
            at = small + m[None, :] * HEIGHT + (part * RANK + r)[:, None]
            total = tl.load(at, mask=hit, other=0.0, cache_modifier=".cg") * factor[None, :]
            acc = tl.dot(w, total.to(w.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def prefetch_b(b, chosen, n, SLOTS: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, BN: tl.constexpr):
    """Ask for what `expand_rows` will read of the outputs n."""
    for slot in range(SLOTS):
        if tl.max((chosen == slot).to(tl.int32), 0) > 0:
            prefetch_rows(b + slot * OUTPUTS * RANK + n.to(tl.int64) * RANK, 0, RANK, BN)


@triton.jit
def add_parts(
    acc, factor, chosen, n, in_n, m, b, small, SLOTS: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    PARTS: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """`expand_rows` for every part that some of the outputs n belong to."""
    for part in tl.static_range(PARTS):
        begin = 0 if part == 0 else SECOND if part == 1 else THIRD
        end = OUTPUTS if part == PARTS - 1 else SECOND if part == 0 else THIRD
        here = in_n & (n >= begin) & (n < end)
        if tl.max(here.to(tl.int32), 0) > 0:
            acc = expand_rows(acc, factor, chosen, n, here, m, b, small, part, SLOTS, RANK, RP, PARTS, COLUMNS, OUTPUTS)
    return acc


@triton.jit
def _look_up_kernel(slots, column, rows, ready, count, products, BLOCK: tl.constexpr):
    """One program: the adapter of each row, and no product begun."""
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        slot = tl.load(slots + i, mask=i < count, other=-1)
        tl.store(rows + i, tl.load(column + slot, mask=slot >= 0, other=-1), mask=i < count)
    for first in range(0, products, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(ready + i, tl.zeros([BLOCK], tl.int32), mask=i < products)


def look_up(slots: Tensor, column: Tensor, rows: Tensor, ready: Tensor) -> None:
    """rows[i] = column[slots[i]], -1 for a slot of -1; ready = 0. All int32."""
    count, products = rows.shape[0], ready.shape[0]
    _look_up_kernel[(1,)](slots, column, rows, ready, count, products, BLOCK=256, num_warps=4)
