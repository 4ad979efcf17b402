"""A device without a model: it stores, per cache position, a hash of the tokens up to it, and checks every read against
it.

The token it samples is a function of all tokens of the request, so the right output of a request is known in advance
and any mistake of the scheduler (a wrong block, a lost or repeated token, a copy too late) changes it or raises.
"""

from __future__ import annotations

from collections import deque

from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.step.messages import CoreOutput, CoreRequest
from vllm.step.plan import StepPlan
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


def full_layout(block_size: int = 4) -> KVLayout:
    return KVLayout((KVGroup(KVKind.FULL, (0, 1)),), block_size, 1, 8, 2)


def mixed_layout(block_size: int = 4, window: int = 10) -> KVLayout:
    groups = (KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.SLIDING, (1,), window))
    return KVLayout(groups, block_size, 1, 8, 2)


class FakeDevice:
    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.cache: list[list[int | None]] = [[None] * layout.block_size for _ in range(num_blocks)]
        self.slots: dict[int, tuple[list[int], list[list[int]]]] = {}
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
        for append in plan.blocks:
            table = self.slots[append.slot][1][append.group]
            table[append.start :] = append.block_ids + table[append.start + len(append.block_ids) :]
        for src, dst in plan.copies:
            self.cache[dst] = list(self.cache[src])
        self.poisoned |= {n.slot for n in plan.new if self.poison in n.token_ids[: n.num_prompt_tokens]}
        if self.poisoned & set(plan.slots.tolist()):
            raise RuntimeError("poison")
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

    def collect(self) -> StepResult:
        return self.results.popleft()

    def _write(self, slot: int, start: int, end: int) -> None:
        tokens, tables = self.slots[slot]
        size = self.layout.block_size
        state = 0
        for position, token in enumerate(tokens[:end]):
            state = fold(state, token)
            if position >= start:
                for table in tables:
                    block = table[position // size]
                    assert block != 0, "write to the null block"
                    self.cache[block][position % size] = state

    def _read(self, slot: int, start: int, end: int) -> int:
        tokens, tables = self.slots[slot]
        size = self.layout.block_size
        state = 0
        for position, token in enumerate(tokens[:end]):
            state = fold(state, token)
            for group, table in zip(self.layout.groups, tables, strict=True):
                first = 0 if group.window is None else start - group.window + 1
                if position >= first:
                    assert self.cache[table[position // size]][position % size] == state, (
                        "stale or foreign cache content"
                    )
        return state


class Simulation:
    """Scheduler and fake device in a loop, with up to `depth` steps in flight."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, limits: SchedulerLimits, depth: int = 1, **kwargs: object
    ) -> None:
        self.scheduler = Scheduler(limits, layout, num_blocks, **kwargs)  # type: ignore[arg-type]
        self.device = FakeDevice(layout, num_blocks)
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
