"""Triton kernels of selective state spaces: the causal convolution, and the scan with the state in registers.

A program has some channels of one request and goes through its tokens, so that steps of single tokens, prompts, chunks
and drafts are one launch each, and nothing is asked of the host. Requests without tokens are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import ssm as ops
from vllm.step.inputs import GroupInputs, StepInputs


@triton.jit(do_not_specialize=["stride_x", "stride_first", "stride_table", "stride_old", "stride_page"])
def _conv_kernel(
    x, weight, bias, old, states, out, starts, first, table, drafts, stride_x, stride_first, stride_table,
    stride_old, stride_page,
    CHANNELS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BIAS: tl.constexpr,
    DRAFTS: tl.constexpr,
):  # fmt: skip
    """Grid (requests, channels / BD). old: pages of the states before the step; with drafts a copy of them, since the
    pages that are written may be the one that is read.
    """
    r = tl.program_id(0)
    c = tl.program_id(1) * BD + tl.arange(0, BD)[None, :]
    live = c < CHANNELS
    begin, end = tl.load(starts + r).to(tl.int64), tl.load(starts + r + 1).to(tl.int64)
    before = old + tl.load(first + r * stride_first).to(tl.int64) * stride_old
    offset = tl.zeros([1, BD], tl.float32)
    if BIAS:
        offset += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    for token in range(begin, end, BT):
        t = token + tl.arange(0, BT)[:, None]
        total = tl.zeros([BT, BD], tl.float32) + offset
        for j in tl.static_range(K):
            at = t - (K - 1) + j
            fresh = at >= begin
            seen = tl.load(x + at * stride_x + c, mask=fresh & (t < end) & live, other=0.0).to(tl.float32)
            kept = before + (at - begin + K - 1) * CHANNELS + c
            seen += tl.load(kept, mask=(at < begin) & (t < end) & live, other=0.0)
            total += seen * tl.load(weight + c * K + j, mask=live, other=0.0).to(tl.float32)
        done = total * tl.sigmoid(total)
        tl.store(out + t * CHANNELS + c, done.to(out.dtype.element_ty), mask=(t < end) & live)
    last = 0
    if DRAFTS:
        last = tl.load(drafts + r).to(tl.int32)
    if end > begin:
        k = tl.arange(0, KP)[:, None]
        for i in range(0, last + 1):
            at = end - last + i - (K - 1) + k
            wanted = (k < K - 1) & live
            state = tl.load(x + at * stride_x + c, mask=wanted & (at >= begin), other=0.0).to(tl.float32)
            kept = before + (at - begin + K - 1) * CHANNELS + c
            state += tl.load(kept, mask=wanted & (at < begin), other=0.0)
            if not DRAFTS:
                tl.debug_barrier()  # other threads may still read the page
            page = tl.load(table + r * stride_table + i).to(tl.int64)
            tl.store(states + page * stride_page + k * CHANNELS + c, state, mask=wanted)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: StepInputs, group: GroupInputs
) -> Tensor:
    """`vllm.ops.ssm.causal_conv` for CUDA."""
    channels, width = weight.shape
    if x.stride(1) != 1 or not weight.is_contiguous():
        x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    table = group.block_table
    old, first = states, group.states()
    if group.drafts is not None:
        old = states.index_select(0, first.long())
        first = torch.arange(len(first), device=x.device)
    tokens = 1 if step.max_query_len == 1 else 16
    wide = 128 if tokens == 1 else 64
    _conv_kernel[(table.shape[0], triton.cdiv(channels, wide))](
        x, weight, bias, old, states, out, step.query_starts, first, table, group.drafts, x.stride(0),
        first.stride(0), table.stride(0), old.stride(0), states.stride(0), CHANNELS=channels, K=width,
        KP=triton.next_power_of_2(width - 1), BT=tokens, BD=wide, BIAS=bias is not None,
        DRAFTS=group.drafts is not None, num_warps=4,
    )  # fmt: skip
    return out


_STRIDES = [
    "stride_u",
    "stride_dt",
    "stride_b",
    "stride_c",
    "stride_gate",
    "stride_first",
    "stride_table",
    "stride_page",
]


@triton.jit(do_not_specialize=_STRIDES)
def _scan_kernel(
    u, dt, dt_bias, a, b, c, d, gate, states, out, starts, first, table, drafts, stride_u, stride_dt, stride_b,
    stride_c, stride_gate, stride_first, stride_table, stride_page,
    CHANNELS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, GROUPS: tl.constexpr, BD: tl.constexpr,
    GATE: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Grid (requests, channels / BD)."""
    r = tl.program_id(0)
    ch = tl.program_id(1) * BD + tl.arange(0, BD)
    n = tl.arange(0, NP)
    live, numbers = ch < CHANNELS, n < N
    here = ch[:, None] * N + n[None, :]
    both = live[:, None] & numbers[None, :]
    begin, end = tl.load(starts + r).to(tl.int64), tl.load(starts + r + 1).to(tl.int64)
    which = (ch // (CHANNELS // GROUPS))[:, None] * N + n[None, :]  # of each group's numbers, if there are several
    decay = tl.load(a + here, mask=both, other=0.0)
    offset = tl.load(dt_bias + ch, mask=live, other=0.0)
    skip = tl.load(d + ch, mask=live, other=0.0)
    h = tl.load(states + tl.load(first + r * stride_first).to(tl.int64) * stride_page + here, mask=both, other=0.0)
    last = 0
    if DRAFTS:
        last = tl.load(drafts + r).to(tl.int32)
    for t in range(begin, end):
        v = tl.load(u + t * stride_u + ch, mask=live, other=0.0).to(tl.float32)
        x = tl.load(dt + t * stride_dt + ch, mask=live, other=0.0).to(tl.float32) + offset
        delta = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        if GROUPS == 1:
            into = tl.load(b + t * stride_b + n, mask=numbers, other=0.0)[None, :].to(tl.float32)
            outof = tl.load(c + t * stride_c + n, mask=numbers, other=0.0)[None, :].to(tl.float32)
        else:
            into = tl.load(b + t * stride_b + which, mask=both, other=0.0).to(tl.float32)
            outof = tl.load(c + t * stride_c + which, mask=both, other=0.0).to(tl.float32)
        h = tl.exp(delta[:, None] * decay) * h + (delta * v)[:, None] * into
        y = tl.sum(h * outof, 1) + skip * v
        if GATE:
            g = tl.load(gate + t * stride_gate + ch, mask=live, other=0.0).to(tl.float32)
            y = y * g * tl.sigmoid(g)
        tl.store(out + t * CHANNELS + ch, y.to(out.dtype.element_ty), mask=live)
        if DRAFTS:  # noqa: SIM102 (the outer one is decided when the kernel is compiled)
            if t >= end - 1 - last:
                page = tl.load(table + r * stride_table + t - (end - 1 - last)).to(tl.int64)
                tl.store(states + page * stride_page + here, h, mask=both)
    if not DRAFTS:  # noqa: SIM102
        if end > begin:
            page = tl.load(table + r * stride_table).to(tl.int64)
            tl.store(states + page * stride_page + here, h, mask=both)


def selective_scan(
    u: Tensor, dt: Tensor, dt_bias: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor | None,
    states: Tensor,
    step: StepInputs, group: GroupInputs,
) -> Tensor:  # fmt: skip
    """`vllm.ops.ssm.selective_scan` for CUDA."""
    channels, numbers = a.shape
    u, dt, b, c = (t if t.stride(1) == 1 else t.contiguous() for t in (u, dt, b, c))
    gate = gate if gate is None or gate.stride(1) == 1 else gate.contiguous()
    out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    table, first = group.block_table, group.states()
    padded = triton.next_power_of_2(numbers)
    # tokens follow each other: with one request or two a program has few channels, so that each of its turns is short
    wide = max(4, min({1: 8, 2: 16}.get(table.shape[0], 32), 512 // padded))
    _scan_kernel[(table.shape[0], triton.cdiv(channels, wide))](
        u, dt, dt_bias, a, b, c, d, gate, states, out, step.query_starts, first, table, group.drafts, u.stride(0),
        dt.stride(0), b.stride(0), c.stride(0), 0 if gate is None else gate.stride(0), first.stride(0),
        table.stride(0), states.stride(0), CHANNELS=channels, N=numbers, NP=padded,
        GROUPS=b.shape[1] // numbers, BD=wide, GATE=gate is not None, DRAFTS=group.drafts is not None, num_warps=1,
    )  # fmt: skip
    return out


def register(device_type: str) -> None:
    ops.causal_conv.register(device_type, causal_conv)
    ops.selective_scan.register(device_type, selective_scan)
