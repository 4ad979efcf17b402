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
    STACKED: the matrices of all experts below each other.   STACKED_TRANSPOSED: the same of transposed matrices.
    UNIT_ROWS: rows count divided by their length.   UP_GATE: up | gate.
    EXPERTS_TRANSPOSED: each expert's matrix as [in, out].   EXPERTS_PAIRS: rows of each one's gate and up alternate.
    ONE_ROW: a vector as a matrix of one row.
    EXPERTS_TRANSPOSED_PAIRS: both.   PAIRS: rows of an MLP's gate and up alternate.
    """

    PLAIN = "plain"
    TRANSPOSED = "transposed"
    QKV_BY_HEAD = "qkv_by_head"
    QKV_BY_GROUP = "qkv_by_group"
    STACKED = "stacked"
    STACKED_TRANSPOSED = "stacked_transposed"
    UNIT_ROWS = "unit_rows"
    UP_GATE = "up_gate"
    EXPERTS_TRANSPOSED = "experts_transposed"
    EXPERTS_PAIRS = "experts_pairs"
    EXPERTS_TRANSPOSED_PAIRS = "experts_transposed_pairs"
    PAIRS = "pairs"
    ONE_ROW = "one_row"


def stored_shape(shape: tuple[int, ...], layout: WeightLayout) -> tuple[int, ...]:
    """The shape in the checkpoint of a tensor whose canonical shape is `shape`."""
    match layout:
        case WeightLayout.TRANSPOSED:
            return tuple(reversed(shape))
        case WeightLayout.STACKED:
            return shape[0] * shape[1], *shape[2:]
        case WeightLayout.STACKED_TRANSPOSED:
            return shape[0] * shape[2], shape[1]
        case WeightLayout.EXPERTS_TRANSPOSED | WeightLayout.EXPERTS_TRANSPOSED_PAIRS:
            return shape[0], shape[2], shape[1]
        case WeightLayout.ONE_ROW:
            return 1, *shape
    return shape


def canonical(tensor: Tensor, layout: WeightLayout, heads: int, kv_heads: int, shape: tuple[int, ...] = ()) -> Tensor:
    """`tensor` in canonical layout, of `shape`, which stacked layouts need. It must be stored in the right shape;
    weights are [out, in], biases [out].
    """
    if layout is WeightLayout.PLAIN:
        return tensor
    if layout is WeightLayout.TRANSPOSED:
        return tensor.t() if tensor.ndim == 2 else tensor
    if layout is WeightLayout.ONE_ROW:
        return tensor[0]
    if layout is WeightLayout.STACKED:
        return tensor.view(shape)
    if layout is WeightLayout.STACKED_TRANSPOSED:
        return tensor.view(shape[0], shape[2], shape[1]).transpose(1, 2)
    if layout is WeightLayout.UNIT_ROWS:
        found: Tensor = (tensor.float() / tensor.float().norm(dim=-1, keepdim=True).clamp_min(1e-12)).to(tensor.dtype)
        return found
    import torch  # here, so that families can name a layout without it

    if layout is WeightLayout.UP_GATE:
        return torch.cat(tensor.chunk(2)[::-1])
    if layout is WeightLayout.PAIRS:
        return torch.cat([tensor[::2], tensor[1::2]])
    if layout in (WeightLayout.EXPERTS_TRANSPOSED, WeightLayout.EXPERTS_TRANSPOSED_PAIRS):
        tensor = tensor.transpose(1, 2)
    if layout is WeightLayout.EXPERTS_TRANSPOSED:
        return tensor
    if layout in (WeightLayout.EXPERTS_PAIRS, WeightLayout.EXPERTS_TRANSPOSED_PAIRS):
        return torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1)
    groups = kv_heads if layout is WeightLayout.QKV_BY_GROUP else heads
    queries = heads // groups
    # [groups, queries + 2, head_dim, ...]
    by_group = tensor.unflatten(0, (groups, queries + 2, -1))
    parts = by_group.split([queries, 1, 1], 1)
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
