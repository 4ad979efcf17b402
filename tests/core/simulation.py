"""A device without a model: it stores, per cache position, a hash of the tokens up to it, and checks every read against
it.

The token it samples is a function of all tokens of the request, so the right output of a request is known in advance
and any mistake of the scheduler (a wrong block, a lost or repeated token, a copy too late) changes it or raises.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVGroup, KVKind, KVPolicy
from vllm.step.messages import CoreOutput, CoreRequest
from vllm.step.plan import SlotInit, StepPlan, Transfer, TransferKind
from vllm.step.result import Pooled, StepResult

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


def uneven_states() -> KVPolicy:
    """Recurrent layers beside blocks of 4 and of 8 tokens."""
    groups = (KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.SLIDING, (1,), 10, units=2), KVGroup(KVKind.RECURRENT, (2,)))
    return KVPolicy(groups, 4, snapshots=12, snapshot_interval=12)


def cross_policy() -> KVPolicy:
    return KVPolicy((KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.CROSS, (1,))), 4, max_encoder_tokens=30)


POLICIES = {
    "full": full_policy(),
    "mixed": mixed_policy(),
    "uneven": uneven_policy(),
    "state": state_policy(),
    "only states": state_policy(full=False),
    "states and windows": state_policy(window=10),
    "states and long blocks": uneven_states(),
    "cross": cross_policy(),
}


class FakeDevice:
    """One number per position and group in pool 0; one (length, number) per page in pool 1.

    With `num_drafts` it has a drafter that is right now and then, and each row accepts as far as its drafts are what it
    samples: only the device knows how long a sequence is.
    """

    def __init__(self, policy: KVPolicy, num_blocks: int, num_states: int = 0, num_drafts: int = 0) -> None:
        self.policy = policy
        self.num_drafts = num_drafts
        self.right = 0.6  # how often a draft is what will be sampled
        self.rng = random.Random(0)
        sizes = [policy.unit * group.units for group in policy.groups]
        self.cache: list[list[int | None]] = [[None] * max(sizes, default=1) for _ in range(num_blocks)]
        self.states: list[tuple[int, int] | None] = [None] * num_states
        self.slots: dict[int, tuple[list[int], list[list[int]]]] = {}
        self.drafts: dict[int, list[int]] = {}  # behind the last token of a slot
        self.accepted: dict[int, int] = {}  # page of a slot's state that is true
        self.inits: dict[int, SlotInit] = {}
        self.encoded: dict[str, int] = {}  # what a request's encoder says, by name
        self.results: deque[StepResult] = deque()
        self.tier: dict[int, list[int | None]] = {}  # in host memory
        self.num_loaded = 0
        self.poisoned: set[int] = set()
        self.poison: int | None = None  # a prompt with this token makes the whole step raise

    def submit(self, plan: StepPlan) -> None:
        for slot in plan.freed:
            self.slots.pop(slot, None)
            self.poisoned.discard(slot)
        for new in plan.new:
            assert new.slot not in self.slots, "slot handed out twice"
            self.slots[new.slot] = (list(new.token_ids), [list(t) for t in new.block_ids])
            self.inits[new.slot], self.accepted[new.slot], self.drafts[new.slot] = new, 0, []
        for append in plan.blocks:
            table = self.slots[append.slot][1][append.group]
            table[append.start :] = append.block_ids + table[append.start + len(append.block_ids) :]
        self._transfer(plan.transfers)
        for slot, start, token_ids in plan.writes:
            assert start == len(self.slots[slot][0]), "drafts that do not follow the last token"
            self.drafts[slot] = list(token_ids)
        self.poisoned |= {n.slot for n in plan.new if self.poison in n.token_ids[: n.num_prompt_tokens]}
        if self.poisoned & set(plan.slots.tolist()):
            raise RuntimeError("poison")
        for new in plan.new:
            self._encode(new.slot)
        rows = [self._row(plan, row) for row in range(len(plan.slots))]
        assert len({slot for slot, _, _, _ in rows}) == len(rows)
        for slot, tokens, start, _ in rows:
            self._write(slot, tokens, start)
        token_ids, counts = [], []
        news: list[Pooled] = []
        for i, (slot, tokens, start, drafts) in enumerate(rows):
            states = self._read(slot, tokens, start)
            new_tokens = self._accept(slot, states, drafts) if plan.sample[i] else []
            token_ids += new_tokens
            counts.append(len(new_tokens))
            init = self.inits[slot]
            if isinstance(init.params, PoolingParams):
                assert plan.pooled is not None and plan.pooled[i] and not plan.sample[i]
                if len(tokens) == len(init.token_ids):
                    news.append(Pooled(i, states[-1].to_bytes(8, "little"), (1,), "int64"))
        if self.num_drafts or plan.drafts is not None:
            self.results.append(StepResult(plan.step_id, token_ids, counts=counts, news=tuple(news)))
        else:
            found = iter(token_ids)
            one_each = [next(found) if count else -1 for count in counts]
            self.results.append(StepResult(plan.step_id, one_each, news=tuple(news)))

    def _row(self, plan: StepPlan, row: int) -> tuple[int, list[int], int, int]:
        """Slot, its tokens up to the end of what this step computes, where that starts, and drafts among it."""
        slot, count, start = int(plan.slots[row]), int(plan.num_tokens[row]), int(plan.num_computed[row])
        drafts = int(plan.drafts[row]) if plan.drafts is not None else 0
        known = self.slots[slot][0]
        if plan.exact is not None and not plan.exact[row]:
            assert len(known) - 1 <= start, "the plan says less than the truth"
            start = len(known) - 1
        elif plan.sample[row]:
            assert start + count - drafts == len(known), "an exact row that is not"
        assert drafts <= len(self.drafts[slot])
        return slot, known[: start + count - drafts] + self.drafts[slot][:drafts], start, drafts

    def _accept(self, slot: int, states: list[int], drafts: int) -> list[int]:
        """The tokens of one row: sampled one after the other as long as the drafts before them hold."""
        known = self.slots[slot][0]
        new_tokens: list[int] = []
        for j, state in enumerate(states[-1 - drafts :]):
            new_tokens.append(next_token(state))
            if j == drafts or self.drafts[slot][j] != new_tokens[-1]:
                break
        self.accepted[slot] = len(new_tokens) - 1
        known += new_tokens
        state = 0
        for token in known:
            state = fold(state, token)
        self.drafts[slot] = []
        for _ in range(self.num_drafts):
            guess = next_token(state) if self.rng.random() < self.right else self.rng.randrange(VOCAB)
            self.drafts[slot].append(guess)
            state = fold(state, guess)
        return new_tokens

    def _transfer(self, transfers: tuple[Transfer, ...]) -> None:
        """Read everything, then write everything, as a device does."""
        written = [(t.pool, t.dst) for t in transfers if t.kind is not TransferKind.SAVE]
        assert len(set(written)) == len(written), "a block is written twice"
        pools: tuple[list[Any], list[Any]] = (self.cache, self.states)
        unread = (TransferKind.ZERO, TransferKind.LOAD)
        values = [
            (0, 0) if t.kind in unread else self.states[t.src] if t.pool else list(self.cache[t.src]) for t in transfers
        ]
        for t, value in zip(transfers, values, strict=True):
            assert t.dst != 0 and (t.kind is TransferKind.ZERO or t.src != 0)
            if t.kind is TransferKind.SAVE:
                self.tier[t.dst] = value
        for t, value in zip(transfers, values, strict=True):
            if t.kind is TransferKind.LOAD:
                self.cache[t.dst] = list(self.tier[t.src])
                self.num_loaded += 1
            elif t.kind is not TransferKind.SAVE:
                pools[t.pool][t.dst] = value

    def _encode(self, slot: int) -> None:
        """Write the encoder's output, as a request's first step does."""
        for group, table in zip(self.policy.groups, self.slots[slot][1], strict=True):
            if group.kind is KVKind.CROSS:
                for block in table:
                    assert block != 0
                    self.cache[block][0] = self.encoded.get(self.inits[slot].request_id, 0)

    def _tables(self, slot: int, *kinds: KVKind) -> list[tuple[KVGroup, int, list[int]]]:
        pairs = zip(self.policy.groups, self.slots[slot][1], strict=True)
        return [(group, self.policy.unit * group.units, table) for group, table in pairs if group.kind in kinds]

    def _write(self, slot: int, tokens: list[int], start: int) -> None:
        states = [0]
        for token in tokens:
            states.append(fold(states[-1], token))
        for _, size, table in self._tables(slot, KVKind.FULL, KVKind.SLIDING):
            for position in range(start, len(tokens)):
                block = table[position // size]
                assert block != 0, "write to the null block"
                self.cache[block][position % size] = states[position + 1]
        for _, _, pages in self._tables(slot, KVKind.RECURRENT):
            assert self.states[pages[self.accepted[slot]]] == (start, states[start]), "stale or foreign state"
            drafts = len(tokens) - len(self.slots[slot][0])
            for j in range(max(0, drafts) + 1):  # one page for each length that may be accepted
                length = len(tokens) - max(0, drafts) + j
                self.states[pages[j]] = (length, states[length])
            self.accepted[slot] = 0

    def _read(self, slot: int, tokens: list[int], start: int) -> list[int]:
        """What the queries of this step see; the state behind each of the tokens."""
        states = [0]
        for token in tokens:
            states.append(fold(states[-1], token))
        for group, size, table in self._tables(slot, KVKind.FULL, KVKind.SLIDING):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, len(tokens)):
                found = self.cache[table[position // size]][position % size]
                assert found == states[position + 1], "stale or foreign cache content"
        for _, _, table in self._tables(slot, KVKind.CROSS):
            said = self.encoded.get(self.inits[slot].request_id, 0)
            assert all(self.cache[block][0] == said for block in table)
        return states

    def collect(self) -> StepResult:
        return self.results.popleft()


class Simulation:
    """Scheduler and fake device in a loop, with up to `depth` steps in flight."""

    def __init__(
        self, policy: KVPolicy, num_blocks: int, limits: SchedulerLimits, depth: int = 1, **kwargs: object
    ) -> None:
        self.now = 1000.0  # seconds; a step, or an attempt at one, takes 10 ms
        self.scheduler = Scheduler(limits, policy, num_blocks, **{"clock": lambda: self.now, **kwargs})  # type: ignore[arg-type]
        self.device = FakeDevice(policy, num_blocks, policy.num_states(limits.max_num_seqs), limits.num_drafts)
        self.pooled: dict[str, bytes] = {}
        self.depth = depth
        self.ahead = False  # whether the step after the oldest one in flight is planned before its result is known
        self.early = False  # and submitted
        self.output: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.reasons: dict[str, tuple[str, int | str | None]] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int, min_tokens: int = 0, **kwargs: object) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=min_tokens)
        self.output[request_id] = []
        self.scheduler.add(CoreRequest(request_id, prompt, params, seed=0, **kwargs))  # type: ignore[arg-type]

    def pool(self, request_id: str, prompt: list[int], **kwargs: object) -> None:
        self.output[request_id] = []
        self.scheduler.add(CoreRequest(request_id, prompt, PoolingParams(), seed=0, **kwargs))  # type: ignore[arg-type]

    def record(self, outputs: list[CoreOutput]) -> None:
        for out in outputs:
            assert out.request_id not in self.finished, "output after the end"
            self.output[out.request_id] += out.new_token_ids
            if out.pooled is not None:
                self.pooled[out.request_id] = out.pooled.data
            if out.finish_reason is not None:
                self.finished[out.request_id] = out.finish_reason
                self.reasons[out.request_id] = (out.finish_reason, out.stop_reason)

    def step(self) -> bool:
        """Plan one more step if possible, then take in the oldest result. False when there was nothing to do."""
        self.now += 0.01
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
            full = self.scheduler.num_in_flight >= self.depth
            ahead = self.scheduler.schedule_ahead() if self.early or (self.ahead and full) else None
            if ahead is not None and self.early:
                self.device.submit(ahead)
            result = self.device.collect()
            if ahead is not None and not self.early:
                self.device.submit(ahead)
            self.record(self.scheduler.apply(result))
        return True

    def check_reason(self) -> None:
        """Fail if nothing is planned or in flight, for no reason, which would be: every request is blocked, or forked
        from one that does not start, or queues behind such a fork in its account.
        """
        if self.scheduler.num_in_flight:
            return
        waiting = dict(self.scheduler.requests)
        held = {r.id for r in waiting.values() if r.blocked}
        while held:
            waiting = {name: r for name, r in waiting.items() if name not in held}
            reasons = set(self.scheduler.requests) - set(waiting)
            forks = [r for r in waiting.values() if r.fork_of in reasons]
            accounts = {r.account for r in forks} - {None}
            held = {r.id for r in forks} | {r.id for r in waiting.values() if r.account in accounts}
        assert not waiting, f"nothing is planned, for no reason: {list(waiting.values())}"

    def run(self, check: bool = True) -> None:
        """Run until nobody is left. Preempted or not, somebody must get on: when as many tokens were computed in vain
        as all requests have, work is done over and over again.
        """
        told = sum(map(len, self.output.values())) + len(self.finished)
        quiet, longest = 0, 0
        while self.scheduler.has_unfinished() or self.device.results:
            longest = max(longest, sum(len(r.tokens) for r in self.scheduler.requests.values()))
            # suspects that have ended may take up one turn to plan
            assert self.step() or self.step(), "stuck: unfinished requests, but nothing to plan"
            before, told = told, sum(map(len, self.output.values())) + len(self.finished)
            quiet = quiet + 1 if told == before else 0
            assert quiet <= longest + 2 * self.depth, f"nobody gets on: {list(self.scheduler.requests.values())}"
            if check:
                self.scheduler.check_invariants()
