"""What a pipeline's last stage has sampled, for the first one, which computes the tokens behind it.

The last stage itself sends what a step has sampled to the first one, without the host, which says when to take it in.
Only how many drafts have held is for the host to find out, and to tell.
"""

from __future__ import annotations

from collections import deque
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


def is_told(plan: StepPlan) -> bool:
    """Whether the last stage tells the first one what this step has sampled: one token for each row that samples."""
    return plan.drafts is None and plan.exact is None and bool(plan.sample.any())


class KnownTokens:
    """Knows which tokens the first stage lacks: those that it takes in before a plan, and those that the host gathers
    from results, until the next plan is sent.
    """

    def __init__(self) -> None:
        # by slot: the step in which its request entered it, and the newest one that was to tell its token
        self._steps: np.ndarray = np.zeros((2, 0), np.int64)
        self._found: list[Known] = []
        self._told: deque[int] = deque()  # steps whose tokens the first stage has not been asked to take in
        self._collected = -1  # the newest step whose result is there

    def planned(self, plan: StepPlan) -> int:
        """A plan is sent: the slots that it fills begin anew. Returns of how many steps, the oldest ones, the first
        stage takes in the tokens before: of all that have ended, so that none waits for long, and of those in flight
        that the plan goes on from.
        """
        most = max([init.slot for init in plan.new], default=-1)
        if len(plan.slots):
            most = max(most, int(plan.slots.max()))
        if most >= self._steps.shape[1]:
            more: np.ndarray = np.full((2, 2 * most + 2 - self._steps.shape[1]), -1, np.int64)
            self._steps = np.concatenate([self._steps, more], 1)
        for init in plan.new:
            self._steps[:, init.slot] = plan.step_id, -1
        needed = max(self._collected, int(self._steps[1, plan.slots].max(initial=-1)))
        count = 0
        while self._told and self._told[0] <= needed:
            self._told.popleft()
            count += 1
        if is_told(plan):
            self._told.append(plan.step_id)
            self._steps[1, plan.slots[plan.sample]] = plan.step_id
        return count

    def sampled(self, plan: StepPlan, result: StepResult) -> None:
        """A plan's result is there. Tokens of requests that have left their slot meanwhile are nobody's."""
        self._collected = plan.step_id
        if is_told(plan):
            return
        last = self._steps[0, plan.slots] <= plan.step_id
        first = plan.num_computed.astype(np.int64) + plan.num_tokens
        ids = np.array(result.token_ids, np.int64)
        counts: np.ndarray
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
