"""`add_lora`: what LoRA adapters add to a linear layer's output, for rows of several adapters at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.ops.activation import activate_gated
from vllm.ops.registry import op
from vllm.step.inputs import RowView, Segment


def segments_of(rows: RowView) -> Sequence[Segment]:
    """The view's segments; where the host does not know them, read off the device."""
    if rows.segments:
        return rows.segments
    slots = rows.adapters.unique().tolist()
    return [Segment(slot, (rows.adapters == slot).nonzero()[:, 0]) for slot in slots if slot >= 0]


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters' matrices of one layer, for every slot on the device.

    a: [slots, parts * rank, inputs], the parts one behind the other; of an embedding [slots, vocabulary, rank].
    b: [slots, outputs, rank], scaled, laid out by `lay_out_b`.
    ranks: [slots] int32, how many rows of a part's `rank` the adapter uses, 0 if it does not change the layer; the
    others are zeros.   parts: (first output, outputs) of each fused projection.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    parts: tuple[tuple[int, int], ...]


@op
def lay_out_b(b: Tensor) -> Tensor:
    """`LowRank.b` with its numbers in the order in which this device's kernels read them; the same shape."""
    return b


@op
def shrink_lora(x: Tensor, a: Tensor, rows: RowView) -> Tensor:
    """a[s] x[r], s being the adapter of row r: [rows, parts * rank] fp32, zeros for rows without one. a: as of
    `LowRank`.
    """
    small = torch.zeros(len(x), a.shape[1], dtype=torch.float32, device=x.device)
    for segment in segments_of(rows):
        chosen = x if segment.rows is None else x.index_select(0, segment.rows)
        shrunk = torch.mm(chosen.to(a.dtype), a[segment.slot].t()).float()
        if segment.rows is None:
            small.copy_(shrunk)
        else:
            small.index_copy_(0, segment.rows, shrunk)
    return small


@op
def expand_lora(out: Tensor, small: Tensor, b: Tensor, parts: tuple[tuple[int, int], ...], rows: RowView) -> None:
    """out[r, part] += b[s, part] small[r, part] in place: the second half of `add_lora`. small: as of `shrink_lora`."""
    rank = b.shape[2]
    for segment in segments_of(rows):
        chosen = small if segment.rows is None else small.index_select(0, segment.rows)
        for index, (first, count) in enumerate(parts):
            shrunk = chosen[:, index * rank : (index + 1) * rank].to(b.dtype)
            change = torch.mm(shrunk, b[segment.slot, first : first + count].t()).to(out.dtype)
            target = out.narrow(1, first, count)
            if segment.rows is None:
                target.add_(change)
            else:
                target.index_add_(0, segment.rows, change)


@op
def add_lora(out: Tensor, x: Tensor, matrices: LowRank, rows: RowView) -> None:
    """out[r, part] += b[s, part] (a[s, part] x[r]) in place, s being the adapter of row r; other rows stay.

    out: [rows, outputs], any float dtype.   x: [rows, inputs].
    """
    a, b, rank = matrices.a, matrices.b, matrices.b.shape[2]
    for segment in segments_of(rows):
        chosen = x if segment.rows is None else x.index_select(0, segment.rows)
        shrunk = torch.mm(chosen.to(a.dtype), a[segment.slot].t())
        for index, (first, count) in enumerate(matrices.parts):
            small, wide = shrunk[:, index * rank : (index + 1) * rank], b[segment.slot, first : first + count].t()
            target = out.narrow(1, first, count)
            before = target if segment.rows is None else target.index_select(0, segment.rows)
            if target.dtype == small.dtype:
                before = before.addmm_(small, wide)
            else:
                before = before.add_(torch.mm(small, wide).to(out.dtype))
            if segment.rows is not None:
                target.index_copy_(0, segment.rows, before)


@op
def activate_gated_lora(
    y: Tensor, x: Tensor, matrices: LowRank, rows: RowView, kind: str, limit: float | None = None
) -> Tensor:
    """`activate_gated` of y with what adapters add to it, for a layer y of x whose two parts are gate and up.

    y: [rows, 2 * dim], which may be overwritten.   x: [rows, inputs].
    """
    add_lora(y, x, matrices, rows)
    activated: Tensor = activate_gated(y, kind, limit)
    return activated


@op
def add_embedding_lora(out: Tensor, ids: Tensor, matrices: LowRank, rows: RowView) -> None:
    """out[r] += b[s] a[s, ids[r]] in place, s being the adapter of row r; other rows stay.

    out: [rows, width].   ids: [rows] int64.
    """
    for segment in segments_of(rows):
        chosen = ids if segment.rows is None else ids.index_select(0, segment.rows)
        change = torch.mm(matrices.a[segment.slot].index_select(0, chosen), matrices.b[segment.slot].t()).to(out.dtype)
        if segment.rows is None:
            out.add_(change)
        else:
            out.index_add_(0, segment.rows, change)
