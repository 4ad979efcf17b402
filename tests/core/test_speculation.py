"""Steps that verify drafts, at any depth: tokens are those without drafts, whatever is accepted; pooled requests and
pipelines beside them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.simulation import EOS, POLICIES, Simulation, expected_output, fold, full_policy
from vllm.core.request import Status
from vllm.core.scheduler import SchedulerLimits
from vllm.step.result import Logprobs, TokenLogprobs


def limits(**kwargs: Any) -> SchedulerLimits:
    return SchedulerLimits(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 96, **kwargs})


def simulation(policy: str, drafts: int, blocks: int = 200, depth: int = 1, **kwargs: Any) -> Simulation:
    sizes = replace(POLICIES[policy], states_per_slot=drafts + 1)
    return Simulation(sizes, blocks, limits(num_drafts=drafts, **kwargs), depth)


def check_invariant(sim: Simulation) -> None:
    """`num_computed` is an upper bound of the device's truth, `num_computed - num_drafted` a lower one."""
    sim.scheduler.check_invariants()
    for request in sim.scheduler.running:
        assert 0 <= request.num_drafted <= request.num_pending
        if request.num_computed >= request.entered_with and not request.pooled:
            assert request.num_computed == len(request.tokens) + request.num_pending - 1
            truth = len(sim.device.slots[request.slot][0]) - 1
            assert request.num_computed - request.num_drafted <= truth <= request.num_computed


@settings(max_examples=120, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    drafts=st.integers(1, 4),
    depth=st.integers(1, 3),
    blocks=st.sampled_from([40, 60, 300]),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    priority=st.booleans(),
    max_pending=st.sampled_from([None, 0]),
    seed=st.integers(0, 1 << 20),
)
def test_tokens_are_those_without_drafts(
    policy: str, drafts: int, depth: int, blocks: int, right: float, priority: bool, max_pending: int | None, seed: int
) -> None:
    rng = random.Random(seed)
    sim = simulation(policy, drafts, blocks, depth, priority=priority, max_pending=max_pending)
    sim.device.right, sim.device.rng = right, rng
    common = [rng.randrange(50) for _ in range(30)]
    want: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for i in range(14):
        prompt = common[: rng.choice([0, 9, 30])] + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        max_tokens, name = rng.randrange(1, 40), str(i)
        parent = rng.choice([None, None, *sim.scheduler.requests])
        if parent is not None:
            prompt = list(sim.scheduler.requests[parent].tokens)[:95]
        want[name] = expected_output(prompt, min(max_tokens, 96 - len(prompt)), frozenset([EOS]))
        sim.add(name, prompt, max_tokens, eos_token_id=EOS, stop_token_ids=(EOS,), priority=i % 3, fork_of=parent)
        for _ in range(rng.randrange(6)):
            sim.step()
            check_invariant(sim)
        if rng.random() < 0.1 and sim.scheduler.requests:
            aborted.add(rng.choice(sorted(sim.scheduler.requests)))
            sim.record(sim.scheduler.abort(aborted))
        if rng.random() < 0.1 and sim.scheduler.requests:
            name = rng.choice(sorted(sim.scheduler.requests))
            sim.scheduler.block(name, "late")
            sim.scheduler.unblock(name, "late")
    while sim.scheduler.has_unfinished():
        assert sim.step(), "stuck"
        check_invariant(sim)
    for name, tokens in want.items():
        assert sim.output[name] == tokens or (name in aborted and tokens[: len(sim.output[name])] == sim.output[name])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(depth: int) -> None:
    def steps(right: float, drafts: int) -> int:
        sim = simulation("full", drafts, depth=depth)
        sim.device.right = right
        sim.add("a", [1] * 5, 60)
        count = 0
        while sim.scheduler.has_unfinished():
            sim.step()
            count += 1
        assert sim.output["a"] == expected_output([1] * 5, 60)
        return count

    assert steps(1.0, 3) <= steps(0.0, 0) / 3 + 2 * depth
    assert steps(0.0, 3) <= steps(0.0, 0) + depth


def test_preemption_with_drafts_in_flight_changes_nothing() -> None:
    for policy in ("full", "mixed", "states and windows"):
        sim = simulation(policy, 3, 44, depth=3)
        work = {str(i): [i] * 18 for i in range(8)}
        for name, prompt in work.items():
            sim.add(name, prompt, 50)
        while sim.scheduler.has_unfinished():
            assert sim.step()
            check_invariant(sim)
        assert sim.scheduler.stats().num_preemptions > 3
        assert all(sim.output[name] == expected_output(prompt, 50) for name, prompt in work.items())


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_of_the_host_travel_with_the_plan(depth: int) -> None:
    """Proposed now and then, right or wrong, also beyond the end and while a step is in flight."""
    sim = Simulation(full_policy(), 200, limits(), depth)
    rng = random.Random(1)
    answer = expected_output([7] * 9, 40)
    sim.add("a", [7] * 9, 40)
    sim.add("b", [8] * 9, 40)
    sim.scheduler.propose("nobody", [1])
    written = 0
    submit = sim.device.submit

    def counting(plan: Any) -> None:
        nonlocal written
        written += sum(len(w.token_ids) for w in plan.writes)
        submit(plan)

    sim.device.submit = counting  # type: ignore[method-assign]
    while sim.scheduler.has_unfinished():
        if rng.random() < 0.7 and "a" in sim.scheduler.requests:
            known = len(sim.output["a"])
            right = answer[known : known + rng.randrange(1, 9)]
            sim.scheduler.propose("a", right if rng.random() < 0.7 else [1, 2, 3, 4])
        assert sim.step()
    assert sim.output == {"a": answer, "b": expected_output([8] * 9, 40)}
    assert written > 10 or depth > 1


def test_tokens_behind_a_stop_among_accepted_ones_are_dropped_with_their_logprobs() -> None:
    sim = simulation("full", 4)
    sim.device.right = 1.0
    answer = expected_output([5] * 6, 20)
    collect = sim.device.collect

    def with_logprobs() -> Any:
        result = collect()
        assert result.counts is not None
        entries = [TokenLogprobs([t], [-1.0], 1) for t in result.token_ids]
        return msgspec.structs.replace(result, news=(Logprobs(0, entries),) if entries else ())

    sim.device.collect = with_logprobs  # type: ignore[method-assign]
    seen: list[int] = []
    record = sim.record

    def recording(outputs: Any) -> None:
        for out in outputs:
            assert len(out.logprobs) == len(out.new_token_ids)
            seen.extend(entry.token_ids[0] for entry in out.logprobs)
        record(outputs)

    sim.record = recording  # type: ignore[method-assign]
    sim.add("a", [5] * 6, 20, stop_token_ids=(answer[7],))
    sim.run()
    stop = answer.index(answer[7]) + 1
    assert sim.output["a"] == seen == answer[:stop]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafts", [0, 2])
def test_pooled_requests_end_without_a_token_beside_generating_ones(depth: int, drafts: int) -> None:
    sim = simulation("mixed", drafts, 60, depth)
    work = {f"p{i}": [i + 1] * (10 + 7 * i) for i in range(8)}
    for i, (name, prompt) in enumerate(work.items()):
        sim.pool(name, prompt)
        sim.add(f"g{i}", prompt, 25)
    sim.run()
    for i, (name, prompt) in enumerate(work.items()):
        state = 0
        for token in prompt:
            state = fold(state, token)
        assert sim.output[name] == [] and sim.reasons[name] == ("stop", None)
        assert int.from_bytes(sim.pooled[name], "little") == state
        assert sim.output[f"g{i}"] == expected_output(prompt, 25)
    assert sim.scheduler.kv.pool.num_free == 59


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_in_a_pipeline_disjoint_sets_take_turns(stages: int, ahead: bool) -> None:
    """No request is in two steps at once, all stages have work, and nobody is left behind."""
    pending = 1 if ahead else 0
    sim = Simulation(
        full_policy(), 300, limits(max_pending=pending, stages=stages, max_num_seqs=12, max_num_batched_tokens=96),
        stages,
    )  # fmt: skip
    sim.ahead = ahead
    for i in range(12):
        sim.add(str(i), [i] * 6, 40)
    in_flight: list[set[int]] = []
    submit, collect = sim.device.submit, sim.device.collect

    def watch(plan: Any) -> None:
        rows = set(plan.slots[plan.sample].tolist())
        assert not any(rows & other for other in in_flight)
        in_flight.append(rows)
        submit(plan)

    def taken() -> Any:
        in_flight.pop(0)
        return collect()

    sim.device.submit, sim.device.collect = watch, taken  # type: ignore[method-assign]
    for _ in range(40):
        sim.step()
    lengths = [len(tokens) for tokens in sim.output.values()]
    assert max(lengths) - min(lengths) <= 2
    assert len(in_flight) >= stages - 1 and all(len(rows) == 12 // stages for rows in in_flight)
    sim.run()
    assert all(sim.output[str(i)] == expected_output([i] * 6, 40) for i in range(12))


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(2, 4), blocks=st.sampled_from([40, 60, 300]), priority=st.booleans(), seed=st.integers(0, 2**20),
    policy=st.sampled_from(sorted(POLICIES)), early=st.booleans(),
)  # fmt: skip
def test_steps_that_are_planned_ahead_know_all_tokens_when_they_are_submitted(
    stages: int, blocks: int, priority: bool, seed: int, policy: str, early: bool
) -> None:
    """Or at most those of the oldest step in flight are missing. With requests that come late, are preempted, aborted,
    or stop where nobody knew.
    """
    rng = random.Random(seed)
    sim = Simulation(POLICIES[policy], blocks, limits(max_pending=1, stages=stages, priority=priority), stages)
    sim.ahead, sim.early = True, early
    in_flight: list[set[str]] = []
    submit, collect = sim.device.submit, sim.device.collect

    def watch(plan: Any) -> None:
        names = {r.id for r, samples in zip(sim.scheduler.planned, plan.sample.tolist(), strict=True) if samples}
        assert not any(names & other for other in in_flight[early:])
        in_flight.append(names)
        assert len(in_flight) <= stages + early
        submit(plan)

    def taken() -> Any:
        in_flight.pop(0)
        return collect()

    sim.device.submit, sim.device.collect = watch, taken  # type: ignore[method-assign]
    work: dict[str, tuple[list[int], int]] = {}
    for i in range(14):
        prompt = [rng.randrange(6) for _ in range(rng.randrange(1, 30))]
        work[str(i)] = prompt, rng.randrange(1, 25)
        answer = expected_output(prompt, work[str(i)][1])
        stop = (rng.choice(answer),) if i % 3 == 0 else ()
        if stop:
            work[str(i)] = prompt, answer.index(stop[0]) + 1
        sim.add(str(i), prompt, len(answer), stop_token_ids=stop, priority=rng.randrange(3))
        for _ in range(rng.randrange(4)):
            sim.step()
        if i == 9:
            sim.record(sim.scheduler.abort(["7"]))
    sim.run()
    for name, (prompt, count) in work.items():
        wanted = expected_output(prompt, count)
        assert sim.output[name] == wanted or (name == "7" and sim.output[name] == wanted[: len(sim.output[name])])
    assert sim.scheduler.kv.pool.num_free == blocks - 1


def test_an_empty_plan_is_a_step_like_any_other() -> None:
    sim = Simulation(full_policy(), 100, limits(), 2)
    sim.add("a", [1] * 9, 10)
    for i in range(30):
        if i % 3 == 0 and sim.scheduler.num_in_flight < 2:
            plan = sim.scheduler.empty_plan()
            assert len(plan.slots) == 0
            sim.device.submit(plan)
        sim.step()
    while sim.device.results:
        sim.record(sim.scheduler.apply(sim.device.collect()))
    assert sim.output["a"] == expected_output([1] * 9, 10) and sim.scheduler.num_in_flight == 0


def test_a_proposal_does_not_outlive_its_residency() -> None:
    sim = Simulation(full_policy(), 100, limits(), 1)
    sim.add("a", [1] * 9, 10)
    sim.step()
    sim.scheduler.propose("a", [3, 3])
    sim.scheduler.block("a", "late")
    assert sim.scheduler.requests["a"].status is Status.BLOCKED and not sim.scheduler.requests["a"].proposal
    sim.scheduler.unblock("a", "late")
    sim.run()
    assert sim.output["a"] == expected_output([1] * 9, 10)
