"""`add_lora`: what LoRA adapters add to a linear layer's output, for rows of several adapters at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.ops.registry import op
from vllm.step.inputs import RowView, Segment


def segments_of(rows: RowView) -> Sequence[Segment]:
    """The view's segments; where the host does not know them, read off the device."""
    if rows.segments:
        return rows.segments
    slots = rows.adapters.unique().tolist()
    return [Segment(slot, (rows.adapters == slot).nonzero()[:, 0]) for slot in slots if slot >= 0]


@op
def add_lora(out: Tensor, x: Tensor, a: Tensor, b: Tensor, parts: Sequence[tuple[int, int]], rows: RowView) -> None:
    """out[r, part] += b[s, part] (a[s, part] x[r]) in place, s being the adapter of row r; other rows stay.

    out: [rows, outputs], any float dtype.   x: [rows, inputs].   a: [slots, parts * rank, inputs].
    b: [slots, outputs, rank], scaled.   parts: (first output, outputs) of each fused projection, whose products of `a`
    lie one behind the other.
    """
    rank = b.shape[2]
    for segment in segments_of(rows):
        chosen = x if segment.rows is None else x.index_select(0, segment.rows)
        shrunk = torch.mm(chosen.to(a.dtype), a[segment.slot].t())
        for index, (first, count) in enumerate(parts):
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
def add_embedding_lora(out: Tensor, ids: Tensor, a: Tensor, b: Tensor, rows: RowView) -> None:
    """out[r] += b[s] a[s, ids[r]] in place, s being the adapter of row r; other rows stay.

    out: [rows, width].   ids: [rows] int64.   a: [slots, vocabulary, rank].   b: [slots, width, rank], scaled.
    """
    for segment in segments_of(rows):
        chosen = ids if segment.rows is None else ids.index_select(0, segment.rows)
        change = torch.mm(a[segment.slot].index_select(0, chosen), b[segment.slot].t()).to(out.dtype)
        if segment.rows is None:
            out.add_(change)
        else:
            out.index_add_(0, segment.rows, change)
