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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

from vllm.ops.shared_prefix import SharedPlan
from vllm.ops.triton.attention import apart, fp8_limit, half_rows, merge_parts, pairs, together, unpack_pairs, walk

# of the kernel for shared keys: keys at a time, tiles of them under way, and warps by rows
SHARED_TILE, SHARED_STAGES, SHARED_WARPS = 64, 3, {64: 4, 128: 8}
PIECE = 1024  # bytes that a thread brings into the L2


@triton.jit
def _load_tile(
    heads_at, v_offset, table, key, live, stride_block, BS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Keys `key` [TILE] of one head through a block table: the first A columns of the keys, transposed, the B behind
    them, and the values, with PAIRS as `unpack_pairs` takes them; last their columns from A on, where A + B are fewer
    than DP. Columns from D on are zeros.
    """
    c = tl.arange(0, A)
    e = tl.arange(0, B)
    d = tl.arange(0, DP)
    block = tl.load(table + key // BS, mask=live, other=0).to(tl.int64)
    base = block * stride_block + (key % BS) * D
    ka_at = heads_at + base[None, :] + c[:, None]
    kb_at = heads_at + base[None, :] + (A + e)[:, None]
    k_a = tl.load(ka_at, mask=live[None, :], other=0.0)  # D is more than A
    if D == A + B:
        k_b = tl.load(kb_at, mask=live[None, :], other=0.0)
    else:
        k_b = tl.load(kb_at, mask=live[None, :] & (A + e < D)[:, None], other=0.0)
    VD = D
    if PAIRS:
        d = tl.arange(0, DP // 2)
        VD = D // 2
        v_at = (heads_at + v_offset).to(tl.pointer_type(tl.int16)) + (base // 2)[:, None] + d[None, :]
    else:
        v_at = heads_at + v_offset + base[:, None] + d[None, :]
    w = k_b  # nothing without a second tile
    if A + B < DP:
        v_at = heads_at + v_offset + base[:, None]
        v = tl.load(v_at + c[None, :], mask=live[:, None], other=0.0)
        w = tl.load(v_at + (A + e)[None, :], mask=live[:, None] & (A + e < D)[None, :], other=0.0)
    elif D == DP:
        v = tl.load(v_at, mask=live[:, None], other=0.0)
    else:
        v = tl.load(v_at, mask=live[:, None] & (d < VD)[None, :], other=0.0)
    return k_a, k_b, v, w


@triton.jit
def _prefetch_keys(heads_at, v_offset, table, lo, hi, stride_block, BS: tl.constexpr, D: tl.constexpr,
                   AHEAD: tl.constexpr):  # fmt: skip
    """Bring the first AHEAD keys from `lo` on, and their values, into the L2; pieces of blocks, each asked for by one
    thread.
    """
    PIECES: tl.constexpr = num_threads() // 2
    KEYS: tl.constexpr = AHEAD // PIECES  # of a piece
    BYTES: tl.constexpr = heads_at.dtype.element_ty.primitive_bitwidth // 8
    i = tl.arange(0, 2 * PIECES)
    key = lo + i // 2 * KEYS
    key = tl.where(key < hi, key, tl.where(lo < hi, lo, 0))
    block = tl.load(table + key // BS).to(tl.int64)
    at = heads_at + block * stride_block + (key % BS) * D + (i % 2) * v_offset
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [at, tl.full([2 * PIECES], KEYS * D * BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_behind(weight, size, stride, program, CHUNKS: tl.constexpr, PIECE: tl.constexpr):
    """Bring a program's pieces of `Behind` into the L2, each asked for by one thread."""
    THREADS: tl.constexpr = num_threads()
    piece = program * THREADS + tl.arange(0, THREADS)
    each = size // PIECE
    chunk = piece // each
    at = weight.to(tl.pointer_type(tl.int8)) + chunk.to(tl.int64) * stride + (piece % each) * PIECE
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [at, tl.where(chunk < CHUNKS, PIECE, 0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _capped(s, scale, cap, SOFTCAP: tl.constexpr):
    """Scores, times log2(e). SOFTCAP: the scale carries no log2(e), and scores end at the cap."""
    s = s * scale
    if SOFTCAP:
        # cap * tanh(s / cap) with tanh(x) = 2 * sigmoid(2 x) - 1
        s = cap * (2.0 * tl.sigmoid(2.0 * s / cap) - 1.0) * 1.4426950408889634
    return s


@triton.jit
def _attend_tile(
    m, z, acc, odd, qa, qb, k_a, k_b, v, w, live, scale, cap, FORMAT: tl.constexpr, SOFTCAP: tl.constexpr,
    PAIRS: tl.constexpr, TWO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running maximum, sum and result. PAIRS: `acc` has even columns, `odd` the others; TWO:
    `odd` has the columns of `w`.
    """
    s = tl.dot(qa, k_a.to(qa.dtype))
    s = _capped(tl.dot(qb, k_b.to(qb.dtype), s), scale, cap, SOFTCAP)
    s = tl.where(live[None, :], s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    z = z * alpha + tl.sum(p, 1)
    if PAIRS:
        v_even, v_odd = unpack_pairs(v, FORMAT, ASM)
        acc = tl.dot(p.to(qa.dtype), v_even.to(qa.dtype), acc * alpha[:, None])
        odd = tl.dot(p.to(qa.dtype), v_odd.to(qa.dtype), odd * alpha[:, None])
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        if TWO:
            odd = tl.dot(p.to(w.dtype), w, odd * alpha[:, None])
    return m_new, z, acc, odd


@triton.jit
def _stored(x, inverse, FORMAT: tl.constexpr, LIMIT: tl.constexpr):
    """Numbers as a cache of 8 bits keeps them; LIMIT: the largest of the format."""
    return tl.minimum(tl.maximum(x.to(tl.float32) * inverse, -LIMIT), LIMIT).to(FORMAT)


@triton.jit
def _partner(c, ROT: tl.constexpr, INTERLEAVED: tl.constexpr):
    """What column c of a head is rotated with: the other column, the column of the table, and the sine's sign. Columns
    from ROT on are not rotated.
    """
    HALF: tl.constexpr = ROT // 2
    if INTERLEAVED:
        other = c ^ 1
        angle = c // 2
        sign = tl.where(c % 2 == 0, -1.0, 1.0)
    else:
        other = tl.where(c < HALF, c + HALF, c - HALF)
        angle = tl.where(c < HALF, c, c - HALF)
        sign = tl.where(c < HALF, -1.0, 1.0)
    other = tl.where(c < ROT, other, c)
    if not INTERLEAVED and ROT % 16 == 0:  # which the compiler does not see: eight neighbours stay neighbours
        other = tl.max_contiguous(tl.multiple_of(other, 8), 8)
        angle = tl.max_contiguous(tl.multiple_of(angle, 8), 8)
    return other, angle, sign


@triton.jit
def _wide(x, AXIS: tl.constexpr):
    """A vector along AXIS of what has as many axes as AXIS + 1."""
    if AXIS == 1:
        x = x[None, :]
    return x


@triton.jit
def _norm_weights(
    weight, a, b, other_a, other_b, offset, D: tl.constexpr, ROT: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The weights of a norm of each head for columns a and b and for those that they are rotated with, as vectors: a
    load of two axes would choose the layout of the heads that it is multiplied with.
    """
    wa = a.to(tl.float32)  # unused without such a norm
    wb, wya, wyb = wa, wa, wa
    if NORM == 1:
        wa = tl.load(weight + a, mask=a < D, other=0.0).to(tl.float32) + offset
        wb = tl.load(weight + b, mask=b < D, other=0.0).to(tl.float32) + offset
        wya, wyb = wb, wa
        if ROT > 0 and not HALVES:
            wya = tl.load(weight + other_a, mask=other_a < D, other=0.0).to(tl.float32) + offset
            wyb = tl.load(weight + other_b, mask=other_b < D, other=0.0).to(tl.float32) + offset
    return wa, wb, wya, wyb


@triton.jit
def _angles(
    cos_sin, position, a, b, keep, ROT: tl.constexpr, INTERLEAVED: tl.constexpr, HALVES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """What columns a and b are rotated with, and their cosines and signed sines; WIDE: for positions [rows, 1]."""
    other_a, angle_a, sign_a = _partner(a, ROT, INTERLEAVED)
    other_b, angle_b, sign_b = _partner(b, ROT, INTERLEAVED)
    if WIDE:
        a, b = a[None, :], b[None, :]
        angle_a, angle_b, sign_a, sign_b = angle_a[None, :], angle_b[None, :], sign_a[None, :], sign_b[None, :]
    at = cos_sin + position * ROT
    if HALVES:
        cos_a = tl.load(at + a, mask=keep, other=1.0)
        cos_b = cos_a
        sin_b = tl.load(at + ROT // 2 + a, mask=keep, other=0.0)
        sin_a = -sin_b
    elif ROT > 0:
        cos_a = tl.load(at + angle_a, mask=keep & (a < ROT), other=1.0)
        cos_b = tl.load(at + angle_b, mask=keep & (b < ROT), other=1.0)
        sin_a = tl.load(at + ROT // 2 + angle_a, mask=keep & (a < ROT), other=0.0) * sign_a
        sin_b = tl.load(at + ROT // 2 + angle_b, mask=keep & (b < ROT), other=0.0) * sign_b
    else:
        cos_a = tl.full(a.shape, 1.0, tl.float32)
        cos_b, sin_a, sin_b = cos_a, cos_a, cos_a
    return other_a, other_b, cos_a, cos_b, sin_a, sin_b


@triton.jit
def _columns(
    at, a, b, keep, other_a, other_b, D: tl.constexpr, DP: tl.constexpr, ROT: tl.constexpr, HALVES: tl.constexpr,
    AXIS: tl.constexpr,
):  # fmt: skip
    """Columns a and b of the heads at `at`, and those that they are rotated with. HALVES: these are each other's.

    AXIS: of the columns, 1 for several heads.
    """
    keep_b = keep
    if D < DP:
        keep_b = keep & (_wide(b, AXIS) < D)
    xa = tl.load(at + _wide(a, AXIS), mask=keep, other=0.0)
    xb = tl.load(at + _wide(b, AXIS), mask=keep_b, other=0.0)
    ya, yb = xb, xa
    if ROT > 0 and not HALVES:
        ya = tl.load(at + _wide(other_a, AXIS), mask=keep, other=0.0)
        yb = tl.load(at + _wide(other_b, AXIS), mask=keep_b, other=0.0)
    return xa, xb, ya, yb


@triton.jit
def _joint_factors(
    at, count, weight_at, a, b, keep, other_a, other_b, eps, offset, COUNT: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROT: tl.constexpr, HALVES: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """What a norm over the COUNT numbers of a token's heads multiplies the columns of `_columns` with. at: the first of
    these numbers, CHUNK of which are read at a time.   count: as COUNT, or 0 to read none.   weight_at: where the
    heads' weights are.
    """
    i = _wide(tl.arange(0, CHUNK), AXIS)
    x = tl.load(at + i, mask=i < count, other=0.0).to(tl.float32)
    squares = x * x
    for first in tl.static_range(CHUNK, COUNT, CHUNK):
        x = tl.load(at + first + i, mask=first + i < count, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, AXIS, keep_dims=True) / COUNT + eps)
    wa, wb, wya, wyb = _columns(weight_at, a, b, keep, other_a, other_b, D, DP, ROT, HALVES, AXIS)
    wa, wb = (wa.to(tl.float32) + offset) * rstd, (wb.to(tl.float32) + offset) * rstd
    wya, wyb = (wya.to(tl.float32) + offset) * rstd, (wyb.to(tl.float32) + offset) * rstd
    return wa, wb, wya, wyb


@triton.jit
def _turned(
    xa, xb, ya, yb, wa, wb, wya, wyb, cos_a, cos_b, sin_a, sin_b, eps, D: tl.constexpr, ROT: tl.constexpr,
    NORM: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """What `_columns` gave, normalised and rotated, in fp32. NORM: 1 for one of each head, with the weights of
    `_norm_weights`; 2 for one of all heads, with the factors of `_joint_factors`.
    """
    xa, xb, ya, yb = xa.to(tl.float32), xb.to(tl.float32), ya.to(tl.float32), yb.to(tl.float32)
    if NORM == 2:
        xa, xb, ya, yb = xa * wa, xb * wb, ya * wya, yb * wyb
    if NORM == 1:
        if xa.shape[AXIS] == xb.shape[AXIS]:
            squares = tl.sum(xa * xa + xb * xb, AXIS, keep_dims=True)
        else:
            squares = tl.sum(xa * xa, AXIS, keep_dims=True) + tl.sum(xb * xb, AXIS, keep_dims=True)
        rstd = tl.rsqrt(squares / D + eps)
        xa = xa * rstd * _wide(wa, AXIS)
        xb = xb * rstd * _wide(wb, AXIS)
        ya = ya * rstd * _wide(wya, AXIS)
        yb = yb * rstd * _wide(wyb, AXIS)
    if ROT > 0:
        xa, xb = xa * cos_a + ya * sin_a, xb * cos_b + yb * sin_b
    return xa, xb


@triton.jit
def _load_parts(
    part, lse, first, here, active, d, GROUP: tl.constexpr, D: tl.constexpr, HEADS_HERE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """PARTS of a row's results from part `here` on, [PARTS * HEADS_HERE, columns d], and the logarithms of their sums;
    zeros and -inf for those from `active` on.
    """
    row = tl.arange(0, PARTS * HEADS_HERE)
    share, head = here + row // HEADS_HERE, row % HEADS_HERE
    there = (share < active) & (head < GROUP)
    at = first + share * GROUP + head
    weight = tl.load(lse + at, mask=there, other=-float("inf"), cache_modifier=".cg")
    keep = there[:, None] & (d < D)[None, :]
    value = tl.load(part + at[:, None].to(tl.int64) * D + d[None, :], mask=keep, other=0.0, cache_modifier=".cg")
    return value, weight


@triton.jit(
    do_not_specialize=["stride_table", "splits", "least", "tile_rows", "behind_size", "behind_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def _decode_kernel(
    qkv, cache, table_ptr, slots_ptr, positions_ptr, cos_sin, q_weight, k_weight, out, part, lse, arrived,
    eps, offset, scale, cap, k_scale, v_scale, v_offset, stride_block, stride_table, splits, least,
    shared_rows, shared_part, shared_lse, tile_rows, behind, behind_size, behind_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr, BS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, GP: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, HEADS_HERE: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
    LIMIT: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
    AHEAD: tl.constexpr, RESERVE: tl.constexpr, LATE: tl.constexpr, CHUNKS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Grid (KV_HEADS, rows, splits). A slot below 0 is padding. DP, GP: head size and query heads a KV head, padded.
    A, B: columns of a head in two tiles; A + B are fewer than DP where that spares work.
    SPLITS: at least as many as there are.   HEADS_HERE: those heads as a power of two.   PARTS: shares of the keys that
    are merged at a time.

    ROT: columns of a head that are rotated.   scale, cap: as `_capped` takes them.
    k_scale, v_scale, LIMIT: of a cache of 8 bits (PAIRS, ASM: as for `walk`).

    SHARED: the first keys of some rows have been taken care of (`SharedPlan`, with tiles of `tile_rows`).
    WINDOW > 0: keys that each query sees, the new one included.
    EARLY: the first tile is loaded before the kernel that computes the queries is waited for.   AHEAD: so many keys are
    brought nearer before that, where a program has no more.   least, LATE: as in `DecodeRows`; RESERVE: least > 0.
    behind, CHUNKS: as in `Behind`; programs without keys ask for PIECE bytes each thread.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TWO: tl.constexpr = A + B < DP
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    if PDL and LATE == 0:
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
    if RESERVE:
        share = tl.maximum(share, least)
    active = tl.cdiv(position + 1 - begin, share)
    lo = begin + split * share
    hi = tl.minimum(lo + share, position)
    if RESERVE:  # noqa: SIM102 (a condition for the compiler)
        if (split > 0) & (split >= active):  # each row's first program waits, so that the kernel does
            return
    table = table_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_table
    heads_at = cache + kv_head * (BS * D)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    a = tl.arange(0, A)
    b = A + tl.arange(0, B)
    t = tl.arange(0, TILE)
    in_g = g[:, None] < GROUP
    in_d = d < D
    keep = in_g
    if D < DP:
        keep = in_g & in_d[None, :]
    HALVES: tl.constexpr = (ROT == DP) and not INTERLEAVED
    column = a
    if A != B:
        column = tl.zeros([1], tl.int32)  # as good as any for masks that both tiles of columns take
    other_a, other_b, cos_a, cos_b, sin_a, sin_b = _angles(
        cos_sin, position, a, b, column < D, ROT, INTERLEAVED, HALVES, False
    )
    qwa, qwb, qwya, qwyb = _norm_weights(q_weight, a, b, other_a, other_b, offset, D, ROT, HALVES, NORM)
    kwa, kwb, kwya, kwyb = _norm_weights(k_weight, a, b, other_a, other_b, offset, D, ROT, HALVES, NORM)
    home = tl.load(table + position // BS).to(tl.int64) * stride_block + kv_head * (BS * D) + (position % BS) * D
    if EARLY:
        live = lo + t < hi
        k_a, k_b, v, w = _load_tile(heads_at, v_offset, table, lo + t, live, stride_block, BS, D, DP, A, B, PAIRS)
    if PDL:
        if AHEAD > 0:  # noqa: SIM102 (a condition for the compiler)
            if hi - lo <= AHEAD:  # of long shares the first keys matter little
                _prefetch_keys(heads_at, v_offset, table, lo, hi, stride_block, BS, D, AHEAD)
        gdc_wait()
        if LATE == 1:
            gdc_launch_dependents()
    if (slot < 0) | (split >= active):
        if PDL and CHUNKS > 0:  # noqa: SIM102 (a condition for the compiler)
            if split >= active:
                program = (split - active) * KV_HEADS + kv_head
                _prefetch_behind(behind, behind_size, behind_stride, program, CHUNKS, PIECE)
        return

    fused = qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
    # everything is asked for before anything is waited for
    q_at = fused + (kv_head * GROUP + g[:, None]) * D
    qxa, qxb, qya, qyb = _columns(q_at, a, b, in_g, other_a, other_b, D, DP, ROT, HALVES, 1)
    last = split == active - 1  # the share that ends with the new token
    width = tl.where(last, D, 0)
    k_at = fused + (HEADS + kv_head) * D
    kxa, kxb, kya, kyb = _columns(k_at, a, b, column < width, other_a, other_b, D, DP, ROT, HALVES, 0)
    v_at = fused + (HEADS + KV_HEADS + kv_head) * D
    if TWO:
        v_new = tl.load(v_at + a, mask=a < width, other=0.0)
        w_new = tl.load(v_at + b, mask=b < width, other=0.0)
    else:
        v_new = tl.load(v_at + d, mask=d < width, other=0.0)
    if NORM == 2:
        qwa, qwb, qwya, qwyb = _joint_factors(
            fused, HEADS * D, q_weight + (kv_head * GROUP + g[:, None]) * D, a, b, in_g, other_a, other_b, eps, offset,
            HEADS * D, 1024, D, DP, ROT, HALVES, 1,
        )  # fmt: skip
        kwa, kwb, kwya, kwyb = _joint_factors(
            fused + HEADS * D, width * KV_HEADS, k_weight + kv_head * D, a, b, column < width, other_a, other_b, eps,
            offset, KV_HEADS * D, 1024, D, DP, ROT, HALVES, 0,
        )  # fmt: skip
    q1, q2 = _turned(
        qxa, qxb, qya, qyb, qwa, qwb, qwya, qwyb, cos_a[None, :], cos_b[None, :], sin_a[None, :], sin_b[None, :], eps,
        D, ROT, NORM, 1,
    )  # fmt: skip
    qa = q1.to(qkv.dtype.element_ty)
    qb = q2.to(qkv.dtype.element_ty)
    FORMAT: tl.constexpr = cache.dtype.element_ty
    row_scale = scale
    if PAIRS:
        top = tl.full([GP, 1], 1.0, tl.float32)
        if qkv.dtype.element_ty == tl.bfloat16:
            top = tl.maximum(tl.max(tl.abs(q1), 1, keep_dims=True), tl.max(tl.abs(q2), 1, keep_dims=True))
            top = tl.where(top > 0.0, top, 1.0)
            qa = (qa.to(tl.float32) / top).to(tl.float16)
            qb = (qb.to(tl.float32) / top).to(tl.float16)
        scale = scale * top
        row_scale = tl.reshape(scale, (GP,))

    m = tl.full([GP], -1.0e30, tl.float32)
    z = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, A if TWO else DP], tl.float32)
    if TWO:
        odd = tl.zeros([GP, B], tl.float32)
    if last:
        k1, k2 = _turned(
            kxa, kxb, kya, kyb, kwa, kwb, kwya, kwyb, cos_a, cos_b, sin_a, sin_b, eps, D, ROT, NORM, 0
        )  # fmt: skip
        ka = k1.to(qkv.dtype.element_ty)
        kb = k2.to(qkv.dtype.element_ty)
        v_kept = v_new  # of its own name: what is assigned under a condition keeps its type
        if PAIRS:
            ka = _stored(ka, 1.0 / k_scale, FORMAT, LIMIT)
            kb = _stored(kb, 1.0 / k_scale, FORMAT, LIMIT)
            v_kept = _stored(v_new, 1.0 / v_scale, FORMAT, LIMIT)
        tl.store(cache + home + a, ka)
        tl.store(cache + home + b, kb, mask=b < D)
        if TWO:
            tl.store(cache + v_offset + home + a, v_kept)
            tl.store(cache + v_offset + home + b, w_new, mask=b < D)
            odd += w_new.to(tl.float32)[None, :]
        else:
            tl.store(cache + v_offset + home + d, v_kept, mask=in_d)
        same = tl.sum(qa.to(tl.float32) * ka.to(tl.float32)[None, :], 1)
        same += tl.sum(qb.to(tl.float32) * kb.to(tl.float32)[None, :], 1)
        m = _capped(same, row_scale, cap, SOFTCAP)
        z += 1.0
        acc += v_kept.to(tl.float32)[None, :]
    if SHARED:  # noqa: SIM102 (a condition for the compiler)
        if split == 0:
            m, z, acc = merge_parts(
                m, z, acc, shared_part, shared_lse, shared_rows + row * 4, tile_rows, kv_head, g, KV_HEADS, GROUP, D, DP
            )
    if not TWO:
        odd = z  # nothing without PAIRS
    if PAIRS:
        acc, odd = apart(acc, GP, DP)
    if EARLY:
        m, z, acc, odd = _attend_tile(
            m, z, acc, odd, qa, qb, k_a, k_b, v, w, live, scale, cap, FORMAT, SOFTCAP, PAIRS, TWO, ASM
        )  # fmt: skip
        lo += TILE
    for start in tl.range(lo, hi, TILE, num_stages=STAGES):
        live = start + t < hi
        k_a, k_b, v, w = _load_tile(heads_at, v_offset, table, start + t, live, stride_block, BS, D, DP, A, B, PAIRS)
        m, z, acc, odd = _attend_tile(
            m, z, acc, odd, qa, qb, k_a, k_b, v, w, live, scale, cap, FORMAT, SOFTCAP, PAIRS, TWO, ASM
        )  # fmt: skip
    if PDL and LATE == 2:
        gdc_launch_dependents()
    if PAIRS:
        acc = together(acc, odd, GP, DP)
    head_out = out + row.to(tl.int64) * (HEADS * D) + kv_head * GROUP * D
    if active == 1:
        mean = acc / z[:, None]
        if PAIRS:
            mean *= v_scale
        if TWO:
            at = head_out + g[:, None] * D
            tl.store(at + a[None, :], mean.to(out.dtype.element_ty), mask=in_g)
            tl.store(at + b[None, :], (odd / z[:, None]).to(out.dtype.element_ty), mask=in_g & (b < D)[None, :])
        else:
            tl.store(head_out + g[:, None] * D + d[None, :], mean.to(out.dtype.element_ty), mask=keep)
        return
    first = (row * KV_HEADS + kv_head) * splits * GROUP
    mine = first + split * GROUP + g
    part_at = part + mine[:, None].to(tl.int64) * D
    if TWO:
        tl.store(part_at + a[None, :], acc / z[:, None], mask=in_g)
        tl.store(part_at + b[None, :], odd / z[:, None], mask=in_g & (b < D)[None, :])
    else:
        tl.store(part_at + d[None, :], acc / z[:, None], mask=keep)
    tl.store(lse + mine, m + tl.log2(z), mask=g < GROUP)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row * KV_HEADS + kv_head, 1, sem="acq_rel")
    if before != active - 1:
        return
    tl.store(arrived + row * KV_HEADS + kv_head, 0)
    # several parts at a time, of which the first are asked for before the whole sum of every head is computed
    i = tl.arange(0, HEADS_HERE)
    j = tl.arange(0, SPLITS)
    in_i = i < GROUP
    value, weight = _load_parts(part, lse, first, 0, active, d, GROUP, D, HEADS_HERE, PARTS)
    listed = in_i[:, None] & (j < active)[None, :]
    all_weights = tl.load(
        lse + first + j[None, :] * GROUP + i[:, None], mask=listed, other=-float("inf"), cache_modifier=".cg"
    )
    peak = tl.max(all_weights, 1)
    peak = tl.where(in_i, peak, 0.0)
    total = tl.sum(tl.exp2(all_weights - peak[:, None]), 1)
    tops = tl.reshape(tl.broadcast_to(peak[None, :], (PARTS, HEADS_HERE)), (PARTS * HEADS_HERE,))
    merged = tl.sum(tl.reshape(value * tl.exp2(weight - tops)[:, None], (PARTS, HEADS_HERE, DP)), 0)
    for here in tl.range(PARTS, active, PARTS):
        value, weight = _load_parts(part, lse, first, here, active, d, GROUP, D, HEADS_HERE, PARTS)
        merged += tl.sum(tl.reshape(value * tl.exp2(weight - tops)[:, None], (PARTS, HEADS_HERE, DP)), 0)
    merged = merged / tl.where(in_i, total, 1.0)[:, None]
    if PAIRS:
        merged *= v_scale
    tl.store(
        head_out + i[:, None] * D + d[None, :], merged.to(out.dtype.element_ty), mask=in_i[:, None] & in_d[None, :]
    )


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def _shared_kernel(
    qkv, cache, table_ptr, slots_ptr, positions_ptr, cos_sin, q_weight, members, items, part, lse,
    eps, offset, scale, cap, k_scale, v_scale, v_offset, stride_block, stride_table,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, LIMIT: tl.constexpr, PAIRS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Grid (KV_HEADS, items): one item of a `SharedPlan`; its keys are in the cache already. v_scale, LIMIT: unused."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
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
    d = tl.arange(0, DP)
    a = tl.arange(0, DP // 2)
    b = DP // 2 + a
    rows = ok[:, None]
    keep = rows & (d < D)[None, :]
    HALVES: tl.constexpr = (ROT == DP) and not INTERLEAVED
    other_a, other_b, cos_a, cos_b, sin_a, sin_b = _angles(
        cos_sin, position[:, None], a, b, rows, ROT, INTERLEAVED, HALVES, True
    )
    if PDL:
        gdc_wait()
    if count == 0:
        return
    head = kv_head * GROUP + i % GROUP
    q_at = qkv + row.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * D) + head[:, None] * D
    xa, xb, ya, yb = _columns(q_at, a, b, rows, other_a, other_b, D, DP, ROT, HALVES, 1)
    if NORM == 2:
        token_at = qkv + row.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * D)
        wa, wb, wya, wyb = _joint_factors(
            token_at, tl.where(rows, HEADS * D, 0), q_weight + head[:, None] * D, a, b, rows, other_a, other_b, eps,
            offset, HEADS * D, 64, D, DP, ROT, HALVES, 1,
        )  # fmt: skip
    else:
        wa, wb, wya, wyb = _norm_weights(q_weight, a, b, other_a, other_b, offset, D, ROT, HALVES, NORM)
    q1, q2 = _turned(xa, xb, ya, yb, wa, wb, wya, wyb, cos_a, cos_b, sin_a, sin_b, eps, D, ROT, NORM, 1)
    qa = q1.to(qkv.dtype.element_ty)
    qb = q2.to(qkv.dtype.element_ty)
    q = tl.reshape(tl.permute(tl.join(qa, qb), (0, 2, 1)), (BM, DP))
    if PAIRS:  # noqa: SIM102 (a condition for the compiler)
        if q.dtype == tl.bfloat16:
            q, top = half_rows(q)
            scale = scale * top

    m = tl.full([BM], -1.0e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    m, z, acc = walk(
        m, z, acc, q, position, z, cache, v_offset, table, kv_head, lo, hi, lo, hi,
        scale, cap, stride_block, D, DP, BS, TILE, 0, SOFTCAP, False, False, STAGES, "tf32", PAIRS=PAIRS, ASM=ASM,
    )  # fmt: skip
    at = (tl.program_id(1) * KV_HEADS + kv_head).to(tl.int64) * BM + i
    tl.store(part + at[:, None] * D + d[None, :], acc / z[:, None], mask=keep)
    tl.store(lse + at, m + tl.log2(z), mask=ok)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """What is fixed per layer. cache: [blocks, 2, kv_heads, block_size, head_dim] in the dtype of the activations, or
    in a float8 format, of numbers divided by k_scale and v_scale.

    cos_sin: [positions, columns of a head that are rotated], None for no rotation; interleaved: as of `ops.rotary`.
    q_weight, k_weight: of a norm of each head, [head_dim], or with `joint` of all of a token's, [heads * head_dim].
    group: of the layer's block table.   window: keys that each query sees; None for all.   softcap: of the scores.
    """

    heads: int
    scale: float
    cache: Tensor
    cos_sin: Tensor | None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    group: int = 0
    window: int | None = None
    softcap: float | None = None
    interleaved: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    joint: bool = False


@dataclass(frozen=True, slots=True)
class Behind:
    """What a product behind attention reads first, for programs that have no keys to bring nearer: `chunks` pieces of
    `size` bytes of its weight, `stride` bytes apart; multiples of `PIECE`.
    """

    weight: Tensor
    size: int
    stride: int
    chunks: int


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of a step. slots: [rows] int32, below 0 for padding; positions: [rows] int32 of the new tokens; table:
    per KV group
    [slots, blocks].

    part, lse, arrived: workspaces of the splits; `arrived` starts as zeros and is left so.   tile: keys at a time.
    early: load the first of them before waiting for the queries.   ahead: keys of each program to bring into the L2
    before that, where it has no more.   shared: keys that rows have in common, for layers of
    the first group without a window.   least: no share of a row's keys is smaller; programs that get none do not wait
    for the kernel in front.   late: when the kernel behind may start, 0: at once, 1: after that one in front, 2: after
    the last key.
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
    ahead: int = 0
    shared: SharedPlan | None = None
    least: int = 0
    late: int = 0


def decode_attention(
    qkv: Tensor, out: Tensor, a: DecodeAttention, rows: DecodeRows, pdl: bool = False, behind: Behind | None = None
) -> None:
    """qkv: [rows, (heads + 2 * kv_heads) * head_dim] -> out: [rows, heads * head_dim]; the cache receives the new
    token. behind: only of one row.
    """
    kv_heads, extra = a.cache.shape[2], {"launch_pdl": True} if pdl else {}
    shared = rows.shared if a.group == 0 and a.window is None else None
    if shared is not None:
        _attend_shared(qkv, a, rows, shared, pdl)
    before: tuple = (None, None, None, 0)
    if shared is not None:
        before = (shared.rows, shared.part, shared.lse, shared.part.shape[2])
    asked = (None, 0, 0) if behind is None else (behind.weight, behind.size, behind.stride)
    tensors, numbers, const = _arguments(qkv, a, rows, pdl)
    heads_here, block_size = triton.next_power_of_2(a.heads // kv_heads), a.cache.shape[3]
    first, second = _columns_of(const["D"], const["DP"], shared is None and not const["PAIRS"])
    _decode_kernel[(kv_heads, qkv.shape[0], rows.splits)](
        *tensors, a.k_weight, out, rows.part, rows.lse, rows.arrived, *numbers,
        rows.splits, rows.least, *before, *asked,
        GP=max(16, triton.next_power_of_2(a.heads // kv_heads)), TILE=rows.tile,
        WINDOW=a.window or 0, SPLITS=max(64, triton.next_power_of_2(rows.splits)),
        HEADS_HERE=heads_here, PARTS=max(1, min(8, 2048 * rows.warps // (heads_here * const["DP"]))),
        STAGES=rows.stages, SHARED=shared is not None, EARLY=rows.early,
        AHEAD=_keys_ahead(rows, block_size), A=first, B=second, RESERVE=rows.least > 0, LATE=rows.late,
        CHUNKS=0 if behind is None else behind.chunks, PIECE=PIECE, **const,
        num_warps=rows.warps, **extra,
    )  # fmt: skip


def _columns_of(dim: int, padded: int, apart: bool) -> tuple[int, int]:
    """The columns of a head's two tiles: its halves, or, if they may be `apart`, powers of two that fit it better."""
    first = 1 << (dim.bit_length() - 1)
    second = max(16, triton.next_power_of_2(max(dim - first, 1)))
    return (first, second) if apart and first + second < padded else (padded // 2, padded // 2)


def _keys_ahead(rows: DecodeRows, block_size: int) -> int:
    """As many keys as are wanted, if every thread gets a whole piece of a block."""
    keys = rows.ahead // (16 * rows.warps)  # of a piece
    return rows.ahead if keys and block_size % keys == 0 and rows.ahead % (16 * rows.warps) == 0 else 0


def _arguments(qkv: Tensor, a: DecodeAttention, rows: DecodeRows, pdl: bool) -> tuple[tuple, tuple, dict]:
    """What both kernels take: tensors, numbers, constants."""
    _, _, kv_heads, block_size, head_dim = a.cache.shape
    table = rows.tables[a.group]
    scale = a.scale * a.k_scale * (1.0 if a.softcap is not None else 1.4426950408889634)
    tensors = (qkv, a.cache, table, rows.slots, rows.positions, qkv if a.cos_sin is None else a.cos_sin, a.q_weight)
    numbers = (
        a.eps, a.offset, scale, a.softcap or 0.0, a.k_scale, a.v_scale, a.cache.stride(1), a.cache.stride(0),
        table.stride(0),
    )  # fmt: skip
    rotated = 0 if a.cos_sin is None else a.cos_sin.shape[1]
    const = {"HEADS": a.heads, "KV_HEADS": kv_heads, "D": head_dim, "DP": max(16, triton.next_power_of_2(head_dim))}
    const |= {"ROT": rotated, "INTERLEAVED": a.interleaved, "BS": block_size, "SOFTCAP": a.softcap is not None}
    const |= {"LIMIT": fp8_limit(a.cache.dtype), **pairs(a.cache)}
    norm = 0 if a.q_weight is None else 2 if a.joint else 1
    return tensors, numbers, {**const, "NORM": norm, "PDL": pdl}


def _attend_shared(qkv: Tensor, a: DecodeAttention, rows: DecodeRows, shared: SharedPlan, pdl: bool) -> None:
    """The parts of every row's result that come from shared keys."""
    tensors, numbers, const = _arguments(qkv, a, rows, pdl)
    tile_rows = shared.part.shape[2]
    _shared_kernel[(a.cache.shape[2], shared.items.shape[0])](
        *tensors, shared.members, shared.items, shared.part, shared.lse, *numbers, BM=tile_rows, TILE=SHARED_TILE,
        STAGES=SHARED_STAGES, **const, num_warps=SHARED_WARPS.get(tile_rows, 4),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
