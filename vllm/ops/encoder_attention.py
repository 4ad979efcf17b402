"""Attention of whole prompts over themselves, without a mask of later tokens and without a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.attention import AttentionParams
from vllm.ops.registry import op
from vllm.step.inputs import StepInputs

_QUERIES = 256  # of a windowed prompt that are computed at a time


@op
def attend_whole(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, step: StepInputs) -> Tensor:
    """Every token of a prompt sees all its tokens, before and behind, within `params.window` on either side if there is
    one (|i - j| < window), with `params.relative` added to the scores. Each request's tokens of the step are its whole
    prompt.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim].
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = step.host_query_starts.tolist()
    first = 0
    while first < len(starts) - 1:  # neighbours of one length are one batch
        length, last = starts[first + 1] - starts[first], first + 1
        while last < len(starts) - 1 and starts[last + 1] - starts[last] == length:
            last += 1
        if length:
            rows = slice(starts[first], starts[last])
            shape = (last - first, length)
            bq, bk, bv = (x[rows].unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
            out[rows] = _attend(bq, bk, bv, params).transpose(1, 2).flatten(0, 1)
        first = last
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """q: [prompts, heads, length, head_dim] -> the same shape."""
    length, window = q.shape[2], params.window
    if params.relative is not None:
        if window is not None and window < length:
            raise ValueError("Attention in a window with a bias by distance is not supported.")
        return _attend_keys(q, k, v, params, _by_distance(params.relative, length))
    if window is None or window >= length:
        return _attend_keys(q, k, v, params, None)
    parts = []
    for first in range(0, length, _QUERIES):
        end = min(first + _QUERIES, length)
        low, high = max(0, first - window + 1), min(length, end + window - 1)
        i = torch.arange(first, end, device=q.device)[:, None]
        seen = (i - torch.arange(low, high, device=q.device)).abs() < window
        parts.append(_attend_keys(q[:, :, first:end], k[:, :, low:high], v[:, :, low:high], params, seen))
    return torch.cat(parts, 2)


def _by_distance(relative: Tensor, length: int) -> Tensor:
    """[heads, 2 * n + 1] -> [heads, length, length], by query and key."""
    farthest = relative.shape[1] // 2
    places = torch.arange(length, device=relative.device)
    distance = (places - places[:, None]).clamp(-farthest, farthest) + farthest
    return relative[:, distance]


def _attend_keys(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, seen: Tensor | None) -> Tensor:
    """seen: [queries, keys] bool; None: all; or what is added to scores, [heads, queries, keys]."""
    grouped = q.shape[1] != k.shape[1]
    if params.softcap is None:
        seen = seen if seen is None or seen.dtype is torch.bool else seen.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=params.scale, enable_gqa=grouped)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = params.softcap * torch.tanh(torch.matmul(q, k.transpose(2, 3)).float() * params.scale / params.softcap)
    if seen is not None and seen.dtype is not torch.bool:
        scores = scores + seen
    elif seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)
