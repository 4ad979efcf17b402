"""Admission policies: small objects, consulted in order, that say whether a waiting request may start in this step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from vllm.core.request import Request


class Verdict(Enum):
    """What a policy says of one waiting request."""

    ADMIT = "admit"
    SKIP = "skip"  # not this one; those behind it may go
    STOP = "stop"  # nobody this step


@dataclass(slots=True)
class StepView:
    """What policies may look at: the requests that run, and those of them whose prompt is not computed yet."""

    num_running: int
    num_prefilling: int
    num_long_prefilling: int
    step_id: int


class AdmissionPolicy(Protocol):
    """Decides on one waiting request. `observe` tells it how long a step that computed prompts took."""

    def admit(self, request: Request, view: StepView) -> Verdict: ...

    def observe(self, prompt_step_seconds: float) -> None: ...


class DelayPolicy:
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


class PartialPrefillPolicy:
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

    def observe(self, prompt_step_seconds: float) -> None:
        """Durations do not matter here."""
