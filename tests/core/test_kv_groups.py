"""What each kind of KV group holds, finds and gives back; snapshots of states; transfers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.simulation import (
    POLICIES,
    Simulation,
    cross_policy,
    expected_output,
    full_policy,
    state_policy,
    uneven_policy,
)
from vllm.core.kv_manager import resolve
from vllm.core.scheduler import SchedulerLimits
from vllm.step.kv_policy import KVGroup, KVKind, KVPolicy
from vllm.step.plan import StepPlan, Transfer, TransferKind


def limits(**kwargs: Any) -> SchedulerLimits:
    return SchedulerLimits(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 96, **kwargs})


def run_step(sim: Simulation) -> StepPlan:
    plan = sim.scheduler.schedule()
    assert plan is not None
    sim.device.submit(plan)
    sim.record(sim.scheduler.apply(sim.device.collect()))
    return plan


@pytest.mark.parametrize("full", [True, False])
def test_a_prompt_is_cut_where_its_state_is_kept_and_another_starts_there(full: bool) -> None:
    sim = Simulation(state_policy(full), 100, limits(max_num_batched_tokens=64), 1)
    prompt = [i % 50 for i in range(31)]
    sim.add("a", prompt, 3)
    plans = [run_step(sim) for _ in range(4)]
    assert [int(p.num_tokens[0]) for p in plans] == [12, 12, 4, 3]  # snapshots at 12, 24 and 28, the last useful one
    assert [t.kind for t in plans[0].transfers] == [TransferKind.ZERO]
    assert all([t.kind for t in p.transfers] == [TransferKind.COPY] for p in plans[1:])
    sim.run()
    for name, shared, start in (("b", 31, 28), ("c", 27, 24), ("d", 12, 12), ("e", 11, 0), ("f", 31, 28)):
        sim.add(name, [*prompt[:shared], 7, 7][: shared + 1], 3)
        plan = run_step(sim)
        assert plan.new[0].num_computed == start, name
        sim.run()
        assert sim.output[name] == expected_output([*prompt[:shared], 7, 7][: shared + 1], 3)


def test_snapshots_that_nobody_used_lately_make_room() -> None:
    sim = Simulation(state_policy(snapshots=2, interval=96), 200, limits(max_num_seqs=1), 1)
    for i in range(6):
        sim.add(str(i), [i] * 30, 2)
        sim.run()
    assert sim.scheduler.kv.states is not None and sim.scheduler.kv.states.num_cached == 2
    sim.add("old", [0] * 30, 2)
    assert run_step(sim).new[0].num_computed == 0
    sim.run()
    sim.add("new", [5] * 30, 2)
    assert run_step(sim).new[0].num_computed == 28


def test_forks_of_a_state_start_from_the_last_snapshot_of_their_prompt() -> None:
    sim = Simulation(state_policy(), 200, limits(), 2)
    prompt = [i % 50 for i in range(30)]
    sim.add("p", prompt, 12)
    for i in range(4):
        sim.add(f"c{i}", prompt, 12, fork_of="p")
    sim.run()
    assert all(output == expected_output(prompt, 12) for output in sim.output.values())
    assert sim.scheduler.stats().prefix_cache_hits == 4 * 28


def test_a_preempted_state_is_computed_from_its_last_snapshot() -> None:
    sim = Simulation(state_policy(), 26, limits(max_num_seqs=6), 2)
    work = {str(i): [i + 1] * 20 for i in range(6)}
    for name, prompt in work.items():
        sim.add(name, prompt, 40)
    sim.run()
    assert sim.scheduler.stats().num_preemptions > 0
    assert all(sim.output[name] == expected_output(prompt, 40) for name, prompt in work.items())


def test_without_prefix_caching_or_chunks_no_prompt_is_cut() -> None:
    for kwargs, caching in (({}, False), ({"chunked_prefill": False}, True)):
        sim = Simulation(
            state_policy(), 100, limits(max_num_batched_tokens=64, **kwargs), 1, enable_prefix_caching=caching
        )
        sim.add("a", [3] * 31, 3)
        assert run_step(sim).num_tokens.tolist() == [31]
        sim.run()
        assert sim.output["a"] == expected_output([3] * 31, 3)


def test_a_hit_ends_where_the_blocks_of_all_groups_end() -> None:
    sim = Simulation(uneven_policy(), 200, limits(max_num_batched_tokens=64), 1)
    prompt = [i % 50 for i in range(50)]
    sim.add("a", prompt, 3)
    sim.run()
    sim.add("b", prompt, 3)
    plan = run_step(sim)
    assert plan.new[0].num_computed == 48  # a multiple of 4, 8 and 12
    assert [len(t) for t in plan.new[0].block_ids] == [13, 7, 5]
    sim.run()
    sim.add("c", [*prompt[:47], 9, 9], 3)
    assert run_step(sim).new[0].num_computed == 24


def test_a_prompt_that_just_fits_in_starts_behind_a_cached_prefix_too() -> None:
    """The blocks of a window that it has already are among those that it needs."""
    windows = tuple(KVGroup(KVKind.SLIDING, (i,), window=7) for i in (1, 2, 3))
    policy = KVPolicy((KVGroup(KVKind.FULL, (0,)), *windows), unit=16)
    small = limits(max_num_seqs=1, max_num_batched_tokens=6, max_model_len=48)
    sim = Simulation(policy, 1 + policy.blocks_for(48, 6), small, 1)
    prompt = [i % 50 for i in range(41)]
    sim.add("a", prompt[:17], 3)
    sim.run()
    sim.add("b", prompt, 3)
    assert run_step(sim).new[0].num_computed == 16
    sim.run()
    assert sim.output["b"] == expected_output(prompt, 3)


def test_snapshots_stand_where_the_blocks_of_all_groups_end() -> None:
    sim = Simulation(POLICIES["states and long blocks"], 200, limits(max_num_batched_tokens=64), 1)
    prompt = [i % 50 for i in range(30)]
    sim.add("a", prompt, 3)
    sim.run()
    sim.add("b", prompt, 3)
    assert run_step(sim).new[0].num_computed == 24, "29 tokens could be skipped, blocks of 8 end at 24"
    sim.run()
    assert sim.output["b"] == expected_output(prompt, 3)


def test_cross_attention_holds_what_the_encoder_needs_from_the_first_step_on() -> None:
    sim = Simulation(cross_policy(), 100, limits(), 1)
    sim.device.encoded = {"a": 7, "b": 8}
    sim.add("a", [1] * 40, 20, encoder_tokens=18, encoder_key=b"a")
    sim.add("b", [1] * 40, 20, encoder_tokens=3, encoder_key=b"b")
    plan = run_step(sim)
    assert [len(n.block_ids[1]) for n in plan.new] == [5]  # the budget ended there
    sim.run()
    sim.add("again", [1] * 40, 2, encoder_tokens=18, encoder_key=b"b")
    assert sim.scheduler.stats().prefix_cache_hits == 0
    sim.run()
    assert sim.scheduler.stats().prefix_cache_hits == 36, "the same text under the same encoder input"
    assert all(sim.output[name] == expected_output([1] * 40, 20) for name in "ab")


def test_forks_share_what_the_encoder_said() -> None:
    sim = Simulation(cross_policy(), 100, limits(), 1, enable_prefix_caching=False)
    sim.device.encoded = {"p": 7, "c": 7}
    sim.add("p", [1] * 10, 20, encoder_tokens=30)
    sim.add("c", [1] * 10, 20, encoder_tokens=30, fork_of="p")
    for _ in range(3):
        run_step(sim)
    parent, child = (sim.scheduler.requests[name].tables[1] for name in "pc")
    assert parent == child and len(parent) == 8
    sim.run()
    assert sim.output["c"] == sim.output["p"] == expected_output([1] * 10, 20)


def test_the_same_tokens_over_other_content_are_not_found() -> None:
    sim = Simulation(full_policy(), 200, limits(), 1)
    prompt = [1] * 30

    def hits(name: str, *keys: tuple[int, int, bytes]) -> int:
        before = sim.scheduler.stats().prefix_cache_hits
        sim.add(name, prompt, 2, content_keys=keys)
        sim.run()
        return sim.scheduler.stats().prefix_cache_hits - before

    assert hits("plain") == 0
    assert hits("picture", (10, 8, b"cat")) == 8  # blocks before the picture
    assert hits("same", (10, 8, b"cat")) == 28
    assert hits("other", (10, 8, b"dog")) == 8
    assert hits("moved", (11, 8, b"cat")) == 8
    assert hits("two", (10, 8, b"cat"), (20, 4, b"dog")) == 20
    assert hits("plain again") == 28


def test_a_model_without_a_cache_needs_no_blocks() -> None:
    sim = Simulation(KVPolicy((), 16), 1, limits(max_num_batched_tokens=96), 1)
    sim.add("a", [1] * 40, 1)
    sim.add("b", [2] * 40, 1)
    plan = sim.scheduler.schedule()
    assert plan is not None and plan.num_tokens.tolist() == [40, 40] and plan.blocks == ()
    assert [n.block_ids for n in plan.new] == [(), ()]
    sim.device.submit(plan)
    sim.record(sim.scheduler.apply(sim.device.collect()))
    assert sim.output == {"a": expected_output([1] * 40, 1), "b": expected_output([2] * 40, 1)}


@pytest.mark.parametrize("name", POLICIES)
def test_groups_are_asked_at_events_only(name: str) -> None:
    """A running request asks its groups once per smallest block, not in every step."""
    sim = Simulation(POLICIES[name], 400, limits(max_model_len=200), 1)
    asked: Counter[str] = Counter()
    grow = sim.scheduler.kv.grow

    def counting(request: Any, *args: Any) -> bool:
        asked[request.id] += 1
        return grow(request, *args)

    sim.scheduler.kv.grow = counting  # type: ignore[method-assign]
    sim.add("a", [1] * 9, 160)
    sim.run()
    assert asked["a"] <= 160 / 4 + 6


def test_recurrent_layers_are_one_group() -> None:
    group = KVGroup(KVKind.RECURRENT, (0,))
    with pytest.raises(ValueError, match="one KV group"):
        Simulation(KVPolicy((group, group), 4), 10, limits(), 1)


transfers = st.builds(
    Transfer,
    st.sampled_from([TransferKind.COPY, TransferKind.COPY, TransferKind.ZERO]),
    st.integers(0, 1),
    st.integers(1, 6),
    st.integers(1, 6),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(transfers, max_size=8))
def test_resolved_transfers_come_to_the_same_in_one_go(steps: list[Transfer]) -> None:
    in_turn = {(pool, block): (pool, block) for pool in (0, 1) for block in range(1, 7)}
    for kind, pool, src, dst in steps:
        in_turn[pool, dst] = in_turn[pool, src] if kind is TransferKind.COPY else (-1, -1)
    at_once = {(pool, block): (pool, block) for pool in (0, 1) for block in range(1, 7)}
    resolved = resolve(steps)
    for kind, pool, src, dst in resolved:
        at_once[pool, dst] = (pool, src) if kind is TransferKind.COPY else (-1, -1)
    assert at_once == in_turn
    assert len({(t.pool, t.dst) for t in resolved}) == len(resolved)
