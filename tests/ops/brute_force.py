"""Slow, obvious float64 versions of the operations, one loop per request, head and query: the oracle of the tests."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vllm.ops.attention import AttentionParams
from vllm.step.inputs import GroupInputs, StepInputs


def attend(q: Tensor, kv_cache: Tensor, params: AttentionParams, step: StepInputs, group: GroupInputs) -> Tensor:
    """Each query against each key it sees, read from the cache one by one. float64 [tokens, heads, head_dim]."""
    tokens, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv_cache.shape
    out = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    for r, seq_len in enumerate(step.host_seq_lens.tolist()):
        lo, hi = int(step.host_query_starts[r]), int(step.host_query_starts[r + 1])
        table = group.block_table[r].tolist()
        positions = range(seq_len)
        keys = torch.stack([kv_cache[table[p // block_size], 0, :, p % block_size] for p in positions]).double()
        values = torch.stack([kv_cache[table[p // block_size], 1, :, p % block_size] for p in positions]).double()
        for t in range(lo, hi):
            at = seq_len - (hi - t)
            first = 0 if params.window is None else max(0, at - params.window + 1)
            for h in range(heads):
                kv = h // (heads // kv_heads)
                k, v = keys[first : at + 1, kv] * params.k_scale, values[first : at + 1, kv] * params.v_scale
                scores = (k @ q[t, h].double()) * params.scale
                if params.softcap is not None:
                    scores = params.softcap * torch.tanh(scores / params.softcap)
                if params.alibi_slopes is not None:
                    slope = float(params.alibi_slopes[h])
                    if params.alibi_known is not None and at + 1 > params.alibi_known:
                        slope = slope * params.alibi_known / (at + 1)
                    scores = scores + slope * torch.arange(first - at, 1, dtype=torch.float64)
                out[t, h] = torch.softmax(scores, 0) @ v
    return out


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Each pair as a complex number times (cos + i sin). float64, x's shape."""
    out = x.double().clone()
    half = cos_sin.shape[-1] // 2
    for t, position in enumerate(positions.tolist()):
        for h in range(x.shape[1]):
            for i in range(half):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                turn = complex(float(cos_sin[position, i]), float(cos_sin[position, half + i]))
                point = complex(float(x[t, h, a]), float(x[t, h, b])) * turn
                out[t, h, a], out[t, h, b] = point.real, point.imag
    return out


def activation(x: Tensor, kind: str) -> Tensor:
    """The textbook formula, in float64."""
    x = x.double()
    if kind == "silu":
        return x / (1 + torch.exp(-x))
    if kind == "gelu":
        return 0.5 * x * (1 + torch.special.erf(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "relu":
        return x.clamp(min=0)
    if kind == "relu2":
        return x.clamp(min=0) ** 2
    raise ValueError(kind)


def mixed_batch(
    query_lens: list[int],
    seq_lens: list[int],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> tuple[Tensor, StepInputs, GroupInputs]:
    """A cache with scattered blocks, and the step over it. Every place that no request owns holds NaN."""
    gen = torch.Generator().manual_seed(seed)
    blocks = [-(-n // block_size) for n in seq_lens]
    total = sum(blocks) + 2
    kv_cache = torch.full((total, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    free = (torch.randperm(total - 1, generator=gen) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(blocks) + 1, dtype=torch.int32)
    slots: list[int] = []
    positions: list[int] = []
    for r, (m, n) in enumerate(zip(query_lens, seq_lens, strict=True)):
        own = [free.pop() for _ in range(blocks[r])]
        table[r, : blocks[r]] = torch.tensor(own, dtype=torch.int32)
        for p in range(n):
            values = torch.randn(2, kv_heads, head_dim, generator=gen)
            kv_cache[own[p // block_size], :, :, p % block_size] = values.to(dtype)
        positions += range(n - m, n)
        slots += [own[p // block_size] * block_size + p % block_size for p in range(n - m, n)]
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.array(seq_lens, np.int32)
    group = GroupInputs(torch.tensor(slots, dtype=torch.int64), table)
    step = StepInputs.of(
        token_ids=torch.zeros(int(starts[-1]), dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        query_starts=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        logits_rows=torch.from_numpy(starts[1:].astype(np.int64) - 1),
        groups=(group,),
        host_query_starts=starts,
        host_seq_lens=lens,
    )
    return kv_cache, step, group
