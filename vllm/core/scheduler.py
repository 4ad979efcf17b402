"""Decides what every step computes. No phases: each request gets `min(tokens it still has to compute, budget left)`."""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.core.kv_manager import KVManager, resolve
from vllm.core.policies import AdmissionPolicy, StepView, Verdict
from vllm.core.request import ENDLESS, Request, Status
from vllm.core.stop import check_stop
from vllm.core.tier import Moves
from vllm.core.waiting import WaitingQueue
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVPolicy
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats
from vllm.step.plan import BlockAppend, SlotInit, StepPlan, TokenWrite, Transfer
from vllm.step.result import Drafts, Logprobs, Pooled, StepResult


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of one step and the order of requests.

    max_num_batched_tokens: tokens computed per step.   max_num_seqs: requests running at once (number of slots).
    chunk_threshold: a prompt gets at most this many tokens per step (0: no bound).
    account_share: the part of the slots, or of the blocks, that one account may keep while others wait.
    num_drafts: drafts that the device proposes behind every token it samples; each step of a request verifies them.
    max_pending: tokens of a request in flight with which it is still planned: 0 where its next step needs to know the
    last token on the host, as in a pipeline. None: as many as there are steps in flight.
    stages: of a pipeline; a step takes so small a part of the requests that all stages have work.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    priority: bool = False
    chunk_threshold: int = 0
    account_share: float = 0.5
    num_drafts: int = 0
    max_pending: int | None = None
    stages: int = 1


_LOADING = "loading"  # what a request waits for whose prefix comes from the lower tier


@dataclass(slots=True)
class _Draft:
    """A plan while it is being made."""

    budget: int
    new: list[SlotInit]
    blocks: list[BlockAppend]
    transfers: list[Transfer]
    requests: list[Request]
    num_tokens: list[int]
    num_computed: list[int]
    sample: list[bool]
    prompt_tokens: int = 0
    rows: int = ENDLESS  # requests that may still be added
    writes: list[TokenWrite] = field(default_factory=list)
    drafted: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> drafts, epoch of the request
    moves: Moves = field(default_factory=Moves)
    inexact: list[int] = field(default_factory=list)  # rows whose `num_computed` is an upper bound


def _processors(message: CoreRequest) -> bool:
    """Whether Python must see each token before the next is sampled."""
    return isinstance(message.params, SamplingParams) and bool(message.params.logits_processors)


class Scheduler:
    """Owns requests, slots and, through the KV manager, blocks.

    `schedule()` may be called again before `apply()` has seen the result of the plan before: whatever the device only
    knows yet (`num_pending` tokens) is planned on, and a token computed past a stop is dropped in `apply()`. Results
    are applied in the order of their plans.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: KVPolicy,
        num_blocks: int,
        *,
        enable_prefix_caching: bool = True,
        policies: Sequence[AdmissionPolicy] = (),
        clock: Callable[[], float] = time.time,
        late_masks: bool = False,
        tier_blocks: int = 0,
    ) -> None:
        """late_masks: what a grammar allows may be said after a step was submitted, so that the step need not wait.
        tier_blocks: blocks of a lower tier that the executor has; 0: it has none.
        """
        self.limits = limits
        self._late_masks = late_masks
        self.kv = KVManager(
            policy,
            num_blocks,
            enable_prefix_caching,
            num_states=policy.num_states(limits.max_num_seqs),
            snapshots=limits.chunked_prefill,
            tier_blocks=tier_blocks,
        )
        self._chunk = min(limits.max_num_batched_tokens, limits.chunk_threshold or limits.max_num_batched_tokens)
        needed = self.kv.blocks_for(limits.max_model_len, self._chunk)
        if needed > num_blocks - 1:
            raise ValueError(
                f"One request of max_model_len={limits.max_model_len} tokens needs {needed} KV cache blocks, but only "
                f"{num_blocks - 1} are available. Decrease max_model_len or give the cache more memory."
            )
        self._policies = tuple(policies)
        self._limiting = tuple(p for p in policies if type(p).limit is not AdmissionPolicy.limit)
        self._clock = clock
        self._long = limits.chunk_threshold or limits.max_model_len
        self._watermark = num_blocks // 100
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self._waiting = WaitingQueue(limits.priority, limits.max_num_seqs, limits.account_share)
        self._blocked: dict[str, Request] = {}
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []
        # Plan, its draft, when it was made.
        self._in_flight: deque[tuple[StepPlan, _Draft, float]] = deque()
        self._speculates = limits.num_drafts > 0
        self._num_pooled = 0
        self._step_id = 0
        self._sequence = 0
        self._suspects: deque[Request] = deque()  # to be tried alone, one step each
        self._isolated = False
        self._stats = CoreStats(kv_blocks_total=num_blocks - 1, kv_blocks_free=num_blocks - 1)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, message: CoreRequest) -> None:
        """Queue a request. Raises ValueError if its id is in use or its prompt cannot be served."""
        limits = self.limits
        length = len(message.prompt_token_ids)
        if message.request_id in self.requests:
            raise ValueError(f"Request {message.request_id} already exists.")
        if not 1 <= length < limits.max_model_len + 1:
            raise ValueError(f"A prompt must have 1 to {limits.max_model_len} tokens, got {length}.")
        if not limits.chunked_prefill and length > limits.max_num_batched_tokens:
            raise ValueError(
                f"A prompt of {length} tokens exceeds max_num_batched_tokens={limits.max_num_batched_tokens} and "
                "chunked prefill is off. Enable chunked prefill or raise max_num_batched_tokens."
            )
        pending = ENDLESS if limits.max_pending is None else limits.max_pending
        request = Request(message, limits.max_model_len, self.kv.num_groups, self._sequence, pending)
        self._sequence += 1
        if self._late_masks and message.grammar is not None and not _processors(message):
            request.max_pending = min(pending, 1)  # its next mask is made when its last token is known
        self.requests[request.id] = request
        self._num_pooled += request.pooled
        self._waiting.push(request)

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """End requests now; unknown ids are ignored. Tokens still in flight for them will be dropped."""
        doomed = [r for r in (self.requests.get(i) for i in request_ids) if r is not None]
        self._finish(doomed)
        return [CoreOutput(request_id=r.id, new_token_ids=[], finish_reason="abort") for r in doomed]

    def fail_all(self, error: str) -> list[CoreOutput]:
        """A step failed as a whole: end every request, forget the steps in flight and the prefix cache."""
        doomed = list(self.requests.values())
        self._forget_plans()
        self._finish(doomed)
        self._forget_device()
        return [CoreOutput(request_id=r.id, new_token_ids=[], finish_reason="error", error=error) for r in doomed]

    def _forget_plans(self) -> None:
        """None of the plans in flight has a result."""
        for _, draft, _ in self._in_flight:
            if self.kv.tier is not None:
                self.kv.tier.dropped(draft.moves)
            for request_id in draft.moves.waiting:
                self.unblock(request_id, _LOADING)
        self._in_flight.clear()

    def _forget_device(self) -> None:
        """Count on nothing that steps have left on the device."""
        self.kv.reset_cache()
        for policy in self._policies:
            policy.failed()

    def isolate(self, error: str) -> list[CoreOutput]:
        """A step failed as a whole, and the device survived: find out which request it was.

        Everything in flight is forgotten and computed again; the requests concerned take their next step alone. One
        that then fails ends with the error, the others never notice. If they fail only together, all of them end.
        """
        involved = {r.id: r for _, draft, _ in self._in_flight for r in draft.requests if r.id in self.requests}
        if not involved or (len(involved) > 1 and all(r.suspected for r in involved.values())):
            return self.fail_all(error)
        self._forget_plans()
        self._isolated = True
        outputs: list[CoreOutput] = []
        if len(involved) == 1 and all(r.suspected for r in involved.values()):
            self._finish(list(involved.values()))
            outputs = [CoreOutput(id, [], finish_reason="error", error=error) for id in involved]
        for request in self.requests.values():
            request.num_pending = request.num_drafted = 0
        while self.running:
            self._preempt(self.running.pop())
        self._freed_slots = list(range(self.limits.max_num_seqs))  # whatever the device did not take in
        self._forget_device()
        for request in involved.values():
            if request.status is Status.WAITING and not request.suspected:
                request.suspected = True
                self._suspects.append(request)
        return outputs

    def block(self, request_id: str, reason: str) -> None:
        """Keep a request from running until `unblock` is called with the same reason; an unknown id is ignored.

        A request that runs gives its slot and blocks back first, and computes its tokens again afterwards.
        """
        request = self.requests.get(request_id)
        if request is None:
            return
        request.blocked.add(reason)
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._leave_slot(request)
        elif request.status is Status.WAITING:
            self._waiting.remove([request])
        request.status = Status.BLOCKED
        self._blocked[request_id] = request

    def unblock(self, request_id: str, reason: str) -> None:
        """One thing that a request waited for is there. It takes the place in the queue that its arrival gives it."""
        request = self._blocked.get(request_id)
        if request is None:
            return
        request.blocked.discard(reason)
        if not request.blocked:
            del self._blocked[request_id]
            request.status = Status.WAITING
            self._waiting.push_back_in(request)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, blocked ones among them."""
        return len(self._waiting) + len(self._blocked)

    @property
    def planned(self) -> list[Request]:
        """The requests of the newest plan, one per row."""
        return self._in_flight[-1][1].requests

    def refuse(self, request_ids: Iterable[str], error: str) -> list[CoreOutput]:
        """End requests that are themselves at fault; unknown ids are ignored. Tokens still in flight for them will be
        dropped.
        """
        doomed = [r for r in (self.requests.get(i) for i in request_ids) if r is not None]
        self._finish(doomed)
        return [CoreOutput(r.id, [], finish_reason="error", error=error, refused=True) for r in doomed]

    # -- planning ------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan one step, or None if nothing can be computed now (all done, or every next token depends on steps in
        flight).
        """
        draft = _Draft(self.limits.max_num_batched_tokens, [], [], [], [], [], [], [])
        self.kv.begin_plan()
        if self.kv.tier is not None:
            self.kv.tier.save(draft.moves, draft.transfers)
        if self.limits.stages > 1:
            active = len(self.running) + min(len(self._waiting), len(self._free_slots))
            draft.rows = max(1, -(-active // self.limits.stages))
        if self._suspects:
            self._plan_suspect(draft)
        else:
            if self._waiting and (self.limits.priority or self._waiting.has_accounts):
                self._make_way()
            preempted = self._continue_running(draft)
            if self._waiting and not preempted and draft.budget > 0:
                self._admit_waiting(draft)
        if not draft.requests and not draft.moves.loaded:
            if self.kv.tier is not None:
                if draft.moves.saved and not self._in_flight:  # what is to be saved takes the room that they need
                    self.kv.tier.dropped(draft.moves)
                    return self.schedule()
                self.kv.tier.undo(draft.moves)
            return None
        for request_id in draft.moves.waiting:
            self.block(request_id, _LOADING)
        plan = StepPlan(
            step_id=self._step_id,
            freed=tuple(self._freed_slots),
            new=tuple(draft.new),
            blocks=tuple(draft.blocks),
            slots=np.array([r.slot for r in draft.requests], dtype=np.int32),
            num_tokens=np.array(draft.num_tokens, dtype=np.int32),
            num_computed=np.array(draft.num_computed, dtype=np.int32),
            sample=np.array(draft.sample, dtype=bool),
            transfers=resolve(draft.transfers) if draft.transfers else (),
            adapters=tuple(load for policy in self._policies for load in policy.loads()) if draft.new else (),
            **(self._features(draft) if self._speculates or self._num_pooled else {}),
        )
        self._freed_slots.clear()
        self._step_id += 1
        self._in_flight.append((plan, draft, self._clock()))
        return plan

    def empty_plan(self) -> StepPlan:
        """A step without requests, for a device that must run one because its peers do."""
        none: np.ndarray = np.empty(0, np.int32)
        plan = StepPlan(self._step_id, tuple(self._freed_slots), (), (), none, none, none, none.astype(bool))
        self._freed_slots.clear()
        self._step_id += 1
        self._in_flight.append((plan, _Draft(0, [], [], [], [], [], [], []), self._clock()))
        return plan

    def propose(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Drafts of the host for the tokens behind the last one of a request, to be verified by its next step, if no
        other step of it is in flight then. Those past the longest output are dropped; an unknown id is ignored.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._speculates = True
            request.proposal = list(token_ids)

    def _features(self, draft: _Draft) -> dict[str, Any]:
        """What a plan has beyond its rows, where it is not neutral."""
        found: dict[str, Any] = {}
        if draft.drafted:
            found["drafts"] = np.zeros(len(draft.requests), np.int32)
            for row, (count, _) in draft.drafted.items():
                found["drafts"][row] = count
        if draft.inexact:
            found["exact"] = np.ones(len(draft.requests), bool)
            found["exact"][draft.inexact] = False
        if draft.writes:
            found["writes"] = tuple(draft.writes)
        if any(r.pooled for r in draft.requests):
            found["pooled"] = np.array([r.pooled for r in draft.requests])
        return found

    def _plan_suspect(self, draft: _Draft) -> None:
        """Give the next suspect a step of its own; nothing else is in flight meanwhile."""
        while self._suspects and not self._in_flight and not draft.requests:
            suspect = self._suspects.popleft()
            if suspect.status is not Status.WAITING:
                continue
            self._waiting.remove([suspect])
            if self._admit(draft, suspect, self._view()) is not Verdict.ADMIT:
                self._waiting.push(suspect)  # there was no room for it: it waits its turn again

    def _make_way(self) -> None:
        """Preempt while requests whose turn it is find no slot or too few blocks, and others should yield to them."""
        fair, reserve = self._waiting.has_accounts, 0
        if fair and self._free_slots:
            reserve = self._watermark + self._growth()
        tokens = self.limits.max_num_batched_tokens
        promised: dict[str, int] = {}
        for slots, request in enumerate(self._waiting.turns(self.limits.max_num_seqs if fair else 1)):
            tokens -= len(request.tokens)
            if (slots and tokens < 0) or request.num_pending or self._fork_parent_waits(request):
                return
            while len(self._free_slots) <= slots or not self.kv.can_admit(
                request, len(request.tokens), self._chunk, reserve
            ):
                mine = promised.get(request.account or "", 0)
                victim = self._yielding(request, mine) if self.running else None
                if victim is None:
                    return
                self.running.remove(victim)
                self._preempt(victim)
            reserve += self.kv.blocks_for(len(request.tokens), self._chunk)
            if request.account is not None:
                promised[request.account] = promised.get(request.account, 0) + 1

    def _growth(self) -> int:
        """Blocks that the running requests will take for their next tokens."""
        return self.kv.num_groups * sum(1 for r in self.running if r.num_computed >= r.capacity)

    def _yielding(self, first: Request, promised: int) -> Request | None:
        """Who must yield to `first`: the last one if its priority is lower, else the last one of an account that holds
        more than its share; nobody of higher priority. promised: slots for others of its account.
        """
        running = self.running
        if self.limits.priority and first.priority < running[-1].priority:
            return running[-1]
        account = self._waiting.over_share(first, promised)
        if account is None and self._free_slots and not promised:
            account = self._largest_holder_of_blocks(first)
        if account is None:
            return None
        for request in reversed(running):
            if request.account == account and (not self.limits.priority or request.priority >= first.priority):
                return request
        return None

    def _largest_holder_of_blocks(self, first: Request) -> str | None:
        """The account with several sequences whose blocks are more than its share, if `first` is another's first."""
        if self._waiting.held(first.account):
            return None
        blocks: dict[str, int] = {}
        for request in self.running:
            if request.account is not None:
                blocks[request.account] = blocks.get(request.account, 0) + sum(map(len, request.tables))
        account = max(blocks, key=blocks.__getitem__, default=None)
        if account is None or self._waiting.held(account) < 2:
            return None
        return account if blocks[account] > (self.kv.pool.num_blocks - 1) * self.limits.account_share else None

    def _continue_running(self, draft: _Draft) -> bool:
        """Give every running request its next tokens, preempting from the end when blocks run out (then True)."""
        running, kv, chunk, budget = self.running, self.kv, self._chunk, draft.budget
        speculates, special = self._speculates, self._speculates or self._num_pooled or draft.rows != ENDLESS
        preempted = False
        i, end = 0, len(running)
        while i < end and budget > 0:
            request = running[i]
            i += 1
            pending = request.num_pending
            total = len(request.tokens) + pending
            start = request.num_computed
            if pending and (total >= request.max_len or pending > request.max_pending):
                continue  # its last token, or one that must be seen first, is in flight
            count = total - start
            if count > 1:
                count = min(count, chunk, budget)
                if kv.takes_snapshots:
                    count = kv.cut(request, start, count)
                for policy in self._limiting:
                    count = policy.limit(request, count)
                if count <= 0 or len(draft.requests) >= draft.rows:
                    continue
            elif special:
                if count <= 0 or len(draft.requests) >= draft.rows:
                    continue  # a pooled request, whose last tokens are being computed; or other stages' turn
                if speculates:
                    count += self._num_drafts(request, start, total, budget)
            while (start + count > request.capacity or request.shares_tail) and not kv.grow(
                request, start + count, draft.blocks, draft.transfers
            ):
                preempted = True
                victim = self._last_to_yield(i - 1)
                self._preempt(victim)
                end -= 1
                if victim is request:
                    draft.budget = budget
                    return True
            budget -= count
            if speculates and start + 1 >= total and not request.pooled:
                self._verify(draft, request, count - 1)
            else:
                self._take(draft, request, count)
        draft.budget = budget
        return preempted

    def _num_drafts(self, request: Request, start: int, total: int, budget: int) -> int:
        """How many drafts the next step of a request verifies, which computes its last token, the one at `start` at
        most; it has `total` tokens at most. The device has drafts behind tokens that it sampled itself.
        """
        if request.proposal and not request.num_pending:
            proposed = len(request.proposal)
        else:
            proposed = self.limits.num_drafts if start >= request.entered_with and not request.pooled else 0
        return max(0, min(proposed, request.max_len - total - 1, budget - 1))

    def _verify(self, draft: _Draft, request: Request, drafts: int) -> None:
        """Put the last token of a request and the drafts behind it into the plan. If an earlier step has drafts in
        flight, only the device knows where they begin.
        """
        row, start = len(draft.requests), request.num_computed
        if request.num_drafted:
            draft.inexact.append(row)
        if request.proposal:
            if drafts and not request.num_pending:
                draft.writes.append(TokenWrite(request.slot, len(request.tokens), request.proposal[:drafts]))
            request.proposal = []
        if drafts:
            draft.drafted[row] = (drafts, request.epoch)
        request.num_computed += 1 + drafts
        request.num_pending += 1 + drafts
        request.num_drafted += drafts
        request.plan_step, request.plan_tokens = self._step_id, 1 + drafts
        draft.requests.append(request)
        draft.num_tokens.append(1 + drafts)
        draft.num_computed.append(start)
        draft.sample.append(True)

    def _last_to_yield(self, start: int) -> Request:
        """Take out of `running[start:]`, which this step has not planned yet, who goes when blocks run out: the last
        one, or the last one of the account that holds the most, if that is beyond its share and no priority is against
        it.
        """
        running = self.running
        last = running[-1]
        if self._waiting.has_accounts:
            account = self._waiting.over_share(last)
            for i in range(len(running) - 1, start - 1, -1) if account is not None else ():
                if running[i].account == account and not (self.limits.priority and running[i].priority < last.priority):
                    return running.pop(i)
        return running.pop()

    def _admit_waiting(self, draft: _Draft) -> None:
        """Start waiting requests, each in its turn, while slots, blocks, budget and policies allow."""
        view = self._view()
        while self._free_slots and draft.budget > 0 and len(draft.requests) < draft.rows:
            request = self._waiting.take()
            if request is None:
                break
            verdict = self._admit(draft, request, view)
            if verdict is Verdict.SKIP:
                self._waiting.set_aside(request)
            elif verdict is Verdict.STOP:
                self._waiting.put_back(request)
                break
        self._waiting.restore()

    def _admit(self, draft: _Draft, request: Request, view: StepView) -> Verdict:
        """Start one request, unless something is against it; then nothing has changed."""
        verdict = self._verdict(request, view)
        if verdict is not Verdict.ADMIT:
            return verdict
        if self.kv.tier is not None and self.kv.fetch(request, self._watermark, draft.moves, draft.transfers):
            return Verdict.SKIP
        if not self._start(request):
            return Verdict.STOP
        remaining = len(request.tokens) - request.num_computed
        count = min(remaining, self._chunk, draft.budget)
        if self.kv.takes_snapshots:
            count = self.kv.cut(request, request.num_computed, count)
        for policy in self._limiting:
            count = policy.limit(request, count)
        split = count < remaining and not self.limits.chunked_prefill
        if count <= 0 or split or not self.kv.grow(request, request.num_computed + count, [], draft.transfers):
            self.kv.free([request])
            request.num_computed = 0
            return Verdict.SKIP if count <= 0 else Verdict.STOP
        self._enter_slot(draft, request)
        self._take(draft, request, count)
        draft.budget -= count
        if request.num_computed < len(request.tokens):
            view.num_prefilling += 1
            view.num_long_prefilling += len(request.tokens) > self._long
        return Verdict.ADMIT

    def _verdict(self, request: Request, view: StepView) -> Verdict:
        if request.num_pending:
            return Verdict.SKIP  # preempted with a token in flight: its tokens are not all known yet
        if self._fork_parent_unready(request):
            return Verdict.SKIP
        for policy in self._policies:
            verdict = policy.admit(request, view)
            if verdict is not Verdict.ADMIT:
                return verdict
        return Verdict.ADMIT

    def _view(self) -> StepView:
        prefilling = [r for r in self.running if r.num_computed < len(r.tokens)] if self._policies else []
        return StepView(
            running=self.running,
            num_prefilling=len(prefilling),
            num_long_prefilling=sum(1 for r in prefilling if len(r.tokens) > self._long),
            step_id=self._step_id,
        )

    def _fork_parent_waits(self, request: Request) -> bool:
        """Whether the request would wait for a parent that has no slot itself."""
        parent = self.requests.get(request.fork_of) if request.fork_of is not None else None
        return parent is not None and parent.status is not Status.RUNNING and self._fork_parent_unready(request)

    def _fork_parent_unready(self, request: Request) -> bool:
        parent = self.requests.get(request.fork_of) if request.fork_of is not None else None
        if parent is None or not request.reads_cache:
            return False
        return self._computed_before(parent) < self._fork_length(parent, request) and parent.num_preemptions == 0

    def _fork_length(self, parent: Request, child: Request) -> int:
        """Tokens of the parent's cache that the child can use: one is left to compute."""
        return min(child.num_prompt_tokens, len(parent.tokens), len(child.tokens) - 1)

    def _computed_before(self, request: Request) -> int:
        """Tokens computed by plans before the one being made."""
        return request.num_computed - (request.plan_tokens if request.plan_step == self._step_id else 0)

    def _start(self, request: Request) -> bool:
        """Attach what is cached or forked; False, changing nothing, if the whole prompt does not fit in."""
        reserve = self._watermark if self.running else 0
        parent = self.requests.get(request.fork_of) if request.fork_of is not None else None
        if parent is not None and request.reads_cache:
            shared = self._fork_length(parent, request)
            if (
                shared <= self._computed_before(parent)
                and self.kv.can_fork(parent, request, shared)
                and parent.tokens[:shared] == request.tokens[:shared]
            ):
                rest = len(request.tokens) - shared + self.kv.block_size
                if not self.kv.can_admit(request, rest, self._chunk, reserve):
                    return False
                self.kv.fork(parent, request, shared)
                return True
        cached = self.kv.attach_prefix(request)
        rest = len(request.tokens) - cached
        if not self.kv.can_admit(request, rest, self._chunk, reserve):
            self.kv.free([request])
            request.num_computed = 0
            return False
        if self.kv.looks_up(request):
            self._stats.prefix_cache_queries += len(request.tokens)
            self._stats.prefix_cache_hits += cached
        return True

    def _enter_slot(self, draft: _Draft, request: Request) -> None:
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        if request.first_scheduled_time == 0.0:
            request.first_scheduled_time = self._clock()
        request.entered_with = len(request.tokens)
        self._waiting.admitted(request)
        for policy in self._policies:
            policy.admitted(request)
        if self.limits.priority:
            insort(self.running, request, key=Request.order)
        else:
            self.running.append(request)
        draft.new.append(
            SlotInit(
                request_id=request.id,
                slot=request.slot,
                token_ids=list(request.tokens),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed=request.num_computed,
                block_ids=tuple(list(t) for t in request.tables),
                params=request.params,
                seed=request.seed,
                stop_token_ids=tuple(request.stop_token_ids),
                lora_id=request.lora_id,
                columns=request.columns,
            )
        )

    def _take(self, draft: _Draft, request: Request, count: int) -> None:
        """Put `count` tokens of a request into the plan; it samples if these are its last."""
        start = request.num_computed
        end = start + count
        samples = end == len(request.tokens) + request.num_pending
        if start < request.num_prompt_tokens:
            draft.prompt_tokens += min(end, request.num_prompt_tokens) - start
        request.num_computed = end
        request.plan_step = self._step_id
        request.plan_tokens = count
        if samples:
            if request.pooled:
                samples = False
            else:
                request.num_pending += 1
        if count > 1:
            # Prompt chunks are findable at once, also by the next request of this plan: in every layer a mixed batch
            # writes all its keys before any query reads. Blocks that single tokens complete are registered in apply().
            self.kv.register_full_blocks(request, min(end, len(request.tokens)))
        draft.requests.append(request)
        draft.num_tokens.append(count)
        draft.num_computed.append(start)
        draft.sample.append(samples)

    def _preempt(self, request: Request) -> None:
        """Take slot and blocks away; the request will compute its tokens again, prompt and output alike."""
        self._leave_slot(request)
        request.status = Status.WAITING
        self._waiting.push(request, front=True)

    def _leave_slot(self, request: Request) -> None:
        self.kv.free([request])
        self._release_slot(request)
        request.num_computed = 0
        request.epoch += 1
        request.proposal = []
        request.fetched = False
        request.num_preemptions += 1
        self._stats.num_preemptions += 1

    # -- results -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Do what can wait until the device is busy with the last plan; whatever needs it earlier does it."""
        self.kv.settle()

    def apply(self, result: StepResult) -> list[CoreOutput]:
        """Take in the result of the oldest plan in flight. The only place where what the device found changes state."""
        plan, draft, planned_at = self._in_flight.popleft()
        requests = draft.requests
        if self.kv.tier is not None:
            self.kv.tier.done(draft.moves)
            for request_id in draft.moves.waiting:
                self.unblock(request_id, _LOADING)
        if plan.step_id != result.step_id:
            raise ValueError(f"Result of step {result.step_id} where step {plan.step_id} was due.")
        self.settle()
        outputs: list[CoreOutput] = []
        finished: list[Request] = []
        generated = 0
        # This loop runs once per request and step: names are bound once, the common case touches no dictionary.
        logprobs, prompt_logprobs, errors = result.logprobs, result.prompt_logprobs, result.errors
        extras = bool(logprobs or prompt_logprobs or errors)
        block_size = self.kv.block_size
        finished_status, running_status = Status.FINISHED, Status.RUNNING
        if result.counts is not None:
            generated = self._apply_counted(plan, draft, result, outputs, finished)
        rows = zip(requests, result.token_ids, strict=True) if result.counts is None else ()
        for i, (request, token) in enumerate(rows):
            if request.status is finished_status:
                continue
            if extras and i in errors:
                self.kv.forget(request)
                finished.append(request)
                outputs.append(CoreOutput(request.id, [], finish_reason="error", error=errors[i]))
                continue
            if token < 0 and not (extras and i in prompt_logprobs):
                continue  # a chunk of a prompt: nothing to tell
            output = CoreOutput(request.id, [])
            if extras and i in prompt_logprobs:
                output.prompt_logprobs = (
                    request.unseen_prompt_logprobs(int(plan.num_computed[i]), prompt_logprobs[i]) or None
                )
            if not request.cached_reported:
                request.cached_reported = True
                output.num_cached_tokens = request.num_cached_tokens
                output.first_scheduled_time = request.first_scheduled_time
            if request.num_preemptions:
                output.num_preemptions = request.num_preemptions
            outputs.append(output)
            if token < 0:
                continue
            tokens = request.tokens
            request.num_pending -= 1
            tokens.append(token)
            generated += 1
            length = len(tokens)
            computed = request.num_computed if request.num_computed < length else length
            if computed // block_size > request.num_registered and request.status is running_status:
                self.kv.register_full_blocks(request, computed)
            output.new_token_ids.append(token)
            if extras and i in logprobs:
                output.logprobs = [logprobs[i]]
            if length >= request.max_len or token in request.stop_token_ids:
                stop = check_stop(request, token)
                if stop is not None:
                    output.finish_reason, output.stop_reason = stop
                    finished.append(request)
        if self._num_pooled:
            self._apply_pooled(draft, result, outputs, finished)
        if len(requests) > 1 or (generated and len(self.requests) == 1):
            self._trust(requests)
        self._finish(finished)
        self._observe(draft.prompt_tokens, generated, self._clock() - planned_at)
        return outputs

    def _apply_counted(
        self, plan: StepPlan, draft: _Draft, result: StepResult, outputs: list[CoreOutput], finished: list[Request]
    ) -> int:
        """`apply` for results with any number of tokens per row; how many were generated.

        Of the 1 + drafts tokens that the plan counted on, a row brings those that were accepted and one more. What it
        does not bring is taken back, unless the request has lost its slot since: then it starts anew in any case.
        """
        assert result.counts is not None
        logprobs = {news.row: news.entries for news in result.news if isinstance(news, Logprobs)}
        generated = first = 0
        for i, (request, count) in enumerate(zip(draft.requests, result.counts, strict=True)):
            new_tokens = result.token_ids[first : first + count]
            first += count
            if request.status is Status.FINISHED:
                continue
            if i in result.errors:
                self.kv.forget(request)
                finished.append(request)
                outputs.append(CoreOutput(request.id, [], finish_reason="error", error=result.errors[i]))
                continue
            drafts, epoch = draft.drafted.get(i, (0, request.epoch))
            if plan.sample[i]:
                request.num_pending -= 1 + drafts
                request.num_drafted -= drafts
                if request.epoch == epoch:
                    request.num_computed -= 1 + drafts - count
            if not new_tokens and i not in result.prompt_logprobs:
                continue
            output = self._output(request)
            if i in result.prompt_logprobs:
                chunk = result.prompt_logprobs[i]
                output.prompt_logprobs = request.unseen_prompt_logprobs(int(plan.num_computed[i]), chunk) or None
            outputs.append(output)
            for token in new_tokens:
                request.tokens.append(token)
                output.new_token_ids.append(token)
                stop = check_stop(request, token)
                if stop is not None:
                    output.finish_reason, output.stop_reason = stop
                    finished.append(request)
                    break
            generated += len(output.new_token_ids)
            if i in logprobs:
                output.logprobs = logprobs[i][: len(output.new_token_ids)]
            computed = min(request.num_computed, len(request.tokens))
            if computed // self.kv.block_size > request.num_registered and request.status is Status.RUNNING:
                self.kv.register_full_blocks(request, computed)
        for news in result.news:
            if isinstance(news, Drafts) and draft.requests[news.row].status is Status.RUNNING:
                self.propose(draft.requests[news.row].id, news.token_ids)
        return generated

    def _apply_pooled(
        self, draft: _Draft, result: StepResult, outputs: list[CoreOutput], finished: list[Request]
    ) -> None:
        """End the pooled requests whose vectors have come."""
        for news in result.news:
            if isinstance(news, Pooled) and (request := draft.requests[news.row]).status is not Status.FINISHED:
                output = self._output(request)
                output.pooled, output.finish_reason = news, "stop"
                outputs.append(output)
                finished.append(request)

    def _output(self, request: Request) -> CoreOutput:
        """An output that says, once, what was known when the request started."""
        output = CoreOutput(request.id, [], num_preemptions=request.num_preemptions)
        if not request.cached_reported:
            request.cached_reported = True
            output.num_cached_tokens = request.num_cached_tokens
            output.first_scheduled_time = request.first_scheduled_time
        return output

    def _trust(self, requests: list[Request]) -> None:
        """A step of all that are suspected went well, and it got one of them further: none is suspected any more."""
        if self._isolated:
            self._isolated = False
            for request in requests:
                request.suspected = False

    def _observe(self, prompt_tokens: int, generated: int, seconds: float) -> None:
        if prompt_tokens > 0:
            for policy in self._policies:
                policy.observe(seconds)
        self._stats.prompt_tokens += prompt_tokens
        self._stats.generation_tokens += generated
        self._stats.step_time_s = seconds

    def _finish(self, requests: list[Request]) -> None:
        """Free everything a request holds and forget it."""
        if not requests:
            return
        self._waiting.remove([r for r in requests if r.status is Status.WAITING])
        for request in requests:
            if request.status is Status.RUNNING:
                self.running.remove(request)
                self._release_slot(request)
            elif request.status is Status.BLOCKED:
                del self._blocked[request.id]
            request.status = Status.FINISHED
            del self.requests[request.id]
            self._num_pooled -= request.pooled
            for policy in self._policies:
                policy.forget(request)
        self.kv.free(requests)

    def _release_slot(self, request: Request) -> None:
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1
        self._waiting.left(request)
        for policy in self._policies:
            policy.left(request)

    # -- looking in ----------------------------------------------------------------------------------------------------

    def stats(self) -> CoreStats:
        """A snapshot. Tokens are those computed since the snapshot before, so that none is counted twice or lost."""
        stats = self._stats
        stats.num_running = len(self.running)
        stats.num_waiting = self.num_waiting
        stats.kv_blocks_free = self.kv.pool.num_free
        snapshot = copy(stats)
        stats.prompt_tokens = stats.generation_tokens = 0
        return snapshot

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; refused (False) while any request holds blocks."""
        if self.running:
            return False
        self.kv.reset_cache()
        return True

    def check_invariants(self) -> None:
        """Raise RuntimeError unless every block is referenced exactly as often as tables name it and slots add up."""
        moving = [block for _, draft, _ in self._in_flight for block in draft.moves.blocks()]
        self.kv.check(self.requests.values(), moving)
        held = sorted([r.slot for r in self.running] + self._free_slots)
        if held != list(range(self.limits.max_num_seqs)):
            raise RuntimeError(f"Slots do not add up: {held}.")
