"""Triton kernels of multi-head latent attention: rotation and cache write, few queries over the latents themselves,
many queries over keys and values that are computed from gathered latents first.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.ops import latent_attention as ops
from vllm.ops.attention import GATHERED_ABOVE, GatherPlan
from vllm.ops.triton.attention import fp8_limit
from vllm.ops.triton.decode_parts import processors
from vllm.ops.triton.prefill import TAIL, attend_runs, library_takes
from vllm.step.inputs import GroupInputs, StepInputs

_LOG2E = math.log2(math.e)
_GATHER = 32  # tokens a program copies
_TAIL = 64  # rows behind the gathered ones, for our own kernel
_EXPANDED = 128, 64, 2, 8  # queries and keys of a tile, stages, warps
_ABSORBED = {16: (32, 2, 4), 32: (32, 2, 4), 64: (32, 2, 8)}  # rows of a tile -> keys, stages, warps


@triton.jit
def _request_of(starts, requests, token):
    """The request that a token of the step belongs to."""
    left = 0
    right = requests
    while left < right:
        mid = (left + right) // 2
        if tl.load(starts + mid) <= token:
            left = mid + 1
        else:
            right = mid
    return left - 1


@triton.jit
def _prepare_kernel(
    q, latent, weight, positions, cos_sin, cache, slots, eps, stride_q, stride_qh, stride_latent, stride_block,
    HEADS: tl.constexpr, HP: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, HALFP: tl.constexpr,
    RANK: tl.constexpr, RP: tl.constexpr, BS: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,): the token's queries rotated in place, its latent normalised, rotated and cached."""
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    to = cache + (slot // BS) * stride_block + (slot % BS) * (RANK + ROPE)
    row = latent + token * stride_latent
    d = tl.arange(0, RP)
    c = tl.load(row + d, mask=d < RANK, other=0.0).to(tl.float32)
    c = c * tl.rsqrt(tl.sum(c * c, 0) / RANK + eps)
    c = c * tl.load(weight + d, mask=d < RANK, other=0.0).to(tl.float32)
    c = c.to(latent.dtype.element_ty)  # as the norm alone would round it
    if LIMIT > 0:
        c = tl.minimum(tl.maximum(c.to(tl.float32), -LIMIT), LIMIT)
    tl.store(to + d, c.to(cache.dtype.element_ty), mask=d < RANK)

    i = tl.arange(0, HALFP)
    at_a = i
    at_b = i + HALF
    if INTERLEAVED:
        at_a = 2 * i
        at_b = 2 * i + 1
    turn = cos_sin + tl.load(positions + token) * ROPE
    cos = tl.load(turn + i, mask=i < HALF, other=0.0)
    sin = tl.load(turn + HALF + i, mask=i < HALF, other=0.0)
    a = tl.load(row + RANK + at_a, mask=i < HALF, other=0.0).to(tl.float32)
    b = tl.load(row + RANK + at_b, mask=i < HALF, other=0.0).to(tl.float32)
    u = (a * cos - b * sin).to(latent.dtype.element_ty)
    w = (b * cos + a * sin).to(latent.dtype.element_ty)
    if LIMIT > 0:
        u = tl.minimum(tl.maximum(u.to(tl.float32), -LIMIT), LIMIT)
        w = tl.minimum(tl.maximum(w.to(tl.float32), -LIMIT), LIMIT)
    tl.store(to + RANK + at_a, u.to(cache.dtype.element_ty), mask=i < HALF)
    tl.store(to + RANK + at_b, w.to(cache.dtype.element_ty), mask=i < HALF)

    h = tl.arange(0, HP)[:, None]
    keep = (h < HEADS) & (i < HALF)[None, :]
    rows = q + token * stride_q + h * stride_qh + NOPE
    a = tl.load(rows + at_a[None, :], mask=keep, other=0.0).to(tl.float32)
    b = tl.load(rows + at_b[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(rows + at_a[None, :], (a * cos[None, :] - b * sin[None, :]).to(q.dtype.element_ty), mask=keep)
    tl.store(rows + at_b[None, :], (b * cos[None, :] + a * sin[None, :]).to(q.dtype.element_ty), mask=keep)


def rotate_and_write_latent(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """`vllm.ops.latent_attention.rotate_and_write_latent` for CUDA; queries are rotated in place."""
    if q.stride(-1) != 1 or latent.stride(-1) != 1:
        q, latent = q.contiguous(), latent.contiguous()
    tokens, heads, width = q.shape
    rank, rope_dim = weight.shape[0], cos_sin.shape[1]
    if tokens:
        rows = triton.next_power_of_2(heads)
        _prepare_kernel[(tokens,)](
            q, latent, weight, positions, cos_sin, cache, slot_mapping, eps, q.stride(0), q.stride(1),
            latent.stride(0), cache.stride(0),
            HEADS=heads, HP=rows, NOPE=width - rope_dim, ROPE=rope_dim, HALFP=triton.next_power_of_2(rope_dim // 2),
            RANK=rank, RP=triton.next_power_of_2(rank), BS=cache.shape[1], INTERLEAVED=interleaved,
            LIMIT=fp8_limit(cache.dtype), num_warps=4 if rows * rope_dim >= 1024 else 1,
        )  # fmt: skip
    return q


@triton.jit
def _latent_tile(
    m, z, acc, inner, q_rope, cache, table, start, last, scale, stride_block,
    RANK: tl.constexpr, RP: tl.constexpr, ROPE: tl.constexpr, PP: tl.constexpr, BS: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of cached latents, from key `start` on, into the running maximum, sum and result."""
    key = start + tl.arange(0, TILE)
    d = tl.arange(0, RP)
    e = tl.arange(0, PP)
    if MASKED:
        live = key < last
        block = tl.load(table + key // BS, mask=live, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // BS).to(tl.int64)
    at = block * stride_block + (key % BS) * (RANK + ROPE)
    if MASKED:
        # stale memory may hold NaN, and 0 * NaN is NaN
        c = tl.load(cache + at[:, None] + d[None, :], mask=live[:, None] & (d < RANK)[None, :], other=0.0)
        k = tl.load(cache + RANK + at[None, :] + e[:, None], mask=live[None, :] & (e < ROPE)[:, None], other=0.0)
    elif RANK == RP and ROPE == PP:
        c = tl.load(cache + at[:, None] + d[None, :])
        k = tl.load(cache + RANK + at[None, :] + e[:, None])
    else:
        c = tl.load(cache + at[:, None] + d[None, :], mask=(d < RANK)[None, :], other=0.0)
        k = tl.load(cache + RANK + at[None, :] + e[:, None], mask=(e < ROPE)[:, None], other=0.0)
    c = c.to(inner.dtype)
    s = tl.dot(inner, tl.trans(c), input_precision=PRECISION)
    s = tl.dot(q_rope, k.to(inner.dtype), s, input_precision=PRECISION) * scale
    if MASKED:
        s = tl.where(live[None, :], s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    z = z * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(inner.dtype), c, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, z, acc


@triton.jit(do_not_specialize=["first_token", "requests", "splits", "longest", "tokens"])
def _absorbed_kernel(
    inner_ptr, q_ptr, cache, table_ptr, starts, lens, out, part, peaks, first_token, tokens, requests, splits, longest,
    scale, stride_ih, stride_it, stride_q, stride_qh, stride_block, stride_table,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, ROPE: tl.constexpr, PP: tl.constexpr,
    BS: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (groups of BM heads, splits, tokens): one token's query heads over the latents that it sees.

    Requests of more than `longest` new tokens are left alone.   inner: absorbed queries [HEADS, tokens, RANK].
    out: [HEADS, tokens, RANK]; with SPLIT sums go to part [tokens, HEADS, splits, RANK], and their maximum and
    normaliser to peaks [tokens, HEADS, splits, 2].
    """
    h = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    local = tl.program_id(2)
    token = first_token + local
    r = _request_of(starts, requests, token)
    start = tl.load(starts + r)
    query_len = tl.load(starts + r + 1) - start
    if query_len > longest:
        return
    length = tl.load(lens + r) - query_len + token - start + 1
    lo = 0
    hi = length
    if SPLIT:
        share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
        lo = split * share
        hi = tl.minimum(lo + share, length)
    d = tl.arange(0, RP)
    e = tl.arange(0, PP)
    in_h = h < HEADS
    at = inner_ptr + h.to(tl.int64) * stride_ih + local.to(tl.int64) * stride_it
    inner = tl.load(at[:, None] + d[None, :], mask=in_h[:, None] & (d < RANK)[None, :], other=0.0)
    at = q_ptr + token.to(tl.int64) * stride_q + h * stride_qh + NOPE
    q_rope = tl.load(at[:, None] + e[None, :], mask=in_h[:, None] & (e < ROPE)[None, :], other=0.0)
    m = tl.full([BM], -1.0e30, tl.float32)  # finite, so that a split without keys stays free of NaN
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, RP], tl.float32)
    table = table_ptr + r.to(tl.int64) * stride_table
    bare = lo + tl.maximum(hi - lo, 0) // TILE * TILE
    for key in tl.range(lo, bare, TILE, num_stages=STAGES):
        m, z, acc = _latent_tile(
            m, z, acc, inner, q_rope, cache, table, key, hi, scale, stride_block, RANK, RP, ROPE, PP, BS, TILE, False,
            PRECISION,
        )  # fmt: skip
    if bare < hi:
        m, z, acc = _latent_tile(
            m, z, acc, inner, q_rope, cache, table, bare, hi, scale, stride_block, RANK, RP, ROPE, PP, BS, TILE, True,
            PRECISION,
        )  # fmt: skip
    keep = in_h[:, None] & (d < RANK)[None, :]
    if SPLIT:
        row = (local.to(tl.int64) * HEADS + h) * splits + split
        tl.store(part + row[:, None] * RANK + d[None, :], acc, mask=keep)
        tl.store(peaks + row * 2, m, mask=in_h)
        tl.store(peaks + row * 2 + 1, z, mask=in_h)
    else:
        row = h.to(tl.int64) * tokens + local
        value = acc / tl.maximum(z, 1.0e-30)[:, None]
        tl.store(out + row[:, None] * RANK + d[None, :], value.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _merge_kernel(
    part, peaks, out, tokens, splits, HEADS: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr
):
    """Grid (tokens, heads): the splits of one row, each weighted by its share of the softmax. SP: at least `splits`."""
    local = tl.program_id(0)
    h = tl.program_id(1)
    first = (local.to(tl.int64) * HEADS + h) * splits
    s = tl.arange(0, SP)
    m = tl.load(peaks + (first + s) * 2, mask=s < splits, other=-1.0e30)
    z = tl.load(peaks + (first + s) * 2 + 1, mask=s < splits, other=0.0)
    peak = tl.max(m, 0)
    total = tl.maximum(tl.sum(z * tl.exp2(m - peak), 0), 1.0e-30)
    d = tl.arange(0, RP)
    merged = tl.zeros([RP], tl.float32)
    for i in range(0, splits):
        weight = tl.exp2(tl.load(peaks + (first + i) * 2) - peak)
        merged += tl.load(part + (first + i) * RANK + d, mask=d < RANK, other=0.0) * weight
    row = h.to(tl.int64) * tokens + local
    tl.store(out + row * RANK + d, (merged / total).to(out.dtype.element_ty), mask=d < RANK)


@triton.jit(do_not_specialize=["stride_table"])
def _gather_kernel(
    cache, table_ptr, pieces, out, stride_block, stride_table, W: tl.constexpr, WP: tl.constexpr, BS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, pieces): the pieces of a `GatherPlan` into rows of out [rows, W]."""
    piece = pieces + tl.program_id(1) * 4
    r = tl.load(piece)
    first = tl.load(piece + 1)
    length = tl.load(piece + 2)
    to = tl.load(piece + 3)
    if tl.program_id(0) * KEYS >= length:
        return
    i = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    live = i < length
    key = first + i
    block = tl.load(table_ptr + r.to(tl.int64) * stride_table + key // BS, mask=live, other=0).to(tl.int64)
    d = tl.arange(0, WP)
    keep = live[:, None] & (d < W)[None, :]
    at = block * stride_block + (key % BS) * W
    row = tl.load(cache + at[:, None] + d[None, :], mask=keep, other=0.0)
    tl.store(out + (to + i).to(tl.int64)[:, None] * W + d[None, :], row.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _expanded_tile(
    m, z, acc, q_nope, q_rope, keys, values, latents, at, column, q_pos, k_pos, scale, NOPE: tl.constexpr,
    RANK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of computed keys and values, from row `at` on. CAUSAL: later keys than the query's are hidden."""
    k = keys.load([at, column])
    s = tl.dot(q_nope, k.T, input_precision=PRECISION)
    s = tl.dot(q_rope, latents.load([at, RANK]).T, s, input_precision=PRECISION) * scale
    if CAUSAL:
        s = tl.where(q_pos[:, None] >= k_pos[None, :], s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    z = z * alpha + tl.sum(p, 1)
    v = values.load([at, column + NOPE])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, z, acc


@triton.jit(do_not_specialize=["requests"])
def _expanded_kernel(
    q_ptr, keys, values, latents, out, starts, lens, places, requests, scale, stride_q, stride_qh,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NP: tl.constexpr, ROPE: tl.constexpr, PP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads), heavy tiles first; requests without gathered latents are left alone.

    keys, values: of one tensor [rows, HEADS * (NOPE + V)], each head's keys before its values.   latents: [rows, RANK +
    ROPE].   places: `GatherPlan.requests`.   SHARED: some have latents in common, always whole tiles of them.
    Columns beyond NOPE, ROPE or V are others', or zeros: zeros in the queries make them count for nothing.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    left = 0
    right = requests
    while left < right:
        mid = (left + right) // 2
        if tl.load(starts + mid) // BM + mid <= tile:
            left = mid + 1
        else:
            right = mid
    r = left - 1
    start = tl.load(starts + r)
    query_len = tl.load(starts + r + 1) - start
    first = (tile - start // BM - r) * BM
    base = tl.load(places + r * 3)
    common = tl.load(places + r * 3 + 1)
    common_row = tl.load(places + r * 3 + 2)
    if (first >= query_len) | (common < 0):
        return
    prefix = tl.load(lens + r) - query_len
    i = first + tl.arange(0, BM)
    ok = i < query_len
    q_pos = prefix + i
    n = tl.arange(0, NP)
    e = tl.arange(0, PP)
    d = tl.arange(0, VP)
    at = q_ptr + (start + i).to(tl.int64) * stride_q + head * stride_qh
    q_nope = tl.load(at[:, None] + n[None, :], mask=ok[:, None] & (n < NOPE)[None, :], other=0.0)
    q_rope = tl.load(at[:, None] + NOPE + e[None, :], mask=ok[:, None] & (e < ROPE)[None, :], other=0.0)
    m = tl.full([BM], -1.0e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, VP], tl.float32)
    t = tl.arange(0, TILE)
    column = head * (NOPE + V)
    bare = (prefix + first + 1) // TILE * TILE  # keys below this are as early as any row's
    last = prefix + tl.minimum(first + BM, query_len)
    for key in tl.range(0, bare, TILE, num_stages=STAGES):
        row = base + key
        if SHARED:
            row = tl.where(key < common, common_row + key, row)
        m, z, acc = _expanded_tile(
            m, z, acc, q_nope, q_rope, keys, values, latents, row, column, q_pos, key + t, scale, NOPE, RANK, False,
            PRECISION,
        )  # fmt: skip
    for key in tl.range(bare, last, TILE, num_stages=STAGES):
        row = base + key
        if SHARED:
            row = tl.where(key < common, common_row + key, row)
        m, z, acc = _expanded_tile(
            m, z, acc, q_nope, q_rope, keys, values, latents, row, column, q_pos, key + t, scale, NOPE, RANK, True,
            PRECISION,
        )  # fmt: skip
    to = ((start + i).to(tl.int64) * HEADS + head) * V
    value = (acc / tl.maximum(z, 1.0e-30)[:, None]).to(out.dtype.element_ty)
    tl.store(out + to[:, None] + d[None, :], value, mask=ok[:, None] & (d < V)[None, :])


def attend_latent(
    q: Tensor, cache: Tensor, kv_b: Tensor, nope_dim: int, scale: float, step: StepInputs, group: GroupInputs
) -> Tensor:
    """`vllm.ops.latent_attention.attend_latent` for CUDA: requests whose latents the step gathers are expanded."""
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, kv_b.shape[1] - nope_dim)
    if not tokens:
        return out
    first, end, longest = 0, tokens, tokens
    if isinstance(group.plan, GatherPlan) and _can_expand(q, cache, kv_b, nope_dim):
        out = _attend_expanded(q, cache, kv_b, nope_dim, scale, step, group, group.plan, out)
        starts, longest = step.host_query_starts, GATHERED_ABOVE
        short = np.flatnonzero(starts[1:] - starts[:-1] <= longest)
        if not len(short):
            return out
        first, end = int(starts[short[0]]), int(starts[short[-1] + 1])
    _attend_absorbed(q, cache, kv_b, nope_dim, scale, step, group, out, first, end, longest)
    return out


def _attend_absorbed(
    q: Tensor, cache: Tensor, kv_b: Tensor, nope_dim: int, scale: float, step: StepInputs, group: GroupInputs,
    out: Tensor, first: int, end: int, longest: int,
) -> None:  # fmt: skip
    """Tokens [first, end) of requests of at most `longest` new tokens, in their rows of `out`; those of others between
    them are left as they are.
    """
    heads, _, rank = kv_b.shape
    rope_dim, count, block_size = q.shape[2] - nope_dim, end - first, cache.shape[1]
    mine, target = q[first:end, :, :nope_dim].transpose(0, 1), out[first:end].transpose(0, 1)
    inner = _bmm(mine, kv_b[:, :nope_dim], None)
    rows = 16 if heads <= 16 else 32 if heads <= 32 else 64
    groups = triton.cdiv(heads, rows)
    exact = q.dtype == torch.float32
    tile, stages, warps = (16, 2, 8) if exact else _ABSORBED[rows]
    splits = _splits(count * groups, step.max_seq_len)
    summed = q.new_empty(heads, count, rank)
    part = peaks = summed
    if splits > 1:
        part = torch.empty(count, heads, splits, rank, dtype=torch.float32, device=q.device)
        peaks = torch.empty(count, heads, splits, 2, dtype=torch.float32, device=q.device)
    padded = triton.next_power_of_2(rank)
    _absorbed_kernel[(groups, splits, count)](
        inner, q, cache, group.block_table, step.query_starts, step.seq_lens, summed, part, peaks, first, count,
        step.seq_lens.shape[0], splits, longest, scale * _LOG2E, inner.stride(0), inner.stride(1), q.stride(0),
        q.stride(1), cache.stride(0), group.block_table.stride(0),
        HEADS=heads, NOPE=nope_dim, RANK=rank, RP=max(16, padded), ROPE=rope_dim,
        PP=max(16, triton.next_power_of_2(rope_dim)), BS=block_size, BM=rows, TILE=tile, STAGES=stages,
        SPLIT=splits > 1, PRECISION="ieee" if exact else "tf32", num_warps=warps,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(count, heads)](
            part, peaks, summed, count, splits, HEADS=heads, RANK=rank, RP=padded,
            SP=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    expand = kv_b[:, nope_dim:].transpose(1, 2)
    lengths = step.host_query_starts[1:] - step.host_query_starts[:-1]
    if longest >= int(lengths.max()):
        _bmm(summed, expand, target)
        return
    wanted: np.ndarray = np.repeat(lengths <= longest, lengths)[first:end]
    if wanted.all():
        _bmm(summed, expand, target)
    else:  # long requests among the short ones have their rows already
        edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]])))
        for lo, hi in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            _bmm(summed[:, lo:hi], expand, target[:, lo:hi])


def _bmm(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """torch.bmm; of tensors without memory the shape alone, since torch's own way there takes seconds to import."""
    if a.is_meta:
        return a.new_empty(a.shape[0], a.shape[1], b.shape[2]) if out is None else out
    return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)


def _splits(programs: int, max_seq_len: int) -> int:
    """A power of two: enough programs for the device, and no split shorter than 128 keys."""
    splits = 1
    while splits < 64 and splits * programs < 2 * processors() and splits * 2 * 128 <= max_seq_len:
        splits *= 2
    return splits


def _attend_expanded(
    q: Tensor, cache: Tensor, kv_b: Tensor, nope_dim: int, scale: float, step: StepInputs, group: GroupInputs,
    plan: GatherPlan, out: Tensor,
) -> Tensor:  # fmt: skip
    """Every request that `plan` gathers, in its rows of `out` or of the result."""
    heads, _, rank = kv_b.shape
    width, rope_dim, v_dim = cache.shape[2], q.shape[2] - nope_dim, out.shape[2]
    taken = _width_taken(q, v_dim) if plan.runs else 0
    rows = plan.rows + (TAIL if taken else _TAIL)
    latents = q.new_empty(rows, width)
    latents[plan.rows :].zero_()
    _gather_kernel[(triton.cdiv(plan.longest, _GATHER), plan.pieces.shape[0])](
        cache, group.block_table, plan.pieces, latents, cache.stride(0), group.block_table.stride(0),
        W=width, WP=triton.next_power_of_2(width), BS=cache.shape[1], KEYS=_GATHER, num_warps=4,
    )  # fmt: skip
    columns = heads * (nope_dim + v_dim)
    wide = q.new_empty(rows, columns)
    if not q.is_meta:
        torch.mm(latents[:, :rank], kv_b.reshape(columns, rank).t(), out=wide)
    if taken:
        by_head = wide.view(rows, heads, nope_dim + v_dim)
        whole = q.new_empty(rows, heads, nope_dim + rope_dim)
        whole[..., :nope_dim] = by_head[..., :nope_dim]
        whole[..., nope_dim:] = latents[:, None, rank:]
        values = by_head[..., nope_dim:]
        if taken == v_dim:
            return attend_runs(q, whole, values, scale, plan, out, False)
        wider = F.pad(values, (0, taken - v_dim))
        out.copy_(attend_runs(q, whole, wider, scale, plan, out.new_empty(len(out), heads, taken), False)[..., :v_dim])
        return out  # the rows of other requests are still to be computed
    exact = q.dtype == torch.float32
    block, tile, stages, warps = (16, 16, 2, 4) if exact else _EXPANDED
    requests = step.seq_lens.shape[0]
    keys, values, places = (max(16, triton.next_power_of_2(n)) for n in (nope_dim, v_dim, rope_dim))

    def tiles(x: Tensor, wide: int) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [tile, wide])

    _expanded_kernel[(len(q) // block + requests, heads)](
        q, tiles(wide, keys), tiles(wide, values), tiles(latents, places), out, step.query_starts, step.seq_lens,
        plan.requests, requests, scale * _LOG2E, q.stride(0), q.stride(1),
        HEADS=heads, NOPE=nope_dim, NP=keys, ROPE=rope_dim, PP=places, V=v_dim, VP=values, RANK=rank, BM=block,
        TILE=tile, STAGES=stages, SHARED=plan.shared, PRECISION="ieee" if exact else "tf32", num_warps=warps,
    )  # fmt: skip
    return out


def _width_taken(q: Tensor, v_dim: int) -> int:
    """How wide values must be for a library to do attention of whole prompts: `v_dim`, or as keys; 0 if it does not."""
    fits = q.shape[2] % 8 == 0 and q.dtype in (torch.bfloat16, torch.float16)
    if not fits or q.stride(2) != 1 or q.stride(1) != q.shape[2] or q.stride(0) % 8:
        return 0
    widths = (n for n in (v_dim, q.shape[2]) if n >= v_dim)
    return next((n for n in widths if library_takes(q.shape[2], n, q.dtype, q.device)), 0)


def _can_expand(q: Tensor, cache: Tensor, kv_b: Tensor, nope_dim: int) -> bool:
    """Whether every head's keys and values, and the latents' parts, begin where tiles can be read from."""
    return all(
        n * q.dtype.itemsize % 16 == 0 for n in (nope_dim, kv_b.shape[1] - nope_dim, kv_b.shape[2], cache.shape[2])
    )


def register(device_type: str) -> None:
    ops.rotate_and_write_latent.register(device_type, rotate_and_write_latent)
    ops.attend_latent.register(device_type, attend_latent)
