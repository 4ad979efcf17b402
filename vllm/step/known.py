"""What a pipeline's last stage has sampled, for the first one, which computes the tokens behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vllm.step.plan import StepPlan
from vllm.step.result import StepResult


@dataclass(frozen=True, slots=True)
class Known:
    """Token `token_ids[i]` stands at position `positions[i]` of slot `slots[i]`; all int64."""

    slots: np.ndarray
    positions: np.ndarray
    token_ids: np.ndarray


class KnownTokens:
    """Gathers sampled tokens from results, until the next plan is sent."""

    def __init__(self) -> None:
        self._entered: np.ndarray = np.zeros(0, np.int64)  # by slot: the step in which its request entered it
        self._found: list[Known] = []

    def planned(self, plan: StepPlan) -> None:
        """A plan was sent: the slots that it fills begin anew."""
        most = max([init.slot for init in plan.new], default=-1)
        if len(plan.slots):
            most = max(most, int(plan.slots.max()))
        if most >= len(self._entered):
            more: np.ndarray = np.full(2 * most + 2 - len(self._entered), -1, np.int64)
            self._entered = np.concatenate([self._entered, more])
        for init in plan.new:
            self._entered[init.slot] = plan.step_id

    def sampled(self, plan: StepPlan, result: StepResult) -> None:
        """A plan's result is there. Tokens of requests that have left their slot meanwhile are nobody's."""
        last = self._entered[plan.slots] <= plan.step_id
        first = plan.num_computed.astype(np.int64) + plan.num_tokens
        ids = np.array(result.token_ids, np.int64)
        counts: np.ndarray
        if result.counts is None and bool(last.all()) and (not len(ids) or int(ids.min()) >= 0):  # as nearly always
            self._found.append(Known(plan.slots.astype(np.int64), first, ids))
            return
        if result.counts is None:
            counts = (ids >= 0).astype(np.int64)
            ids = ids[ids >= 0]
        else:
            counts = np.array(result.counts, np.int64)
            first = first if plan.drafts is None else first - plan.drafts
        place = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        found = Known(np.repeat(plan.slots, counts).astype(np.int64), np.repeat(first, counts) + place, ids)
        self._found.append(_of(found, np.repeat(last, counts)))

    def take(self) -> Known | None:
        """What was found since the last call; None for nothing."""
        found = [known for known in self._found if len(known.slots)]
        self._found.clear()
        return _joined(found) if found else None


def _of(known: Known, which: np.ndarray) -> Known:
    return Known(known.slots[which], known.positions[which], known.token_ids[which])


def _joined(parts: Iterable[Known]) -> Known:
    slots, positions, ids = zip(*((k.slots, k.positions, k.token_ids) for k in parts), strict=True)
    return Known(np.concatenate(slots), np.concatenate(positions), np.concatenate(ids))
