"""Triton attention of a decode step in one kernel: head norm, rotation, cache write, attention, and its reduction.

One new token per row. Its key and value never leave the registers on their way into the softmax; the keys of a row are
split over programs, and the last of them to arrive merges the parts in fixed order. See `decode_linear` for PDL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.shared_prefix import SharedPlan
from vllm.ops.triton.attention import merge_parts, walk

# of the kernel for shared keys: keys at a time, tiles of them under way, and warps by rows
SHARED_TILE, SHARED_STAGES, SHARED_WARPS = 64, 3, {64: 4, 128: 8}


@triton.jit
def _load_tile(heads_at, v_offset, table, key, live, stride_block, BS: tl.constexpr, D: tl.constexpr):
    """Keys `key` [TILE] of one head through a block table: both halves of the keys, transposed, and the values."""
    HALF: tl.constexpr = D // 2
    c = tl.arange(0, HALF)
    block = tl.load(table + key // BS, mask=live, other=0).to(tl.int64)
    base = block * stride_block + (key % BS) * D
    k_a = tl.load(heads_at + base[None, :] + c[:, None], mask=live[None, :], other=0.0)
    k_b = tl.load(heads_at + base[None, :] + HALF + c[:, None], mask=live[None, :], other=0.0)
    v = tl.load(heads_at + v_offset + base[:, None] + tl.arange(0, D)[None, :], mask=live[:, None], other=0.0)
    return k_a, k_b, v


@triton.jit
def _attend_tile(m, z, acc, qa, qb, k_a, k_b, v, live, scale_log2):
    """One tile of keys into the running maximum, sum and result."""
    s = tl.dot(qa, k_a)
    s = tl.dot(qb, k_b, s) * scale_log2
    s = tl.where(live[None, :], s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    z = z * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, z, acc


@triton.jit(
    do_not_specialize=["stride_table", "splits", "tile_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def _decode_kernel(
    qkv, cache, table_ptr, slots_ptr, positions_ptr, cos_sin, q_weight, k_weight, out, part, lse, arrived,
    eps, offset, scale_log2, v_offset, stride_block, stride_table, splits,
    shared_rows, shared_part, shared_lse, tile_rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, GP: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
    MERGE: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (KV_HEADS, splits, rows). A slot below 0 is padding. D is a power of two; GP: query heads a KV head,
    padded.

    SHARED: the first keys of some rows have been taken care of (`SharedPlan`, with tiles of `tile_rows`).
    WINDOW > 0: keys that each query sees, the new one included.
    EARLY: the first tile is loaded before the kernel that computes the queries is waited for.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = D // 2
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    # nothing of this comes from the kernel before: slots, positions and block tables, older keys and values
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row, mask=slot >= 0, other=0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0)
    if SHARED:
        begin = tl.load(shared_rows + row * 4)
    share = tl.cdiv(tl.cdiv(position + 1 - begin, splits), TILE) * TILE
    if SHARED:
        share = tl.maximum(share, 8 * TILE)  # what is left is short, and merging costs as much as a few tiles
    active = tl.cdiv(position + 1 - begin, share)
    lo = begin + split * share
    hi = tl.minimum(lo + share, position)
    table = table_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_table
    heads_at = cache + kv_head * (BS * D)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    c = tl.arange(0, HALF)
    t = tl.arange(0, TILE)
    in_g = g[:, None] < GROUP
    cos = tl.load(cos_sin + position * D + c)
    sin = tl.load(cos_sin + position * D + HALF + c)
    if EARLY:
        live = lo + t < hi
        k_a, k_b, v = _load_tile(heads_at, v_offset, table, lo + t, live, stride_block, BS, D)
    if PDL:
        gdc_wait()
    if (slot < 0) | (split >= active):
        return

    fused = qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
    q_at = fused + (kv_head * GROUP + g[:, None]) * D + c[None, :]
    q1 = tl.load(q_at, mask=in_g, other=0.0).to(tl.float32)
    q2 = tl.load(q_at + HALF, mask=in_g, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt((tl.sum(q1 * q1, 1) + tl.sum(q2 * q2, 1)) / D + eps)[:, None]
        q1 = q1 * rstd * (tl.load(q_weight + c).to(tl.float32) + offset)[None, :]
        q2 = q2 * rstd * (tl.load(q_weight + HALF + c).to(tl.float32) + offset)[None, :]
    qa = (q1 * cos[None, :] - q2 * sin[None, :]).to(qkv.dtype.element_ty)
    qb = (q2 * cos[None, :] + q1 * sin[None, :]).to(qkv.dtype.element_ty)

    m = tl.full([GP], -1.0e30, tl.float32)
    z = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, D], tl.float32)
    if split == active - 1:  # the share that ends with the new token
        k_at = fused + (HEADS + kv_head) * D + c
        k1 = tl.load(k_at).to(tl.float32)
        k2 = tl.load(k_at + HALF).to(tl.float32)
        v_new = tl.load(fused + (HEADS + KV_HEADS + kv_head) * D + d)
        if NORM:
            k_rstd = tl.rsqrt((tl.sum(k1 * k1, 0) + tl.sum(k2 * k2, 0)) / D + eps)
            k1 = k1 * k_rstd * (tl.load(k_weight + c).to(tl.float32) + offset)
            k2 = k2 * k_rstd * (tl.load(k_weight + HALF + c).to(tl.float32) + offset)
        ka = (k1 * cos - k2 * sin).to(qkv.dtype.element_ty)
        kb = (k2 * cos + k1 * sin).to(qkv.dtype.element_ty)
        home = tl.load(table + position // BS).to(tl.int64) * stride_block + kv_head * (BS * D) + (position % BS) * D
        tl.store(cache + home + c, ka)
        tl.store(cache + home + HALF + c, kb)
        tl.store(cache + v_offset + home + d, v_new)
        same = tl.sum(qa.to(tl.float32) * ka.to(tl.float32)[None, :], 1)
        same += tl.sum(qb.to(tl.float32) * kb.to(tl.float32)[None, :], 1)
        m = same * scale_log2
        z += 1.0
        acc += v_new.to(tl.float32)[None, :]
    if SHARED:  # noqa: SIM102 (a condition for the compiler)
        if split == 0:
            m, z, acc = merge_parts(
                m, z, acc, shared_part, shared_lse, shared_rows + row * 4, tile_rows, kv_head, g, KV_HEADS, GROUP, D, D
            )
    if EARLY:
        m, z, acc = _attend_tile(m, z, acc, qa, qb, k_a, k_b, v, live, scale_log2)
        lo += TILE
    for start in tl.range(lo, hi, TILE, num_stages=STAGES):
        live = start + t < hi
        k_a, k_b, v = _load_tile(heads_at, v_offset, table, start + t, live, stride_block, BS, D)
        m, z, acc = _attend_tile(m, z, acc, qa, qb, k_a, k_b, v, live, scale_log2)
    head_out = out + row.to(tl.int64) * (HEADS * D) + kv_head * GROUP * D
    if active == 1:
        tl.store(head_out + g[:, None] * D + d[None, :], (acc / z[:, None]).to(out.dtype.element_ty), mask=in_g)
        return
    first = (row * KV_HEADS + kv_head) * splits * GROUP
    mine = first + split * GROUP + g
    tl.store(part + mine[:, None].to(tl.int64) * D + d[None, :], acc / z[:, None], mask=in_g)
    tl.store(lse + mine, m + tl.log2(z), mask=g < GROUP)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row * KV_HEADS + kv_head, 1, sem="acq_rel")
    if before != active - 1:
        return
    tl.store(arrived + row * KV_HEADS + kv_head, 0)
    some = tl.arange(0, MERGE)
    for i in tl.static_range(GROUP):
        peak = tl.full([], -1.0e30, tl.float32)
        total = tl.zeros([], tl.float32)
        merged = tl.zeros([D], tl.float32)
        for begin in range(0, active, MERGE):  # as many as there are, not as many as there might be
            here = begin + some
            at = first + here * GROUP + i
            weight = tl.load(lse + at, mask=here < active, other=-float("inf"), cache_modifier=".cg")
            value = tl.load(
                part + at[:, None].to(tl.int64) * D + d[None, :],
                mask=here[:, None] < active,
                other=0.0,
                cache_modifier=".cg",
            )
            new_peak = tl.maximum(peak, tl.max(weight, 0))
            weight = tl.exp2(weight - new_peak)
            old = tl.exp2(peak - new_peak)
            total = total * old + tl.sum(weight, 0)
            merged = merged * old + tl.sum(value * weight[:, None], 0)
            peak = new_peak
        tl.store(head_out + i * D + d, (merged / total).to(out.dtype.element_ty))


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def _shared_kernel(
    qkv, cache, table_ptr, slots_ptr, positions_ptr, cos_sin, q_weight, members, items, part, lse,
    eps, offset, scale_log2, v_offset, stride_block, stride_table,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (KV_HEADS, items): one item of a `SharedPlan`; its keys are in the cache already."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = D // 2
    kv_head = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    item = items + tl.program_id(1) * 4
    first = tl.load(item)
    count = tl.load(item + 1)
    lo = tl.load(item + 2)
    hi = tl.load(item + 3)
    i = tl.arange(0, BM)
    ok = i // GROUP < count
    row = tl.load(members + first + i // GROUP, mask=ok, other=0)
    position = tl.load(positions_ptr + row, mask=ok, other=0)
    table = table_ptr
    if count > 0:
        table += tl.load(slots_ptr + tl.load(members + first)).to(tl.int64) * stride_table
    c = tl.arange(0, HALF)
    keep = ok[:, None]
    angle = cos_sin + position[:, None] * D + c[None, :]
    cos = tl.load(angle, mask=keep, other=0.0)
    sin = tl.load(angle + HALF, mask=keep, other=0.0)
    if PDL:
        gdc_wait()
    if count == 0:
        return
    head = kv_head * GROUP + i % GROUP
    q_at = qkv + row.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * D) + head[:, None] * D + c[None, :]
    q1 = tl.load(q_at, mask=keep, other=0.0).to(tl.float32)
    q2 = tl.load(q_at + HALF, mask=keep, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt((tl.sum(q1 * q1, 1) + tl.sum(q2 * q2, 1)) / D + eps)[:, None]
        q1 = q1 * rstd * (tl.load(q_weight + c).to(tl.float32) + offset)[None, :]
        q2 = q2 * rstd * (tl.load(q_weight + HALF + c).to(tl.float32) + offset)[None, :]
    qa = (q1 * cos - q2 * sin).to(qkv.dtype.element_ty)
    qb = (q2 * cos + q1 * sin).to(qkv.dtype.element_ty)
    q = tl.reshape(tl.permute(tl.join(qa, qb), (0, 2, 1)), (BM, D))

    m = tl.full([BM], -1.0e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    m, z, acc = walk(
        m, z, acc, q, position, z, cache, v_offset, table, kv_head, lo, hi, lo, hi,
        scale_log2, 0.0, stride_block, D, D, BS, TILE, 0, False, False, False, STAGES, "tf32",
    )  # fmt: skip
    at = (tl.program_id(1) * KV_HEADS + kv_head).to(tl.int64) * BM + i
    d = tl.arange(0, D)
    tl.store(part + at[:, None] * D + d[None, :], acc / z[:, None], mask=keep)
    tl.store(lse + at, m + tl.log2(z), mask=ok)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """What is fixed per layer. cache: [blocks, 2, kv_heads, block_size, head_dim] in the dtype of the activations.

    group: of the layer's block table.   window: keys that each query sees; None for all.
    """

    heads: int
    scale: float
    cache: Tensor
    cos_sin: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    offset: float
    group: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of a step. slots: [rows] int32, below 0 for padding; positions: [rows] int32 of the new tokens; table:
    per KV group
    [slots, blocks].

    part, lse, arrived: workspaces of the splits; `arrived` starts as zeros and is left so.   tile: keys at a time.
    early: load the first of them before waiting for the queries.   shared: keys that rows have in common, for layers of
    the first group without a window.
    """

    slots: Tensor
    positions: Tensor
    tables: Sequence[Tensor]
    part: Tensor
    lse: Tensor
    arrived: Tensor
    splits: int
    tile: int = 32
    warps: int = 1
    stages: int = 2
    early: bool = False
    shared: SharedPlan | None = None


def decode_attention(qkv: Tensor, out: Tensor, a: DecodeAttention, rows: DecodeRows, pdl: bool = False) -> None:
    """qkv: [rows, (heads + 2 * kv_heads) * head_dim] -> out: [rows, heads * head_dim]; the cache receives the new
    token.
    """
    _, _, kv_heads, block_size, head_dim = a.cache.shape
    extra = {"launch_pdl": True} if pdl else {}
    scale = a.scale * 1.4426950408889634
    shared = rows.shared if a.group == 0 and a.window is None else None
    table = rows.tables[a.group]
    if shared is not None:
        _attend_shared(qkv, a, rows, shared, scale, pdl)
    before = (rows.slots, rows.part, rows.lse, 0)
    if shared is not None:
        before = (shared.rows, shared.part, shared.lse, shared.part.shape[2])
    _decode_kernel[(kv_heads, rows.splits, qkv.shape[0])](
        qkv, a.cache, table, rows.slots, rows.positions, a.cos_sin,
        qkv if a.q_weight is None else a.q_weight, qkv if a.k_weight is None else a.k_weight,
        out, rows.part, rows.lse, rows.arrived, a.eps, a.offset, scale,
        a.cache.stride(1), a.cache.stride(0), table.stride(0), rows.splits, *before,
        HEADS=a.heads, KV_HEADS=kv_heads, D=head_dim, BS=block_size,
        GP=max(16, triton.next_power_of_2(a.heads // kv_heads)), TILE=rows.tile, WINDOW=a.window or 0, MERGE=8,
        STAGES=rows.stages, NORM=a.q_weight is not None, PDL=pdl, SHARED=shared is not None, EARLY=rows.early,
        num_warps=rows.warps, **extra,
    )  # fmt: skip


def _attend_shared(
    qkv: Tensor, a: DecodeAttention, rows: DecodeRows, shared: SharedPlan, scale_log2: float, pdl: bool
) -> None:
    """The parts of every row's result that come from shared keys."""
    _, _, kv_heads, block_size, head_dim = a.cache.shape
    table = rows.tables[a.group]
    tile_rows = shared.part.shape[2]
    _shared_kernel[(kv_heads, shared.items.shape[0])](
        qkv, a.cache, table, rows.slots, rows.positions, a.cos_sin, qkv if a.q_weight is None else a.q_weight,
        shared.members, shared.items, shared.part, shared.lse, a.eps, a.offset, scale_log2,
        a.cache.stride(1), a.cache.stride(0), table.stride(0),
        HEADS=a.heads, KV_HEADS=kv_heads, D=head_dim, BS=block_size, BM=tile_rows, TILE=SHARED_TILE,
        STAGES=SHARED_STAGES, NORM=a.q_weight is not None, PDL=pdl, num_warps=SHARED_WARPS.get(tile_rows, 4),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
