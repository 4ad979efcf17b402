"""The core loop with a simulated device: steps in flight, aborts, failures, and nothing left over after any of them."""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.hf import HFConfig
from vllm.engine.core import EngineCore
from vllm.exceptions import EngineDeadError
from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.step.messages import CoreRequest
from vllm.step.result import StepResult
from vllm.structured_output.compiler import Compiled
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.requests import GrammarRequests
from vllm.structured_output.spec import GrammarSpec


class Device:
    """Answers each row with 100 + the number of steps so far; fails or is interrupted at the steps it is told."""

    def __init__(self, max_in_flight: int) -> None:
        group = KVGroup(KVKind.FULL, (0,))
        self.kv_layout = KVLayout.alike((group,), block_size=4, kv_heads=1, head_dim=2, bytes_per_element=4)
        self.num_blocks = 40
        self.max_in_flight = max_in_flight
        self.ahead = False  # whether steps go on from tokens that have not been told
        self.fails_at: dict[int, BaseException] = {}
        self.in_flight: deque = deque()
        self.deepest = 0
        self.steps = 0
        self.dead = False

    def submit(self, plan) -> None:
        self.in_flight.append(plan)
        self.deepest = max(self.deepest, len(self.in_flight))

    def prepare(self) -> bool:
        return False

    def runs_ahead(self) -> bool:
        return self.ahead

    def collect(self) -> StepResult:
        plan = self.in_flight.popleft()
        self.steps += 1
        error = self.fails_at.pop(self.steps, None)
        if error is not None:
            raise error
        tokens = np.where(plan.sample, 100 + self.steps, -1).tolist()
        return StepResult(plan.step_id, tokens)

    def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("gone")

    def shutdown(self) -> None: ...


def new_core(max_in_flight=1, stages=1, **scheduler) -> tuple[EngineCore, Device]:
    parallel = ParallelConfig(pipeline_parallel_size=stages, distributed_executor_backend="mp")
    config = VllmConfig(
        model_config=replace(ModelConfig(), hf=HFConfig({"vocab_size": 1000})),
        parallel_config=parallel,
        cache_config=CacheConfig(),
        scheduler_config=SchedulerConfig(
            **{"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, **scheduler}
        ),
    )
    device = Device(max_in_flight)
    return EngineCore(config, device), device


def request(name: str, length: int = 5, max_tokens: int = 6, account: str | None = None) -> CoreRequest:
    ids = list(range(1, length + 1))
    return CoreRequest(name, ids, SamplingParams(max_tokens=max_tokens), seed=0, account=account)


def run(core: EngineCore) -> dict[str, tuple[int, str | None]]:
    """Run to the end: request -> (number of tokens, how it ended)."""
    ends: dict[str, tuple[int, str | None]] = {}
    for _ in range(1000):
        if not core.has_unfinished():
            return ends
        for output in core.step():
            count, _ = ends.get(output.request_id, (0, None))
            ends[output.request_id] = (count + len(output.new_token_ids), output.finish_reason)
    raise AssertionError("does not end")


def assert_empty(core: EngineCore) -> None:
    report = core.idle_report()
    assert (report["requests"], report["in_flight"]) == (0, 0)
    assert report["blocks_free"] == report["blocks_total"] == 39


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_steps_in_flight_as_the_device_takes(depth):
    core, device = new_core(depth)
    assert core.add_requests([request(str(i), max_tokens=4 + i) for i in range(7)]) == []
    assert run(core) == {str(i): (4 + i, "length") for i in range(7)}
    assert device.deepest == depth
    assert_empty(core)


def test_stages_get_their_next_step_before_there_are_the_tokens_that_it_goes_on_from():
    core, device = new_core(2, stages=2)
    device.ahead = True
    core.add_requests([request("0")])
    tokens = Counter(output.request_id for output in core.step())
    assert tokens == {"0": 1} and len(device.in_flight) == 1, "it goes on, alone"
    core.add_requests([request(str(i)) for i in range(1, 4)])
    for _ in range(3):
        tokens.update(output.request_id for output in core.step())
    assert device.deepest == 3 and [len(plan.slots) for plan in device.in_flight] == [2, 2]
    device.fails_at[device.steps + 2] = RuntimeError("broken")
    ends = run(core)
    assert all(tokens[name] + count == 6 and end == "length" for name, (count, end) in ends.items())
    assert len(ends) == 4
    assert_empty(core)


def test_stages_get_their_next_step_before_anybody_looks_at_what_the_last_one_brought():
    core, device = new_core(2, stages=2)
    core.add_requests([request(str(i)) for i in range(4)])
    outputs = core.step()
    assert len(outputs) == 2 and len(device.in_flight) == 2, "half of the requests, and both stages have work"
    assert not device.in_flight[1].new and len(device.in_flight[1].slots) == 2
    device.fails_at[device.steps + 2] = RuntimeError("broken")
    submit, device.submit = device.submit, lambda plan: (_ for _ in ()).throw(RuntimeError("no"))
    assert {output.request_id for output in core.step()} == {"2", "3"}, "what a step brought is not lost"
    device.submit = submit
    device.fails_at.clear()
    assert run(core).keys() == {"0", "1", "2", "3"}
    assert_empty(core)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_begun_early_changes_nothing(depth):
    core, device = new_core(depth)
    core.begin()
    assert not device.in_flight, "there was nothing to begin with"
    core.add_requests([request(str(i)) for i in range(3)])
    core.begin()
    assert len(device.in_flight) == (depth > 1), "only a device beside the host computes already"
    core.add_requests([request(str(i)) for i in range(3, 7)])
    core.begin()
    assert len(device.in_flight) == (depth > 1), "one step, not more"
    assert run(core) == {str(i): (6, "length") for i in range(7)}
    assert_empty(core)


def test_a_step_that_cannot_begin_is_tried_again():
    core, device = new_core(2)
    core.add_requests([request(str(i)) for i in range(3)])
    working = device.submit

    def broken(plan) -> None:
        device.submit = working
        raise RuntimeError("not now")

    device.submit = broken
    core.begin()
    assert run(core) == {str(i): (6, "length") for i in range(3)}
    assert_empty(core)


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_any_time_frees_everything(depth):
    for when in range(6):
        core, _ = new_core(depth)
        core.add_requests([request(str(i)) for i in range(6)])
        for _ in range(when):
            core.step()
        core.abort(["0", "3", "5", "unknown"])
        ends = run(core)
        assert set(ends) == set("124")
        assert {reason for _, reason in ends.values()} == {"length"}
        assert_empty(core)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failure_that_passes_is_not_noticed(depth):
    core, device = new_core(depth)
    device.fails_at[3] = RuntimeError("broken")
    core.add_requests([request(str(i)) for i in range(6)])
    assert run(core) == {str(i): (6, "length") for i in range(6)}
    assert_empty(core)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failure_that_stays_ends_the_requests_and_the_next_one_works(depth):
    core, device = new_core(depth)
    device.fails_at.update({step: RuntimeError("broken") for step in range(3, 13)})
    core.add_requests([request(str(i)) for i in range(6)])
    ends = run(core)
    assert len(ends) == 6 and "error" in {reason for _, reason in ends.values()}
    device.fails_at.clear()
    assert_empty(core)
    core.add_requests([request("later")])
    assert run(core) == {"later": (6, "length")}
    assert_empty(core)


def test_dead_executor_ends_the_core():
    core, device = new_core()
    core.add_requests([request("a")])
    device.fails_at[1] = EngineDeadError("a worker died")
    device.dead = True
    (end,) = core.step()
    assert (end.finish_reason, "a worker died" in end.error) == ("error", True)
    with pytest.raises(EngineDeadError, match="^EngineCore encountered an issue.*a worker died"):
        core.add_requests([request("b")])
    with pytest.raises(EngineDeadError):
        core.step()
    with pytest.raises(EngineDeadError):
        core.check_health()


def test_interrupt_passes_and_leaves_nothing_half_done():
    core, device = new_core(2)
    device.fails_at[2] = KeyboardInterrupt()
    core.add_requests([request("a"), request("b")])
    with pytest.raises(KeyboardInterrupt):
        run(core)
    assert core.has_unfinished()
    core.abort(["b"])
    assert [(output.request_id, output.finish_reason) for output in core.step()] == [("a", "error")]
    assert_empty(core)
    core.add_requests([request("a")])
    assert run(core) == {"a": (6, "length")}


def test_requests_that_cannot_be_served_come_back():
    core, _ = new_core()
    rejected = core.add_requests([request("a"), request("a"), request("long", length=65), request("b")])
    assert [(o.request_id, o.finish_reason) for o in rejected] == [("a", "error"), ("long", "error")]
    assert rejected[0].error == "Request a already exists."
    assert run(core) == {"a": (6, "length"), "b": (6, "length")}


def test_settings_of_the_scheduler_reach_it():
    core, _ = new_core(policy="priority", delay_factor=0.5, long_prefill_token_threshold=7)
    limits = core.scheduler.limits
    assert limits.priority
    assert limits.chunk_threshold == 7
    assert [type(policy).__name__ for policy in core.scheduler._policies] == ["DelayPolicy"]
    core, _ = new_core(max_num_partial_prefills=2)
    assert [type(policy).__name__ for policy in core.scheduler._policies] == ["PartialPrefillPolicy"]


def with_grammars(core: EngineCore) -> dict[str, Future]:
    """Let requests have grammars that allow every token, each compiled when its future is given a result."""
    compiling: dict[str, Future] = {}
    compiler = SimpleNamespace(
        compile=lambda spec: compiling.setdefault(spec.text, Future()),
        give_up=lambda spec: compiling.pop(spec.text),
        vocabulary=SimpleNamespace(words=8, width=256, end_ids=(5, 6), tokens=(None,) * 256),
        close=lambda: None,
    )
    core._grammars = GrammarRequests(compiler)
    return compiling


def guided(name: str, text: str, **fields) -> CoreRequest:
    params = SamplingParams(max_tokens=3, min_tokens=2)
    return CoreRequest(name, [1, 2, 3], params, seed=0, grammar=GrammarSpec("regex", text, "none"), **fields)


class FreeGrammar:
    """A grammar and its back end that allow everything."""

    def start(self):
        return SimpleNamespace(take=lambda token: True, accept=lambda token: True)

    def fill_all(self, matchers, tokens, bits):
        bits[:] = 0xFFFFFFFF
        return SimpleNamespace(may_end=[], dead=[], errors={})


def test_a_grammar_that_compiles_holds_a_request_up_where_it_stands():
    core, _ = new_core(max_num_seqs=1)
    compiling = with_grammars(core)
    assert not core.add_requests([guided("a", "x"), request("b"), request("c"), guided("d", "y")])
    (again,) = core.add_requests([guided("a", "x")])
    assert "already exists" in again.error and core.stats().num_waiting == 4
    free = FreeGrammar()
    while core.scheduler.requests["b"].num_output_tokens < 2:
        core.step()
    compiling["x"].set_result(Compiled(free, free))
    order = []
    while core.scheduler.requests.keys() != {"d"}:
        order += [output.request_id for output in core.step() if output.finish_reason == "length"]
    assert order == ["b", "a", "c"], "it came before c"
    assert core.scheduler.all_blocked and not core.step()
    (end,) = core.abort(["d"])
    assert end.finish_reason == "abort" and "y" not in compiling
    assert not core.has_unfinished() and core.idle_report()["grammars"] == 0


def test_a_grammar_says_where_its_request_ends_and_why_there_is_none():
    core, _ = new_core()
    compiling = with_grammars(core)
    core.add_requests([guided("good", "x"), guided("bad", "y"), guided("lost", "z")])
    free = FreeGrammar()
    compiling["x"].set_result(Compiled(free, free))
    compiling["y"].set_exception(GrammarError("no such thing"))
    compiling["z"].set_exception(OSError("the helper is gone"))
    ends = {end.request_id: end for end in core.step()}
    assert ends.keys() == {"bad", "lost"}
    assert ends["bad"].refused and "no such thing" in ends["bad"].error
    assert not ends["lost"].refused and "the helper is gone" in ends["lost"].error
    good = core.scheduler.requests["good"]
    assert good.stop_token_ids == {5, 6} and good.eos_token_id == 5
    assert good.params.min_tokens == 0 and good.min_len == 3
    assert run(core) == {"good": (3, "length")}
    assert core.idle_report()["grammars"] == 0
