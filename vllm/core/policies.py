"""Admission policies: small objects, consulted in order, that say whether a waiting request may start in this step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from vllm.core.request import Request
from vllm.step.plan import AdapterLoad


class Verdict(Enum):
    """What a policy says of one waiting request."""

    ADMIT = "admit"
    SKIP = "skip"  # not this one; those behind it may go
    STOP = "stop"  # nobody this step


@dataclass(slots=True)
class StepView:
    """What policies may look at: the requests that run, and how many of them have prompt left to compute. Requests
    admitted while a step is planned are counted at once.
    """

    running: Sequence[Request]
    num_prefilling: int
    num_long_prefilling: int
    step_id: int

    @property
    def num_running(self) -> int:
        return len(self.running)


class AdmissionPolicy:
    """Decides on waiting requests, one at a time. A policy says what it has to say; the rest is neutral.

    What a policy counts (adapters, encoder tokens, ...) it takes in `admitted` and gives back in `left`, which is
    called once for each `admitted`: when the request ends, is preempted or blocked, or is tried again after a failure.
    """

    def admit(self, request: Request, view: StepView) -> Verdict:
        """Whether a waiting request may start in this step. It may still not start, for want of blocks; and it may be
        asked for twice in a step, first before others are preempted for it.
        """
        return Verdict.ADMIT

    def limit(self, request: Request, count: int) -> int:
        """How many of the next `count` tokens of a running prompt may be computed in this step; 0 leaves it out."""
        return count

    def admitted(self, request: Request) -> None:
        """The request has a slot."""

    def left(self, request: Request) -> None:
        """The request has given its slot back; it may come again."""

    def forget(self, request: Request) -> None:
        """The request has ended and will not come again. Follows `left` if it had a slot."""

    def loads(self) -> tuple[AdapterLoad, ...]:
        """What the step being planned needs on the device, since the last call."""
        return ()

    def failed(self) -> None:
        """A step failed: what steps in flight were to bring to the device may not be there."""

    def observe(self, prompt_step_seconds: float) -> None:
        """How long a step that computed prompts took."""


class DelayPolicy(AdmissionPolicy):
    """`scheduler_delay_factor`: let prompts gather for `factor` times the duration of the last step with prompts."""

    def __init__(self, factor: float, clock: Callable[[], float] = time.time) -> None:
        self._factor = factor
        self._clock = clock
        self._last_prompt_seconds = 0.0

    def admit(self, request: Request, view: StepView) -> Verdict:
        waited = self._clock() - request.arrival_time
        if view.num_running == 0 or waited > self._factor * self._last_prompt_seconds:
            return Verdict.ADMIT
        return Verdict.STOP

    def observe(self, prompt_step_seconds: float) -> None:
        self._last_prompt_seconds = prompt_step_seconds


class PartialPrefillPolicy(AdmissionPolicy):
    """Bounds how many prompts are computed at the same time, and how many long ones among them.

    A prompt is long if it has more than `long_threshold` tokens. Short prompts pass long ones that must wait.
    """

    def __init__(self, max_partial: int, max_long: int, long_threshold: int) -> None:
        self._max_partial = max_partial
        self._max_long = max_long
        self._long_threshold = long_threshold

    def admit(self, request: Request, view: StepView) -> Verdict:
        if view.num_prefilling >= self._max_partial:
            return Verdict.STOP
        if len(request.tokens) > self._long_threshold and view.num_long_prefilling >= self._max_long:
            return Verdict.SKIP
        return Verdict.ADMIT
