"""Paged attention over a mixed batch, and the cache write. The heart of the engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.ops.registry import op
from vllm.worker.step_inputs import GroupInputs, StepInputs


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What is fixed per layer. `window`: tokens each query sees, itself included. `alibi_slopes`: [heads] fp32 or None."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    k_scale: float = 1.0  # fp8 cache: stored = value / scale
    v_scale: float = 1.0


@op
def write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store keys and values of the step's tokens.

    k, v: [tokens, kv_heads, head_dim]; kv_cache: [2, blocks, kv_heads, block_size, head_dim]; slot_mapping: [tokens] int64.
    """
    block_size = kv_cache.shape[3]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[0][block, :, offset] = k.to(kv_cache.dtype)
    kv_cache[1][block, :, offset] = v.to(kv_cache.dtype)


@op
def attend(q: Tensor, kv_cache: Tensor, params: AttentionParams, step: StepInputs, group: GroupInputs) -> Tensor:
    """Causal attention of every request's new tokens over its cached tokens (the step's own included, already written).

    q: [tokens, heads, head_dim]; kv_cache: [2, blocks, kv_heads, block_size, head_dim] -> [tokens, heads, head_dim].
    Token t of request r sits at position seq_len - query_len + t and sees positions p with 0 <= position - p < window.
    Query head h reads kv head h // (heads / kv_heads).
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    out = torch.empty_like(q)
    starts, lens = step.host_query_starts, step.host_seq_lens
    for r in range(len(lens)):
        lo, hi, n = int(starts[r]), int(starts[r + 1]), int(lens[r])
        if lo == hi:
            continue
        m = hi - lo
        first = 0 if params.window is None else max(0, n - m - params.window + 1) // block_size
        table = group.block_table[r, first : -(-n // block_size)].long()
        # [kv_heads, keys, head_dim]
        k = kv_cache[0][table].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, : n - first * block_size]
        v = kv_cache[1][table].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, : n - first * block_size]
        k, v = k.float() * params.k_scale, v.float() * params.v_scale
        # the query heads of one kv head are extra rows: [kv_heads, group * m, head_dim]
        qr = q[lo:hi].float().transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores = torch.matmul(qr, k.transpose(1, 2)).view(heads, m, -1) * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        q_pos = torch.arange(n - m, n, device=q.device)[:, None]
        k_pos = torch.arange(first * block_size, n, device=q.device)[None]
        if params.alibi_slopes is not None:
            scores = scores + params.alibi_slopes[:, None, None] * (k_pos - q_pos)
        hidden = k_pos > q_pos
        if params.window is not None:
            hidden = hidden | (q_pos - k_pos >= params.window)
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        ctx = torch.matmul(probs.view(kv_heads, -1, probs.shape[-1]), v).view(heads, m, head_dim)
        out[lo:hi] = ctx.transpose(0, 1).to(q.dtype)
    return out


@op
def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks within one cache tensor (copy-on-write). src, dst: [n] int64 block ids, disjoint."""
    kv_cache[:, dst] = kv_cache[:, src]
