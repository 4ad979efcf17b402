"""Triton kernels of latent attention (MLA) in a decode step of few rows: three launches from the product of the hidden
states to what the output projection reads.

  absorb   each head's query times its K_h, so that it can be multiplied with latents; rotation; the new latent into the
           cache, normalised
  attend   the heads over the cached latents, which are split over programs
  expand   what the splits found, merged, times each head's V_h

See `ops/latent_attention.py` for what K_h and V_h are, and `decode_linear` for PDL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.triton.decode_parts import processors

MOST_ROWS = 16  # each reads K_h and V_h for itself
_COLUMNS = 64  # of the latent that a program of `absorb` computes
_VALUES = 16  # numbers of a head that a program of `expand` computes
_TILE, _STAGES, _WARPS = 32, 2, 8  # of `attend`: latents at a time
_TOGETHER = 8  # splits that are merged at a time


@dataclass(frozen=True, slots=True)
class LatentDecode:
    """What latent attention reads of a layer. cache: [blocks, block_size, rank + rope_dim]; kv_b: [heads, nope_dim +
    v_dim, rank]; norm_weight: [rank], of the latent; cos_sin: [positions, rope_dim] fp32.   group: of the KV cache.
    """

    heads: int
    nope_dim: int
    scale: float
    cache: Tensor
    kv_b: Tensor
    norm_weight: Tensor
    eps: float
    cos_sin: Tensor
    interleaved: bool
    group: int

    @property
    def rank(self) -> int:
        return self.kv_b.shape[2]

    @property
    def v_dim(self) -> int:
        return self.kv_b.shape[1] - self.nope_dim

    @property
    def window(self) -> None:
        """There is none."""
        return None


@triton.jit
def _shares(position, splits, TILE: tl.constexpr):
    """(keys of each split, splits that have any) of a sequence whose newest token is at `position`."""
    share = tl.cdiv(tl.cdiv(position + 1, splits), TILE) * TILE
    return share, tl.cdiv(position + 1, share)


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _absorb_kernel(
    x, kv_b, norm_weight, cos_sin, cache, table_ptr, slots_ptr, positions_ptr, inner, turned, eps, stride_block,
    stride_table,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NP: tl.constexpr, ROPE: tl.constexpr, HALFP: tl.constexpr,
    V: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (HEADS * RANK / BR + 1, rows); the last one has the row's latent. A slot below 0 is padding.

    x: [rows, HEADS * (NOPE + ROPE) + RANK + ROPE], queries and the latent.   inner: [rows, HEADS, RANK].
    turned: [rows, HEADS, ROPE], what is rotated of the queries.
    """
    CHUNKS: tl.constexpr = (RANK + BR - 1) // BR
    HALF: tl.constexpr = ROPE // 2
    head = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row, mask=slot >= 0, other=0)
    n = tl.arange(0, NP)
    c = chunk * BR + tl.arange(0, BR)
    d = tl.arange(0, RP)
    i = tl.arange(0, HALFP)
    in_c = c < tl.where(head < HEADS, RANK, 0)
    w = tl.load(
        kv_b + (head * (NOPE + V) + n).to(tl.int64)[:, None] * RANK + c[None, :],
        mask=(n < NOPE)[:, None] & in_c[None, :], other=0.0,
    )  # fmt: skip
    cos = tl.load(cos_sin + position * ROPE + i, mask=i < HALF, other=0.0)
    sin = tl.load(cos_sin + position * ROPE + HALF + i, mask=i < HALF, other=0.0)
    at_a = i
    at_b = i + HALF
    if INTERLEAVED:
        at_a = 2 * i
        at_b = 2 * i + 1
    mine = x + row * (HEADS * (NOPE + ROPE) + RANK + ROPE)
    dtype = x.dtype.element_ty
    if PDL:
        gdc_wait()
    if head < HEADS:
        query = mine + head * (NOPE + ROPE)
        q = tl.load(query + n, mask=n < NOPE, other=0.0).to(tl.float32)
        y = tl.sum(q[:, None] * w.to(tl.float32), 0)
        tl.store(inner + (row * HEADS + head) * RANK + c, y.to(dtype), mask=in_c)
        if chunk == 0:
            a = tl.load(query + NOPE + at_a, mask=i < HALF, other=0.0).to(tl.float32)
            b = tl.load(query + NOPE + at_b, mask=i < HALF, other=0.0).to(tl.float32)
            to = turned + (row * HEADS + head) * ROPE
            tl.store(to + at_a, (a * cos - b * sin).to(dtype), mask=i < HALF)
            tl.store(to + at_b, (b * cos + a * sin).to(dtype), mask=i < HALF)
    else:
        latent = mine + HEADS * (NOPE + ROPE)
        x_l = tl.load(latent + d, mask=d < RANK, other=0.0).to(tl.float32)
        a = tl.load(latent + RANK + at_a, mask=i < HALF, other=0.0).to(tl.float32)
        b = tl.load(latent + RANK + at_b, mask=i < HALF, other=0.0).to(tl.float32)
        x_l = x_l * tl.rsqrt(tl.sum(x_l * x_l, 0) / RANK + eps)
        x_l = x_l * tl.load(norm_weight + d, mask=d < RANK, other=0.0).to(tl.float32)
        table = table_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_table
        block = tl.load(table + position // BS).to(tl.int64)
        to = cache + block * stride_block + (position % BS) * (RANK + ROPE)
        half = tl.where(slot >= 0, HALF, 0)
        tl.store(to + d, x_l.to(dtype), mask=d < tl.where(slot >= 0, RANK, 0))
        tl.store(to + RANK + at_a, (a * cos - b * sin).to(dtype), mask=i < half)
        tl.store(to + RANK + at_b, (b * cos + a * sin).to(dtype), mask=i < half)


@triton.jit
def _places(cache, table, key, live, stride_block, width: tl.constexpr, BS: tl.constexpr):
    """Where latents `key` [TILE] stand, [TILE, 1]."""
    block = tl.load(table + key // BS, mask=live, other=0).to(tl.int64)
    return (cache + block * stride_block + (key % BS) * width)[:, None]


@triton.jit
def _latents(at, d, e, live, RANK: tl.constexpr, ROPE: tl.constexpr):
    """Latents [TILE, d] and their rotated keys [TILE, e]; zeros for those that are not live: stale memory may hold NaN,
    and 0 * NaN is NaN.
    """
    c = tl.load(at + d[None, :], mask=live[:, None] & (d < RANK)[None, :], other=0.0)
    k = tl.load(at + RANK + e[None, :], mask=live[:, None] & (e < ROPE)[None, :], other=0.0)
    return c, k


@triton.jit
def _attend_tile(m, z, acc, inner, q_rope, c, k, live, scale, PRECISION: tl.constexpr):
    """One tile of latents, the left operand, of which there are enough rows, into maxima, sums and results."""
    s = tl.dot(c, tl.trans(inner), input_precision=PRECISION)
    s = tl.dot(k, tl.trans(q_rope), s, input_precision=PRECISION) * scale
    s = tl.where(live[:, None], s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[None, :])
    z = z * alpha + tl.sum(p, 0)
    acc = tl.dot(tl.trans(c), p.to(c.dtype), acc * alpha[None, :], input_precision=PRECISION)
    return m_new, z, acc


@triton.jit(do_not_specialize=["stride_table", "splits"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _attend_kernel(
    inner_ptr, turned, cache, table_ptr, slots_ptr, positions_ptr, part, peaks, scale, stride_block, stride_table,
    splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, ROPE: tl.constexpr, PP: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (splits, groups of BM heads, rows): part [rows, HEADS, splits, RANK] fp32, and in peaks [rows, HEADS,
    splits, 2] the largest score and the sum of what the others are beside it.
    """
    split = tl.program_id(0)
    h = tl.program_id(1) * BM + tl.arange(0, BM)
    row = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row, mask=slot >= 0, other=0)
    share, active = _shares(position, splits, TILE)
    table = table_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_table
    lo = split * share
    hi = tl.where(slot >= 0, tl.minimum(lo + share, position + 1), 0)
    d = tl.arange(0, RP)
    e = tl.arange(0, PP)
    t = tl.arange(0, TILE)
    # the first tile is read before the kernel in front is waited for, but for the newest latent, which that one writes
    at = _places(cache, table, lo + t, lo + t < hi, stride_block, RANK + ROPE, BS)
    c, k = _latents(at, d, e, (lo + t < hi) & (lo + t < position), RANK, ROPE)
    if PDL:
        gdc_wait()
    if lo >= hi:
        return
    in_h = h < HEADS
    heads = row * HEADS + h
    inner = tl.load(inner_ptr + heads[:, None] * RANK + d[None, :], mask=in_h[:, None] & (d < RANK)[None, :], other=0.0)
    q_rope = tl.load(turned + heads[:, None] * ROPE + e[None, :], mask=in_h[:, None] & (e < ROPE)[None, :], other=0.0)
    newest = lo + t == position
    c_new, k_new = _latents(at, d, e, newest, RANK, ROPE)
    c = tl.where(newest[:, None], c_new, c)  # a masked load with `c` for the others made an illegal access on an H200
    k = tl.where(newest[:, None], k_new, k)
    m = tl.full([BM], -1.0e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([RP, BM], tl.float32)
    m, z, acc = _attend_tile(m, z, acc, inner, q_rope, c, k, lo + t < hi, scale, PRECISION)
    for key in tl.range(lo + TILE, hi, TILE, num_stages=STAGES):
        live = key + t < hi
        at = _places(cache, table, key + t, live, stride_block, RANK + ROPE, BS)
        c, k = _latents(at, d, e, live, RANK, ROPE)
        m, z, acc = _attend_tile(m, z, acc, inner, q_rope, c, k, live, scale, PRECISION)
    place = heads * splits + split
    tl.store(part + place[None, :] * RANK + d[:, None], acc, mask=in_h[None, :] & (d < RANK)[:, None])
    tl.store(peaks + place * 2, m, mask=in_h)
    tl.store(peaks + place * 2 + 1, z, mask=in_h)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _expand_kernel(
    part, peaks, kv_b, slots_ptr, positions_ptr, out, splits, HEADS: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr,
    RANK: tl.constexpr, RP: tl.constexpr, BV: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (HEADS * V / BV, rows): out [rows, HEADS * V]. SPLITS: at least as many as there are."""
    CHUNKS: tl.constexpr = (V + BV - 1) // BV
    head = tl.program_id(0) // CHUNKS
    v = tl.program_id(0) % CHUNKS * BV + tl.arange(0, BV)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    d = tl.arange(0, RP)
    w = tl.load(
        kv_b + (head * (NOPE + V) + NOPE + v).to(tl.int64)[:, None] * RANK + d[None, :],
        mask=(v < V)[:, None] & (d < RANK)[None, :], other=0.0,
    )  # fmt: skip
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row, mask=slot >= 0, other=0)
    _, active = _shares(position, splits, TILE)
    if PDL:
        gdc_wait()
    if slot < 0:
        return
    first = (row * HEADS + head) * splits
    s = tl.arange(0, SPLITS)
    m = tl.load(peaks + (first + s) * 2, mask=s < active, other=-1.0e30)
    z = tl.load(peaks + (first + s) * 2 + 1, mask=s < active, other=0.0)
    peak = tl.max(m, 0)
    total = tl.sum(z * tl.exp2(m - peak), 0)
    latent = tl.zeros([RP], tl.float32)
    for begin in range(0, active, TOGETHER):
        j = begin + tl.arange(0, TOGETHER)
        weight = tl.exp2(tl.load(peaks + (first + j) * 2, mask=j < active, other=-1.0e30) - peak)
        found = tl.load(
            part + (first + j)[:, None] * RANK + d[None, :], mask=(j < active)[:, None] & (d < RANK)[None, :], other=0.0
        )
        latent += tl.sum(found * weight[:, None], 0)
    y = tl.sum(w.to(tl.float32) * (latent / total)[None, :], 1)
    tl.store(out + (row * HEADS + head) * V + v, y.to(out.dtype.element_ty), mask=v < V)


@dataclass(frozen=True, slots=True)
class LatentRows:
    """The rows of a step, and room for what the kernels pass to each other; all static.

    slots, positions: [rows] int32.   tables: the block tables of every KV group.
    inner: [rows, heads, rank].   turned: [rows, heads, rope_dim].   part: [rows, heads, splits, rank] fp32.
    peaks: [rows, heads, splits, 2] fp32.
    """

    slots: Tensor
    positions: Tensor
    tables: Sequence[Tensor]
    inner: Tensor
    turned: Tensor
    part: Tensor
    peaks: Tensor

    @classmethod
    def of(cls, a: LatentDecode, slots: Tensor, positions: Tensor, tables: Sequence[Tensor], splits: int) -> LatentRows:
        """With new memory."""
        rows, device, dtype = len(slots), a.cache.device, a.cache.dtype
        rope_dim, fp32 = a.cos_sin.shape[1], torch.float32
        return cls(
            slots, positions, tables,
            torch.empty(rows, a.heads, a.rank, dtype=dtype, device=device),
            torch.empty(rows, a.heads, rope_dim, dtype=dtype, device=device),
            torch.empty(rows, a.heads, splits, a.rank, dtype=fp32, device=device),
            torch.empty(rows, a.heads, splits, 2, dtype=fp32, device=device),
        )  # fmt: skip


def choose_latent_splits(rows: int, heads: int) -> int:
    """A power of two: a program for each processor."""
    splits, programs = 1, rows * triton.cdiv(heads, _head_rows(heads))
    while splits < 128 and 2 * splits * programs <= processors():
        splits *= 2
    return splits


def _head_rows(heads: int) -> int:
    return 16 if heads <= 16 else 32 if heads <= 32 else 64


def decode_latent(x: Tensor, out: Tensor, a: LatentDecode, s: LatentRows, pdl: bool = False) -> None:
    """Attention of the rows' new tokens. x: [rows, heads * (nope_dim + rope_dim) + rank + rope_dim], each head's query
    and the latent as projected; out: [rows, heads * v_dim].
    """
    rows, splits = len(x), s.part.shape[2]
    rope_dim, table, block_size = a.cos_sin.shape[1], s.tables[a.group], a.cache.shape[1]
    extra = {"launch_pdl": True} if pdl else {}
    padded, exact = triton.next_power_of_2(a.rank), x.dtype == torch.float32
    columns = min(_COLUMNS, padded)
    _absorb_kernel[(a.heads * triton.cdiv(a.rank, columns) + 1, rows)](
        x, a.kv_b, a.norm_weight, a.cos_sin, a.cache, table, s.slots, s.positions, s.inner, s.turned, a.eps,
        a.cache.stride(0), table.stride(0),
        HEADS=a.heads, NOPE=a.nope_dim, NP=triton.next_power_of_2(a.nope_dim), ROPE=rope_dim,
        HALFP=triton.next_power_of_2(rope_dim // 2), V=a.v_dim, RANK=a.rank, RP=padded, BS=block_size, BR=columns,
        INTERLEAVED=a.interleaved, PDL=pdl, num_warps=4, **extra,
    )  # fmt: skip
    head_rows = _head_rows(a.heads)
    _attend_kernel[(splits, triton.cdiv(a.heads, head_rows), rows)](
        s.inner, s.turned, a.cache, table, s.slots, s.positions, s.part, s.peaks, a.scale * math.log2(math.e),
        a.cache.stride(0), table.stride(0), splits,
        HEADS=a.heads, RANK=a.rank, RP=max(16, padded), ROPE=rope_dim, PP=max(16, triton.next_power_of_2(rope_dim)),
        BS=block_size, BM=head_rows, TILE=_TILE, STAGES=_STAGES, PRECISION="ieee" if exact else "tf32", PDL=pdl,
        num_warps=_WARPS, **extra,
    )  # fmt: skip
    values = min(_VALUES, triton.next_power_of_2(a.v_dim))
    _expand_kernel[(a.heads * triton.cdiv(a.v_dim, values), rows)](
        s.part, s.peaks, a.kv_b, s.slots, s.positions, out, splits, HEADS=a.heads, NOPE=a.nope_dim, V=a.v_dim,
        RANK=a.rank, RP=padded, BV=values, TILE=_TILE, SPLITS=splits, TOGETHER=_TOGETHER, PDL=pdl, num_warps=4, **extra,
    )  # fmt: skip
