"""Triton kernels of selective state spaces: the causal convolution, and the scan with the state in registers.

A program has some channels of one request, or of a piece of one with many tokens, and goes through its tokens, so that
steps of single tokens, prompts, chunks and drafts are a launch or three, and nothing is asked of the host. Requests
without tokens are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import ssm as ops
from vllm.step.inputs import GroupInputs, StepInputs


@triton.jit
def _piece(starts, requests, piece, PIECE: tl.constexpr):
    """(request, number in it, first token of the request, end of them) of a piece. Request r has those from
    starts[r] // PIECE + r on, of which the last ones may be empty.
    """
    left = 0
    right = requests
    while left < right:
        mid = (left + right) // 2
        if tl.load(starts + mid) // PIECE + mid <= piece:
            left = mid + 1
        else:
            right = mid
    r = left - 1
    begin, end = tl.load(starts + r).to(tl.int64), tl.load(starts + r + 1).to(tl.int64)
    return r, piece - (begin // PIECE).to(tl.int32) - r, begin, end


@triton.jit(do_not_specialize=["stride_x", "stride_first", "stride_table", "stride_old", "stride_page", "requests"])
def _conv_kernel(
    x, weight, bias, old, states, out, starts, first, table, drafts, requests, stride_x, stride_first, stride_table,
    stride_old, stride_page,
    CHANNELS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BIAS: tl.constexpr,
    DRAFTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Grid (requests, channels / BD), or with PIECE > 0 (pieces, channels / BD). old: pages of the states before the
    step; with drafts a copy of them, since the pages that are written may be the one that is read. Of several pieces
    the first reads the old state and writes the new one, so that nobody else looks at the page.
    """
    r = tl.program_id(0)
    number = 0
    if PIECE > 0:
        r, number, begin, end = _piece(starts, requests, tl.program_id(0), PIECE)
    else:
        begin, end = tl.load(starts + r).to(tl.int64), tl.load(starts + r + 1).to(tl.int64)
    start, stop = begin, end
    if PIECE > 0:
        start = begin + number * PIECE
        stop = tl.minimum(start + PIECE, end)
        if start >= end:
            return
    c = tl.program_id(1) * BD + tl.arange(0, BD)[None, :]
    live = c < CHANNELS
    before = old + tl.load(first + r * stride_first).to(tl.int64) * stride_old
    offset = tl.zeros([1, BD], tl.float32)
    if BIAS:
        offset += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    for token in range(start, stop, BT):
        t = token + tl.arange(0, BT)[:, None]
        total = tl.zeros([BT, BD], tl.float32) + offset
        for j in tl.static_range(K):
            at = t - (K - 1) + j
            fresh = at >= begin
            seen = tl.load(x + at * stride_x + c, mask=fresh & (t < stop) & live, other=0.0).to(tl.float32)
            kept = before + (at - begin + K - 1) * CHANNELS + c
            seen += tl.load(kept, mask=(at < begin) & (t < stop) & live, other=0.0)
            total += seen * tl.load(weight + c * K + j, mask=live, other=0.0).to(tl.float32)
        done = total * tl.sigmoid(total)
        tl.store(out + t * CHANNELS + c, done.to(out.dtype.element_ty), mask=(t < stop) & live)
    last = 0
    if DRAFTS:
        last = tl.load(drafts + r).to(tl.int32)
    if (end > begin) & (number == 0):
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
    requests = table.shape[0]
    cut = step.max_query_len > _PIECE and group.drafts is None
    _conv_kernel[(len(x) // _PIECE + requests if cut else requests, triton.cdiv(channels, wide))](
        x, weight, bias, old, states, out, step.query_starts, first, table, group.drafts, requests, x.stride(0),
        first.stride(0), table.stride(0), old.stride(0), states.stride(0), CHANNELS=channels, K=width,
        KP=triton.next_power_of_2(width - 1), BT=tokens, BD=wide, BIAS=bias is not None,
        DRAFTS=group.drafts is not None, PIECE=_PIECE if cut else 0, num_warps=4,
    )  # fmt: skip
    return out


LOG2E = tl.constexpr(1.4426950408889634)
# Tokens that follow each other in one program where a request has more: the others run beside them. A multiple of 4.
_PIECE = 128

_STRIDES = [
    "stride_u",
    "stride_dt",
    "stride_b",
    "stride_c",
    "stride_gate",
    "stride_first",
    "stride_table",
    "stride_page",
    "requests",
]


@triton.jit
def _token(u, dt, b, live, known, offset, ALIKE: tl.constexpr):
    """(input, step size, b) of the token that is pointed at, none of which waits for the state."""
    v = tl.load(u, mask=live, other=0.0).to(tl.float32)
    return v, _step_size(dt, live, offset), _selected(b, known, ALIKE)


@triton.jit
def _advanced(h, decay, v, delta, into):
    """The state behind a token."""
    return tl.exp2(delta[:, None] * decay) * h + (delta * v)[:, None] * into


@triton.jit
def _said(h, skip, v, c, gate, live, known, ALIKE: tl.constexpr, GATE: tl.constexpr):
    """What a token gives, of the state behind it."""
    y = tl.sum(h * _selected(c, known, ALIKE), 1) + skip * v
    if GATE:
        g = tl.load(gate, mask=live, other=0.0).to(tl.float32)
        y = y * g * tl.sigmoid(g)
    return y


@triton.jit
def _step_size(dt, live, offset):
    x = tl.load(dt, mask=live, other=0.0).to(tl.float32) + offset
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _selected(x, known, ALIKE: tl.constexpr):
    """A token's b or c for each channel, [channels or 1, NP] fp32. ALIKE: the program's channels are of one group."""
    found = tl.load(x, mask=known, other=0.0).to(tl.float32)
    return found[None, :] if ALIKE else found


@triton.jit(do_not_specialize=_STRIDES)
def _sum_kernel(
    u, dt, dt_bias, a, b, starts, sums, times, requests, stride_u, stride_dt, stride_b,
    CHANNELS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, GROUPS: tl.constexpr, BD: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Grid (pieces, channels / BD): what each piece that others follow would leave of an empty state, to sums [pieces,
    channels, N], and the time that passes in it, the sum of its step sizes, to times [pieces, channels].
    """
    piece = tl.program_id(0)
    r, number, begin, end = _piece(starts, requests, piece, PIECE)
    first = begin + number * PIECE
    if first + PIECE >= end:
        return
    ch = tl.program_id(1) * BD + tl.arange(0, BD)
    n = tl.arange(0, NP)
    live, numbers = ch < CHANNELS, n < N
    here = ch[:, None] * N + n[None, :]
    both = live[:, None] & numbers[None, :]
    ALIKE: tl.constexpr = (CHANNELS // GROUPS) % BD == 0
    group = tl.program_id(1) * BD // (CHANNELS // GROUPS)
    if ALIKE:
        b += group * N + n
        known = numbers
    else:
        b += (ch // (CHANNELS // GROUPS))[:, None] * N + n[None, :]
        known = both
    u += ch
    dt += ch
    decay = tl.load(a + here, mask=both, other=0.0) * LOG2E
    offset = tl.load(dt_bias + ch, mask=live, other=0.0)
    h = tl.zeros([BD, NP], tl.float32)
    time = tl.zeros([BD], tl.float32)
    for t in range(first, first + PIECE, 4):  # of four tokens, all is on its way before the first is needed
        v, d, i = _token(u + t * stride_u, dt + t * stride_dt, b + t * stride_b, live, known, offset, ALIKE)
        at = t + 1
        v1, d1, i1 = _token(u + at * stride_u, dt + at * stride_dt, b + at * stride_b, live, known, offset, ALIKE)
        at = t + 2
        v2, d2, i2 = _token(u + at * stride_u, dt + at * stride_dt, b + at * stride_b, live, known, offset, ALIKE)
        at = t + 3
        v3, d3, i3 = _token(u + at * stride_u, dt + at * stride_dt, b + at * stride_b, live, known, offset, ALIKE)
        h = _advanced(h, decay, v, d, i)
        h = _advanced(h, decay, v1, d1, i1)
        h = _advanced(h, decay, v2, d2, i2)
        h = _advanced(h, decay, v3, d3, i3)
        time = time + d + d1 + d2 + d3
    tl.store(sums + piece.to(tl.int64) * (CHANNELS * N) + here, h, mask=both)
    tl.store(times + piece * CHANNELS + ch, time, mask=live)


@triton.jit(do_not_specialize=_STRIDES)
def _carry_kernel(
    a, states, starts, first, sums, times, stride_first, stride_page,
    CHANNELS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Grid (requests, channels / BD): the state before each piece of a request of several, in place of its sum."""
    r = tl.program_id(0)
    begin, end = tl.load(starts + r), tl.load(starts + r + 1)
    if end - begin <= PIECE:
        return
    ch = tl.program_id(1) * BD + tl.arange(0, BD)
    n = tl.arange(0, NP)
    live = ch < CHANNELS
    here = ch[:, None] * N + n[None, :]
    both = live[:, None] & (n < N)[None, :]
    decay = tl.load(a + here, mask=both, other=0.0) * LOG2E
    h = tl.load(states + tl.load(first + r * stride_first).to(tl.int64) * stride_page + here, mask=both, other=0.0)
    own = (begin // PIECE + r).to(tl.int64)
    count = (end - begin + PIECE - 1) // PIECE
    for piece in range(own, own + count - 1):
        added = tl.load(sums + piece * (CHANNELS * N) + here, mask=both, other=0.0)
        time = tl.load(times + piece * CHANNELS + ch, mask=live, other=0.0)
        tl.store(sums + piece * (CHANNELS * N) + here, h, mask=both)
        h = tl.exp2(time[:, None] * decay) * h + added
    tl.store(sums + (own + count - 1) * (CHANNELS * N) + here, h, mask=both)


@triton.jit(do_not_specialize=_STRIDES)
def _scan_kernel(
    u, dt, dt_bias, a, b, c, d, gate, states, out, starts, first, table, drafts, sums, requests, stride_u, stride_dt,
    stride_b, stride_c, stride_gate, stride_first, stride_table, stride_page,
    CHANNELS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, GROUPS: tl.constexpr, BD: tl.constexpr,
    GATE: tl.constexpr, DRAFTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Grid (requests, channels / BD), or with PIECE > 0 (pieces, channels / BD); then the state before each piece of a
    request of several stands in sums.
    """
    r = tl.program_id(0)
    if PIECE > 0:
        r, number, begin, end = _piece(starts, requests, tl.program_id(0), PIECE)
        start = begin + number * PIECE
        if start >= end:
            return
        stop = tl.minimum(start + PIECE, end)
    else:
        begin, end = tl.load(starts + r).to(tl.int64), tl.load(starts + r + 1).to(tl.int64)
        start, stop = begin, end
    ch = tl.program_id(1) * BD + tl.arange(0, BD)
    n = tl.arange(0, NP)
    live, numbers = ch < CHANNELS, n < N
    here = ch[:, None] * N + n[None, :]
    both = live[:, None] & numbers[None, :]
    ALIKE: tl.constexpr = (CHANNELS // GROUPS) % BD == 0
    group = tl.program_id(1) * BD // (CHANNELS // GROUPS)
    if ALIKE:
        b += group * N + n
        c += group * N + n
        known = numbers
    else:
        each = (ch // (CHANNELS // GROUPS))[:, None] * N + n[None, :]  # of each group's numbers
        b += each
        c += each
        known = both
    u += ch
    dt += ch
    out += ch
    gate = gate + ch if GATE else u
    decay = tl.load(a + here, mask=both, other=0.0) * LOG2E
    offset = tl.load(dt_bias + ch, mask=live, other=0.0)
    skip = tl.load(d + ch, mask=live, other=0.0)
    page = tl.load(first + r * stride_first).to(tl.int64)
    source = states + page * stride_page + here
    if PIECE > 0:  # noqa: SIM102
        if end - begin > PIECE:
            source = sums + tl.program_id(0).to(tl.int64) * (CHANNELS * N) + here
    h = tl.load(source, mask=both, other=0.0)
    last = 0
    if DRAFTS:
        last = tl.load(drafts + r).to(tl.int32)
    fours = start
    if not DRAFTS:
        fours = start + (stop - start) // 4 * 4
    for t in range(start, fours, 4):  # of four tokens, all is on its way before the first is needed
        v, e, i = _token(u + t * stride_u, dt + t * stride_dt, b + t * stride_b, live, known, offset, ALIKE)
        at = t + 1
        v1, e1, i1 = _token(u + at * stride_u, dt + at * stride_dt, b + at * stride_b, live, known, offset, ALIKE)
        at = t + 2
        v2, e2, i2 = _token(u + at * stride_u, dt + at * stride_dt, b + at * stride_b, live, known, offset, ALIKE)
        at = t + 3
        v3, e3, i3 = _token(u + at * stride_u, dt + at * stride_dt, b + at * stride_b, live, known, offset, ALIKE)
        h = _advanced(h, decay, v, e, i)
        y = _said(h, skip, v, c + t * stride_c, gate + t * stride_gate, live, known, ALIKE, GATE)
        h = _advanced(h, decay, v1, e1, i1)
        y1 = _said(h, skip, v1, c + (t + 1) * stride_c, gate + (t + 1) * stride_gate, live, known, ALIKE, GATE)
        h = _advanced(h, decay, v2, e2, i2)
        y2 = _said(h, skip, v2, c + (t + 2) * stride_c, gate + (t + 2) * stride_gate, live, known, ALIKE, GATE)
        h = _advanced(h, decay, v3, e3, i3)
        y3 = _said(h, skip, v3, c + (t + 3) * stride_c, gate + (t + 3) * stride_gate, live, known, ALIKE, GATE)
        tl.store(out + t * CHANNELS, y.to(out.dtype.element_ty), mask=live)
        tl.store(out + (t + 1) * CHANNELS, y1.to(out.dtype.element_ty), mask=live)
        tl.store(out + (t + 2) * CHANNELS, y2.to(out.dtype.element_ty), mask=live)
        tl.store(out + (t + 3) * CHANNELS, y3.to(out.dtype.element_ty), mask=live)
    for t in range(fours, stop):
        v, e, i = _token(u + t * stride_u, dt + t * stride_dt, b + t * stride_b, live, known, offset, ALIKE)
        h = _advanced(h, decay, v, e, i)
        y = _said(h, skip, v, c + t * stride_c, gate + t * stride_gate, live, known, ALIKE, GATE)
        tl.store(out + t * CHANNELS, y.to(out.dtype.element_ty), mask=live)
        if DRAFTS:  # noqa: SIM102 (the outer one is decided when the kernel is compiled)
            if t >= end - 1 - last:
                page = tl.load(table + r * stride_table + t - (end - 1 - last)).to(tl.int64)
                tl.store(states + page * stride_page + here, h, mask=both)
    if not DRAFTS:  # noqa: SIM102
        if (stop == end) & (end > begin):
            page = tl.load(table + r * stride_table).to(tl.int64)
            tl.store(states + page * stride_page + here, h, mask=both)


def selective_scan(
    u: Tensor, dt: Tensor, dt_bias: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor | None,
    states: Tensor,
    step: StepInputs, group: GroupInputs,
) -> Tensor:  # fmt: skip
    """`vllm.ops.ssm.selective_scan` for CUDA.

    A request of many tokens is cut into pieces, at the same places in any company. What each would add to an empty
    state is computed side by side; a state fades by exp(a * time), so that those before each piece follow quickly; then
    all pieces are computed side by side from these.
    """
    channels, numbers = a.shape
    u, dt, b, c = (t if t.stride(1) == 1 else t.contiguous() for t in (u, dt, b, c))
    gate = gate if gate is None or gate.stride(1) == 1 else gate.contiguous()
    out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    table, first, requests = group.block_table, group.states(), group.block_table.shape[0]
    padded = triton.next_power_of_2(numbers)
    wide = max(4, min(32, 512 // padded))
    sizes = {"CHANNELS": channels, "N": numbers, "NP": padded}
    across = triton.cdiv(channels, wide)
    cut = step.max_query_len > _PIECE
    sums, programs = states, requests
    if cut:
        programs = len(u) // _PIECE + requests
        sums = torch.empty(programs, channels, numbers, dtype=torch.float32, device=u.device)
        times = torch.empty(programs, channels, dtype=torch.float32, device=u.device)
        groups = b.shape[1] // numbers
        _sum_kernel[(programs, across)](
            u, dt, dt_bias, a, b, step.query_starts, sums, times, requests, u.stride(0), dt.stride(0), b.stride(0),
            **sizes, GROUPS=groups, BD=wide, PIECE=_PIECE, num_warps=1,
        )  # fmt: skip
        few = max(4, wide // 4)
        _carry_kernel[(requests, triton.cdiv(channels, few))](
            a, states, step.query_starts, first, sums, times, first.stride(0), states.stride(0),
            **sizes, BD=few, PIECE=_PIECE, num_warps=1,
        )  # fmt: skip
    _scan_kernel[(programs, across)](
        u, dt, dt_bias, a, b, c, d, gate, states, out, step.query_starts, first, table, group.drafts, sums, requests,
        u.stride(0), dt.stride(0), b.stride(0), c.stride(0), 0 if gate is None else gate.stride(0), first.stride(0),
        table.stride(0), states.stride(0), **sizes, GROUPS=b.shape[1] // numbers, BD=wide, GATE=gate is not None,
        DRAFTS=group.drafts is not None, PIECE=_PIECE if cut else 0, num_warps=1,
    )  # fmt: skip
    return out


def register(device_type: str) -> None:
    ops.causal_conv.register(device_type, causal_conv)
    ops.selective_scan.register(device_type, selective_scan)
