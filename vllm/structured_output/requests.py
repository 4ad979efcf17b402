"""The grammars of the core's requests: compiled before a request begins, then a mask for each of its steps.

Where a request stands in its grammar is a function of its tokens. Nothing has to be undone when it is preempted or
when a step is forgotten, since tokens are only ever added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.structured_output.compiler import Compiled, GrammarCompiler
from vllm.structured_output.grammar import Backend, GrammarError, Matcher
from vllm.structured_output.vocabulary import WORD_BITS

if TYPE_CHECKING:
    from vllm.core.request import Request
    from vllm.engine.messages import CoreRequest
    from vllm.structured_output.spec import GrammarSpec

# A request waits this long for its grammar, of which it may spend most behind the compilations of others.
WAIT_SECONDS = 30.0
# Masks: fewer are computed sooner than a thread begins.
BESIDE_FROM = 8


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

    begin: list[CoreRequest]
    refused: dict[str, str]
    late: dict[str, str]


class Masks(NamedTuple):
    """rows: [n] int32, of a plan.   bits: [n, words] uint32.   errors: requests that cannot go on, with the reason."""

    rows: np.ndarray
    bits: np.ndarray
    errors: dict[str, str]


class _Waiting(NamedTuple):
    """A request whose grammar is being compiled."""

    message: CoreRequest
    future: Future[Compiled]
    deadline: float


class _State:
    """One request. ends_late: it ends only if it can do nothing else; jumps: a token that must follow need not be
    sampled; position: of the first token that the matcher has not seen; seen: output tokens that were searched for the
    end of the reasoning.
    """

    __slots__ = ("backend", "ends", "ends_late", "jumps", "matcher", "min_tokens", "position", "reasoning", "seen")

    def __init__(self, compiled: Compiled, message: CoreRequest, reasoning: bool) -> None:
        self.backend: Backend = compiled.backend
        self.matcher: Matcher = compiled.grammar.start()
        self.ends = message.stop_token_ids
        self.ends_late = False
        assert isinstance(message.params, SamplingParams)  # a pooled request has no output to be constrained
        self.min_tokens = message.params.min_tokens
        self.jumps = _jumps(message.params)
        self.position = len(message.prompt_token_ids)
        self.seen = 0
        self.reasoning = reasoning


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

    def add(self, message: CoreRequest, spec: GrammarSpec) -> bool:
        """Take in a request; whether it may begin at once. If not, `ready` will tell."""
        future = self.compiler.compile(spec)
        if future.done() and future.exception() is None:
            self._begin(message, future.result())
            return True
        self._waiting[message.request_id] = _Waiting(message, future, self._clock() + WAIT_SECONDS)
        return False

    def ready(self, patience: float = 0.0) -> Ready:
        """What has become of the requests that wait; waits for up to `patience` seconds for a first one."""
        found = Ready([], {}, {})
        if patience:
            wait([waiting.future for waiting in self._waiting.values()], patience, FIRST_COMPLETED)
        for request_id, (message, future, deadline) in list(self._waiting.items()):
            if not future.done():
                if self._clock() > deadline:
                    found.late[request_id] = f"Its grammar was not compiled within {WAIT_SECONDS:g} s; try again later."
                    del self._waiting[request_id]
                continue
            del self._waiting[request_id]
            error = future.exception()
            if error is None:
                self._begin(message, future.result())
                found.begin.append(message)
            elif isinstance(error, GrammarError):
                found.refused[request_id] = refusal(error)
            else:
                found.late[request_id] = f"Its grammar was not compiled: {type(error).__name__}: {error}"
        return found

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="masks")

    def close(self) -> None:
        """End the threads and processes."""
        self.compiler.close()
        if "_thread" in self.__dict__:
            self._thread.shutdown()

    @cached_property
    def _reasoning_end(self) -> ReasoningEnd | None:
        return None if self._make_reasoning_end is None else self._make_reasoning_end()

    def _begin(self, message: CoreRequest, compiled: Compiled) -> None:
        """From here on the grammar says where the request may end, and the sampler nothing any more."""
        end = self._reasoning_end
        reasoning = end is not None and not end.in_prompt(message.prompt_token_ids)
        state = self._states[message.request_id] = _State(compiled, message, reasoning)
        if not state.ends:
            state.ends = message.stop_token_ids = self.compiler.vocabulary.end_ids
            message.eos_token_id = next(iter(state.ends), None)
            state.ends_late = True
        if state.min_tokens:
            message.params = params = copy(message.params)
            assert isinstance(params, SamplingParams)
            params.min_tokens = 0

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """These have ended; unknown ids are ignored. Returns those that still waited."""
        for request_id in (request_ids := list(request_ids)):
            self._states.pop(request_id, None)
        return [i for i in request_ids if self._waiting.pop(i, None) is not None]

    def forget_all(self) -> list[str]:
        return self.forget([*self._states, *self._waiting])

    # -- masks ---------------------------------------------------------------------------------------------------------

    def masks(self, requests: Sequence[Request], sample: Sequence[bool]) -> Masks:
        """The masks of a step. requests, sample: its rows, and which of them sample a token."""
        return self._filled(*self._wanting(requests, sample))

    def masks_beside(self, requests: Sequence[Request], sample: Sequence[bool]) -> Future[Masks] | Masks:
        """The same, computed in a thread if there is enough to do. Until it is done, nothing else may be asked."""
        wanting, errors = self._wanting(requests, sample)
        if len(wanting) < BESIDE_FROM:
            return self._filled(wanting, errors)
        return self._thread.submit(self._filled, wanting, errors)

    def forced(self, request: Request) -> list[int]:
        """Tokens that must follow the last one, which now count as seen: the request takes them next."""
        state = self._states[request.id]
        found: list[int] = []
        if not state.jumps:
            return found
        try:
            if not self._follow(state, request):
                return found
            while (token := state.matcher.forced()) is not None and token not in state.ends:
                if not state.matcher.accept(token):
                    break
                found.append(token)
        except GrammarError:
            pass  # the mask of the next token says so
        state.position += len(found)
        return found

    def _wanting(
        self, requests: Sequence[Request], sample: Sequence[bool]
    ) -> tuple[list[tuple[int, Request, _State]], dict[str, str]]:
        """Rows that sample under a grammar, whose matchers have seen all tokens."""
        states, found, errors = self._states, [], {}
        for row, (request, samples) in enumerate(zip(requests, sample, strict=True)):
            if samples and (state := states.get(request.id)) is not None:
                try:
                    if self._follow(state, request):
                        found.append((row, request, state))
                except GrammarError as error:
                    errors[request.id] = str(error)
        return found, errors

    def _filled(self, found: list[tuple[int, Request, _State]], errors: dict[str, str]) -> Masks:
        bits: np.ndarray = np.zeros((len(found), self.compiler.vocabulary.words if found else 0), np.uint32)
        by_backend: dict[Backend, list[int]] = {}
        for i, (_, _, state) in enumerate(found):
            by_backend.setdefault(state.backend, []).append(i)
        for backend, members in by_backend.items():
            filled = backend.fill_all([found[i][2].matcher for i in members], bits, members)
            alive = (bits if len(members) == len(bits) else bits[members]).any(1)
            special = filled.may_end | ~alive
            for place in {*special.nonzero()[0].tolist(), *filled.errors}:
                i = members[place]
                _, request, state = found[i]
                error = filled.errors.get(place)
                problem = str(error) if error else _end(state, request, bits[i], bool(filled.may_end[place]))
                if problem:
                    errors[request.id] = problem
                    bits[i] = 0xFFFFFFFF  # its token will be dropped
        return Masks(np.array([row for row, _, _ in found], np.int32), bits, errors)

    def _follow(self, state: _State, request: Request) -> bool:
        """Show the matcher the request's new tokens; False if the grammar has not begun."""
        tokens = request.tokens
        if state.position == len(tokens):
            return not state.reasoning
        if state.reasoning:
            assert self._reasoning_end is not None
            output = tokens[request.num_prompt_tokens :]
            begin = self._reasoning_end.find(output, state.seen)
            state.seen = len(output)
            if begin < 0:
                return False
            state.reasoning = False
            state.position = request.num_prompt_tokens + begin
        for position in range(state.position, len(tokens)):
            if not state.matcher.accept(tokens[position]):
                raise GrammarError(f"Token {tokens[position]} was sampled although the grammar does not allow it.")
        state.position = len(tokens)
        return True


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


def _end(state: _State, request: Request, row: np.ndarray, may_end: bool) -> str | None:
    """Allow the tokens that end the request where its text may end. Returns why it cannot go on, if it cannot.

    A text that can only end ends, whatever min_tokens and ignore_eos say.
    """
    may_go_on = bool(row.any())
    early = state.ends_late or len(request.tokens) - request.num_prompt_tokens < state.min_tokens
    if may_end and not (early and may_go_on):
        if not state.ends:
            return None if may_go_on else "The text is complete, but the model has no token that ends it."
        for token in state.ends:
            row[token // WORD_BITS] |= np.uint32(1 << (token % WORD_BITS))
        return None
    return None if may_go_on else "No token that the model has can go on as the grammar wants it."
