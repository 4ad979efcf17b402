"""What a running request costs the core in each step, counted instead of timed: bytecode instructions, and calls.

A count is the same on every machine and in any company. It says nothing about what one call into C costs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.step.messages import CoreRequest
from vllm.step.result import StepResult

RUNNING, STEPS = 64, 32
# At c1cf030, with Python 3.11: 161.8 and 125.8 instructions, 8.5 and 5.4 calls.
CEILING = {"schedule": (163, 8.6), "apply": (127, 5.5)}
# Other versions of Python compile the same lines to other instructions.
SLACK = 1.0 if sys.version_info[:2] == (3, 11) else 1.25


class Counter:
    """Counts instructions executed in Python code, and calls from it."""

    def __init__(self) -> None:
        self.instructions = self.calls = 0

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        before = sys.gettrace(), sys.getprofile()
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        try:
            return function(*args)
        finally:
            sys.setprofile(before[1])
            sys.settrace(before[0])

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.instructions += event == "opcode"
        return self._trace

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        self.calls += event in ("call", "c_call")


def measure(running: int) -> dict[str, tuple[float, float]]:
    """Instructions and calls per step of each half, with `running` requests that decode."""
    layout = KVLayout.alike((KVGroup(KVKind.FULL, (0,)),), 16, 1, 64, 2)
    scheduler = Scheduler(SchedulerLimits(running, 8192, 2048), layout.policy, running * 64 + 200)
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    for i in range(running):
        scheduler.add(CoreRequest(str(i), [(i * 7 + j) % 997 for j in range(1 + i % 16)], params, seed=i))
    counters = {"schedule": Counter(), "apply": Counter()}
    for step in range(STEPS + 4):
        if step == 4:
            counters = {"schedule": Counter(), "apply": Counter()}
        plan = counters["schedule"](scheduler.schedule)
        assert len(plan.slots) == running
        counters["apply"](scheduler.apply, StepResult(plan.step_id, [5] * running))
    return {name: (c.instructions / STEPS, c.calls / STEPS) for name, c in counters.items()}


@pytest.fixture(scope="module")
def cost() -> dict[str, tuple[float, float]]:
    """Per running request and step: what 64 cost beyond what one costs."""
    many, one = measure(RUNNING + 16), measure(16)
    return {k: ((many[k][0] - one[k][0]) / RUNNING, (many[k][1] - one[k][1]) / RUNNING) for k in many}


@pytest.mark.parametrize("half", CEILING)
def test_a_running_request_costs_no_more_than_it_did(half: str, cost: dict[str, tuple[float, float]]) -> None:
    instructions, calls = cost[half]
    assert instructions <= CEILING[half][0] * SLACK, f"{instructions} instructions per request and step"
    assert calls <= CEILING[half][1] * SLACK, f"{calls} calls per request and step"
    assert instructions > 20, "the counter does not count"
