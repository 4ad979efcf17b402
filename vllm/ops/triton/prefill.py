"""Triton attention of long prompts: keys and values gathered out of their blocks once, then read tile by tile
through TMA.

Tensor memory descriptors need rows at regular distances, which a paged cache has only within a block. Copying keys and
values to consecutive rows costs a few microseconds per thousand tokens and pays itself back from a few hundred
queries on. It also turns a float8 cache into the dtype of the queries.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.ops.attention import AttentionParams, GatherPlan, OwnKV
from vllm.ops.triton.decode_parts import has_warp_roles
from vllm.step.inputs import GroupInputs, StepInputs

_LOG2E = math.log2(math.e)
_GATHER = 64  # keys a program
TAIL = 1024  # rows behind the gathered ones
_DENSE_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


@triton.jit(do_not_specialize=["stride_table"])
def _gather_kernel(
    cache, table_ptr, pieces, k_out, v_out, v_offset, stride_block, stride_table, k_scale, v_scale,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, KEYS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv_heads, pieces): the pieces of a `GatherPlan` into rows of k_out and v_out [rows, KV_HEADS, D].

    Zeros for the null block, which stands where a window has passed: what it holds need not be finite.
    """
    piece = pieces + tl.program_id(2) * 4
    head = tl.program_id(1)
    r = tl.load(piece)
    first = tl.load(piece + 1)
    length = tl.load(piece + 2)
    start = tl.load(piece + 3)
    if tl.program_id(0) * KEYS >= length:
        return
    i = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    live = i < length
    key = first + i
    block = tl.load(table_ptr + r.to(tl.int64) * stride_table + key // BS, mask=live, other=0).to(tl.int64)
    d = tl.arange(0, DP)
    in_d = d[None, :] < D
    held = (block != 0)[:, None] & in_d
    at = (block * stride_block + head * (BS * D) + (key % BS) * D)[:, None] + d[None, :]
    to = ((start + i).to(tl.int64) * KV_HEADS + head)[:, None] * D + d[None, :]
    k = tl.load(cache + at, mask=held, other=0.0)
    v = tl.load(cache + v_offset + at, mask=held, other=0.0)
    if SCALED:
        k = k.to(tl.float32) * k_scale
        v = v.to(tl.float32) * v_scale
    tl.store(k_out + to, k.to(k_out.dtype.element_ty), mask=live[:, None] & in_d)
    tl.store(v_out + to, v.to(v_out.dtype.element_ty), mask=live[:, None] & in_d)


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    """FAST: the device's own, to 11 bits, more than bf16 scores have."""
    if FAST:
        y = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        y = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return y


@triton.jit
def _attend_tile(
    m, z, acc, q, k_desc, v_desc, at, column, q_pos, k_pos, inner, outer, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One tile of keys, from row `at` and `column` on, into the running maximum, sum and result.

    Scores are outer * q k, or outer * tanh(inner * q k), in base 2.   CAUSAL: later keys than the query's are hidden.
    WINDOW > 0: so are those that are as far behind it.
    """
    k = k_desc.load([at, column])
    s = tl.dot(q, k.T)
    if SOFTCAP:
        s = _tanh(s * inner, FAST)
    if CAUSAL:
        s = tl.where(q_pos[:, None] >= k_pos[None, :], s, -float("inf"))
    if WINDOW > 0:
        s = tl.where(q_pos[:, None] - k_pos[None, :] < WINDOW, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * outer)
    p = tl.exp2(s * outer - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    z = z * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    # rows behind the request belong to the next one, or to nobody, and are finite then: written as zeros with
    # gathered keys, read as zeros behind a step's last token
    v = v_desc.load([at, column])
    acc = tl.dot(p.to(v.dtype), v, acc)
    return m_new, z, acc


@triton.jit(do_not_specialize=["requests", "fresh"])
def _prefill_kernel(
    q_desc, k_desc, v_desc, out_ptr, sinks_ptr, starts_ptr, lens_ptr, places, requests, fresh, inner, outer, stride_o,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FAST: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads), heavy tiles first. Requests without gathered keys are left alone.

    places: `GatherPlan.requests`. fresh: keys stand where their queries do, not where `places` says.
    SHARED: some have keys in common, always whole tiles of them.   inner, outer: as for `_attend_tile`.
    Columns beyond D are those of the next head: zeros in the queries make them count for nothing.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    left = 0
    right = requests
    while left < right:
        mid = (left + right) // 2
        if tl.load(starts_ptr + mid) // BM + mid <= tile:
            left = mid + 1
        else:
            right = mid
    r = left - 1
    start = tl.load(starts_ptr + r)
    query_len = tl.load(starts_ptr + r + 1) - start
    first = (tile - start // BM - r) * BM
    kv_start = tl.where(fresh != 0, start, tl.load(places + r * 3))
    common = tl.load(places + r * 3 + 1)
    if (first >= query_len) | (common < 0):
        return
    common_row = tl.load(places + r * 3 + 2)
    prefix = tl.load(lens_ptr + r) - query_len
    column = (head // (HEADS // KV_HEADS)) * D
    d = tl.arange(0, DP)
    q = q_desc.load([start + first, head * D])
    if D < DP:
        q = tl.where(d[None, :] < D, q, 0.0)
    row = first + tl.arange(0, BM)
    q_pos = prefix + row
    n = tl.arange(0, TILE)
    m = tl.full([BM], -1.0e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    if SINKS:
        m = tl.zeros([BM], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        z += 1.0
    acc = tl.zeros([BM, DP], tl.float32)
    bare = (prefix + first + 1) // TILE * TILE  # keys below this are as early as any row's
    end = tl.minimum(first + BM, query_len)
    last = prefix + end
    edge = 0  # keys from here on are in the window of every row
    if WINDOW > 0:
        edge = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW, 0), TILE) * TILE, bare)
        for key in tl.range(tl.maximum(prefix + first - WINDOW + 1, 0) // TILE * TILE, edge, TILE, num_stages=STAGES):
            at = kv_start + key
            if SHARED:
                at = tl.where(key < common, common_row + key, at)
            m, z, acc = _attend_tile(
                m, z, acc, q, k_desc, v_desc, at, column, q_pos, key + n, inner, outer, False, WINDOW, SOFTCAP, FAST
            )
    for key in tl.range(edge, bare, TILE, num_stages=STAGES):
        at = kv_start + key
        if SHARED:
            at = tl.where(key < common, common_row + key, at)
        m, z, acc = _attend_tile(
            m, z, acc, q, k_desc, v_desc, at, column, q_pos, key + n, inner, outer, False, 0, SOFTCAP, FAST
        )
    for key in tl.range(bare, last, TILE, num_stages=STAGES):
        m, z, acc = _attend_tile(
            m, z, acc, q, k_desc, v_desc, kv_start + key, column, q_pos, key + n, inner, outer, True, WINDOW, SOFTCAP,
            FAST,
        )  # fmt: skip
    at = (start + row).to(tl.int64) * stride_o + head * D
    out = (acc / z[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + d[None, :], out, mask=(row[:, None] < query_len) & (d[None, :] < D))


def can_gather(q: Tensor, kv_cache: Tensor, params: AttentionParams, plan: GatherPlan | None) -> bool:
    """Whether a batch's long queries go through the gathered form."""
    aligned = q.stride(-1) == 1 and q.stride(1) == q.shape[2] and q.stride(0) % 8 == 0 and q.data_ptr() % 16 == 0
    fits = q.shape[2] % 8 == 0 and 64 <= q.shape[2] <= 256 and q.dtype in (torch.bfloat16, torch.float16)
    stored = kv_cache.dtype == q.dtype or kv_cache.dtype.itemsize == 1
    usual = params.alibi_slopes is None and params.chunk is None and params.sparse is None
    return plan is not None and usual and aligned and fits and stored


def attend_gathered(
    q: Tensor,
    kv_cache: Tensor,
    params: AttentionParams,
    step: StepInputs,
    group: GroupInputs,
    plan: GatherPlan,
    out: Tensor,
    own: OwnKV | None = None,
) -> Tensor:
    """Attention of every request that `plan` gathers, in its rows of `out` [tokens, heads, head_dim] or of the
    result.
    """
    kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    heads, requests = q.shape[1], step.seq_lens.shape[0]
    fresh = own is not None and kv_cache.dtype == q.dtype and _in_place(plan, own)
    keys, values = own if own is not None and fresh else _gather(q, kv_cache, params, group, plan)
    window = params.window if params.window is not None and step.max_seq_len > params.window else None
    softcap = params.softcap
    if plan.runs and window is None and softcap is None and params.sinks is None:
        return attend_runs(q, keys, values, params.scale, plan, out, fresh)
    inner, outer = (0.0, params.scale * _LOG2E) if softcap is None else (params.scale / softcap, softcap * _LOG2E)
    if has_warp_roles():
        from vllm.ops.triton import hopper_prefill  # whose language not every Triton has

        if hopper_prefill.takes(head_dim):
            capped, scales = softcap is not None, (inner, outer)
            hopper_prefill.attend(q, keys, values, params.sinks, step, plan, fresh, scales, window or 0, capped, out)
            return out
    k, v = (x.as_strided((x.shape[0], kv_heads * head_dim), (x.stride(0), 1)) for x in (keys, values))
    padded = triton.next_power_of_2(head_dim)
    rows, tile, stages, warps = 128, 64, 2, 4 if padded <= 128 else 8  # as measured on an H200
    tiles = q.shape[0] // rows + requests
    fused = q.as_strided((q.shape[0], heads * head_dim), (q.stride(0), 1))
    _prefill_kernel[(tiles, heads)](
        TensorDescriptor(fused, list(fused.shape), list(fused.stride()), [rows, padded]),
        TensorDescriptor(k, list(k.shape), list(k.stride()), [tile, padded]),
        TensorDescriptor(v, list(v.shape), list(v.stride()), [tile, padded]),
        out, out if params.sinks is None else params.sinks, step.query_starts, step.seq_lens, plan.requests, requests,
        int(fresh), inner, outer, heads * head_dim,
        HEADS=heads, KV_HEADS=kv_heads, D=head_dim, DP=padded, BM=rows, TILE=tile, STAGES=stages, SHARED=plan.shared,
        WINDOW=window or 0, SOFTCAP=softcap is not None, FAST=q.device.type != "cpu",
        SINKS=params.sinks is not None, num_warps=warps,
    )  # fmt: skip
    return out


def _in_place(plan: GatherPlan, own: OwnKV) -> bool:
    """Whether a step's own keys and values can be read where they are, instead of copies of what the cache holds."""
    dense = all(
        x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in own
    )
    return plan.fresh and dense and all(run.padded == run.length for run in plan.runs)


def _gather(
    q: Tensor, kv_cache: Tensor, params: AttentionParams, group: GroupInputs, plan: GatherPlan
) -> tuple[Tensor, Tensor]:
    """Keys and values of `plan`, copied to consecutive rows: [rows, kv_heads, head_dim] in q's dtype."""
    _, _, kv_heads, block_size, head_dim = kv_cache.shape
    # a tile or a padded prompt may reach past the last gathered row, where memory must at least be finite
    k, v = (torch.empty(plan.rows + TAIL, kv_heads, head_dim, dtype=q.dtype, device=q.device) for _ in range(2))
    k[plan.rows :].zero_()
    v[plan.rows :].zero_()
    _gather_kernel[(triton.cdiv(plan.longest, _GATHER), kv_heads, plan.pieces.shape[0])](
        kv_cache, group.block_table, plan.pieces, k, v, kv_cache.stride(1), kv_cache.stride(0),
        group.block_table.stride(0), params.k_scale, params.v_scale,
        KV_HEADS=kv_heads, D=head_dim,
        DP=triton.next_power_of_2(head_dim), BS=block_size, KEYS=_GATHER, SCALED=kv_cache.dtype != q.dtype, num_warps=4,
    )  # fmt: skip
    return k, v


@functools.cache
def library_takes(width: int, values: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `attend_runs` can be used for queries and keys of `width` and values of `values` numbers: tried once."""
    q, v = (torch.zeros(1, 1, 128, n, dtype=dtype, device=device) for n in (width, values))
    try:
        with warnings.catch_warnings(), sdpa_kernel(_DENSE_BACKENDS, set_priority=True):
            warnings.simplefilter("ignore")  # each library's reason
            return F.scaled_dot_product_attention(q, q, v, is_causal=True, enable_gqa=True).shape == v.shape
    except RuntimeError:
        return False


def attend_runs(q: Tensor, k: Tensor, v: Tensor, scale: float, plan: GatherPlan, out: Tensor, fresh: bool) -> Tensor:
    """Plain causal attention through cuDNN, a quarter faster than ours on long prompts. Keys behind a query's own are
    hidden from it, so that what stands in the padding does not matter.

    k, v: [rows, kv_heads, ...] as gathered, with TAIL rows behind, or those of the step itself if `fresh`. In `out`
    [tokens, heads, width of v], or in the result alone.
    """
    tokens, heads, head_dim = q.shape
    for run in plan.runs:
        first, rows = run.first_token, run.prompts * run.padded
        first_row = first if fresh else run.first_row
        if first + rows <= tokens:
            queries = q[first : first + rows]
        else:
            queries = torch.cat([q[first:], q.new_zeros(first + rows - tokens, heads, head_dim)])
        keys, values = (x[first_row : first_row + rows] for x in (k, v))
        shape = (run.prompts, run.padded, k.shape[1], -1)
        with sdpa_kernel(_DENSE_BACKENDS, set_priority=True):
            found = F.scaled_dot_product_attention(
                queries.view(run.prompts, run.padded, heads, head_dim).transpose(1, 2),
                keys.view(shape).transpose(1, 2),
                values.view(shape).transpose(1, 2),
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )
        found = found.transpose(1, 2).reshape(rows, heads, v.shape[2])
        length = run.prompts * run.length
        if length == tokens:
            return found[:tokens]
        out[first : first + length] = found[:length]
    return out
