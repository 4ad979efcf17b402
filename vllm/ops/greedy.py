"""The most likely token of every row."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.registry import op

_BLOCK = 128


@op
def finite_rows(logits: Tensor) -> Tensor:
    """Which rows a token can be chosen from: neither NaN nor +inf, and a finite maximum. logits: [rows, vocab] fp32 ->
    [rows] bool.

    Models bar tokens with -inf or with the least number of a type. A sum says it all: NaN and +inf stay in it, barred
    tokens make it -inf at most (what else there is in a row is nowhere near the range of fp32).
    """
    return (logits.sum(-1) < torch.inf) & (logits.amax(-1) > -torch.inf)


@op
def greedy(logits: Tensor) -> Tensor:
    """The lowest index of each row's maximum. logits: [rows, vocab] fp32 -> [rows] int64.

    A maximum is found much faster than its place (torch's argmax is not vectorised on the CPU), so the place is looked
    up among block maxima, then inside one block. A row with NaN gives some index below `vocab`.
    """
    rows, vocab = logits.shape
    whole = vocab // _BLOCK * _BLOCK
    if whole < 4 * _BLOCK or logits.stride(-1) != 1:
        return logits.argmax(-1)
    blocks = logits[:, :whole].unflatten(-1, (-1, _BLOCK))
    best = blocks.amax(-1)  # [rows, blocks]
    block = best.argmax(-1)
    row = torch.arange(rows, device=logits.device)
    index = block * _BLOCK + blocks[row, block].argmax(-1)
    if whole == vocab:
        return index
    tail = logits[:, whole:]
    return torch.where(tail.amax(-1) > best.amax(-1), whole + tail.argmax(-1), index)


@op
def greedy_and_finite(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`greedy` and `finite_rows` of the same logits; a kernel may read them once for both."""
    return greedy(logits), finite_rows(logits)
