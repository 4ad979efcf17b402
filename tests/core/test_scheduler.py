"""The scheduler against a device whose right answers are known in advance."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter

import pytest
from msgspec.structs import replace

from tests.core.simulation import EOS, POLICIES, Simulation, expected_output, full_policy
from vllm.core.policies import AdmissionPolicy, DelayPolicy, PartialPrefillPolicy, StepView, Verdict
from vllm.core.request import Request
from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreRequest
from vllm.step.plan import StepPlan
from vllm.step.result import StepResult


def limits(**kwargs: object) -> SchedulerLimits:
    defaults: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 96}
    return SchedulerLimits(**{**defaults, **kwargs})  # type: ignore[arg-type]


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    common = [rng.randrange(50) for _ in range(30)]
    out = []
    for _ in range(count):
        head = common[: rng.randrange(31)] if rng.random() < 0.5 else []
        out.append((head + [rng.randrange(50) for _ in range(rng.randrange(1, longest))])[:longest])
    return out


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("layout", POLICIES)
@pytest.mark.parametrize("blocks", [50, 400])
def test_every_request_gets_its_own_answer(layout: str, depth: int, blocks: int) -> None:
    sim = Simulation(POLICIES[layout], blocks, limits(), depth)
    work = prompts(40)
    for i, prompt in enumerate(work):
        sim.add(str(i), prompt, 1 + i % 30, eos_token_id=EOS, stop_token_ids=(EOS,))
    sim.run()
    for i, prompt in enumerate(work):
        assert sim.output[str(i)] == expected_output(prompt, 1 + i % 30, frozenset([EOS]))
        assert sim.finished[str(i)] == ("stop" if sim.output[str(i)][-1] == EOS else "length")
    assert sim.scheduler.kv.pool.num_free == blocks - 1


def test_small_pool_preempts_often_and_changes_nothing() -> None:
    sim = Simulation(full_policy(), 26, limits(max_num_seqs=16), 2)
    work = prompts(60, seed=3, longest=40)
    for i, prompt in enumerate(work):
        sim.add(str(i), prompt, 50)
    sim.run()
    assert sim.scheduler.stats().num_preemptions >= 100
    for i, prompt in enumerate(work):
        assert sim.output[str(i)] == expected_output(prompt, 50)


@pytest.mark.parametrize("layout", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
def test_forks_share_the_prompt_and_copy_on_write(layout: str, depth: int) -> None:
    recurrent = "state" in layout  # forks of a state start from a snapshot of it, which is cached
    sim = Simulation(POLICIES[layout], 300, limits(max_num_seqs=16), depth, enable_prefix_caching=recurrent)
    prompt = prompts(1, seed=5)[0][:39] + [7] * 3
    sim.add("p", prompt, 20)
    for i in range(5):
        sim.add(f"c{i}", prompt, 20, fork_of="p")
    while len(sim.scheduler.running) < 6:
        assert sim.step()
        sim.scheduler.check_invariants()
    used = 299 - sim.scheduler.kv.pool.num_free
    alone = sim.scheduler.kv.blocks_for(len(prompt) + 8, 32)
    assert used < 3 * alone or layout == "only states", "six sequences must not hold six copies of the prompt"
    sim.run()
    assert all(sim.output[k] == expected_output(prompt, 20) for k in sim.output)


@pytest.mark.parametrize("layout", ["full", "mixed"])
def test_a_fork_never_copies_a_block_that_the_same_step_fills(layout: str) -> None:
    """y finds what x computes in this step; z forks y in the middle of such a block."""
    sim = Simulation(POLICIES[layout], 300, limits(max_num_batched_tokens=90), 1)
    prompt = [i % 50 for i in range(32)]
    sim.add("x", prompt[:30], 5)
    sim.add("y", prompt, 5)
    sim.add("z", prompt[:27], 5, fork_of="y")
    plan = sim.scheduler.schedule()
    assert plan is not None and [n.num_computed for n in plan.new] == [0, 28, 24]
    sim.device.submit(plan)
    sim.record(sim.scheduler.apply(sim.device.collect()))
    sim.run()
    assert all(
        sim.output[n] == expected_output(p, 5) for n, p in {"x": prompt[:30], "y": prompt, "z": prompt[:27]}.items()
    )


def test_a_fork_of_a_fork_in_one_step_copies_what_the_first_one_held() -> None:
    sim = Simulation(full_policy(), 300, limits(), 1, enable_prefix_caching=False)
    prompt = [i % 50 for i in range(15)]
    sim.add("p", prompt, 20)
    sim.step()
    for name, parent in (("a", "p"), ("b", "a"), ("c", "b")):
        sim.add(name, prompt, 20, fork_of=parent)
    plan = sim.scheduler.schedule()
    assert plan is not None and [n.request_id for n in plan.new] == ["a", "b", "c"]
    assert len({t.src for t in plan.transfers}) == 1 and len(plan.transfers) >= 3
    sim.device.submit(plan)
    sim.record(sim.scheduler.apply(sim.device.collect()))
    sim.run()
    assert all(output == expected_output(prompt, 20) for output in sim.output.values())


def test_fork_of_a_longer_live_request_continues_from_its_prefix() -> None:
    sim = Simulation(full_policy(), 300, limits(), 1, enable_prefix_caching=False)
    prompt = list(range(10))
    sim.add("p", prompt, 30)
    for _ in range(6):
        sim.step()
    tokens = prompt + sim.output["p"]
    sim.add("beam", tokens, 10, fork_of="p")
    plan = sim.scheduler.schedule()
    assert plan is not None and dict(zip([n.request_id for n in plan.new], plan.num_tokens[-1:], strict=True)) == {
        "beam": 1
    }
    sim.device.submit(plan)
    sim.record(sim.scheduler.apply(sim.device.collect()))
    sim.run()
    assert sim.output["beam"] == expected_output(tokens, 10)
    assert sim.output["p"] == expected_output(prompt, 30)


def test_second_request_with_the_same_prefix_computes_only_the_rest() -> None:
    sim = Simulation(full_policy(), 100, limits(), 1)
    prompt = list(range(30))
    sim.add("a", prompt, 4)
    sim.run()
    sim.add("b", [*prompt, 1, 2], 4)
    plan = sim.scheduler.schedule()
    assert plan is not None
    # 30 prompt tokens and 3 written outputs make 8 full blocks, 7 of which "b" shares (28 tokens)
    assert plan.num_computed.tolist() == [28] and plan.num_tokens.tolist() == [4]
    sim.device.submit(plan)
    sim.record(sim.scheduler.apply(sim.device.collect()))
    sim.run()
    assert sim.output["b"] == expected_output([*prompt, 1, 2], 4)
    assert sim.scheduler.stats().prefix_cache_hits == 28
    assert sim.scheduler.stats().prefix_cache_queries == 30 + 32


def test_without_prefix_caching_nothing_is_looked_up() -> None:
    sim = Simulation(full_policy(), 100, limits(), 1, enable_prefix_caching=False)
    for name in "ab":
        sim.add(name, list(range(30)), 4)
        sim.run()
    assert (sim.scheduler.stats().prefix_cache_queries, sim.scheduler.stats().prefix_cache_hits) == (0, 0)


def test_a_salt_or_another_adapter_never_hits() -> None:
    sim = Simulation(full_policy(), 100, limits(), 1)
    prompt = list(range(30))
    sim.add("a", prompt, 2)
    sim.run()
    for i, extra in enumerate([{"cache_salt": "x"}, {"lora_id": 1}]):
        sim.add(f"b{i}", prompt, 2, **extra)
        sim.run()
    assert sim.scheduler.stats().prefix_cache_hits == 0


def test_chunked_prefill_mixes_with_decode_under_the_budget() -> None:
    sim = Simulation(full_policy(), 200, limits(max_num_batched_tokens=16), 1)
    sim.add("a", list(range(5)), 40)
    sim.step()
    sim.add("long", [i % 50 for i in range(60)], 5)
    plan = sim.scheduler.schedule()
    assert plan is not None and sorted(plan.num_tokens.tolist()) == [1, 15]
    assert plan.sample.tolist() == [True, False]
    sim.device.submit(plan)
    sim.record(sim.scheduler.apply(sim.device.collect()))
    sim.run()
    assert sim.output["long"] == expected_output([i % 50 for i in range(60)], 5)


def test_without_chunked_prefill_a_prompt_is_never_split() -> None:
    sim = Simulation(full_policy(), 200, limits(max_num_batched_tokens=64, chunked_prefill=False), 1)
    for i in range(5):
        sim.add(str(i), [i] * 40, 6)
    while sim.scheduler.has_unfinished():
        plan = sim.scheduler.schedule()
        assert plan is not None and all(n in (1, 40) for n in plan.num_tokens.tolist())
        sim.device.submit(plan)
        sim.record(sim.scheduler.apply(sim.device.collect()))
    with pytest.raises(ValueError, match="chunked prefill is off"):
        sim.add("x", [1] * 65, 4)


def test_where_prompts_are_not_divided_none_waits_for_a_shorter_step() -> None:
    sizes = limits(max_num_batched_tokens=2048, max_model_len=2048, chunked_prefill=False, max_gap=0.06)
    sim = Simulation(full_policy(), 1200, sizes, 1)
    sim.pool("short", [1] * 4)  # as few tokens as an answer
    sim.step()
    sim.pool("long", [2] * 2000)
    sim.pool("another", [3] * 2000)
    for _ in range(4):
        sim.step()
    assert set(sim.finished) == {"short", "long", "another"}


def test_priority_runs_first_and_is_preempted_last() -> None:
    sim = Simulation(full_policy(), 26, limits(max_num_seqs=3, priority=True), 1)
    for i in range(4):
        sim.add(f"low{i}", [i] * 30, 20, priority=5)
    for _ in range(3):
        sim.step()
    sim.add("high", [9] * 30, 20, priority=0)
    order: list[str] = []
    while sim.scheduler.has_unfinished():
        before = set(sim.finished)
        sim.step()
        order += [r for r in sim.finished if r not in before]
    assert order.index("high") <= 1
    assert all(sim.output[f"low{i}"] == expected_output([i] * 30, 20) for i in range(4))


def test_abort_frees_everything_and_drops_tokens_in_flight() -> None:
    sim = Simulation(full_policy(), 100, limits(), 3)
    for i in range(6):
        sim.add(str(i), [i] * 20, 20)
    for _ in range(4):
        sim.step()
    sim.record(sim.scheduler.abort(["0", "3", "nobody"]))
    sim.run()
    assert sim.finished["0"] == sim.finished["3"] == "abort"
    assert all(sim.output[str(i)] == expected_output([i] * 20, 20) for i in (1, 2, 4, 5))
    assert sim.scheduler.kv.pool.num_free == 99


def test_a_failed_step_ends_all_requests_and_leaves_a_working_engine() -> None:
    sim = Simulation(full_policy(), 100, limits(), 2)
    for i in range(4):
        sim.add(str(i), [i] * 20, 20)
    sim.step()
    sim.record(sim.scheduler.fail_all("boom"))
    sim.device.results.clear()
    assert set(sim.finished.values()) == {"error"}
    sim.scheduler.check_invariants()
    sim.add("next", [1] * 20, 5)
    sim.run()
    assert sim.output["next"] == expected_output([1] * 20, 5)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_breaks_the_step_ends_alone(depth: int) -> None:
    sim = Simulation(full_policy(), 100, limits(), depth)
    sim.device.poison = 49
    work = {str(i): [i] * (5 + i) for i in range(7)}
    for key, prompt in work.items():
        sim.add(key, [*prompt, 49, 3] if key == "4" else prompt, 20)
    sim.run()
    assert sim.finished["4"] == "error"
    for key, prompt in work.items():
        if key != "4":
            assert sim.finished[key] == "length" and sim.output[key] == expected_output(prompt, 20)
    assert sim.scheduler.kv.pool.num_free == 99


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_so_does_one_that_breaks_the_step_of_a_later_chunk(depth: int, seed: int) -> None:
    """The first chunks of its prompt are harmless, as often as they are computed again."""
    rng = random.Random(seed)
    policy = POLICIES[rng.choice(sorted(set(POLICIES) - {"cross"}))]
    sim = Simulation(policy, rng.choice([60, 200]), limits(max_num_batched_tokens=8, max_num_seqs=4), depth)
    submit, prompt_in = sim.device.submit, dict[int, list[int]]()

    def fails_where_the_token_is(plan: StepPlan) -> None:
        prompt_in.update((new.slot, new.token_ids[: new.num_prompt_tokens]) for new in plan.new)
        submit(plan)
        rows = zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_tokens.tolist(), strict=True)
        if any(49 in prompt_in[slot][start : start + count] for slot, start, count in rows):
            raise RuntimeError("poison")

    sim.device.submit = fails_where_the_token_is  # type: ignore[method-assign]
    work = {str(i): [rng.randrange(48) for _ in range(rng.randrange(1, 50))] for i in range(7)}
    for key, prompt in work.items():
        if key in "25":
            prompt[-1 - rng.randrange(min(9, len(prompt)))] = 49
        sim.add(key, prompt, 12)
    sim.run()
    assert {key for key, reason in sim.finished.items() if reason == "error"} == {"2", "5"}
    for key, prompt in work.items():
        if key not in "25":
            assert sim.finished[key] == "length" and sim.output[key] == expected_output(prompt, 12)


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_finds_the_blocks_of_a_request_that_failed(depth: int) -> None:
    """Its numbers may be none, also in front of the token that was to blame."""
    sim = Simulation(full_policy(), 100, limits(), depth)
    prompt = list(range(30))
    collect = sim.device.collect

    def fails() -> StepResult:
        return replace(collect(), errors={0: "not finite"})

    sim.add("good", prompt, 4)
    sim.run()
    sim.device.collect = fails  # type: ignore[method-assign]
    sim.add("bad", [*prompt, 1, 2, 3, 4, 5], 4)
    sim.run()
    sim.device.collect = collect  # type: ignore[method-assign]
    assert sim.finished == {"good": "length", "bad": "error"}
    assert sim.scheduler.kv.pool.num_free == 99
    hits = sim.scheduler.stats().prefix_cache_hits
    sim.add("again", prompt, 4)
    sim.run()
    assert sim.output["again"] == sim.output["good"]
    assert sim.scheduler.stats().prefix_cache_hits == hits == 28


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pooled_request_without_a_result_fails(depth: int) -> None:
    """It would wait for ever: its prompt is computed, and nothing is left to plan."""
    sim = Simulation(full_policy(), 100, limits(max_num_batched_tokens=16), depth)
    collect = sim.device.collect

    def without_the_second() -> StepResult:
        result = collect()
        return replace(result, news=result.news[:1])

    sim.device.collect = without_the_second  # type: ignore[method-assign]
    for name, length in (("a", 30), ("b", 5), ("c", 4), ("d", 9)):
        sim.pool(name, list(range(length)))
    sim.add("text", [1] * 20, 5)
    sim.run()
    assert sim.output["text"] == expected_output([1] * 20, 5) and set(sim.finished.values()) == {
        "error",
        "stop",
        "length",
    }
    assert set(sim.pooled) == {name for name, reason in sim.finished.items() if reason == "stop"}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("alone", [True, False])
def test_steps_that_fail_once_cost_nothing(depth: int, alone: bool) -> None:
    """Also for a request that is the only one: it is tried again, as often as it gets further in between."""
    sim = Simulation(full_policy(), 100, limits(), depth)
    work = {str(i): [i] * (5 + i) for i in range(1 if alone else 4)}
    for key, prompt in work.items():
        sim.add(key, prompt, 40)
    submit, calls = sim.device.submit, itertools.count(1)

    def fails_now_and_then(plan: StepPlan) -> None:
        submit(plan)
        if next(calls) % 11 == 0:  # less often than all need to be tried alone
            raise RuntimeError("transient")

    sim.device.submit = fails_now_and_then  # type: ignore[method-assign]
    sim.run()
    assert next(calls) > 40, "the device was asked more often than without failures"
    assert sim.output == {key: expected_output(prompt, 40) for key, prompt in work.items()}


def test_a_single_request_that_always_fails_ends_at_the_second_try() -> None:
    sim = Simulation(full_policy(), 100, limits(), 1)
    sim.device.poison = 49
    sim.add("only", [3, 49], 20)
    sim.run()
    assert sim.finished == {"only": "error"} and sim.output == {"only": []}


def test_stop_tokens_count_after_min_tokens_and_the_reason_names_them() -> None:
    """The reason is the stop token's id, None for the model's own end and for length."""
    prompt = [4, 8, 15]
    answer = expected_output(prompt, 20)
    sim = Simulation(full_policy(), 100, limits(), 1)
    stop, later = answer[4], answer[9]
    assert answer.index(stop) == 4 and later not in answer[:9]
    sim.add("stop", prompt, 20, stop_token_ids=(stop,))
    sim.add("eos", prompt, 20, stop_token_ids=(stop,), eos_token_id=stop)
    sim.add("min", prompt, 20, min_tokens=5, stop_token_ids=(stop, later))
    sim.add("exactly", prompt, 20, min_tokens=4, stop_token_ids=(stop, later))
    sim.add("length", prompt, 4, stop_token_ids=(stop,))
    sim.run()
    assert sim.output["stop"] == sim.output["eos"] == sim.output["exactly"] == answer[:5]
    assert sim.output["min"] == answer[:10] and sim.output["length"] == answer[:4]
    assert sim.reasons == {
        "stop": ("stop", stop), "eos": ("stop", None), "min": ("stop", later), "exactly": ("stop", stop),
        "length": ("length", None),
    }  # fmt: skip


def test_delay_policy_lets_prompts_gather() -> None:
    now = [100.0]
    policy = DelayPolicy(2.0, clock=lambda: now[0])
    sim = Simulation(full_policy(), 100, limits(), 1, policies=[policy])
    sim.add("a", [1] * 10, 30, arrival_time=100.0)
    sim.step()
    policy.observe(1.0)
    sim.add("b", [2] * 10, 5, arrival_time=100.0)
    sim.step()
    assert sim.scheduler.num_waiting == 1
    now[0] = 102.5
    sim.step()
    assert sim.scheduler.num_waiting == 0


def test_partial_prefill_policy_lets_short_prompts_pass_long_ones() -> None:
    policy = PartialPrefillPolicy(max_partial=2, max_long=1, long_threshold=8)
    sim = Simulation(full_policy(), 200, limits(chunk_threshold=8, max_num_batched_tokens=64), 1, policies=[policy])
    sim.add("long0", [0] * 60, 2)
    sim.add("long1", [1] * 60, 2)
    sim.add("short", [2] * 5, 2)
    plan = sim.scheduler.schedule()
    assert plan is not None and [n.request_id for n in plan.new] == ["long0", "short"]


class AdapterSlots(AdmissionPolicy):
    """At most `count` adapters in the batch, and two tokens of a prompt at a time: counts what it is told."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.users: Counter[int] = Counter()
        self.forgotten: list[str] = []
        self.most = 0

    def admit(self, request: Request, view: StepView) -> Verdict:
        assert sorted(self.users.elements()) == sorted(r.lora_id for r in view.running)
        known = request.lora_id in +self.users or len(+self.users) < self.count
        return Verdict.ADMIT if known else Verdict.SKIP

    def limit(self, request: Request, count: int) -> int:
        return min(count, 2)

    def admitted(self, request: Request) -> None:
        self.users[request.lora_id] += 1
        self.most = max(self.most, len(+self.users))

    def left(self, request: Request) -> None:
        self.users[request.lora_id] -= 1

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.id)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_follows_what_runs_through_preemption_failure_abort_and_end(depth: int) -> None:
    policy = AdapterSlots(2)
    sim = Simulation(full_policy(), 40, limits(), depth, policies=[policy])
    work = prompts(30, seed=4, longest=30)
    for i, prompt in enumerate(work):
        sim.add(str(i), prompt, 20, lora_id=i % 5)
    submit, calls = sim.device.submit, itertools.count(1)

    def fails_once(plan: StepPlan) -> None:
        assert all(n <= 2 for n in plan.num_tokens)
        submit(plan)
        if next(calls) == 30:
            raise RuntimeError("transient")

    sim.device.submit = fails_once  # type: ignore[method-assign]
    for _ in range(20):
        sim.step()
    sim.record(sim.scheduler.abort(["3", "29"]))
    sim.run()
    assert sim.scheduler.stats().num_preemptions > 0 and policy.most == 2
    assert not +policy.users and sorted(policy.forgotten) == sorted(sim.output)
    for i, prompt in enumerate(work):
        if str(i) not in ("3", "29"):
            assert sim.output[str(i)] == expected_output(prompt, 20)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_blocked_request_takes_its_old_place_when_everything_it_waits_for_is_there(depth: int) -> None:
    sim = Simulation(full_policy(), 200, limits(max_num_seqs=1), depth)
    for name in "abc":
        sim.add(name, [4, 5, 6], 6)
    scheduler = sim.scheduler
    scheduler.block("a", "grammar")
    scheduler.block("a", "adapter")
    scheduler.block("nobody", "grammar")
    for _ in range(3):
        sim.step()
    assert [r.id for r in scheduler.running] == ["b"] and scheduler.num_waiting == 2
    scheduler.unblock("a", "grammar")
    scheduler.block("b", "late")  # a running one gives its slot back
    assert not scheduler.running
    scheduler.unblock("a", "adapter")
    scheduler.unblock("a", "adapter")
    scheduler.unblock("b", "late")
    for _ in range(depth):
        sim.step()
    scheduler.check_invariants()
    assert [r.id for r in scheduler.running] == ["a"]
    sim.run()
    assert all(sim.output[name] == expected_output([4, 5, 6], 6) for name in "abc")


def test_blocked_requests_can_be_aborted_and_leave_nothing_to_plan() -> None:
    sim = Simulation(full_policy(), 200, limits(), 1)
    sim.add("a", [4, 5, 6], 6)
    sim.scheduler.block("a", "grammar")
    assert sim.scheduler.schedule() is None and sim.scheduler.has_unfinished()
    sim.record(sim.scheduler.abort(["a"]))
    assert sim.finished == {"a": "abort"} and not sim.scheduler.has_unfinished()
    sim.scheduler.unblock("a", "grammar")
    assert sim.scheduler.num_waiting == 0


def test_a_fork_of_higher_priority_than_its_waiting_parent_stops_nobody() -> None:
    sim = Simulation(full_policy(), 30, limits(max_num_seqs=1, max_num_batched_tokens=8, priority=True), 1)
    sim.add("runs", list(range(30)), 5, priority=1)
    sim.step()
    sim.add("parent", list(range(20)), 5, priority=2)
    sim.add("child", list(range(20)), 5, priority=0, fork_of="parent")
    sim.run()
    assert set(sim.finished.values()) == {"length"}


def test_pool_too_small_for_one_request_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        Simulation(full_policy(), 10, limits(), 1)


def test_prefix_cache_reset_only_when_idle() -> None:
    sim = Simulation(full_policy(), 100, limits(), 1)
    sim.add("a", list(range(30)), 10)
    sim.step()
    assert not sim.scheduler.reset_prefix_cache()
    sim.run()
    assert sim.scheduler.reset_prefix_cache()
    assert sim.scheduler.kv.pool.num_cached == 0


def test_ten_thousand_requests() -> None:
    sim = Simulation(full_policy(16), 4000, limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=256), 2)
    rng = random.Random(1)
    work = {str(i): [rng.randrange(50) for _ in range(rng.randrange(1, 12))] for i in range(10_000)}
    for key, prompt in work.items():
        sim.add(key, prompt, 1 + len(prompt) % 7)
    sim.run(check=False)
    sim.scheduler.check_invariants()
    assert all(sim.output[k] == expected_output(p, 1 + len(p) % 7) for k, p in work.items())


def test_core_runs_without_torch() -> None:
    code = "import sys, vllm.core.scheduler; print('torch' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_suspects_of_several_steps_may_be_more_than_there_are_slots() -> None:
    """One is preempted for another while a step with it is in flight: both are suspected, and had one slot."""
    limits = SchedulerLimits(2, 64, 80, priority=True)
    scheduler = Scheduler(limits, full_policy(), 100)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    for name, priority in (("a", 5), ("b", 5)):
        scheduler.add(CoreRequest(name, [1, 2, 3], params, seed=0, priority=priority))
    assert scheduler.schedule() is not None
    scheduler.add(CoreRequest("c", [4, 5, 6], params, seed=0, priority=0))
    assert scheduler.schedule() is not None
    assert {request.id for request in scheduler.running} == {"a", "c"} and scheduler.num_in_flight == 2
    assert not scheduler.isolate("a step failed")
    ended: dict[str, str | None] = {}
    for _ in range(60):
        plan = scheduler.schedule()
        if plan is None:
            continue
        scheduler.check_invariants()
        result = StepResult(plan.step_id, [7 if samples else -1 for samples in plan.sample.tolist()])
        ended.update((out.request_id, out.finish_reason) for out in scheduler.apply(result) if out.finish_reason)
    assert ended == {"a": "length", "b": "length", "c": "length"} and not scheduler.has_unfinished()


def test_those_that_fail_only_together_end_and_nobody_else() -> None:
    scheduler = Scheduler(SchedulerLimits(2, 64, 80), full_policy(), 100)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for name in "abcd":
        scheduler.add(CoreRequest(name, [1, 2, 3], params, seed=0))
    ended: dict[str, str | None] = {}
    together = 0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        assert plan is not None
        if {request.id for request in scheduler.planned} == {"a", "b"}:
            together += 1
            outputs = scheduler.isolate("a step failed")
        else:
            outputs = scheduler.apply(StepResult(plan.step_id, [7 if samples else -1 for samples in plan.sample]))
        scheduler.check_invariants()
        ended.update((out.request_id, out.finish_reason) for out in outputs if out.finish_reason)
    assert together == 2 and ended == {"a": "error", "b": "error", "c": "length", "d": "length"}


@pytest.mark.parametrize("depth", [1, 2])
def test_paused_requests_are_left_out_while_others_can_go_on(depth: int) -> None:
    sim = Simulation(full_policy(), 400, limits(), depth)
    for name in "abc":
        sim.add(name, [1, 2, 3], 40)
    while not all(sim.output.values()):
        sim.step()
    while sim.scheduler.num_in_flight:
        sim.record(sim.scheduler.apply(sim.device.collect()))
    had = {name: len(output) for name, output in sim.output.items()}
    while "c" not in sim.finished:
        sim.scheduler.paused = ["b", "a"]
        sim.step()
    assert (len(sim.output["a"]), len(sim.output["b"])) == (had["a"], had["b"])
    while "b" not in sim.finished:  # the first goes on where nobody else can
        sim.scheduler.paused = [name for name in "ba" if name in sim.scheduler.requests]
        sim.step()
    assert len(sim.output["a"]) == had["a"]
    sim.scheduler.paused = ()
    sim.run()
    assert all(sim.output[name] == expected_output([1, 2, 3], 40, frozenset()) for name in "abc")
