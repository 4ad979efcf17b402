"""Triton attention of whole prompts over themselves: keys and values are read where the step has them."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import encoder_attention as ops
from vllm.ops.attention import AttentionParams
from vllm.step.inputs import StepInputs

_LOG2E = math.log2(math.e)
_SHORT = 64  # queries; steps whose prompts have at most so many use smaller tiles


@triton.jit
def _tile(
    m, z, acc, q, k_ptr, v_ptr, relative_ptr, stride_k, stride_v, row, column, q_pos, length, d, inner, outer,
    D: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr, FARTHEST: tl.constexpr, SOFTCAP: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `column` of the prompt that begins at `row`, into the running maximum, sum and result.

    Scores are outer * q k, or outer * tanh(inner * q k), in base 2; FARTHEST > 0: or outer * (q k + inner * b), where b
    is the bias by distance.   EDGE: some of the keys are behind the prompt.
    """
    rows = (row + column).to(tl.int64)
    live = column < length
    if EDGE or D < DP:
        held = live[:, None] & (d[None, :] < D)
        k = tl.load(k_ptr + rows[:, None] * stride_k + d[None, :], mask=held, other=0.0)
        v = tl.load(v_ptr + rows[:, None] * stride_v + d[None, :], mask=held, other=0.0)
    else:
        k = tl.load(k_ptr + rows[:, None] * stride_k + d[None, :])
        v = tl.load(v_ptr + rows[:, None] * stride_v + d[None, :])
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if FARTHEST > 0:
        distance = tl.minimum(tl.maximum(column[None, :] - q_pos[:, None], -FARTHEST), FARTHEST)
        s += inner * tl.load(relative_ptr + distance + FARTHEST)
    if SOFTCAP:
        s = 2.0 * tl.sigmoid(2.0 * s * inner) - 1.0
    if EDGE:
        s = tl.where(live[None, :], s, -float("inf"))
    if WINDOW > 0:
        distance = q_pos[:, None] - column[None, :]
        s = tl.where((distance < WINDOW) & (distance > -WINDOW), s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * outer)
    p = tl.exp2(s * outer - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    z = z * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, z, acc


@triton.jit(do_not_specialize=["requests"])
def _whole_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, relative_ptr, starts_ptr, requests, inner, outer, stride_q, stride_k, stride_v,
    stride_o, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, WINDOW: tl.constexpr, FARTHEST: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads): `tokens // BM + requests` tiles are enough for any division of the tokens."""
    tile = tl.program_id(0)
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
    length = tl.load(starts_ptr + r + 1) - start
    first = (tile - start // BM - r) * BM
    if first >= length:
        return
    d = tl.arange(0, DP)
    q_pos = first + tl.arange(0, BM)
    held = (q_pos < length)[:, None] & (d[None, :] < D)
    rows = (start + q_pos).to(tl.int64)
    q = tl.load(q_ptr + rows[:, None] * stride_q + head * D + d[None, :], mask=held, other=0.0)
    k_head = k_ptr + (head // (HEADS // KV_HEADS)) * D
    v_head = v_ptr + (head // (HEADS // KV_HEADS)) * D
    relative = relative_ptr + head * (2 * FARTHEST + 1)
    n = tl.arange(0, BN)
    m = tl.full([BM], -1.0e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    low = 0
    high = length
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BN * BN
        high = tl.minimum(length, first + BM - 1 + WINDOW)
    bare = tl.minimum(length // BN * BN, (high + BN - 1) // BN * BN)
    for key in range(low, bare, BN):
        m, z, acc = _tile(
            m, z, acc, q, k_head, v_head, relative, stride_k, stride_v, start, key + n, q_pos, length, d, inner, outer,
            D, DP, WINDOW, FARTHEST, SOFTCAP, False, PRECISION,
        )  # fmt: skip
    for key in range(tl.maximum(low, bare), high, BN):
        m, z, acc = _tile(
            m, z, acc, q, k_head, v_head, relative, stride_k, stride_v, start, key + n, q_pos, length, d, inner, outer,
            D, DP, WINDOW, FARTHEST, SOFTCAP, True, PRECISION,
        )  # fmt: skip
    out = (acc / z[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * stride_o + head * D + d[None, :], out, mask=held)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, step: StepInputs) -> Tensor:
    """As the operation says; without a word from the host. Head sizes beyond 256 go to the reference, and a bias by
    distance together with a window or a cap.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, requests = k.shape[1], len(step.host_query_starts) - 1
    relative = params.relative
    mixed = relative is not None and not (params.window is None and params.softcap is None)
    if head_dim > 256 or params.alibi_slopes is not None or mixed:
        found: Tensor = ops.attend_whole.reference(q, k, v, params, step)
        return found
    q, k, v = (x if x.stride(2) == 1 and x.stride(1) == head_dim else x.contiguous() for x in (q, k, v))
    out = torch.empty(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
    window = params.window if params.window is not None and step.max_query_len > params.window else None
    softcap = params.softcap
    exact = q.dtype == torch.float32
    padded = max(16, triton.next_power_of_2(head_dim))
    rows = 64 if exact or step.max_query_len <= _SHORT or padded > 128 else 128
    tile = 32 if exact or padded > 128 else 64
    inner, outer = 1.0 / params.scale, params.scale * _LOG2E
    if softcap is not None:
        inner, outer = params.scale / softcap, softcap * _LOG2E
    farthest, table = (0, out) if relative is None else (relative.shape[1] // 2, relative)
    _whole_kernel[(tokens // rows + requests, heads)](
        q, k, v, out, table, step.query_starts, requests, inner, outer, q.stride(0), k.stride(0), v.stride(0),
        out.stride(0), HEADS=heads, KV_HEADS=kv_heads, D=head_dim, DP=padded, BM=rows, BN=tile, WINDOW=window or 0,
        FARTHEST=farthest, SOFTCAP=softcap is not None, PRECISION="ieee" if exact else "tf32",
        num_warps=4 if padded <= 64 or rows == 64 else 8, num_stages=3 if padded <= 128 else 2,
    )  # fmt: skip
    return out


def register(device_type: str) -> None:
    ops.attend_whole.register(device_type, attend_whole)
