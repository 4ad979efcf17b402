"""A device without a model: it stores, per cache position, a hash of the tokens up to it, and checks every read against
it.

The token it samples is a function of all tokens of the request, so the right output of a request is known in advance
and any mistake of the scheduler (a wrong block, a lost or repeated token, a copy too late) changes it or raises.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVGroup, KVKind, KVPolicy
from vllm.step.messages import CoreOutput, CoreRequest
from vllm.step.plan import StepPlan, Transfer, TransferKind
from vllm.step.result import StepResult

VOCAB = 50
EOS = 3


def fold(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % ((1 << 61) - 1)


def next_token(state: int) -> int:
    return (state >> 7) % VOCAB


def expected_output(prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """What a request must produce, whatever happens around it."""
    state = 0
    for token in prompt:
        state = fold(state, token)
    output: list[int] = []
    while len(output) < max_tokens:
        token = next_token(state)
        output.append(token)
        if token in stop:
            break
        state = fold(state, token)
    return output


def full_policy(block_size: int = 4) -> KVPolicy:
    return KVPolicy((KVGroup(KVKind.FULL, (0, 1)),), block_size)


def mixed_policy(block_size: int = 4, window: int = 10) -> KVPolicy:
    return KVPolicy((KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.SLIDING, (1,), window)), block_size)


def uneven_policy() -> KVPolicy:
    """Blocks of 8 tokens for a window, of 4 and 12 for full attention."""
    full, window = KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.SLIDING, (1,), 10, units=2)
    return KVPolicy((full, window, KVGroup(KVKind.FULL, (2,), units=3)), 4)


def state_policy(full: bool = True, window: int | None = None, snapshots: int = 12, interval: int = 12) -> KVPolicy:
    """Recurrent layers, with attention beside them or alone."""
    groups = [KVGroup(KVKind.RECURRENT, (0, 1))]
    groups += [KVGroup(KVKind.FULL, (2,))] * full
    groups += [KVGroup(KVKind.SLIDING, (3,), window)] * (window is not None)
    return KVPolicy(tuple(groups), 4, snapshots=snapshots, snapshot_interval=interval)


def cross_policy() -> KVPolicy:
    return KVPolicy((KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.CROSS, (1,))), 4, max_encoder_tokens=30)


POLICIES = {
    "full": full_policy(),
    "mixed": mixed_policy(),
    "uneven": uneven_policy(),
    "state": state_policy(),
    "only states": state_policy(full=False),
    "states and windows": state_policy(window=10),
    "cross": cross_policy(),
}


class FakeDevice:
    """One number per position and group in pool 0; one (length, number) per page in pool 1."""

    def __init__(self, policy: KVPolicy, num_blocks: int, num_states: int = 0) -> None:
        self.policy = policy
        sizes = [policy.unit * group.units for group in policy.groups]
        self.cache: list[list[int | None]] = [[None] * max(sizes, default=1) for _ in range(num_blocks)]
        self.states: list[tuple[int, int] | None] = [None] * num_states
        self.slots: dict[int, tuple[list[int], list[list[int]]]] = {}
        self.names: dict[int, str] = {}
        self.encoded: dict[str, int] = {}  # what a request's encoder says, by name
        self.results: deque[StepResult] = deque()
        self.poisoned: set[int] = set()
        self.poison: int | None = None  # a prompt with this token makes the whole step raise

    def submit(self, plan: StepPlan) -> None:
        for slot in plan.freed:
            self.slots.pop(slot, None)
            self.poisoned.discard(slot)
        for new in plan.new:
            assert new.slot not in self.slots, "slot handed out twice"
            self.slots[new.slot] = (list(new.token_ids), [list(t) for t in new.block_ids])
            self.names[new.slot] = new.request_id
        for append in plan.blocks:
            table = self.slots[append.slot][1][append.group]
            table[append.start :] = append.block_ids + table[append.start + len(append.block_ids) :]
        self._transfer(plan.transfers)
        self.poisoned |= {n.slot for n in plan.new if self.poison in n.token_ids[: n.num_prompt_tokens]}
        if self.poisoned & set(plan.slots.tolist()):
            raise RuntimeError("poison")
        for new in plan.new:
            self._encode(new.slot)
        rows = list(zip(plan.slots.tolist(), plan.num_tokens.tolist(), plan.num_computed.tolist(), strict=True))
        assert len({slot for slot, _, _ in rows}) == len(rows)
        for slot, count, start in rows:
            self._write(slot, start, start + count)
        sampled = [-1] * len(rows)
        for i, (slot, count, start) in enumerate(rows):
            state = self._read(slot, start, start + count)
            if plan.sample[i]:
                assert start + count == len(self.slots[slot][0])
                sampled[i] = next_token(state)
        for i, (slot, _, _) in enumerate(rows):
            if sampled[i] >= 0:
                self.slots[slot][0].append(sampled[i])
        self.results.append(StepResult(plan.step_id, sampled))

    def _transfer(self, transfers: tuple[Transfer, ...]) -> None:
        """Read everything, then write everything, as a device does."""
        written = [(t.pool, t.dst) for t in transfers if t.kind is not TransferKind.SAVE]
        assert len(set(written)) == len(written), "a block is written twice"
        pools: tuple[list[Any], list[Any]] = (self.cache, self.states)
        values = [
            (0, 0) if t.kind is TransferKind.ZERO else list(self.cache[t.src]) if t.pool == 0 else self.states[t.src]
            for t in transfers
        ]
        for t, value in zip(transfers, values, strict=True):
            assert t.dst != 0 and (t.kind is TransferKind.ZERO or t.src != 0)
            pools[t.pool][t.dst] = value

    def _encode(self, slot: int) -> None:
        """Write the encoder's output, as a request's first step does."""
        for group, table in zip(self.policy.groups, self.slots[slot][1], strict=True):
            if group.kind is KVKind.CROSS:
                for block in table:
                    assert block != 0
                    self.cache[block][0] = self.encoded.get(self.names[slot], 0)

    def _token_tables(self, slot: int) -> list[tuple[KVGroup, int, list[int]]]:
        own = (KVKind.FULL, KVKind.SLIDING)
        pairs = zip(self.policy.groups, self.slots[slot][1], strict=True)
        return [(group, self.policy.unit * group.units, table) for group, table in pairs if group.kind in own]

    def _write(self, slot: int, start: int, end: int) -> None:
        tokens, tables = self.slots[slot]
        state = before = 0
        for position, token in enumerate(tokens[:end]):
            if position == start:
                before = state
            state = fold(state, token)
            if position >= start:
                for _, size, table in self._token_tables(slot):
                    block = table[position // size]
                    assert block != 0, "write to the null block"
                    self.cache[block][position % size] = state
        for group, table in zip(self.policy.groups, tables, strict=True):
            if group.kind is KVKind.RECURRENT:
                assert self.states[table[0]] == (start, before), "stale or foreign state"
                self.states[table[0]] = (end, state)

    def _read(self, slot: int, start: int, end: int) -> int:
        tokens, tables = self.slots[slot]
        state = 0
        for position, token in enumerate(tokens[:end]):
            state = fold(state, token)
            for group, size, table in self._token_tables(slot):
                first = 0 if group.window is None else start - group.window + 1
                if position >= first:
                    assert self.cache[table[position // size]][position % size] == state, (
                        "stale or foreign cache content"
                    )
        for group, table in zip(self.policy.groups, tables, strict=True):
            if group.kind is KVKind.CROSS:
                assert all(self.cache[b][0] == self.encoded.get(self.names[slot], 0) for b in table)
        return state

    def collect(self) -> StepResult:
        return self.results.popleft()


class Simulation:
    """Scheduler and fake device in a loop, with up to `depth` steps in flight."""

    def __init__(
        self, policy: KVPolicy, num_blocks: int, limits: SchedulerLimits, depth: int = 1, **kwargs: object
    ) -> None:
        self.scheduler = Scheduler(limits, policy, num_blocks, **kwargs)  # type: ignore[arg-type]
        self.device = FakeDevice(policy, num_blocks, policy.num_states(limits.max_num_seqs))
        self.depth = depth
        self.output: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.reasons: dict[str, tuple[str, int | str | None]] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int, min_tokens: int = 0, **kwargs: object) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=min_tokens)
        self.output[request_id] = []
        self.scheduler.add(CoreRequest(request_id, prompt, params, seed=0, **kwargs))  # type: ignore[arg-type]

    def record(self, outputs: list[CoreOutput]) -> None:
        for out in outputs:
            assert out.request_id not in self.finished, "output after the end"
            self.output[out.request_id] += out.new_token_ids
            if out.finish_reason is not None:
                self.finished[out.request_id] = out.finish_reason
                self.reasons[out.request_id] = (out.finish_reason, out.stop_reason)

    def step(self) -> bool:
        """Plan one more step if possible, then take in the oldest result. False when there was nothing to do."""
        plan = self.scheduler.schedule() if self.scheduler.num_in_flight < self.depth else None
        if plan is not None:
            try:
                self.device.submit(plan)
            except RuntimeError as error:
                self.device.results.clear()
                self.record(self.scheduler.isolate(str(error)))
                return True
        if plan is None or self.scheduler.num_in_flight >= self.depth:
            if not self.device.results:
                return plan is not None
            self.record(self.scheduler.apply(self.device.collect()))
        return True

    def run(self, check: bool = True) -> None:
        while self.scheduler.has_unfinished() or self.device.results:
            assert self.step(), "stuck: unfinished requests, but nothing to plan"
            if check:
                self.scheduler.check_invariants()
