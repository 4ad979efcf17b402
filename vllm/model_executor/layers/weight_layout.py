"""How checkpoints lay out fused weights, and the way to the canonical layout: parts concatenated along the outputs."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class WeightLayout(Enum):
    """PLAIN: canonical already, also q | k | v and gate | up.   TRANSPOSED: [in, out] instead of [out, in].

    QKV_BY_HEAD: q, k, v of head 0, then of head 1, ... (as many key/value heads as heads).
    QKV_BY_GROUP: for each key/value head its query heads, then k, then v.
    """

    PLAIN = "plain"
    TRANSPOSED = "transposed"
    QKV_BY_HEAD = "qkv_by_head"
    QKV_BY_GROUP = "qkv_by_group"


def stored_shape(shape: tuple[int, ...], layout: WeightLayout) -> tuple[int, ...]:
    """The shape in the checkpoint of a tensor whose canonical shape is `shape`."""
    return tuple(reversed(shape)) if layout is WeightLayout.TRANSPOSED else shape


def canonical(tensor: Tensor, layout: WeightLayout, heads: int, kv_heads: int) -> Tensor:
    """`tensor` in canonical layout. Its shape must be right already; weights are [out, in], biases [out]."""
    if layout is WeightLayout.PLAIN:
        return tensor
    if layout is WeightLayout.TRANSPOSED:
        return tensor.t() if tensor.ndim == 2 else tensor
    import torch  # here, so that families can name a layout without it

    groups = kv_heads if layout is WeightLayout.QKV_BY_GROUP else heads
    queries = heads // groups
    # [groups, queries + 2, head_dim, ...]
    by_group = tensor.unflatten(0, (groups, queries + 2, -1))
    parts = by_group.split([queries, 1, 1], 1)
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
