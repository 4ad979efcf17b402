"""Masks of allowed tokens, one bit each, applied to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.greedy import finite_rows, greedy_and_finite
from vllm.ops.registry import op

_CHUNK = 1 << 24  # logits handled at once


@op
def apply_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Make forbidden tokens impossible, in place.

    logits: [rows, vocab] fp32.   rows: [masked] int64, each at most once.   bits: [masked, ceil(vocab / 32)] int32,
    contiguous; bit t % 32 of word t // 32 says whether token t is allowed.
    """
    vocab = logits.shape[1]
    place = torch.arange(8, dtype=torch.uint8, device=logits.device)
    step = max(1, _CHUNK // vocab)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        octets = bits[start : start + step].view(torch.uint8)  # the lowest bits first, as all our machines store them
        forbidden = ((octets[:, :, None] >> place) & 1).flatten(1)[:, :vocab] == 0
        logits[chunk] = logits[chunk].masked_fill_(forbidden, float("-inf"))


@op
def apply_bitmask_and_finite(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """`apply_bitmask`; returns what `finite_rows` said before."""
    finite: Tensor = finite_rows(logits)
    apply_bitmask(logits, rows, bits)
    return finite


@op
def greedy_under_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The greedy tokens of all rows, of which some have masks; logits, which may change, and masks are those of
    `apply_bitmask`. Returns the ids, which rows were finite before, and which have a token that is left: [rows] each.
    """
    finite = apply_bitmask_and_finite(logits, rows, bits)
    ids, possible = greedy_and_finite(logits)
    return ids, finite, possible
