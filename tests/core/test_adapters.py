"""Slots for adapters: never more than there are, never taken from a running request, and nobody starves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.simulation import full_policy
from vllm import SamplingParams
from vllm.core.adapters import AdapterSlots
from vllm.core.policies import StepView, Verdict
from vllm.core.request import Request
from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.step.messages import CoreRequest
from vllm.step.result import StepResult


def request(number: int, adapter: int) -> Request:
    message = CoreRequest(f"r{number}", [1], SamplingParams(), 0, lora_id=adapter, arrival_time=float(number))
    return Request(message, 100, 1, number)


def view() -> StepView:
    return StepView([], 0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 4), adapters=st.integers(1, 7))
def test_a_running_request_keeps_its_adapter(seed: int, slots: int, adapters: int) -> None:
    rng = random.Random(seed)
    policy = AdapterSlots(slots, clock=lambda: 0.0)
    device: dict[int, int] = {}  # slot -> adapter
    running: list[Request] = []
    for number in range(120):
        if running and rng.random() < 0.5:
            done = running.pop(rng.randrange(len(running)))
            policy.left(done)
            policy.forget(done)
        if rng.random() < 0.03:
            for one in running:
                policy.left(one)
            running.clear()
            policy.failed()
            device.clear()
        new = request(number, rng.randrange(adapters + 1))
        verdict = policy.admit(new, view())
        used = {r.lora_id for r in running if r.lora_id}
        assert (verdict is Verdict.ADMIT) == (not new.lora_id or new.lora_id in used or len(used) < slots)
        if verdict is Verdict.ADMIT:
            policy.admitted(new)
            running.append(new)
        for load in policy.loads():
            device[load.slot] = load.adapter_id
        assert len(device) <= slots
        for one in running:
            assert one.columns == () if not one.lora_id else device[one.columns[0]] == one.lora_id


def test_a_request_that_waited_long_is_not_passed_any_more() -> None:
    now = [0.0]
    policy = AdapterSlots(1, patience=1.0, clock=lambda: now[0])
    first = request(0, 1)
    assert policy.admit(first, view()) is Verdict.ADMIT
    policy.admitted(first)
    starving = request(1, 2)
    assert policy.admit(starving, view()) is Verdict.SKIP
    assert policy.admit(request(2, 1), view()) is Verdict.ADMIT, "its adapter is there"
    now[0] = 1.5
    assert policy.admit(request(3, 1), view()) is Verdict.SKIP
    assert policy.admit(request(4, 0), view()) is Verdict.ADMIT, "it needs no slot"
    policy.left(first)
    policy.forget(first)
    assert policy.admit(starving, view()) is Verdict.ADMIT
    policy.admitted(starving)
    assert [load.adapter_id for load in policy.loads()] == [1, 2]
    policy.left(starving)
    policy.forget(starving)
    assert policy.admit(request(3, 1), view()) is Verdict.ADMIT


def test_the_least_recently_used_adapter_gives_way_and_pinned_ones_stay() -> None:
    policy = AdapterSlots(3, clock=lambda: 0.0)

    def use(adapter: int) -> int:
        one = request(0, adapter)
        assert policy.admit(one, view()) is Verdict.ADMIT
        policy.admitted(one)
        policy.left(one)
        policy.forget(one)
        return one.columns[0]

    places = {adapter: use(adapter) for adapter in (1, 2, 3)}
    policy.pin(2)
    use(1)
    assert use(4) == places[3]
    assert use(5) == places[1]
    assert use(2) == places[2]
    policy.pin(4)
    with pytest.raises(ValueError, match="max_loras"):
        policy.pin(5)
    policy.remove(2)
    policy.pin(5)
    assert use(6) == places[2]


@pytest.mark.parametrize("count", (8, 16, 200))
def test_a_request_for_another_adapter_waits_for_those_that_run_and_takes_nothing_from_them(count: int) -> None:
    """One account has all slots, which is more than its share; its adapter is the only one that fits in."""
    now = [0.0]
    limits = SchedulerLimits(8, 2048, 1024)
    policies = [AdapterSlots(1, clock=lambda: now[0])]
    scheduler = Scheduler(limits, full_policy(16), 2000, policies=policies, clock=lambda: now[0])
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for i in range(count):
        message = CoreRequest(f"g{i}", [i] * 8, params, 0, arrival_time=0.0, account="g", lora_id=1)
        scheduler.add(message)
    waited, preempted, ended = 0, 0, []
    for step in range(200 * count):
        plan = scheduler.schedule()
        if plan is None:
            break
        now[0] += 0.01
        outputs = scheduler.apply(StepResult(plan.step_id, [5 if s else -1 for s in plan.sample.tolist()]))
        ended += [out.request_id for out in outputs if out.finish_reason]
        preempted = scheduler.stats().num_preemptions
        if step == 5:
            scheduler.add(CoreRequest("other", [1] * 8, params, 0, arrival_time=now[0], lora_id=2))
            scheduler.add(CoreRequest("base", [1] * 8, params, 0, arrival_time=now[0]))
        waited += "other" not in ended
    assert set(ended) == {"other", "base", *(f"g{i}" for i in range(count))}
    assert preempted <= 2, "for the one without an adapter"
    assert waited < 5 + 100 + 4 * 100, "those that start within a second, and those that run then, and its own tokens"
