"""Presence, frequency and repetition penalties.

Only logits of tokens that a request has seen are touched, through the device's token table: the work follows the length
of the request, not the vocabulary. How often each token was produced is counted only for slots with a presence or
frequency penalty.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.worker.device import DeviceContext
from vllm.worker.sample.params import ParamsTable
from vllm.worker.slot_table import SlotTable

_FIRST_ROWS = 8


class OutputCounts:
    """How often each token stands in a request's output: one row of [vocab] int32 per slot that needs it."""

    def __init__(self, vocab_size: int, table: SlotTable, context: DeviceContext) -> None:
        self._vocab = vocab_size
        self._table = table
        self._context = context
        self._row_of: np.ndarray = np.full(table.num_slots, -1, np.int64)
        self._free: list[int] = []
        self.counts: Tensor | None = None  # [rows, vocab], allocated when first needed

    def enter(self, slot: int, num_tokens: int) -> None:
        """Count the output that a request brings along. The slot's tokens must be in the table."""
        counts, row = self._take_row()
        self._row_of[slot] = row
        counts[row].zero_()
        output = self._table.tokens[slot, int(self._table.num_prompt[slot]) : num_tokens].long()
        if len(output):
            counts[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def leave(self, slot: int) -> None:
        """Give the slot's row back, if it has one."""
        if self._row_of[slot] >= 0:
            self._free.append(int(self._row_of[slot]))
            self._row_of[slot] = -1

    def _take_row(self) -> tuple[Tensor, int]:
        counts = self.counts
        if counts is None or not self._free:
            old = 0 if counts is None else len(counts)
            rows = min(self._table.num_slots, max(_FIRST_ROWS, 2 * old))
            grown = torch.zeros((rows, self._vocab), dtype=torch.int32, device=self._context.device)
            if counts is not None:
                grown[:old] = counts
            self.counts = counts = grown
            self._free.extend(range(rows - 1, old - 1, -1))
        return counts, self._free.pop()

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Where the slots' rows begin in the flattened counts. slots: [n] -> [n] int64."""
        starts: np.ndarray = self._row_of[slots] * self._vocab
        return starts

    def add(self, slots: np.ndarray, token_ids: Tensor, which: Tensor | None = None) -> None:
        """Count one more token for each slot, or only those of `which`; a slot may then come more than once.

        token_ids: [n] int64; which: [n] bool.
        """
        if self.counts is None:
            raise RuntimeError("Tokens are counted for slots that never entered.")
        (starts,) = self._context.upload([self.places(slots)])
        if which is None:
            self.counts.view(-1)[starts + token_ids] += 1
        else:
            self.counts.view(-1).index_add_(0, starts + token_ids, which.to(torch.int32))

    def of(self, slots: np.ndarray, lengths: np.ndarray, drafted: np.ndarray | None) -> tuple[Tensor, np.ndarray]:
        """Counts in one flat tensor, and where those of each row begin; the last `drafted` of its `lengths` tokens,
        which nobody has accepted yet, count too. slots, lengths, drafted: [n].
        """
        if self.counts is None:
            raise RuntimeError("Counts are asked for slots that never entered.")
        if drafted is None or not drafted.any():
            return self.counts.view(-1), self.places(slots)
        (own,) = self._context.upload([self._row_of[slots]])
        counts = self.counts.index_select(0, own)
        behind = np.flatnonzero(drafted)
        tokens = _seen(self._table, slots[behind], (lengths - drafted)[behind], lengths[behind], self._context)
        rows, sizes = self._context.upload([behind, drafted[behind].astype(np.int64)])
        real = torch.arange(tokens.shape[1], device=tokens.device) < sizes[:, None]
        places = (rows[:, None] * self._vocab + tokens).view(-1)
        counts.view(-1).index_add_(0, places, real.view(-1).to(torch.int32))
        return counts.view(-1), np.arange(len(slots), dtype=np.int64) * self._vocab


def _seen(
    table: SlotTable, slots: np.ndarray, first: np.ndarray, lengths: np.ndarray, context: DeviceContext
) -> Tensor:
    """Tokens `first : lengths` of each slot, [n, longest] int64; shorter rows repeat their token `first`."""
    longest = int((lengths - first).max())
    starts, sizes = context.upload([table.token_index(slots, first), (lengths - first).astype(np.int64)])
    column = torch.arange(longest, device=context.device)
    index = starts[:, None] + torch.where(column < sizes[:, None], column, 0)
    return table.read_tokens(index.view(-1)).view(index.shape)


def penalize_repetition(
    logits: Tensor,
    rows: np.ndarray,
    slots: np.ndarray,
    lengths: np.ndarray,
    params: ParamsTable,
    table: SlotTable,
    context: DeviceContext,
) -> None:
    """Divide positive logits of tokens in prompt or output by the penalty, multiply negative ones; in place.

    rows, slots, lengths: [n], the rows with such a penalty. A token seen twice is written twice with the same value.
    """
    seen = _seen(table, slots, np.zeros_like(lengths), lengths, context)
    starts, penalty = context.upload([rows.astype(np.int64) * logits.shape[1], params.repetition[slots]])
    places = (starts[:, None] + seen).view(-1)
    flat = logits.view(-1)
    values = flat[places].view(seen.shape)
    values = torch.where(values > 0, values / penalty[:, None], values * penalty[:, None])
    flat[places] = values.view(-1)


def penalize_output(
    logits: Tensor,
    rows: np.ndarray,
    slots: np.ndarray,
    lengths: np.ndarray,
    params: ParamsTable,
    counts: OutputCounts,
    table: SlotTable,
    context: DeviceContext,
    drafted: np.ndarray | None = None,
) -> None:
    """logit - frequency * count - presence * (count > 0) over the output's tokens; in place. Arguments as above.

    drafted: [n], how many of the last tokens are drafts.
    """
    prompt = table.num_prompt[slots]
    with_output = lengths > prompt
    rows, slots, lengths, prompt = rows[with_output], slots[with_output], lengths[with_output], prompt[with_output]
    drafted = None if drafted is None else drafted[with_output]
    if not len(rows) or counts.counts is None:
        return
    seen = _seen(table, slots, prompt, lengths, context)
    flat_counts, places_of_counts = counts.of(slots, lengths, drafted)
    starts, count_starts, presence, frequency = context.upload(
        [rows.astype(np.int64) * logits.shape[1], places_of_counts, params.presence[slots], params.frequency[slots]]
    )
    count = flat_counts[count_starts[:, None] + seen]
    places = (starts[:, None] + seen).view(-1)
    flat = logits.view(-1)
    values = flat[places].view(seen.shape) - frequency[:, None] * count
    flat[places] = (values - presence[:, None] * (count > 0)).view(-1)
