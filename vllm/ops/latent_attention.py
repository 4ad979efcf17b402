"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a cache of one latent per token, for all heads.

A token leaves `rank` numbers c, from which each head's key and value would be computed, and `rope_dim` numbers k_r
that are rotated and that all heads share. Head h's key is [K_h c | k_r] and its value V_h c. So q . k is
(K_h^T q_nope) . c + q_rope . k_r: attention of few queries reads the latents as they are, as the keys and values of one
common head ("absorbed"), and multiplies by V_h afterwards; that of many queries computes keys and values first
("expanded").
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.ops.attention import to_cache_dtype
from vllm.ops.norm import rms_norm
from vllm.ops.registry import op
from vllm.ops.rotary import rotate
from vllm.step.inputs import GroupInputs, StepInputs


@op
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
    """Rotate the queries, normalise and rotate the step's latents and store them; the rotated queries.

    q: [tokens, heads, nope_dim + rope_dim], of which the last `rope_dim` are rotated.   weight: [rank], of the norm.
    latent: [tokens, rank + rope_dim], as projected.   cos_sin: [positions, rope_dim] fp32 = [cos | sin].
    cache: [blocks, block_size, rank + rope_dim].   slot_mapping: [tokens] int64. q may be overwritten.
    """
    rank, rope_dim = weight.shape[0], cos_sin.shape[1]
    k_rope = rotate.reference(latent[:, None, rank:], positions, cos_sin, interleaved)[:, 0]
    stored = torch.cat((rms_norm.reference(latent[:, :rank], weight, eps), k_rope), -1)
    block_size = cache.shape[1]
    cache[slot_mapping // block_size, slot_mapping % block_size] = to_cache_dtype(stored, 1.0, cache.dtype)
    q_nope, q_rope = q.split([q.shape[2] - rope_dim, rope_dim], -1)
    return torch.cat((q_nope, rotate.reference(q_rope, positions, cos_sin, interleaved)), -1)


@op
def attend_latent(
    q: Tensor, cache: Tensor, kv_b: Tensor, nope_dim: int, scale: float, step: StepInputs, group: GroupInputs
) -> Tensor:
    """Causal attention of every request's new tokens over its cached latents (the step's own included).

    q: [tokens, heads, nope_dim + rope_dim]; cache: [blocks, block_size, rank + rope_dim]; kv_b: [heads, nope_dim +
    v_dim, rank], each head's K_h above its V_h -> [tokens, heads, v_dim].
    """
    heads, _, rank = kv_b.shape
    v_dim = kv_b.shape[1] - nope_dim
    out = q.new_empty(len(q), heads, v_dim)
    starts, lens = step.host_query_starts, step.host_seq_lens
    query_lens = starts[1:] - starts[:-1]
    single = np.flatnonzero(query_lens == 1)
    if len(single):
        rows = torch.from_numpy(starts[single].astype(np.int64)).to(q.device)
        requests = torch.from_numpy(single).to(q.device)
        seq_lens = torch.from_numpy(lens[single].astype(np.int64)).to(q.device)
        blocks = -(-int(lens[single].max()) // cache.shape[1])
        keys = cache[group.block_table[requests, :blocks].long()].flatten(1, 2).float()
        hidden = torch.arange(keys.shape[1], device=q.device) >= seq_lens[:, None]
        keys = keys.masked_fill(hidden[:, :, None], 0.0)  # unwritten cache may hold NaN, and 0 * NaN is NaN
        scores = torch.matmul(absorb_queries(q[rows], kv_b, nope_dim).float(), keys.transpose(1, 2)) * scale
        probs = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        out[rows] = expand_values(torch.matmul(probs, keys[..., :rank]).to(q.dtype), kv_b, nope_dim)
    for r in np.flatnonzero(query_lens > 1):
        lo, hi, length = int(starts[r]), int(starts[r + 1]), int(lens[r])
        table = group.block_table[r, : -(-length // cache.shape[1])].long()
        keys = cache[table].flatten(0, 1)[:length].float()
        out[lo:hi] = _attend_request(q[lo:hi], keys, kv_b, nope_dim, scale)
    return out


def absorb_queries(q: Tensor, kv_b: Tensor, nope_dim: int) -> Tensor:
    """Queries for the latents themselves: [tokens, heads, rank + rope_dim]."""
    q_nope, q_rope = q[..., :nope_dim], q[..., nope_dim:]
    inner = torch.bmm(q_nope.transpose(0, 1), kv_b[:, :nope_dim]).transpose(0, 1)
    return torch.cat((inner, q_rope), -1)


def expand_values(latents: Tensor, kv_b: Tensor, nope_dim: int) -> Tensor:
    """latents: [tokens, heads, rank], weighted sums of latents -> the same sums of values, [tokens, heads, v_dim]."""
    return torch.bmm(latents.transpose(0, 1), kv_b[:, nope_dim:].transpose(1, 2)).transpose(0, 1)


def expands(queries: int, rank: int, nope_dim: int, v_dim: int) -> bool:
    """Whether so many queries of one request are worth computing its keys and values for."""
    saved = 2 * rank - nope_dim - v_dim  # products for each pair of a query and a key
    return queries * saved > rank * (nope_dim + v_dim)


def _attend_request(q: Tensor, keys: Tensor, kv_b: Tensor, nope_dim: int, scale: float) -> Tensor:
    """The new tokens of one request. q: [m, heads, nope_dim + rope_dim]; keys: [keys, rank + rope_dim] fp32."""
    m, length = len(q), len(keys)
    rank, v_dim = kv_b.shape[2], kv_b.shape[1] - nope_dim
    expanded = expands(m, rank, nope_dim, v_dim)
    if expanded:
        latents, k_rope = keys[:, :rank], keys[None, :, rank:]
        wide = torch.matmul(latents, kv_b.float().transpose(1, 2))  # [heads, keys, nope_dim + v_dim]
        k = torch.cat((wide[..., :nope_dim], k_rope.expand(len(wide), -1, -1)), -1)
        values = wide[..., nope_dim:]
        queries = q
    else:
        queries, k, values = absorb_queries(q, kv_b, nope_dim), keys[None], keys[None, :, :rank]
    scores = torch.matmul(queries.float().transpose(0, 1), k.transpose(1, 2)) * scale
    q_pos = torch.arange(length - m, length, device=q.device)[:, None]
    hidden = torch.arange(length, device=q.device)[None] > q_pos
    out = torch.matmul(scores.masked_fill(hidden, float("-inf")).softmax(-1), values).transpose(0, 1).to(q.dtype)
    return out if expanded else expand_values(out, kv_b, nope_dim)
