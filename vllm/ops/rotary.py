"""Rotary position embedding, and its fusion with the cache write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.ops.attention import OwnKV, write_kv
from vllm.ops.norm import rms_norm
from vllm.ops.registry import op


@op
def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first rotary_dim dimensions of each head by its position, in fp32.

    x: [tokens, heads, head_dim]; positions: [tokens] int64; cos_sin: [max_positions, rotary_dim] fp32 = [cos | sin].
    Pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) when interleaved. Returns x's dtype; may update in place.
    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)  # [tokens, 1, rotary_dim / 2]
    rot, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    a, b = (rot[..., ::2], rot[..., 1::2]) if interleaved else rot.chunk(2, -1)
    u, v = a * cos - b * sin, b * cos + a * sin
    rot = torch.stack((u, v), -1).flatten(-2) if interleaved else torch.cat((u, v), -1)
    return torch.cat((rot.to(x.dtype), rest), -1)


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norm of each query and key head before its rotation, or with `joint` of all of a token's query heads
    together, and of all its key heads. q_weight, k_weight: [head_dim], with `joint` [heads * head_dim].
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0
    joint: bool = False

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q: [tokens, heads, head_dim], k: [tokens, kv_heads, head_dim], normalised by the reference."""
        first = 1 if self.joint else 2
        parts = ((q, self.q_weight), (k, self.k_weight))
        q, k = (rms_norm.reference(x.flatten(first), w, self.eps, self.offset).view(x.shape) for x, w in parts)
        return q, k


@op
def rotate_and_write_kv(
    qkv: Tensor,
    heads: int,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    qk_norm: QKNorm | None = None,
) -> tuple[Tensor, OwnKV | None]:
    """Normalise (if asked) and rotate queries and keys, store keys and values, return the rotated queries.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], as the fused projection gives it -> q: [tokens, heads, head_dim].
    The second result is what `attend` takes as `own`, from kernels that have it at hand. qkv may be overwritten, and
    the results be views of it.
    """
    kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    q, k, v = qkv.view(qkv.shape[0], -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    if qk_norm is not None:
        q, k = qk_norm.apply(q, k)
    q = rotate.reference(q, positions, cos_sin, interleaved)
    k = rotate.reference(k, positions, cos_sin, interleaved)
    write_kv.reference(k, v, kv_cache, slot_mapping, k_scale, v_scale)
    return q, (k, v)
