"""The virtual tokens of prompt adapters on one rank: which tokens of a step they are, and their embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.step.plan import SlotInit, StepPlan
from vllm.worker.device import DeviceContext


class VirtualTokenTable:
    """By slot, the embeddings of the first tokens of its request: [count, width]."""

    def __init__(self, width: int, dtype: torch.dtype, context: DeviceContext) -> None:
        self._width, self._dtype, self._context = width, dtype, context
        self._tables: dict[int, Tensor] = {}

    def leave(self, freed: Iterable[int]) -> None:
        """Forget the rows of slots that are free."""
        for slot in freed:
            self._tables.pop(slot, None)

    def enter(self, new: Sequence[SlotInit]) -> None:
        """Take in what requests bring that enter a slot."""
        self.leave(init.slot for init in new)
        for init in new:
            if init.virtual:
                rows = np.frombuffer(init.virtual, np.float32).reshape(-1, self._width).copy()  # torch wants to write
                (table,) = self._context.upload([rows])
                self._tables[init.slot] = table.to(self._dtype)

    def of(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """(which tokens of the step, [n] int64; their embeddings, [n, width]), None if none of them is virtual."""
        if not self._tables:
            return None
        where: list[np.ndarray] = []
        values: list[Tensor] = []
        first = 0
        for slot, count, start in zip(
            plan.slots.tolist(), plan.num_tokens.tolist(), plan.num_computed.tolist(), strict=True
        ):
            table = self._tables.get(slot)
            if table is not None and start < len(table):
                part = table[start : start + count]
                where.append(np.arange(first, first + len(part)))
                values.append(part)
            first += count
        if not where:
            return None
        (index,) = self._context.upload([np.concatenate(where).astype(np.int64)])
        return index, torch.cat(values)
