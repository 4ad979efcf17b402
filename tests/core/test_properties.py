"""Hypothesis drives the scheduler through random add / step / abort / fork / priority / reset; nothing is ever lost or
mixed up.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.simulation import EOS, POLICIES, Simulation, expected_output
from vllm.core.scheduler import SchedulerLimits


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        blocks=st.integers(36, 120),
        budget=st.sampled_from([9, 16, 64]),
        depth=st.integers(1, 3),
        chunked=st.booleans(),
        priority=st.booleans(),
        caching=st.booleans(),
        seqs=st.sampled_from([1, 3, 8]),
    )
    def start(
        self, policy: str, blocks: int, budget: int, depth: int, chunked: bool, priority: bool, caching: bool, seqs: int
    ) -> None:
        limits = SchedulerLimits(seqs, budget if chunked else 64, 60, chunked_prefill=chunked, priority=priority)
        self.sim = Simulation(POLICIES[policy], blocks, limits, depth, enable_prefix_caching=caching)
        self.want: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.rng = random.Random(0)
        self.common = [self.rng.randrange(50) for _ in range(40)]
        self.count = 0

    def _add(
        self, prompt: list[int], max_tokens: int, priority: int, fork_of: str | None = None, account: str | None = None
    ) -> None:
        name = f"r{self.count}"
        self.count += 1
        max_tokens = min(max_tokens, 60 - len(prompt))
        self.want[name] = expected_output(prompt, max_tokens, frozenset([EOS]))
        self.sim.add(
            name, prompt, max_tokens, priority=priority, fork_of=fork_of, eos_token_id=EOS, stop_token_ids=(EOS,),
            account=account, encoder_tokens=self.rng.randrange(31), encoder_key=self.rng.choice([b"", b"x"]),
            content_keys=((self.rng.randrange(20), 9, b"y"),) * self.rng.randrange(2),
        )  # fmt: skip

    @rule(
        shared=st.integers(0, 40),
        own=st.integers(1, 15),
        max_tokens=st.integers(1, 25),
        priority=st.integers(0, 2),
        account=st.sampled_from([None, None, "a", "b"]),
        count=st.sampled_from([1, 1, 5]),
    )
    def add(self, shared: int, own: int, max_tokens: int, priority: int, account: str | None, count: int) -> None:
        for _ in range(count):
            prompt = self.common[:shared] + [self.rng.randrange(50) for _ in range(own)]
            self._add(prompt, max_tokens, priority, account=account)

    @precondition(lambda self: self.sim.scheduler.requests)
    @rule(data=st.data(), reason=st.sampled_from(["grammar", "adapter"]))
    def block(self, data: st.DataObject, reason: str) -> None:
        self.sim.scheduler.block(data.draw(st.sampled_from(sorted(self.sim.scheduler.requests))), reason)

    @rule(reason=st.sampled_from(["grammar", "adapter"]))
    def unblock(self, reason: str) -> None:
        for name in list(self.sim.scheduler.requests):
            self.sim.scheduler.unblock(name, reason)

    @precondition(lambda self: self.sim.scheduler.requests)
    @rule(children=st.integers(1, 3), longer=st.booleans(), data=st.data())
    def fork(self, children: int, longer: bool, data: st.DataObject) -> None:
        parent = self.sim.scheduler.requests[data.draw(st.sampled_from(sorted(self.sim.scheduler.requests)))]
        tokens = list(parent.tokens) + ([5] if longer else [])
        if not longer:
            tokens = tokens[: parent.num_prompt_tokens]
        for _ in range(children):
            if len(tokens) < 60:  # what the encoder was given is a fork's too, but this device says nothing of it
                self._add(tokens, 20, parent.priority, fork_of=parent.id, account=parent.account)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.sim.step():
                self.sim.check_reason()
            self.sim.scheduler.check_invariants()

    @precondition(lambda self: self.sim.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sim.scheduler.requests)))
        self.sim.record(self.sim.scheduler.abort([name]))
        self.aborted.add(name)

    @rule()
    def reset_cache(self) -> None:
        idle = not self.sim.scheduler.running
        assert self.sim.scheduler.reset_prefix_cache() == idle

    @invariant()
    def blocks_are_conserved_and_outputs_right_so_far(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.scheduler.check_invariants()
        for name, got in self.sim.output.items():
            assert got == self.want[name][: len(got)]

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        for reason in ("grammar", "adapter"):
            self.unblock(reason)
        self.sim.run()
        for name, got in self.sim.output.items():
            if name not in self.aborted:
                assert got == self.want[name]
        for pool in (self.sim.scheduler.kv.pool, self.sim.scheduler.kv.states):
            assert pool is None or pool.num_free == pool.num_blocks - 1


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
class TestSchedulerAtLength(SchedulerMachine.TestCase):  # type: ignore[name-defined, misc]
    """T45 in full: 200 runs of up to 1,000 steps."""

    settings = settings(
        max_examples=200, stateful_step_count=1000, deadline=None, suppress_health_check=list(HealthCheck)
    )
