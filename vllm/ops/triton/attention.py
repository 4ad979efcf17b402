"""Triton kernels of paged attention: prefill tiles and split-KV decode over block tables, in one family.

A tile holds the rows of one KV head: `BQ` tokens times the `GROUP` query heads that read it. Long queries are cut into
tiles of many tokens; queries of a token or two get the small tile, and their keys are split over several programs when
the batch alone does not fill the device. Both walk the keys through the block table with an online softmax in base 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import attention as ops
from vllm.ops.attention import GATHERED_ABOVE, AttentionParams, GatherPlan, OwnKV
from vllm.ops.shared_prefix import SharedPlan
from vllm.ops.triton.decode_parts import processors
from vllm.ops.triton.prefill import attend_gathered, can_gather
from vllm.step.inputs import GroupInputs, StepInputs

_LOG2E = math.log2(math.e)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def half_rows(q):
    """Rows of queries as fp16 within [-1, 1], and what they were divided by, [rows, 1]: two numbers of 8 bits become
    fp16 in one instruction, and bf16 in five.
    """
    x = q.to(tl.float32)
    top = tl.max(tl.abs(x), 1, keep_dims=True)
    top = tl.where(top > 0.0, top, 1.0)
    return (x / top).to(tl.float16), top


@triton.jit
def unpack_pairs(x, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Neighbours of a float8 FORMAT that were loaded as int16: those in the low bytes and those in the high ones, fp16.

    Loaded as numbers of 16 bits they can be transposed on their way to the tensor cores, as bytes they cannot.
    """
    if tl.float8e5 == FORMAT:  # fp16 without its last byte
        low = (x << 8).to(tl.float16, bitcast=True)
        high = (x & -256).to(tl.float16, bitcast=True)
    elif ASM:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 a, b;
            .reg .b32 c, d;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 c, a;
            cvt.rn.f16x2.e4m3x2 d, b;
            prmt.b32 $0, c, d, 0x5410;
            prmt.b32 $1, c, d, 0x7632;
            }
            """,
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (x & 255).to(tl.uint8).to(FORMAT, bitcast=True).to(tl.float16)
        high = ((x >> 8) & 255).to(tl.uint8).to(FORMAT, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def apart(acc, ROWS: tl.constexpr, DP: tl.constexpr):
    """The even and the odd columns of [ROWS, DP]."""
    even, odd = tl.split(tl.reshape(acc, (ROWS, DP // 2, 2)))
    return even, odd


@triton.jit
def together(even, odd, ROWS: tl.constexpr, DP: tl.constexpr):
    """What `apart` took apart."""
    return tl.reshape(tl.join(even, odd), (ROWS, DP))


@triton.jit
def walk(
    m, z, acc, q, q_pos, slope, cache, v_offset, table, kv_head, lo, hi, first, last,
    qk_scale, cap, stride_block,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr = 0, SPARSE: tl.constexpr = 0, LOCAL: tl.constexpr = 0,
    STRIDE: tl.constexpr = 1, number=0, PAIRS: tl.constexpr = False, ASM: tl.constexpr = False,
):  # fmt: skip
    """Online softmax (m: maximum, z: normaliser) over keys [lo, hi), lo a multiple of TILE.

    MASKED: keys outside [first, last) are not read.   SPARSE, LOCAL, STRIDE: of `SparseBlocks`, 0 without; number: its
    head's, of each row.   PAIRS: the cache is one of 8 bits, and values are read two at a time (`unpack_pairs`, ASM).
    """
    d = tl.arange(0, DP)
    values, vd, VD = cache + v_offset, d, D
    odd = z  # nothing without PAIRS
    if PAIRS:
        values = (cache + v_offset).to(tl.pointer_type(tl.int16))
        vd = tl.arange(0, DP // 2)
        VD = D // 2
        acc, odd = apart(acc, acc.shape[0], DP)
    for start in tl.range(lo, hi, TILE, num_stages=STAGES):
        k_pos = start + tl.arange(0, TILE)
        if MASKED:
            live = (k_pos >= first) & (k_pos < last)
            block = tl.load(table + k_pos // BS, mask=live, other=0).to(tl.int64)
        else:
            block = tl.load(table + k_pos // BS).to(tl.int64)
        base = block * stride_block + kv_head * (BS * D) + (k_pos % BS) * D
        v_base = base
        if PAIRS:
            v_base = base // 2
        if MASKED:
            # stale memory may hold NaN, and 0 * NaN is NaN: what is not live must be loaded as zero
            k = tl.load(cache + base[None, :] + d[:, None], mask=live[None, :] & (d[:, None] < D), other=0.0)
            v = tl.load(values + v_base[:, None] + vd[None, :], mask=live[:, None] & (vd[None, :] < VD), other=0.0)
        elif D == DP:
            k = tl.load(cache + base[None, :] + d[:, None])
            v = tl.load(values + v_base[:, None] + vd[None, :])
        else:
            k = tl.load(cache + base[None, :] + d[:, None], mask=d[:, None] < D, other=0.0)
            v = tl.load(values + v_base[:, None] + vd[None, :], mask=vd[None, :] < VD, other=0.0)
        s = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        s = s * qk_scale
        if SOFTCAP:
            # cap * tanh(s / cap) with tanh(x) = 2 * sigmoid(2 x) - 1; qk_scale carries no log2(e) here
            s = cap * (2.0 * tl.sigmoid(2.0 * s / cap) - 1.0) * 1.4426950408889634
        if ALIBI:
            s += slope[:, None] * (k_pos[None, :] - q_pos[:, None]).to(tl.float32)
        if MASKED:
            seen = live[None, :] & (k_pos[None, :] <= q_pos[:, None])
            if WINDOW > 0:
                seen = seen & (q_pos[:, None] - k_pos[None, :] < WINDOW)
            if CHUNK > 0:
                seen = seen & (k_pos[None, :] >= (q_pos // CHUNK * CHUNK)[:, None])
            if SPARSE > 0:
                k_block = k_pos // SPARSE
                near = (q_pos // SPARSE)[:, None] - k_block[None, :] < LOCAL
                seen = seen & (near | ((k_block[None, :] + number[:, None] + 1) % STRIDE == 0))
            s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        z = z * alpha + tl.sum(p, 1)
        if PAIRS:
            v_even, v_odd = unpack_pairs(v, cache.dtype.element_ty, ASM)
            acc = tl.dot(p.to(q.dtype), v_even.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
            odd = tl.dot(p.to(q.dtype), v_odd.to(q.dtype), odd * alpha[:, None], input_precision=PRECISION)
        else:
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    if PAIRS:
        acc = together(acc, odd, acc.shape[0], DP)
    return m, z, acc


@triton.jit
def merge_parts(
    m, z, acc, part, lse, row, tile_rows, kv_head, g, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Merge what shared keys gave into the state of one request's query heads `g`, part after part.

    part, lse: of a `SharedPlan`, with `tile_rows` rows a tile; row: where the request's four numbers of it stand.
    """
    d = tl.arange(0, DP)
    in_g = g < GROUP
    first = tl.load(row + 2) * KV_HEADS + kv_head
    at = first.to(tl.int64) * tile_rows + tl.load(row + 3) * GROUP + g
    for j in tl.range(0, tl.load(row + 1), num_stages=3):
        here = at + j * (KV_HEADS * tile_rows)
        weight = tl.load(lse + here, mask=in_g, other=-1.0e30)
        mean = tl.load(part + here[:, None] * D + d[None, :], mask=in_g[:, None] & (d[None, :] < D), other=0.0)
        m_new = tl.maximum(m, weight)
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(weight - m_new)
        z = z * alpha + weight
        acc = acc * alpha[:, None] + mean * weight[:, None]
        m = m_new
    return m, z, acc


@triton.jit(do_not_specialize=["stride_table"])
def _shared_kernel(
    q_ptr, cache, table_ptr, lens_ptr, slopes_ptr, members, items, part, lse, qk_scale, cap, v_offset, stride_block,
    stride_table, stride_q, stride_qh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads, items): one item of a `SharedPlan`. Every request has one new token."""
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 4
    first = tl.load(item)
    count = tl.load(item + 1)
    if count == 0:
        return
    i = tl.arange(0, BM)
    ok = i // GROUP < count
    r = tl.load(members + first + i // GROUP, mask=ok, other=0)
    head = kv_head * GROUP + i % GROUP
    q_pos = tl.load(lens_ptr + r, mask=ok, other=1) - 1
    d = tl.arange(0, DP)
    in_d = d[None, :] < D
    q_at = r.to(tl.int64) * stride_q + head * stride_qh
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=ok[:, None] & in_d, other=0.0)
    slope = tl.zeros([BM], tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=ok, other=0.0) * 1.4426950408889634
        if KNOWN > 0:
            slope = slope * tl.minimum(KNOWN / (q_pos + 1).to(tl.float32), 1.0)
    lo = tl.load(item + 2)
    hi = tl.load(item + 3)
    table = table_ptr + tl.load(members + first).to(tl.int64) * stride_table
    m = tl.full([BM], -1.0e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    m, z, acc = walk(
        m, z, acc, q, q_pos, slope, cache, v_offset, table, kv_head, lo, hi, lo, hi,
        qk_scale, cap, stride_block, D, DP, BS, TILE, 0, SOFTCAP, ALIBI, False, STAGES, PRECISION,
    )  # fmt: skip
    at = (tl.program_id(1) * KV_HEADS + kv_head).to(tl.int64) * BM + i
    tl.store(part + at[:, None] * D + d[None, :], acc / z[:, None], mask=ok[:, None] & in_d)
    tl.store(lse + at, m + tl.log2(z), mask=ok)


@triton.jit(do_not_specialize=["max_query", "requests", "stride_table", "splits", "tile_rows"])
def _attend_kernel(
    q_ptr, cache, table_ptr, starts_ptr, lens_ptr, slopes_ptr, sinks_ptr, numbers_ptr, out_ptr, part_ptr, lse_ptr,
    shared_rows, shared_part, shared_lse, tile_rows, max_query,
    requests, splits, qk_scale, cap, v_scale, v_offset, stride_block, stride_table, stride_q, stride_qh, stride_o,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SMALL: tl.constexpr,
    MIN_QUERY: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    CHUNK: tl.constexpr, SPARSE: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, SHARED: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """SMALL: grid (kv_heads, splits, requests), queries of at most BQ tokens.
    Else: grid (tiles, kv_heads), those of MIN_QUERY to max_query tokens.

    SHARED: the first keys of some requests, all of one new token, have been taken care of (`SharedPlan`).
    PAIRS, ASM: as for `walk`.
    """
    if SMALL:
        kv_head = tl.program_id(0)
        split = tl.program_id(1)
        r = tl.program_id(2)
        tile_token = 0
    else:
        # heavy tiles (late in their sequence) first; request r's tiles begin at starts[r] // BQ + r, an upper bound
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        kv_head = tl.program_id(1)
        split = 0
        left = 0
        right = requests
        while left < right:
            mid = (left + right) // 2
            if tl.load(starts_ptr + mid) // BQ + mid <= tile:
                left = mid + 1
            else:
                right = mid
        r = left - 1
        tile_token = (tile - tl.load(starts_ptr + r) // BQ - r) * BQ
    start = tl.load(starts_ptr + r)
    query_len = tl.load(starts_ptr + r + 1) - start
    seq_len = tl.load(lens_ptr + r)
    if tile_token >= query_len:
        return
    if SMALL:
        if query_len > BQ:
            return
    elif (query_len < MIN_QUERY) | (query_len > max_query):
        return

    row = tl.arange(0, BM)
    token = tile_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    ok = (row < BQ * GROUP) & (token < query_len)
    q_pos = seq_len - query_len + tl.where(ok, token, tile_token)
    d = tl.arange(0, DP)
    q_at = (start + token).to(tl.int64) * stride_q + head * stride_qh
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=ok[:, None] & (d[None, :] < D), other=0.0)
    if PAIRS:  # noqa: SIM102 (a condition for the compiler)
        if q.dtype == tl.bfloat16:
            q, top = half_rows(q)
            qk_scale = qk_scale * top
    slope = tl.zeros([BM], tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=ok, other=0.0) * 1.4426950408889634
        if KNOWN > 0:
            slope = slope * tl.minimum(KNOWN / (q_pos + 1).to(tl.float32), 1.0)
    number = head
    if SPARSE > 0:
        number = tl.load(numbers_ptr + head, mask=ok, other=0)

    first_pos = seq_len - query_len + tile_token
    last = tl.minimum(first_pos + BQ, seq_len)  # one past the last key that any row sees
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_pos - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(first, first_pos // CHUNK * CHUNK)
    if SHARED:
        first = tl.load(shared_rows + r * 4)
    lo = first // TILE * TILE
    hi = last
    if SPLIT:
        share = tl.cdiv(tl.cdiv(last - lo, splits), TILE) * TILE
        lo += split * share
        hi = tl.minimum(lo + share, last)

    m = tl.full([BM], -1.0e30, tl.float32)  # finite, so that a row without a visible key stays free of NaN
    z = tl.zeros([BM], tl.float32)
    if SINKS:  # noqa: SIM102 (a condition for the compiler)
        if split == 0:
            m = tl.load(sinks_ptr + head, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
            z += 1.0
    acc = tl.zeros([BM, DP], tl.float32)
    table = table_ptr + r.to(tl.int64) * stride_table
    bare = lo  # where not all keys before a query are seen every tile is masked
    if (WINDOW == 0) & (CHUNK == 0) & (SPARSE == 0):
        bare += tl.maximum(tl.minimum(hi, first_pos + 1) - lo, 0) // TILE * TILE
    m, z, acc = walk(
        m, z, acc, q, q_pos, slope, cache, v_offset, table, kv_head, lo, bare, first, last, qk_scale, cap, stride_block,
        D, DP, BS, TILE, WINDOW, SOFTCAP, ALIBI, False, STAGES, PRECISION, CHUNK, SPARSE, LOCAL, STRIDE, number, PAIRS,
        ASM,
    )  # fmt: skip
    m, z, acc = walk(
        m, z, acc, q, q_pos, slope, cache, v_offset, table, kv_head, bare, hi, first, last, qk_scale, cap, stride_block,
        D, DP, BS, TILE, WINDOW, SOFTCAP, ALIBI, True, STAGES, PRECISION, CHUNK, SPARSE, LOCAL, STRIDE, number, PAIRS,
        ASM,
    )  # fmt: skip

    if SHARED:  # noqa: SIM102 (a condition for the compiler)
        if split == 0:
            m, z, acc = merge_parts(
                m, z, acc, shared_part, shared_lse, shared_rows + r * 4, tile_rows, kv_head, row, KV_HEADS, GROUP, D, DP
            )
    keep = ok[:, None] & (d[None, :] < D)
    if SPLIT:
        part = ((r * BQ + token) * (KV_HEADS * GROUP) + head) * splits + split
        tl.store(part_ptr + part[:, None].to(tl.int64) * D + d[None, :], acc, mask=keep)
        tl.store(lse_ptr + part * 2, m, mask=ok)
        tl.store(lse_ptr + part * 2 + 1, z, mask=ok)
    else:
        out = acc / tl.maximum(z, 1.0e-30)[:, None] * v_scale
        at = (start + token).to(tl.int64) * stride_o + head * D
        tl.store(out_ptr + at[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    part_ptr, lse_ptr, starts_ptr, out_ptr, splits, v_scale, stride_o,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Grid (requests * BQ, heads): merge the splits of one row, each weighted by its share of the softmax."""
    r = tl.program_id(0) // BQ
    token = tl.program_id(0) % BQ
    head = tl.program_id(1)
    start = tl.load(starts_ptr + r)
    query_len = tl.load(starts_ptr + r + 1) - start
    if (token >= query_len) | (query_len > BQ):
        return
    d = tl.arange(0, DP)
    peak = tl.full([], -1.0e30, tl.float32)
    total = tl.zeros([], tl.float32)
    merged = tl.zeros([DP], tl.float32)
    for begin in range(0, splits, MERGE):
        s = begin + tl.arange(0, MERGE)
        part = ((r * BQ + token) * HEADS + head) * splits + s
        m = tl.load(lse_ptr + part * 2, mask=s < splits, other=-1.0e30)
        z = tl.load(lse_ptr + part * 2 + 1, mask=s < splits, other=0.0)
        keep = (s[:, None] < splits) & (d[None, :] < D)
        acc = tl.load(part_ptr + part[:, None].to(tl.int64) * D + d[None, :], mask=keep, other=0.0)
        new_peak = tl.maximum(peak, tl.max(m, 0))
        w = tl.exp2(m - new_peak)
        old = tl.exp2(peak - new_peak)
        total = total * old + tl.sum(z * w, 0)
        merged = merged * old + tl.sum(acc * w[:, None], 0)
        peak = new_peak
    out = merged / tl.maximum(total, 1.0e-30) * v_scale
    at = (start + token).to(tl.int64) * stride_o + head * D
    tl.store(out_ptr + at + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def attend(
    q: Tensor,
    kv_cache: Tensor,
    params: AttentionParams,
    step: StepInputs,
    group: GroupInputs,
    own: OwnKV | None = None,
) -> Tensor:
    """`vllm.ops.attention.attend` for CUDA: short queries through the small tile, long ones through the big one."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    if q.stride(-1) != 1:
        q = q.contiguous()
    heads_per_kv = q.shape[1] // kv_cache.shape[2]
    short = _short_query(heads_per_kv)
    if step.max_query_len > short:
        plan, lengths = group.plan, step.host_query_starts[1:] - step.host_query_starts[:-1]
        if isinstance(plan, GatherPlan) and can_gather(q, kv_cache, params, plan):
            out = attend_gathered(q, kv_cache, params, step, group, plan, out, own)
            if ((lengths > short) & (lengths <= GATHERED_ABOVE)).any():
                _launch_long(q, kv_cache, params, step, group, out, short, GATHERED_ABOVE)
        else:
            _launch_long(q, kv_cache, params, step, group, out, short)
        if not (lengths <= short).any():
            return _cleared(out, step)
    _launch_short(q, kv_cache, params, step, group, out, short)
    return _cleared(out, step)


def _cleared(out: Tensor, step: StepInputs) -> Tensor:
    """`out` with zeros for tokens that no request has."""
    used = int(step.host_query_starts[-1])
    if used < len(out):
        out[used:].zero_()
    return out


def _short_query(heads_per_kv: int) -> int:
    """The longest query, in tokens, that the small tile of 16 rows takes."""
    return max(1, 16 // heads_per_kv)


def _common(q: Tensor, kv_cache: Tensor, params: AttentionParams) -> dict:
    head_dim = q.shape[2]
    return {
        "KV_HEADS": kv_cache.shape[2],
        "GROUP": q.shape[1] // kv_cache.shape[2],
        "D": head_dim,
        "DP": max(16, triton.next_power_of_2(head_dim)),
        "BS": kv_cache.shape[3],
        "SOFTCAP": params.softcap is not None,
        "ALIBI": params.alibi_slopes is not None,
        "KNOWN": params.alibi_known or 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def pairs(kv_cache: Tensor) -> dict:
    """How `walk` reads a cache of this dtype in the kernels for few queries."""
    return {"PAIRS": kv_cache.dtype in _FP8, "ASM": kv_cache.device.type != "cpu"}


def _reach(params: AttentionParams) -> dict:
    """Constants that only some layers need."""
    sparse = params.sparse
    return {
        "WINDOW": params.window or 0,
        "SINKS": params.sinks is not None,
        "CHUNK": params.chunk or 0,
        "SPARSE": 0 if sparse is None else sparse.block,
        "LOCAL": 0 if sparse is None else sparse.local,
        "STRIDE": 1 if sparse is None else sparse.stride,
    }


def _per_head(params: AttentionParams, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes, sinks and numbers of heads; `other` for what there is not."""
    numbers = None if params.sparse is None else params.sparse.heads
    slopes, sinks = params.alibi_slopes, params.sinks
    return tuple(other if x is None else x for x in (slopes, sinks, numbers))  # type: ignore[return-value]


def _arguments(
    q: Tensor, kv_cache: Tensor, params: AttentionParams, step: StepInputs, group: GroupInputs, splits: int = 1
) -> tuple:
    """The kernel's arguments between the tensors it writes and its constants."""
    scale = params.scale * params.k_scale * (1.0 if params.softcap is not None else _LOG2E)
    return (
        step.seq_lens.shape[0], splits, scale, params.softcap or 0.0, params.v_scale, kv_cache.stride(1),
        kv_cache.stride(0), group.block_table.stride(0), q.stride(0), q.stride(1), q.shape[1] * q.shape[2],
    )  # fmt: skip


def _launch_long(
    q: Tensor,
    kv_cache: Tensor,
    params: AttentionParams,
    step: StepInputs,
    group: GroupInputs,
    out: Tensor,
    short: int,
    longest: int = 1 << 30,
) -> None:
    const = _common(q, kv_cache, params)
    wide = const["DP"] > 128 or q.dtype == torch.float32
    rows = 64 if wide else 128
    rows = max(rows, triton.next_power_of_2(const["GROUP"]))
    tokens_per_tile = rows // const["GROUP"]
    tiles = q.shape[0] // tokens_per_tile + step.seq_lens.shape[0]
    _attend_kernel[(tiles, const["KV_HEADS"])](
        q, kv_cache, group.block_table, step.query_starts, step.seq_lens, *_per_head(params, out), out, out, out,
        step.seq_lens, out, out, 0, longest, *_arguments(q, kv_cache, params, step, group),
        BM=rows, BQ=tokens_per_tile, TILE=32 if wide else 64, SPLIT=False, SMALL=False, MIN_QUERY=short + 1,
        SHARED=False, PAIRS=False, ASM=False, STAGES=2, num_warps=4, **const, **_reach(params),
    )  # fmt: skip


def _launch_short(
    q: Tensor, kv_cache: Tensor, params: AttentionParams, step: StepInputs, group: GroupInputs, out: Tensor, short: int
) -> None:
    const = _common(q, kv_cache, params)
    heads, head_dim, requests = q.shape[1], q.shape[2], step.seq_lens.shape[0]
    rows = max(16, triton.next_power_of_2(const["GROUP"]))
    whole = params.window is None and params.chunk is None and params.sparse is None
    shared = group.plan if isinstance(group.plan, SharedPlan) and whole else None
    splits = choose_splits(requests * const["KV_HEADS"], step.max_seq_len, params.window or params.chunk)
    if splits > 1:
        part = torch.empty((requests * short, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((requests * short, heads, splits, 2), dtype=torch.float32, device=q.device)
    else:
        part = lse = out
    per_head = _per_head(params, out)
    wide = const["DP"] > 128 or q.dtype == torch.float32 or rows > 32
    before: tuple[Tensor, Tensor, Tensor, int] = (step.seq_lens, out, out, 0)
    if shared is not None:
        _launch_shared(q, kv_cache, params, step, group, per_head[0], shared)
        before = (shared.rows, shared.part, shared.lse, shared.part.shape[2])
    _attend_kernel[(const["KV_HEADS"], splits, requests)](
        q, kv_cache, group.block_table, step.query_starts, step.seq_lens, *per_head, out, part, lse,
        *before, short, *_arguments(q, kv_cache, params, step, group, splits),
        BM=rows, BQ=short, TILE=32, SPLIT=splits > 1, SMALL=True, MIN_QUERY=1, SHARED=shared is not None, STAGES=2,
        num_warps=4 if wide else 1, **pairs(kv_cache), **const, **_reach(params),
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(requests * short, heads)](
            part, lse, step.query_starts, out, splits, params.v_scale, heads * head_dim,
            HEADS=heads, D=head_dim, DP=const["DP"], BQ=short, MERGE=8, num_warps=1,
        )  # fmt: skip


def _launch_shared(
    q: Tensor, kv_cache: Tensor, params: AttentionParams, step: StepInputs, group: GroupInputs, slopes: Tensor,
    shared: SharedPlan,
) -> None:  # fmt: skip
    """What every request's result has from keys that it shares, as parts for the small tile to merge."""
    const = _common(q, kv_cache, params)
    _, _, scale, cap, _, v_offset, stride_block, stride_table, stride_q, stride_qh, _ = _arguments(
        q, kv_cache, params, step, group
    )
    tile_rows = shared.part.shape[2]
    wide = const["DP"] > 128 or q.dtype == torch.float32
    _shared_kernel[(const["KV_HEADS"], shared.items.shape[0])](
        q, kv_cache, group.block_table, step.seq_lens, slopes, shared.members, shared.items, shared.part, shared.lse,
        scale, cap, v_offset, stride_block, stride_table, stride_q, stride_qh,
        BM=tile_rows, TILE=32 if wide else 64, STAGES=2, num_warps=8 if tile_rows == 128 else 4, **const,
    )  # fmt: skip


def choose_splits(programs: int, max_seq_len: int, window: int | None) -> int:
    """A power of two: enough programs for the device, and no split shorter than 64 keys."""
    keys = max_seq_len if window is None else min(max_seq_len, window)
    wanted = -(-(processors() * 31 // 4) // max(programs, 1))
    splits = 1
    while splits < wanted and splits < 64 and splits * 2 * 64 <= keys:
        splits *= 2
    return splits


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, cache, slots_ptr, inv_k_scale, inv_v_scale, v_offset, stride_block, stride_k, stride_kh,
    stride_v, stride_vh, KV_HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,): store one token's keys and values. LIMIT > 0: the largest magnitude of an fp8 cache."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    h = tl.arange(0, HP)[:, None]
    d = tl.arange(0, DP)[None, :]
    keep = (h < KV_HEADS) & (d < D)
    k = tl.load(k_ptr + token * stride_k + h * stride_kh + d, mask=keep, other=0.0)
    v = tl.load(v_ptr + token * stride_v + h * stride_vh + d, mask=keep, other=0.0)
    if LIMIT > 0:
        k = tl.minimum(tl.maximum(k.to(tl.float32) * inv_k_scale, -LIMIT), LIMIT)
        v = tl.minimum(tl.maximum(v.to(tl.float32) * inv_v_scale, -LIMIT), LIMIT)
    at = (slot // BS) * stride_block + h * (BS * D) + (slot % BS) * D + d
    tl.store(cache + at, k.to(cache.dtype.element_ty), mask=keep)
    tl.store(cache + v_offset + at, v.to(cache.dtype.element_ty), mask=keep)


def fp8_limit(dtype: torch.dtype) -> float:
    """The largest finite magnitude if `dtype` is a float8 format, else 0."""
    return torch.finfo(dtype).max if dtype in _FP8 else 0.0


def write_kv(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """`vllm.ops.attention.write_kv` for CUDA."""
    if k.shape[0] == 0:
        return
    _, _, kv_heads, block_size, head_dim = kv_cache.shape
    _write_kernel[(k.shape[0],)](
        k, v, kv_cache, slot_mapping, 1.0 / k_scale, 1.0 / v_scale, kv_cache.stride(1), kv_cache.stride(0),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KV_HEADS=kv_heads, HP=triton.next_power_of_2(kv_heads), D=head_dim, DP=triton.next_power_of_2(head_dim),
        BS=block_size, LIMIT=fp8_limit(kv_cache.dtype), num_warps=4,
    )  # fmt: skip


def register(device_type: str) -> None:
    ops.attend.register(device_type, attend)
    ops.plan_batch.register(device_type, ops.plan_gathered)
    ops.write_kv.register(device_type, write_kv)
