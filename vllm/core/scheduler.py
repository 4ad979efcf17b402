"""Decides what every step computes. No phases: each request gets `min(tokens it still has to compute, budget left)`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import takewhile
from operator import index
from typing import Any

from vllm.core import results
from vllm.core.crowd import Crowd
from vllm.core.kv_manager import KVManager
from vllm.core.limits import SchedulerLimits
from vllm.core.pace import Pace
from vllm.core.plan_builder import PlanBuilder
from vllm.core.policies import AdmissionPolicy, StepView, Verdict
from vllm.core.request import ENDLESS, Request, Status
from vllm.core.slots import Slots
from vllm.core.starts import Starts
from vllm.core.stop import check_stop
from vllm.core.waiting import WaitingQueue
from vllm.core.yielding import Yielding
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVPolicy
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats
from vllm.step.plan import StepPlan
from vllm.step.result import Drafts, StepResult

__all__ = ["Scheduler", "SchedulerLimits"]

_REST_SECONDS = 0.1  # for which a request waits for those that will be forked from it
_LOADING = "loading"  # what a request waits for whose prefix comes from the lower tier


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
        self.paused: Sequence[str] = ()  # ids of requests that the next plan leaves out, the first if another can go on
        self._waiting = WaitingQueue(limits.priority, limits.max_num_seqs, limits.account_share)
        self._crowd = Crowd(self._waiting, limits.max_num_batched_tokens)
        # where prompts are not divided, one may be as long as a step, and waits for ever for a shorter one
        stages, max_gap = (limits.stages, limits.max_gap) if limits.chunked_prefill else (1, 0.0)
        self._pace = Pace(max_gap, limits.max_num_batched_tokens, stages)
        self._blocked: dict[str, Request] = {}
        self._slots = Slots(limits.max_num_seqs, limits.priority, self._waiting, self._policies)
        self._yielding = Yielding(
            self._slots, self._waiting, self.kv, priority=limits.priority, share=limits.account_share,
            watermark=self._watermark,
        )  # fmt: skip
        self._stats = CoreStats(kv_blocks_total=num_blocks - 1, kv_blocks_free=num_blocks - 1)
        self._starts = Starts(self.requests, self.kv, self._chunk, self._stats)
        # Plan, what it was built from, when it was made.
        self._in_flight: deque[tuple[StepPlan, PlanBuilder, float]] = deque()
        self._speculates = limits.num_drafts > 0
        self._num_pooled = self._num_lending = 0
        self._num_resting = 0  # requests that the newest plan left out for those that will be forked from them
        self._step_id = 0
        self._sequence = 0
        self._suspects: deque[Request] = deque()  # to be tried alone, one after the other
        self._isolated = False
        self._ahead = -1  # the step in flight that the plan being made follows

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, message: CoreRequest) -> None:
        """Queue a request. Raises ValueError if its id is in use or its prompt cannot be served."""
        limits = self.limits
        length = len(message.prompt_token_ids)
        if message.request_id in self.requests:
            raise ValueError(f"Request {message.request_id} already exists.")
        if message.parts:
            self._check_parts(message)
        elif not 1 <= length < limits.max_model_len + 1:
            raise ValueError(f"A prompt must have 1 to {limits.max_model_len} tokens, got {length}.")
        if not limits.chunked_prefill and length > limits.max_num_batched_tokens:
            raise ValueError(
                f"A prompt of {length} tokens exceeds max_num_batched_tokens={limits.max_num_batched_tokens} and "
                "chunked prefill is off. Enable chunked prefill or raise max_num_batched_tokens."
            )
        pending = ENDLESS if limits.max_pending is None else limits.max_pending
        request = Request(message, limits.max_model_len, self.kv.num_groups, self._sequence, pending)
        self._sequence += 1
        if self._late_masks and limits.stages == 1 and message.grammar is not None and not _processors(message):
            request.max_pending = min(pending, 1)  # its next mask is made when its last token is known
        self.requests[request.id] = request
        self._num_pooled += request.pooled
        self._num_lending += request.lends
        self._crowd.came(request, self._clock())
        self._pace.came(length)
        self._waiting.push(request)

    def _check_parts(self, message: CoreRequest) -> None:
        """Raise ValueError unless these prompts can be computed together, in one step."""
        lengths = [length for length, _ in message.parts]
        if self.kv.num_groups:
            raise ValueError("Prompts share a request only where the model keeps nothing of them between steps.")
        if not 1 <= min(lengths) <= max(lengths) <= self.limits.max_model_len:
            raise ValueError(f"A prompt must have 1 to {self.limits.max_model_len} tokens.")
        if sum(lengths) != len(message.prompt_token_ids):
            raise ValueError("The lengths of the prompts of a request do not add up to its tokens.")

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
        for _, built, _ in self._in_flight:
            if self.kv.tier is not None:
                self.kv.tier.dropped(built.moves)
            for request_id in built.moves.waiting:
                self.unblock(request_id, _LOADING)
        self._in_flight.clear()

    def _forget_device(self) -> None:
        """Count on nothing that steps have left on the device."""
        self.kv.reset_cache()
        for policy in self._policies:
            policy.failed()

    def isolate(self, error: str) -> list[CoreOutput]:
        """A step failed as a whole, and the device survived: find out which request it was.

        Everything in flight is forgotten and computed again; the requests concerned do so alone, as far as they had
        come. One that then fails ends with the error, and so do several that fail only together; the others never
        notice.
        """
        involved = {r.id: r for _, built, _ in self._in_flight for r in built.requests if r.id in self.requests}
        if not involved:
            return self.fail_all(error)
        for _, built, _ in self._in_flight:
            for request, start, count in zip(built.requests, built.num_computed, built.num_tokens, strict=True):
                request.doubtful = min(start + count, len(request.tokens))
        self._forget_plans()
        self._isolated = True
        outputs: list[CoreOutput] = []
        if all(r.suspected for r in involved.values()):
            self._finish(list(involved.values()))
            outputs = [CoreOutput(id, [], finish_reason="error", error=error) for id in involved]
        for request in self.requests.values():
            request.num_pending = request.num_drafted = 0
        while self.running:
            self._preempt(self.running.pop())
        self._slots.freed = list(range(self.limits.max_num_seqs))  # whatever the device did not take in
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

    @property
    def running(self) -> list[Request]:
        """The requests that hold a slot, in the order in which they are served."""
        return self._slots.running

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def step_seconds(self) -> float:
        """What the last step took, from its plan to its result."""
        return self._stats.step_time_s

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, blocked ones among them."""
        return len(self._waiting) + len(self._blocked)

    @property
    def all_blocked(self) -> bool:
        """Whether nothing can be computed before something outside the core is there."""
        return len(self._blocked) == len(self.requests)

    @property
    def planned(self) -> list[Request]:
        """The requests of the newest plan, one per row."""
        return self._in_flight[-1][1].requests

    @property
    def planned_tokens(self) -> int:
        """Of the newest plan."""
        return sum(self._in_flight[-1][1].num_tokens)

    def refuse(self, request_ids: Iterable[str], error: str, at_fault: bool = True) -> list[CoreOutput]:
        """End requests that cannot go on; unknown ids are ignored. Tokens still in flight for them will be dropped.

        at_fault: they are themselves; else they have not begun, and may be sent again.
        """
        doomed = [r for r in (self.requests.get(i) for i in request_ids) if r is not None]
        self._finish(doomed)
        return [
            CoreOutput(r.id, [], finish_reason="error", error=error, refused=at_fault, late=not at_fault)
            for r in doomed
        ]

    # -- planning ------------------------------------------------------------------------------------------------------

    def schedule(self, more: Callable[[list[Request], list[bool]], dict[str, Any]] | None = None) -> StepPlan | None:
        """Plan one step, or None if nothing can be computed now (all done, or every next token depends on steps in
        flight).

        more: given the rows and which of them sample, says what else the plan holds, by its names; it may change
        nothing here.
        """
        if self._num_resting and self._in_flight:
            return None  # those they wait for are about to come: nothing else shall be in front of them
        expects = self._waiting.has_accounts and self._crowd.has_company(self._clock())
        builder = PlanBuilder(self._step_id, self._pace.budget(len(self._waiting), expects), self.kv)
        self.kv.begin_plan()
        if self.kv.tier is not None:
            self.kv.tier.save(builder.moves, builder.transfers)
        if self.limits.stages > 1:
            active = len(self.running) + min(len(self._waiting), len(self._slots.free))
            builder.room = max(1, -(-active // self.limits.stages))
        if self._suspects:
            self._plan_suspect(builder)
        else:
            waiting = len(self._waiting) > 0
            if waiting and (self.limits.priority or self._waiting.has_accounts):
                self._make_way()
            crowd = self._crowd
            if self._waiting.has_accounts or crowd.account is not None:
                crowd.begin(self._clock(), len(self.running), builder.budget, self._num_resting)
                if waiting and crowd.may_wait:
                    self._admit_waiting(builder, 0)
                    builder.express = bool(builder.requests)
            preempted = not builder.express and self._continue_running(builder, crowd.parts)
            if crowd.parts > 1 and not (builder.requests or self._in_flight):
                preempted = self._continue_running(builder)  # nobody of the part whose turn it was can go on
            if waiting and not preempted and not builder.express and builder.budget > 0:
                tokens = builder.budget
                if crowd.account is not None:
                    tokens = crowd.tokens_of_prompts(builder.requests, builder.num_tokens)
                self._admit_waiting(builder, tokens)
            if self.paused and not (builder.requests or self._in_flight or preempted):
                self.paused = self.paused[1:]  # nobody else can go on
                self._continue_running(builder)
        if not builder.requests and not builder.moves.loaded:
            if self.kv.tier is not None:
                if builder.moves.saved and not self._in_flight:  # what is to be saved takes the room that they need
                    self.kv.tier.dropped(builder.moves)
                    return self.schedule(more)
                self.kv.tier.undo(builder.moves)
            return None
        for request_id in builder.moves.waiting:
            self.block(request_id, _LOADING)
        loads = tuple(load for policy in self._policies for load in policy.loads()) if builder.new else ()
        said = {} if more is None else more(builder.requests, builder.sample)
        plain = not (self._speculates or self._num_pooled or builder.writes)
        plan = builder.build(self._slots.take_freed(), loads, plain, said)
        self._step_id += 1
        self._pace.planned(builder.num_tokens, builder.left)
        self._in_flight.append((plan, builder, self._clock()))
        return plan

    def schedule_ahead(
        self, more: Callable[[list[Request], list[bool]], dict[str, Any]] | None = None
    ) -> StepPlan | None:
        """As `schedule`, of a pipeline: plan what follows the oldest step in flight, which brings the tokens that the
        first stage goes on from. It may be submitted before the result of that step is applied.
        """
        if not self._in_flight:
            return None
        self._ahead = self._in_flight[0][0].step_id
        try:
            return self.schedule(more)
        finally:
            self._ahead = -1

    def empty_plan(self) -> StepPlan:
        """A step without requests, for a device that must run one because its peers do."""
        builder = PlanBuilder(self._step_id, 0, self.kv)
        plan = builder.build(self._slots.take_freed(), (), plain=True)
        self._step_id += 1
        self._in_flight.append((plan, builder, self._clock()))
        return plan

    def propose(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Drafts of the host for the tokens behind the last one of a request, to be verified by its next step, if no
        other step of it is in flight then. Those past the longest output are dropped, those for which recurrent layers
        have no page of state, and those from the first on that is no token of the model; an unknown id is ignored.
        Raises TypeError for drafts that are no integers.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._speculates = True
            drafts = map(index, token_ids[: self.kv.max_drafts])
            request.proposal = list(takewhile(lambda token: 0 <= token < self.limits.vocab_size, drafts))

    def _plan_suspect(self, builder: PlanBuilder) -> None:
        """Give the next suspect steps of its own until it has computed what is doubtful; nothing else is in flight
        meanwhile.

        Those of several steps may be more than there are slots. Who finds no room waits for its turn, as all others do,
        and will be tried if a step fails again; this plan may then be empty.
        """
        while self._suspects and not self._in_flight and not builder.requests:
            suspect = self._suspects.popleft()
            if suspect.status is Status.RUNNING:
                self._go_on_alone(builder, suspect)
            elif suspect.status is Status.WAITING:
                self._waiting.remove([suspect])
                if not self._slots.free or self._admit(builder, suspect, self._view()) is not Verdict.ADMIT:
                    self._waiting.push(suspect)
            if not builder.requests:
                suspect.suspected = False
            elif suspect.num_computed < suspect.doubtful:
                self._suspects.appendleft(suspect)

    def _go_on_alone(self, builder: PlanBuilder, request: Request) -> None:
        """Add the next chunk of a running request. Others that run make way, if it needs their blocks."""
        start = request.num_computed
        count = min(len(request.tokens) - start, self._chunk, builder.budget)
        if self.kv.takes_snapshots:
            count = self.kv.cut(request, start, count)
        for policy in self._limiting:
            count = policy.limit(request, count)
        if count <= 0:
            return
        while (start + count > request.capacity or request.shares_tail) and not self.kv.grow(
            request, start + count, builder.blocks, builder.transfers
        ):
            victim = next((r for r in reversed(self.running) if r is not request), None)
            if victim is None:
                return
            self.running.remove(victim)
            self._preempt(victim)
        builder.take(request, count)
        builder.budget -= count

    def _make_way(self) -> None:
        """Preempt while requests whose turn it is find no slot or too few blocks, and others should yield to them."""
        fair = self._waiting.has_accounts
        turns = self._waiting.turns(self.limits.max_num_seqs if fair else 1)
        view = self._view()
        startable = (
            r
            for r in turns
            if not r.num_pending
            and not self._starts.parent_waits(r, self._step_id)
            and all(policy.admit(r, view) is not Verdict.SKIP for policy in self._policies)
        )
        for victim in self._yielding.for_waiting(startable, self.limits.max_num_batched_tokens, self._chunk, fair):
            self._preempt(victim)

    def _continue_running(self, builder: PlanBuilder, parts: int = 1) -> bool:
        """Give every running request its next tokens, preempting from the end when blocks run out (then True).

        parts: of the account that crowds the batch, of which one has its turn.
        """
        running, kv, chunk, budget = self.running, self.kv, self._chunk, builder.budget
        speculates, lends = self._speculates, self._num_lending > 0
        special = speculates or lends or self._num_pooled or builder.room != ENDLESS
        self._num_resting = 0
        preempted, take, usual, step_id = False, builder.take, not special, self._step_id
        rotates, ahead = self.limits.stages > 1, self._ahead
        add, add_tokens = builder.requests.append, builder.num_tokens.append
        add_computed, add_sample = builder.num_computed.append, builder.sample.append
        paused = frozenset(self.paused)
        crowd, turn = (self._crowd.account, self._crowd.next_turn()) if parts > 1 else (None, 0)
        i, end = 0, len(running)
        while i < end and budget > 0:
            request = running[i]
            i += 1
            if crowd is not None and request.slot % parts != turn and request.account == crowd:
                continue
            if paused and request.id in paused:
                continue
            pending = request.num_pending
            total = len(request.tokens) + pending
            start = request.num_computed
            if pending and (
                total >= request.max_len or pending > request.max_pending or (rotates and request.plan_step != ahead)
            ):
                continue  # its last token, or one that must be seen first, is in flight
            count = total - start
            if count > 1:
                count = min(count, chunk, budget)
                if kv.takes_snapshots:
                    count = kv.cut(request, start, count)
                for policy in self._limiting:
                    count = policy.limit(request, count)
                if count <= 0 or builder.is_full:
                    continue
            elif special:
                if count <= 0 or builder.is_full:
                    continue  # a pooled request, whose last tokens are being computed; or other stages' turn
                if lends and request.lends and self._rests(request):
                    self._num_resting += 1
                    continue
                if speculates:
                    count += self._num_drafts(request, start, total, budget)
            while (start + count > request.capacity or request.shares_tail) and not kv.grow(
                request, start + count, builder.blocks, builder.transfers
            ):
                preempted = True
                victim = self._yielding.for_growth(i - 1)
                self._preempt(victim)
                end -= 1
                if victim is request:
                    builder.budget = budget
                    return True
            budget -= count
            if usual and start + 1 == total and start >= request.num_prompt_tokens:  # as `take` does it, without a call
                request.num_computed = start + 1
                request.num_pending = pending + 1
                request.plan_step, request.plan_tokens = step_id, 1
                add(request)
                add_tokens(1)
                add_computed(start)
                add_sample(True)
            elif speculates and start + 1 >= total and not request.pooled:
                builder.verify(request, count - 1)
            else:
                take(request, count)
        builder.budget = budget
        return preempted

    def _rests(self, request: Request) -> bool:
        """Whether a request that lends its cache waits for those that will be forked from it."""
        if request.num_computed < request.num_prompt_tokens:
            return False
        if not self._slots.free or self.kv.pool.num_free < len(self.running):
            return False  # it holds what others need
        now = self._clock()
        request.rests_since = request.rests_since or now
        return now - request.rests_since < _REST_SECONDS

    def _num_drafts(self, request: Request, start: int, total: int, budget: int) -> int:
        """How many drafts the next step of a request verifies, which computes its last token, the one at `start` at
        most; it has `total` tokens at most. The device has drafts behind tokens that it sampled itself.
        """
        if request.proposal and not request.num_pending:
            proposed = len(request.proposal)
        else:
            proposed = self.limits.num_drafts if start >= request.entered_with and not request.pooled else 0
        return max(0, min(proposed, request.max_len - total - 1, budget - 1))

    def _admit_waiting(self, builder: PlanBuilder, tokens: int) -> None:
        """Start waiting requests, each in its turn, while slots, blocks, budget and policies allow; of the account that
        crowds the batch until they have `tokens` tokens.
        """
        view, crowd = self._view(), self._crowd.account
        while self._slots.free and builder.budget > 0 and not builder.is_full:
            request = self._waiting.take()
            if request is None:
                break
            crowds = crowd is not None and request.account == crowd
            if crowds and tokens <= 0:
                self._waiting.put_back(request)
                break
            before = builder.budget
            verdict = self._admit(builder, request, view)
            if crowds:
                tokens -= before - builder.budget
            if verdict is Verdict.SKIP:
                self._waiting.set_aside(request, forks=self._starts.parent_unready(request, self._step_id))
            elif verdict is Verdict.STOP:
                self._waiting.put_back(request)
                break
        self._waiting.restore()

    def _admit(self, builder: PlanBuilder, request: Request, view: StepView) -> Verdict:
        """Start one request, unless something is against it; then nothing has changed."""
        verdict = self._verdict(request, view)
        if verdict is not Verdict.ADMIT:
            return verdict
        if self.kv.tier is not None and self.kv.fetch(request, self._watermark, builder.moves, builder.transfers):
            return Verdict.SKIP
        if not self._starts.start(request, self._step_id, self._watermark if self.running else 0):
            return Verdict.STOP
        remaining = len(request.tokens) - request.num_computed
        count = min(remaining, self._chunk, builder.budget)
        if self.kv.takes_snapshots:
            count = self.kv.cut(request, request.num_computed, count)
        for policy in self._limiting:
            count = policy.limit(request, count)
        split = count < remaining and not self.limits.chunked_prefill
        if count <= 0 or split or not self.kv.grow(request, request.num_computed + count, [], builder.transfers):
            self._starts.undo(request)
            return Verdict.SKIP if count <= 0 else Verdict.STOP
        if request.first_scheduled_time == 0.0:
            request.first_scheduled_time = self._clock()
        self._slots.give(request)
        builder.enter(request)
        builder.take(request, count)
        builder.budget -= count
        if request.num_computed < len(request.tokens):
            view.num_prefilling += 1
            view.num_long_prefilling += len(request.tokens) > self._long
        return Verdict.ADMIT

    def _verdict(self, request: Request, view: StepView) -> Verdict:
        if request.num_pending:
            return Verdict.SKIP  # preempted with a token in flight: its tokens are not all known yet
        if self._starts.parent_unready(request, self._step_id):
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

    def _preempt(self, request: Request) -> None:
        """Take slot and blocks away; the request will compute its tokens again, prompt and output alike."""
        self._leave_slot(request)
        request.status = Status.WAITING
        self._waiting.push(request, front=True)

    def _leave_slot(self, request: Request) -> None:
        self.kv.free([request])
        self._slots.take_back(request)
        request.num_computed = 0
        request.epoch += 1
        request.proposal = []
        request.unwritten = 0  # who gets a slot again brings all its tokens
        request.fetched = False
        request.num_preemptions += 1
        self._stats.num_preemptions += 1

    # -- results -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Do what can wait until the device is busy with the last plan; whatever needs it earlier does it."""
        self.kv.settle()

    def apply(self, result: StepResult) -> list[CoreOutput]:
        """Take in the result of the oldest plan in flight. The only place where what the device found changes state."""
        plan, built, planned_at = self._in_flight.popleft()
        if self.kv.tier is not None:
            self.kv.tier.done(built.moves)
            for request_id in built.moves.waiting:
                self.unblock(request_id, _LOADING)
        if plan.step_id != result.step_id:
            raise ValueError(f"Result of step {result.step_id} where step {plan.step_id} was due.")
        self.settle()
        taken = results.take(plan, built, result, self.kv)
        for news in result.news:
            if isinstance(news, Drafts) and built.requests[news.row].status is Status.RUNNING:
                self.propose(built.requests[news.row].id, news.token_ids)
        if self._num_pooled:
            results.take_pooled(built, result, self.kv, taken)
        if len(built.requests) > 1 or (taken.generated and len(self.requests) == 1):
            self._trust(built.requests)
        self._finish(taken.finished)
        now = self._clock()
        seconds = now - planned_at
        self._pace.took(planned_at, now, built.num_tokens)
        self._crowd.took(planned_at, now, built.requests, built.num_tokens, built.express)
        self._observe(built.prompt_tokens, taken.generated, seconds)
        return taken.outputs

    def extend(self, output: CoreOutput, token_ids: Sequence[int]) -> None:
        """Tokens that must follow those of a request's newest output, and so were not sampled. They become part of the
        output, up to where the request ends; its next step computes them together.

        No step of the request may be in flight.
        """
        request = self.requests[output.request_id]
        if request.status is Status.RUNNING and not request.unwritten:
            request.unwritten = len(request.tokens)
        before = len(output.new_token_ids)
        for token in token_ids:
            request.tokens.append(token)
            output.new_token_ids.append(token)
            stop = check_stop(request, token)
            if stop is not None:
                output.finish_reason, output.stop_reason = stop
                self._finish([request])
                break
        self._stats.generation_tokens += len(output.new_token_ids) - before

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
                self._slots.take_back(request)
            elif request.status is Status.BLOCKED:
                del self._blocked[request.id]
            request.status = Status.FINISHED
            del self.requests[request.id]
            self._num_pooled -= request.pooled
            self._num_lending -= request.lends
            for policy in self._policies:
                policy.forget(request)
        self.kv.free(requests)

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
        moving = [block for _, built, _ in self._in_flight for block in built.moves.blocks()]
        self.kv.check(self.requests.values(), moving)
        self._slots.check()
