"""The grammars of the core's requests: compiled before a request begins, then a mask for each of its steps.

Where a request stands in its grammar is a function of its tokens. Nothing has to be undone when it is preempted or
when a step is forgotten, since tokens are only ever added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.structured_output.compiler import Compiled, GrammarCompiler
from vllm.structured_output.grammar import NO_TOKEN, Backend, GrammarError, Matcher, refused
from vllm.structured_output.vocabulary import WORD_BITS

if TYPE_CHECKING:
    from vllm.core.request import Request
    from vllm.step.messages import CoreOutput
    from vllm.structured_output.spec import GrammarSpec

# The stop reason of a request whose text was complete, and could not go on, before it had min_tokens.
COMPLETE_EARLY = "complete before min_tokens"
# A request waits this long for its grammar, of which it may spend most behind the compilations of others.
WAIT_SECONDS = 30.0
# Tokens that must follow are taken so many at a time: a grammar may force any number.
MAX_FORCED = 64
# A mask may take so long. What a request's masks take beyond that is added up, and ends it when it comes to the other:
# nobody else gets a token meanwhile.
MASK_SECONDS = 0.05
EXCESS_SECONDS = 1.0
_NO_MASKS: np.ndarray = np.zeros((0, 0), np.uint32)


class ReasoningEnd(Protocol):
    """Says where a model's reasoning ends and its answer begins."""

    def in_prompt(self, token_ids: Sequence[int]) -> bool:
        """Whether the answer begins with the first token that is generated."""

    def find(self, token_ids: Sequence[int], start: int) -> int:
        """The index of the first token after the end of the reasoning in the output, of which the tokens before
        `start` were looked at before; -1 if it has not ended.
        """


class Ready(NamedTuple):
    """What has become of requests that waited: those that may begin, and those that cannot, with the reason.

    `refused` ones are at fault themselves.
    """

    begin: list[str]
    refused: dict[str, str]
    late: dict[str, str]


class Masks(NamedTuple):
    """rows: [n] int32, of a plan.   bits: [n, words] uint32.   errors: requests that cannot go on, with the reason."""

    rows: np.ndarray
    bits: np.ndarray
    errors: dict[str, str]


class _Waiting(NamedTuple):
    """A request whose grammar is being compiled."""

    request: Request
    spec: GrammarSpec
    future: Future[Compiled]
    deadline: float


class _State:
    """One request. begin: of its output.   ends_late: it ends only if it can do nothing else.   jumps: a token that
    must follow need not be sampled.   position: of the first token that was not taken in.   pending: the one before
    it, if the matcher has not seen it.   seen: output tokens that were searched for the end of the reasoning.
    mask: of the token at `position`, once it is computed: a matrix and its row.   excess: seconds that masks have
    taken beyond what they may.   problem: why the request cannot go on there.   complete_early: its text is
    complete there, though it has fewer than min_tokens.
    """

    __slots__ = (
        "backend", "begin", "complete_early", "ends", "ends_late", "excess", "jumps", "mask", "matcher", "min_tokens",
        "pending", "position", "problem", "reasoning", "seen",
    )  # fmt: skip

    def __init__(self, compiled: Compiled, request: Request, reasoning: bool) -> None:
        self.backend: Backend = compiled.backend
        self.matcher: Matcher = compiled.grammar.start()
        self.ends: Collection[int] = request.stop_token_ids
        self.ends_late = False
        assert isinstance(request.params, SamplingParams)  # a pooled request has no output to be constrained
        self.min_tokens = request.params.min_tokens
        self.jumps = _jumps(request.params)
        self.begin = self.position = request.num_prompt_tokens
        self.seen = 0
        self.reasoning = reasoning
        self.pending = NO_TOKEN
        self.mask: tuple[np.ndarray, int] | None = None
        self.excess = 0.0
        self.problem: str | None = None
        self.complete_early = False


class GrammarRequests:
    """Owned by the core. `reasoning_end` is made when the first request begins."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        reasoning_end: Callable[[], ReasoningEnd] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.compiler = compiler
        self._make_reasoning_end = reasoning_end
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._states: dict[str, _State] = {}
        self._filled: tuple[list[_State], np.ndarray] = [], _NO_MASKS  # the last matrix of masks
        self._slow = False  # masks have taken too long: those of each request are timed

    def __bool__(self) -> bool:
        """Whether any request has a grammar, or waits for one."""
        return bool(self._states or self._waiting)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request that has begun has a grammar."""
        return request_id in self._states

    def __len__(self) -> int:
        return len(self._states) + len(self._waiting)

    # -- before a request begins ---------------------------------------------------------------------------------------

    def check(self, specs: Iterable[GrammarSpec]) -> None:
        """Compile, and wait for it. Raises GrammarError for the first that cannot be."""
        for future in [self.compiler.compile(spec) for spec in dict.fromkeys(specs)]:
            future.result()

    def add(self, request: Request, spec: GrammarSpec) -> bool:
        """Take in a request that has not begun; whether it may at once. If not, `ready` will tell."""
        future = self.compiler.compile(spec)
        if future.done() and future.exception() is None:
            self._begin(request, future.result())
            return True
        self._waiting[request.id] = _Waiting(request, spec, future, self._clock() + WAIT_SECONDS)
        return False

    def ready(self, patience: float = 0.0) -> Ready:
        """What has become of the requests that wait; waits for up to `patience` seconds for a first one."""
        found = Ready([], {}, {})
        if patience:
            wait([waiting.future for waiting in self._waiting.values()], patience, FIRST_COMPLETED)
        for request_id, (request, _, future, deadline) in list(self._waiting.items()):
            if not future.done():
                if self._clock() > deadline:
                    found.late[request_id] = f"Its grammar was not compiled within {WAIT_SECONDS:g} s; try again later."
                    self._leave(request_id)
                continue
            del self._waiting[request_id]
            error = future.exception()
            if error is None:
                self._begin(request, future.result())
                found.begin.append(request_id)
            elif isinstance(error, GrammarError):
                found.refused[request_id] = refusal(error)
            else:
                found.late[request_id] = f"Its grammar was not compiled: {type(error).__name__}: {error}"
        return found

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """End the threads and processes."""
        self.compiler.close()

    @cached_property
    def _words(self) -> int:
        return self.compiler.vocabulary.words

    @cached_property
    def _reasoning_end(self) -> ReasoningEnd | None:
        return None if self._make_reasoning_end is None else self._make_reasoning_end()

    def _begin(self, request: Request, compiled: Compiled) -> None:
        """From here on the grammar says where the request may end, and the sampler nothing any more."""
        end = self._reasoning_end
        reasoning = end is not None and not end.in_prompt(request.tokens)
        state = self._states[request.id] = _State(compiled, request, reasoning)
        if not state.ends:
            state.ends = self.compiler.vocabulary.end_ids
            state.ends_late = True
            request.end_at(state.ends)
        if state.min_tokens:
            request.forget_min_tokens()

    def stopped_early(self, request_id: str) -> bool:
        """Whether a request that has stopped had to, since its text was complete before it had min_tokens."""
        state = self._states.get(request_id)
        return state is not None and state.complete_early

    def forget(self, request_ids: Iterable[str]) -> None:
        """These have ended; unknown ids are ignored."""
        for request_id in request_ids:
            self._states.pop(request_id, None)
            self._leave(request_id)
        if not self._states:
            self._filled = [], _NO_MASKS

    def _leave(self, request_id: str) -> None:
        """A request waits no longer, if it did."""
        left = self._waiting.pop(request_id, None)
        if left is not None and not any(other.future is left.future for other in self._waiting.values()):
            self.compiler.give_up(left.spec)

    def forget_all(self) -> None:
        self.forget([*self._states, *self._waiting])

    # -- masks ---------------------------------------------------------------------------------------------------------

    def rows(self, requests: Sequence[Request], sample: Sequence[bool]) -> list[int]:
        """Which rows of a step sample under a grammar. requests, sample: its rows, and whether they sample."""
        states = self._states
        return [i for i, request in enumerate(requests) if request.id in states and sample[i]]

    def masks(self, requests: Sequence[Request], rows: Iterable[int]) -> Masks:
        """The masks of some rows of a step; a request that has ended, or whose grammar has not begun, has none."""
        states, errors = self._states, {}
        where: list[int] = []
        found: list[_State] = []
        for row in rows:
            request = requests[row]
            state = states.get(request.id)
            if state is None:
                continue
            if state.reasoning or state.position < len(request.tokens):
                try:
                    if not self._follow(state, request.tokens):
                        continue
                except GrammarError as error:
                    errors[request.id] = str(error)
                    continue
            where.append(row)
            found.append(state)
        missing = [state for state in found if state.mask is None]
        if missing:
            self._fill(missing)
        for row, state in zip(where, found, strict=True):
            if state.problem is not None:
                errors[requests[row].id] = state.problem
        return Masks(np.array(where, np.int32), self._together(found), errors)

    def _together(self, states: list[_State]) -> np.ndarray:
        """Their masks, [n, words]; usually they are a matrix already."""
        filled, bits = self._filled
        if states == filled:
            return bits
        masks = [state.mask for state in states if state.mask is not None]
        return np.stack([bits[place] for bits, place in masks]) if masks else _NO_MASKS

    def advance(
        self, outputs: Iterable[CoreOutput], requests: Mapping[str, Request], jumps: bool = True
    ) -> list[tuple[CoreOutput, list[int]]]:
        """Compute the masks of the tokens behind those that a step brought. Returns the outputs behind which there is
        no choice, with the tokens that must follow; these count as seen: the requests take them next.

        jumps: whether steps take so long that it pays to take several tokens at once; else only ends are found.
        """
        states, found, forced = self._states, [], []
        for output in outputs:
            state = states.get(output.request_id)
            if state is None or output.finish_reason is not None or not output.new_token_ids:
                continue
            try:
                if self._follow(state, requests[output.request_id].tokens):
                    found.append((output, state))
            except GrammarError:
                pass  # `masks` says so
        for bits, members, may_end in self._fill([state for _, state in found]):
            for place in ((bits != 0).sum(1) == 1).nonzero()[0].tolist() if jumps else may_end:
                output, state = found[members[place]]
                if not state.jumps:
                    continue
                request = requests[output.request_id]
                room = min(MAX_FORCED, request.max_len - len(request.tokens))
                if tokens := self._forced(state, room, jumps):
                    forced.append((output, tokens))
        return forced

    def _forced(self, state: _State, most: int, jumps: bool) -> list[int]:
        """The tokens that must follow, as long as masks have only one; the last may be one that ends the request."""
        tokens: list[int] = []
        while len(tokens) < most and state.problem is None and state.mask is not None:
            bits, place = state.mask
            words = bits[place].nonzero()[0]
            if len(words) != 1 or (word := int(bits[place, words[0]])) & (word - 1):
                break
            token = int(words[0]) * WORD_BITS + word.bit_length() - 1
            if token in state.ends:
                tokens.append(token)
                break
            if not jumps or not state.matcher.take(token):
                break
            tokens.append(token)
            state.position += 1
            self._compute(state.backend, [state], bits[place : place + 1])
        return tokens

    def _fill(self, states: list[_State]) -> list[tuple[np.ndarray, list[int], list[int]]]:
        """Compute the masks of these. Returns them by back end: a matrix, whose its rows are, and in which the text may
        end.
        """
        by_backend: dict[Backend, list[int]] = {}
        if len({state.backend for state in states}) == 1:
            by_backend[states[0].backend] = list(range(len(states)))
        else:
            for i, state in enumerate(states):
                by_backend.setdefault(state.backend, []).append(i)
        found = []
        for backend, members in by_backend.items():
            bits: np.ndarray = np.empty((len(members), self._words), np.uint32)
            filled = [states[i] for i in members]
            for place, state in enumerate(filled):
                state.mask = bits, place
            found.append((bits, members, self._compute(backend, filled, bits)))
            self._filled = filled, bits
        return found

    def _compute(self, backend: Backend, states: Sequence[_State], bits: np.ndarray) -> list[int]:
        """Compute masks of one back end, each into its row. Returns the rows of texts that may end."""
        if self._slow and len(states) > 1:
            self._slow = False  # it stays if one of them is slow
            rows = [self._compute(backend, [state], bits[i : i + 1]) for i, state in enumerate(states)]
            return [i for i, may_end in enumerate(rows) if may_end]
        begun = time.perf_counter()
        filled = backend.fill_all([state.matcher for state in states], [state.pending for state in states], bits)
        for state in states:
            state.pending = NO_TOKEN
        if time.perf_counter() - begun > MASK_SECONDS:
            self._slow = True
            if len(states) == 1:
                states[0].excess += time.perf_counter() - begun - MASK_SECONDS
                if states[0].excess > EXCESS_SECONDS:
                    filled.errors[0] = GrammarError(
                        "the grammar is too complex: what may follow takes too long to find out"
                    )
        if filled.may_end or filled.dead or filled.errors:
            for place in {*filled.may_end, *filled.dead, *filled.errors}:
                error, state, row = filled.errors.get(place), states[place], bits[place]
                state.problem = str(error) if error else _end(state, row, place in filled.may_end)
                if state.problem:
                    row[:] = 0xFFFFFFFF  # its token will be dropped
        return filled.may_end

    def _follow(self, state: _State, tokens: Sequence[int]) -> bool:
        """Take in the request's new tokens; False if the grammar has not begun. The last one waits for `_compute`,
        which shows it to the matcher and then computes the mask behind it.
        """
        count = len(tokens)
        if state.position >= count:
            return not state.reasoning
        if state.reasoning:
            assert self._reasoning_end is not None
            output = tokens[state.begin :]
            begin = self._reasoning_end.find(output, state.seen)
            state.seen = len(output)
            if begin < 0:
                return False
            state.reasoning = False
            state.position = state.begin + begin
            self._show(state, state.matcher.accept, tokens, count)  # nobody masked what stands behind the thoughts
            return True
        self._show(state, state.matcher.take, tokens, count - 1)
        state.pending = tokens[count - 1]
        state.position = count
        return True

    @staticmethod
    def _show(state: _State, take: Callable[[int], bool], tokens: Sequence[int], end: int) -> None:
        """Show the matcher the tokens before `end`. Raises GrammarError."""
        state.mask = None
        for position in range(state.position, end):
            if not take(tokens[position]):
                raise refused(tokens[position])
            state.position = position + 1


def _jumps(params: SamplingParams) -> bool:
    """Whether sampling a token that must follow could neither fail nor tell anything."""
    return (
        params.logprobs is None
        and not params.logits_processors
        and not params.logit_bias
        and params.allowed_token_ids is None
        and not params.bad_words_token_ids
    )


def refusal(error: GrammarError) -> str:
    """What a user gets to read of a constraint that cannot be compiled."""
    return f"The guided decoding constraint cannot be compiled: {error}"


def _end(state: _State, row: np.ndarray, may_end: bool) -> str | None:
    """Allow the tokens that end the request where its text may end. Returns why it cannot go on, if it cannot.

    A text that can only end ends, whatever min_tokens and ignore_eos say.
    """
    may_go_on = bool(row.any())
    early = state.ends_late or state.position - state.begin < state.min_tokens
    if may_end and not (early and may_go_on):
        if not state.ends:
            return None if may_go_on else "The text is complete, but the model has no token that ends it."
        state.complete_early = not may_go_on and state.position - state.begin < state.min_tokens
        for token in state.ends:
            row[token // WORD_BITS] |= np.uint32(1 << (token % WORD_BITS))
        return None
    return None if may_go_on else "No token that the model has can go on as the grammar wants it."
