"""A lower tier in host memory: what was evicted comes back, nobody waits for others' loads, nothing stays held."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.simulation import POLICIES, Simulation, expected_output, full_policy
from vllm.core.scheduler import SchedulerLimits
from vllm.step.plan import StepPlan, TransferKind


def simulation(policy: str = "full", blocks: int = 30, depth: int = 1, places: int = 200, **kwargs: Any) -> Simulation:
    limits = SchedulerLimits(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 80, **kwargs})
    return Simulation(POLICIES[policy], blocks, limits, depth, tier_blocks=places)


def check_nothing_held(sim: Simulation) -> None:
    assert sim.scheduler.kv.tier is not None
    for pool in (sim.scheduler.kv.pool, sim.scheduler.kv.tier.places):
        assert pool.num_free == pool.num_blocks - 1


def turn_over(sim: Simulation) -> None:
    """Fill the device's cache with other prompts."""
    for i in range(5):
        sim.add(f"other {len(sim.output)}", [i + 10] * 60, 2)
        sim.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_evicted_prefix_comes_back(depth: int) -> None:
    sim = simulation(depth=depth)
    prompt = [i % 50 for i in range(41)]
    sim.add("a", prompt, 3)
    sim.run()
    turn_over(sim)
    hits = sim.scheduler.stats().prefix_cache_hits
    sim.add("b", prompt, 3)
    sim.run()
    assert sim.device.num_loaded == 10 and sim.scheduler.stats().prefix_cache_hits == hits + 40
    assert sim.output["a"] == sim.output["b"] == expected_output(prompt, 3)
    check_nothing_held(sim)


def test_others_run_while_a_prefix_is_loaded() -> None:
    sim = simulation(depth=2)
    prompt = [i % 50 for i in range(41)]
    sim.add("a", prompt, 3)
    sim.run()
    turn_over(sim)
    sim.add("b", prompt, 3)
    sim.add("c", [3] * 5, 6)
    plan = sim.scheduler.schedule()
    assert plan is not None and [n.request_id for n in plan.new] == ["c"]
    assert sum(t.kind is TransferKind.LOAD for t in plan.transfers) == 10
    assert [r.id for r in sim.scheduler.running] == ["c"] and sim.scheduler.num_waiting == 1
    sim.device.submit(plan)
    sim.record(sim.scheduler.apply(sim.device.collect()))
    plan = sim.scheduler.schedule()
    assert plan is not None and [(n.request_id, n.num_computed) for n in plan.new] == [("b", 40)]
    sim.device.submit(plan)
    sim.run()
    assert sim.output["b"] == expected_output(prompt, 3)


def test_a_prefix_that_loads_is_waited_for_beside_a_crowd() -> None:
    sim = simulation(blocks=40, max_num_seqs=4)
    prompt = [i % 50 for i in range(41)]
    sim.add("a", prompt, 3)
    sim.run()
    turn_over(sim)
    for i in range(3):
        sim.add(f"crowd {i}", [60 + i] * 5, 12, account="many")
    for _ in range(3):
        sim.step()
    sim.add("b", prompt, 3)
    plan = sim.scheduler.schedule()
    assert plan is not None and sum(t.kind is TransferKind.LOAD for t in plan.transfers) == 10
    assert not plan.new and min(plan.slots) >= 0
    sim.device.submit(plan)
    sim.run()
    assert sim.output["b"] == expected_output(prompt, 3)
    check_nothing_held(sim)


def test_blocks_being_saved_are_not_given_to_others() -> None:
    sim = simulation(blocks=24, depth=2)
    saving: list[set[int]] = []
    submit, collect = sim.device.submit, sim.device.collect

    def watch(plan: StepPlan) -> None:
        written = {b for append in plan.blocks for b in append.block_ids}
        written |= {b for new in plan.new for b in new.block_ids[0][new.num_computed // 4 :]}
        assert not any(written & blocks for blocks in saving)
        saving.append({t.src for t in plan.transfers if t.kind is TransferKind.SAVE})
        assert not written & saving[-1]
        submit(plan)

    def taken() -> Any:
        saving.pop(0)
        return collect()

    sim.device.submit, sim.device.collect = watch, taken  # type: ignore[method-assign]
    for i in range(30):
        sim.add(str(i), [i % 7] * (20 + i), 10)
    sim.run()
    assert len(sim.device.tier) > 20
    check_nothing_held(sim)


def test_an_abort_or_a_failed_step_while_loading_leaves_nothing_behind() -> None:
    for failing in (False, True):
        sim = simulation()
        prompt = [i % 50 for i in range(41)]
        sim.add("a", prompt, 3)
        sim.run()
        turn_over(sim)
        sim.add("b", prompt, 3)
        sim.add("c", [3] * 5, 6)
        plan = sim.scheduler.schedule()
        assert plan is not None and any(t.kind is TransferKind.LOAD for t in plan.transfers)
        if failing:
            sim.record(sim.scheduler.isolate("a step failed"))
        else:
            sim.record(sim.scheduler.abort(["b"]))
            sim.device.submit(plan)
            sim.record(sim.scheduler.apply(sim.device.collect()))
        sim.scheduler.check_invariants()
        sim.run()
        assert sim.finished["b"] == ("length" if failing else "abort")
        assert sim.output["c"] == expected_output([3] * 5, 6)
        check_nothing_held(sim)


def test_without_a_tier_nothing_is_saved() -> None:
    sim = Simulation(full_policy(), 100, SchedulerLimits(4, 64, 80), 1)
    sim.add("a", [1] * 40, 3)
    sim.run()
    assert not sim.device.tier and sim.scheduler.kv.tier is None


@settings(max_examples=80, deadline=None)
@given(
    policy=st.sampled_from(["full", "mixed", "state", "states and windows", "cross"]),
    depth=st.integers(1, 3),
    places=st.sampled_from([3, 20, 300]),
    blocks=st.sampled_from([48, 90]),
    drafts=st.sampled_from([0, 2]),
    seed=st.integers(0, 1 << 20),
)
def test_answers_are_right_whatever_is_saved_and_loaded(
    policy: str, depth: int, places: int, blocks: int, drafts: int, seed: int
) -> None:
    rng = random.Random(seed)
    if "state" in policy:
        drafts = 0
    sim = simulation(policy, blocks, depth, places, num_drafts=drafts)
    prompts = [[rng.randrange(50) for _ in range(50)] for _ in range(4)]
    want: dict[str, list[int]] = {}
    for i in range(25):
        prompt = rng.choice(prompts)[: rng.randrange(1, 51)]
        want[str(i)] = expected_output(prompt, 8)
        sim.add(str(i), prompt, 8, account=rng.choice([None, "many"]))
        for _ in range(rng.randrange(5)):
            sim.step()
            sim.scheduler.check_invariants()
        if rng.random() < 0.1:
            sim.device.results.clear()
            sim.record(sim.scheduler.isolate("a step failed"))
        if rng.random() < 0.1:
            name = rng.choice(sorted(want))
            sim.record(sim.scheduler.abort([name]))
    sim.run()
    for name, tokens in want.items():
        assert sim.output[name] == tokens or sim.finished[name] in ("abort", "error")
    check_nothing_held(sim)
