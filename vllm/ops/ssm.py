"""Selective state spaces (Mamba, arXiv 2312.00752) over a mixed batch: the causal convolution and the scan, each with a
recurrent state per request in pages of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.registry import op
from vllm.step.inputs import GroupInputs, StepInputs

_CHUNK = 64  # tokens whose decays and inputs are held at once


@op
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: StepInputs, group: GroupInputs
) -> Tensor:
    """silu(bias + sum_j weight[:, j] * x_{t - (width - 1) + j}) for each channel, with the inputs before the step's
    first token read from the state, and the last ones written there.

    x: [tokens, channels], maybe rows of a wider tensor; weight: [channels, width]; bias: [channels];
    states: [pages, width - 1, channels] fp32, the oldest input first -> [tokens, channels].
    """
    width, out = weight.shape[1], torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taps = weight.float().t()  # [width, channels]
    offset = torch.zeros_like(taps[0]) if bias is None else bias.float()
    single, long = _split(step, group)
    if len(single):
        read, write = group.states()[single].long(), group.block_table[single, 0].long()
        rows = _rows(step, single, x)
        window = torch.cat([states[read], x[rows].float()[:, None]], 1)  # [requests, width, channels]
        out[rows] = F.silu((window * taps).sum(1) + offset).to(x.dtype)
        states[write] = window[:, 1:]
    for r, first, end, drafts in long:
        window = torch.cat([states[int(group.states()[r])], x[first:end].float()])  # [width - 1 + tokens, channels]
        n = end - first
        mixed = offset.expand(n, -1).clone()
        for j in range(width):
            mixed += window[j : j + n] * taps[j]
        out[first:end] = F.silu(mixed).to(x.dtype)
        for i in range(drafts + 1):
            kept = n - drafts + i
            states[int(group.block_table[r, i])] = window[kept : kept + width - 1]
    return out


@op
def selective_scan(
    u: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    gate: Tensor | None,
    states: Tensor,
    step: StepInputs,
    group: GroupInputs,
) -> Tensor:
    """h_t = exp(delta_t a) h_{t-1} + delta_t b_t u_t and y_t = (c_t . h_t + d u_t) silu(gate_t), with delta_t =
    softplus(dt_t + dt_bias); without a gate that factor is 1.

    u, dt, gate: [tokens, channels], all but dt maybe rows of a wider tensor; dt_bias, d: [channels] fp32; a:
    [channels, n] fp32, negative; b, c: [tokens, groups * n], each for as many neighbouring channels;
    states: [pages, channels, n] fp32 -> y in u's dtype.
    """
    out = torch.empty_like(u)
    single, long = _split(step, group)
    if len(single):
        read, write = group.states()[single].long(), group.block_table[single, 0].long()
        rows = _rows(step, single, u)
        delta, v = F.softplus(dt[rows].float() + dt_bias), u[rows].float()
        h = (delta[..., None] * a).exp() * states[read] + (delta * v)[..., None] * _per_channel(b[rows], a)
        y = (h * _per_channel(c[rows], a)).sum(-1) + d * v
        out[rows] = (y if gate is None else y * F.silu(gate[rows].float())).to(u.dtype)
        states[write] = h
    for r, first, end, drafts in long:
        h = states[int(group.states()[r])].clone()
        for start in range(first, end, _CHUNK):
            t = slice(start, min(end, start + _CHUNK))
            delta, v = F.softplus(dt[t].float() + dt_bias), u[t].float()
            decay = (delta[..., None] * a).exp()  # [tokens, channels, n]
            seen = (delta * v)[..., None] * _per_channel(b[t], a)
            for i in range(len(seen)):
                h = torch.addcmul(seen[i], decay[i], h, out=seen[i])
                if (kept := start + i - (end - 1 - drafts)) >= 0:
                    states[int(group.block_table[r, kept])] = h
            y = (seen * _per_channel(c[t], a)).sum(-1) + d * v
            out[t] = (y if gate is None else y * F.silu(gate[t].float())).to(u.dtype)
    return out


def _per_channel(x: Tensor, a: Tensor) -> Tensor:
    """[tokens, groups * n] -> fp32 [tokens, channels or 1, n].   a: [channels, n]."""
    channels, n = a.shape
    grouped = x.float().view(len(x), -1, n)
    return grouped if grouped.shape[1] == 1 else grouped.repeat_interleave(channels // grouped.shape[1], 1)


def _split(step: StepInputs, group: GroupInputs) -> tuple[Tensor, Iterator[tuple[int, int, int, int]]]:
    """The requests with one token and no state to keep but the last; and the others: request, first and end of its
    tokens, drafts.
    """
    starts = step.host_query_starts
    counts = np.diff(starts)
    drafts: np.ndarray = np.zeros(len(counts), np.int64) if group.drafts is None else group.drafts.cpu().numpy()
    long = ((r, int(starts[r]), int(starts[r + 1]), int(drafts[r])) for r in np.flatnonzero(counts > 1).tolist())
    return torch.from_numpy(np.flatnonzero(counts == 1)).to(step.positions.device), long


def _rows(step: StepInputs, requests: Tensor, like: Tensor) -> Tensor:
    """[requests] int64, the first token of each."""
    return step.query_starts.index_select(0, requests).long().to(like.device)
