"""Tokens that adapters add to a model's vocabulary: their embeddings, or their rows of the head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.step.inputs import RowView


class AddedTokens:
    """The rows of tokens behind the model's own `first` ones, of each adapter on the device, whole on every rank.

    most: tokens that an adapter may add.   counts: how many each slot's adapter adds.   rows: [slots, most, width];
    None until the first adapter comes that adds any.
    """

    def __init__(self, first: int, most: int, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.first, self.most, self.width = first, most, width
        self.counts = [0] * slots
        self.rows: Tensor | None = None
        self._dtype, self._device = dtype, device

    def load(self, slot: int, rows: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """What puts an adapter's rows [tokens, width] into `slot`, pairs (to, of); None if it adds no tokens."""
        self.counts[slot] = 0 if rows is None else len(rows)
        if rows is None:
            return []
        if self.rows is None:
            shape = len(self.counts), self.most, self.width
            self.rows = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return [(self.rows[slot, : len(rows)], rows)]

    def known(self, ids: Tensor) -> Tensor:
        """The ids with some token of the model instead of each added one."""
        return ids if self.rows is None else ids.clamp(max=self.first - 1)

    def embed(self, out: Tensor, ids: Tensor, view: RowView) -> Tensor:
        """out [rows, width] with the embeddings of added tokens where `ids` are such."""
        if self.rows is None:
            return out
        place = (ids - self.first).clamp(0, self.most - 1)
        found = self.rows[view.adapters.clamp(min=0).long(), place].to(out.dtype)
        return torch.where((ids >= self.first)[:, None], found, out)

    def behind(self, logits: Tensor, hidden: Tensor, view: RowView) -> tuple[Tensor, Tensor | None]:
        """logits [rows, tokens] fp32 with those of added tokens behind them, and which of all these do not exist for
        the row; unchanged, and None, if no row's adapter adds any. hidden: [rows, width].
        """
        present = [segment for segment in view.segments if self.counts[segment.slot]]
        if self.rows is None or not present:
            return logits, None
        tokens = logits.shape[1]
        wide = nn.functional.pad(logits, (0, self.most))
        absent = torch.zeros_like(wide, dtype=torch.bool)
        absent[:, tokens:] = True
        for segment in present:
            count = self.counts[segment.slot]
            chosen = hidden if segment.rows is None else hidden.index_select(0, segment.rows)
            product = torch.mm(chosen.to(self._dtype), self.rows[segment.slot, :count].t()).float()
            rows = slice(None) if segment.rows is None else segment.rows
            wide[rows, tokens : tokens + count] = product
            absent[rows, tokens : tokens + count] = False
        return wide, absent
