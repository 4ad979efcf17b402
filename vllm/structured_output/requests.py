"""The grammars of the core's requests: compiled before a request begins, then a mask for each of its steps.

Where a request stands in its grammar is a function of its tokens. Nothing has to be undone when it is preempted or
when a step is forgotten, since tokens are only ever added.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.structured_output.compiler import Compiled, GrammarCompiler
from vllm.structured_output.excess import MASK_SECONDS, Excess, Share
from vllm.structured_output.grammar import NO_TOKEN, Backend, Grammar, GrammarError, Matcher, refused
from vllm.structured_output.positions import MaskTable, Node
from vllm.structured_output.vocabulary import WORD_BITS

if TYPE_CHECKING:
    from vllm.core.request import Request
    from vllm.reasoning.think import Begins
    from vllm.step.messages import CoreOutput
    from vllm.structured_output.spec import GrammarSpec

# The stop reason of a request whose text was complete, and could not go on, before it had min_tokens.
COMPLETE_EARLY = "complete before min_tokens"
# A request waits this long for its grammar, of which it may spend most behind the compilations of others.
WAIT_SECONDS = 30.0
# Tokens that must follow are taken so many at a time: a grammar may force any number.
MAX_FORCED = 64
MIN_MASK_SECONDS = 0.002  # of each mask, however many requests have slow ones
MASKS_AT_ONCE = 8  # after so many it is known whether they take long
QUICK_SECONDS = 0.0002  # a mask that takes no longer costs about what the rest of its row does
QUICK_STEP_SECONDS = 0.005  # and so may all masks of a step, however few there are
SLOW_SECONDS = 10.0  # so long masks are computed one by one after some have taken longer
COMPANY_SECONDS = 1.0  # so long others count as there after they were
_TOO_COMPLEX = "the grammar is too complex: what may follow takes too long to find out"
_NO_MASKS: np.ndarray = np.zeros((0, 0), np.uint32)


class ReasoningEnd(Protocol):
    """Says where a model's reasoning ends and its answer begins."""

    def openings(self, token_ids: Sequence[int], begins: Begins | None) -> Sequence[tuple[int, ...]] | None:
        """The tokens with which the output may open reasoning before its answer, in each way that there is; None if it
        begins inside reasoning. begins: where it begins, None if the prompt's tokens are to tell.
        """

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
    begins: Begins | None


class _State:
    """One request. begin: of its output.   ends_late: it ends only if it can do nothing else.   jumps: a token that
    must follow need not be sampled.   position: of the first token that was not taken in.   unseen: those before it
    that the matcher has not seen.   node: where the text stands, if it can be told; then its mask may be known.   seen:
    output tokens that were searched for the end of the reasoning.
    mask: of the token at `position`, once it is computed: a matrix and its row.   share: of the time that slow masks
    have taken.   problem: why the request cannot go on there.   complete_early: its text is complete there, though it
    has fewer than min_tokens.
    paused_until: its next token shall not be computed before, if others are there.   mask_seconds: of its last slow
    mask.
    openings: what must still follow to open the reasoning, in each way that there is; before the first token the answer
    may begin instead.   opened: output tokens that have opened it.   own: the first tokens of openings that may begin
    the answer, too.   put_off: tokens that a text may have, but that end the request: not before min_tokens.
    """

    __slots__ = (
        "backend", "begin", "complete_early", "ends", "ends_late", "grammar", "jumps", "mask", "mask_seconds",
        "matcher", "min_tokens", "node", "opened", "openings", "own", "paused_until", "places", "position", "problem",
        "put_off", "reasoning", "request_id", "seen", "share", "table", "unseen",
    )  # fmt: skip

    def __init__(
        self, compiled: Compiled, request: Request, openings: Sequence[tuple[int, ...]] | None, share: Share
    ) -> None:
        self.backend: Backend = compiled.backend
        self.grammar: Grammar = compiled.grammar
        self.request_id = request.id
        self.share = share
        self.paused_until, self.mask_seconds = -math.inf, 0.0
        self.matcher: Matcher = compiled.grammar.start()
        self.ends: Collection[int] = request.stop_token_ids
        self.ends_late = False
        assert isinstance(request.params, SamplingParams)  # a pooled request has no output to be constrained
        self.min_tokens = request.params.min_tokens
        self.jumps = _jumps(request.params)
        self.begin = self.position = request.num_prompt_tokens
        self.seen = 0
        self.reasoning = openings is None or bool(openings)
        self.openings = openings or ()
        self.opened = 0
        self.own: set[int] = set()
        self.put_off: list[int] = []
        self.unseen: list[int] = []
        self.places = compiled.places
        self.node: Node | None = None if compiled.places is None else compiled.places.begin
        self.mask: tuple[np.ndarray, int] | None = None
        self.table: MaskTable | None = None if compiled.places is None else compiled.places.table
        self.problem: str | None = None
        self.complete_early = False

    @property
    def is_new(self) -> bool:
        return self.position == self.begin

    def take_in(self, token: int) -> None:
        """The text goes on with a token that its mask allowed."""
        self.unseen.append(token)
        if self.node is not None and self.places is not None:
            self.node = self.places.after(self.node, token)

    def walk(self, most: int) -> list[int]:
        """Take in at most so many tokens, as long as it is known that there is no other: in the middle of the text."""
        tokens: list[int] = []
        node, places, table = self.node, self.places, self.table
        while node is not None and places is not None and table is not None and len(tokens) < most:
            token = node.only
            if token == NO_TOKEN or node.may_end or not table.has(node) or token in self.ends:
                break
            tokens.append(token)
            node = places.after(node, token)
        self.node = node
        self.unseen += tokens
        self.position += len(tokens)
        return tokens

    def show_all_but_last(self) -> GrammarError | None:
        """Show the matcher what it has not seen, but for the newest token. Returns what is wrong with it."""
        shown = self.unseen[:-1]
        if shown:
            del self.unseen[:-1]
            if not self.matcher.take_all(shown):
                return refused(shown[0], self.matcher)
        return None


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
        self._excess = Excess(clock)
        # Masks have taken long: until then each one is timed, without the time in which no processor was free.
        self._slow_until = -math.inf
        self._paced: dict[str, _State] = {}  # requests whose masks take long, by their ids
        self._others_seen = -math.inf

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

    def add(self, request: Request, spec: GrammarSpec, begins: Begins | None = None) -> bool:
        """Take in a request that has not begun; whether it may at once. If not, `ready` will tell.

        begins: where its output begins, None if the prompt's tokens are to tell.
        """
        future = self.compiler.compile(spec)
        if future.done() and future.exception() is None:
            self._begin(request, future.result(), begins)
            return True
        self._waiting[request.id] = _Waiting(request, spec, future, self._clock() + WAIT_SECONDS, begins)
        return False

    def ready(self, patience: float = 0.0) -> Ready:
        """What has become of the requests that wait; waits for up to `patience` seconds for a first one."""
        found = Ready([], {}, {})
        if patience:
            wait([waiting.future for waiting in self._waiting.values()], patience, FIRST_COMPLETED)
        for request_id, (request, _, future, deadline, begins) in list(self._waiting.items()):
            if not future.done():
                if self._clock() > deadline:
                    found.late[request_id] = f"Its grammar was not compiled within {WAIT_SECONDS:g} s; try again later."
                    self._leave(request_id)
                continue
            del self._waiting[request_id]
            error = future.exception()
            if error is None:
                self._begin(request, future.result(), begins)
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

    def _begin(self, request: Request, compiled: Compiled, begins: Begins | None) -> None:
        """From here on the grammar says where the request may end, and the sampler nothing any more."""
        end = self._reasoning_end
        openings = () if end is None else end.openings(request.tokens, begins)
        width = self.compiler.vocabulary.width  # adapters may have further tokens, which no mask allows
        if openings:
            openings = [opening for opening in openings if max(opening) < width]
        state = self._states[request.id] = _State(compiled, request, openings, self._excess.join(compiled.grammar))
        state.ends_late = not state.ends
        state.ends = [token for token in state.ends if token < width]
        if not state.ends:
            state.ends = self.compiler.vocabulary.end_ids
            request.end_at(state.ends)
        if state.min_tokens:
            request.forget_min_tokens()
            tokens = self.compiler.vocabulary.tokens
            state.put_off = [token for token in state.ends if tokens[token] is not None]
            if state.put_off:
                state.node = None  # its masks are not those of others

    def stopped_early(self, request_id: str) -> bool:
        """Whether a request that has stopped had to, since its text was complete before it had min_tokens."""
        state = self._states.get(request_id)
        return state is not None and state.complete_early

    def forget(self, request_ids: Iterable[str]) -> None:
        """These have ended; unknown ids are ignored."""
        for request_id in request_ids:
            if (state := self._states.pop(request_id, None)) is not None:
                self._excess.leave(state.grammar)
                self._paced.pop(request_id, None)
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

    # -- while it runs -------------------------------------------------------------------------------------------------

    def paused(self, running: Iterable[Request], num_requests: int) -> list[str]:
        """Requests that the next step shall leave out, since their masks have taken their part of the time; the first
        may go on first. num_requests: all that there are, also those that do not run.

        Nobody else gets a token while a mask is computed, so slow masks take half of the time at most while others are
        there; in it all that have slow masks get the same, whatever their grammars. No more of them go on together than
        have masks for one step, and none before the mask of its last token is computed.
        """
        if not self._paced:
            return []
        now = self._clock()
        if num_requests > len(self._paced):
            self._others_seen = now
        if now - self._others_seen >= COMPANY_SECONDS:
            return []
        found: list[str] = []
        room = MASK_SECONDS
        slow = [(state, request) for request in running if (state := self._paced.get(request.id)) is not None]
        for state, request in sorted(slow, key=lambda one: one[0].paused_until):
            if state.share.is_over:
                continue  # it ends
            if request.num_pending or state.paused_until > now or room <= 0:
                found.append(request.id)
            else:
                room -= state.mask_seconds
        return found

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
            if state.opened and state.openings:
                state.mask = np.zeros((1, self._words), np.uint32), 0
                _allow_openings(state)
                self._filled = [], _NO_MASKS
        missing = [state for state in found if state.mask is None]
        if missing:
            self._fill(missing)
            for state in missing:
                if state.openings and state.problem is None:
                    _allow_openings(state)
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
        states, found = self._states, []
        forced: list[tuple[CoreOutput, list[int]]] = []
        for output in outputs:
            state = states.get(output.request_id)
            if state is None or output.finish_reason is not None or not output.new_token_ids:
                continue
            tokens, node = requests[output.request_id].tokens, state.node
            if node is not None and state.position + 1 == len(tokens) and not (state.reasoning or state.openings):
                token = tokens[-1]  # as `_follow` does it, in the one case that is frequent
                then = node.then.get(token)
                if then is None:
                    state.take_in(token)
                else:
                    state.unseen.append(token)
                    state.node = then
                state.mask = None
                state.position += 1
                found.append((output, state))
                continue
            try:
                if self._follow(state, tokens) and not state.openings:
                    found.append((output, state))
            except GrammarError:
                pass  # `masks` says so
        if not found:
            return forced
        members = [state for _, state in found]
        may_end = self._fill(members)
        until = time.perf_counter() + MASK_SECONDS
        for place in sorted({*_without_choice(members), *may_end}) if jumps else may_end:
            output, state = found[place]
            if not state.jumps:
                continue
            request = requests[output.request_id]
            room = min(MAX_FORCED, request.max_len - len(request.tokens))
            if tokens := self._forced(state, room, jumps, until):
                forced.append((output, tokens))
        return forced

    def _forced(self, state: _State, most: int, jumps: bool, until: float) -> list[int]:
        """The tokens that must follow, as long as masks have only one, and the time is not `until`; the last may be one
        that ends the request.
        """
        tokens: list[int] = []
        while len(tokens) < most and state.problem is None and state.mask is not None:
            bits, place = state.mask
            in_time = time.perf_counter() < until
            if jumps and in_time and (known := state.walk(most - len(tokens))):
                tokens += known
                self._fill_one(state, bits[place : place + 1])
                state.mask = bits, place
                continue
            token = _only(bits[place])
            if token in state.ends:
                tokens.append(token)
                break
            if not jumps or token == NO_TOKEN or not in_time:
                break
            tokens.append(token)
            state.take_in(token)
            state.position += 1
            self._fill_one(state, bits[place : place + 1])
            state.mask = bits, place
        return tokens

    def _fill_one(self, state: _State, bits: np.ndarray) -> None:
        """As `_fill`, of one."""
        node, table = state.node, state.table
        if node is None or table is None or node.may_end or not table.has(node):
            self._fill([state], bits)
        else:
            bits[0] = table.bits[node.row]

    def _fill(self, states: list[_State], bits: np.ndarray | None = None, again: bool = False) -> list[int]:
        """Find the masks of these, each in its row of `bits` if that is given. Returns those of texts that may end.

        Of several at one place one is computed, and then the others are there; again: unless it could not be kept.
        """
        if bits is None:
            bits = np.empty((len(states), self._words), np.uint32)
            self._filled = states, bits
        known: list[int] = []
        rows: list[int] = []
        may_end: list[int] = []
        missing: dict[Backend, list[int]] = {}
        places: set[int] = set()
        twins: list[int] = []
        for i, state in enumerate(states):
            state.mask = bits, i
            node, table = state.node, state.table
            if node is not None and table is not None and node.generation == table.generation:
                known.append(i)
                rows.append(node.row)
                if node.may_end:
                    may_end.append(i)
            elif node is not None and table is not None and not again and id(node) in places:
                twins.append(i)
            else:
                places.add(id(node))
                missing.setdefault(state.backend, []).append(i)
        if known:  # before others are kept, for which the table may have to forget these
            table = states[known[0]].table
            assert table is not None
            if len(known) < len(states):
                bits[known] = table.bits[rows]
            else:
                np.take(table.bits, rows, axis=0, out=bits, mode="clip")
            for i in may_end:
                self._settle(states[i], bits[i], True, None)
        for backend, where in missing.items():
            if len(where) == len(states):
                may_end += self._compute(backend, states, bits)
                continue
            part: np.ndarray = np.empty((len(where), self._words), np.uint32)
            may_end += [where[i] for i in self._compute(backend, [states[i] for i in where], part)]
            bits[where] = part
        if twins:
            part = np.empty((len(twins), self._words), np.uint32)
            may_end += [twins[i] for i in self._fill([states[i] for i in twins], part, again=True)]
            bits[twins] = part
            for i in twins:
                states[i].mask = bits, i
        return may_end

    def _compute(self, backend: Backend, states: Sequence[_State], bits: np.ndarray) -> list[int]:
        """Compute masks of one back end, each into its row. Returns the rows of texts that may end."""
        quick = max(QUICK_STEP_SECONDS, QUICK_SECONDS * len(states))
        ends: list[int] = []
        begin = 0
        while begin < len(states):
            if self._clock() < self._slow_until:
                end = begin + 1
                found = self._compute_slow(backend, states[begin:end], bits[begin:end])
            else:
                end = _together_from(states, begin)
                begun = time.perf_counter()
                found = self._compute_some(backend, states[begin:end], bits[begin:end])
                quick -= time.perf_counter() - begun
                if quick < 0:
                    self._slow_until = self._clock() + SLOW_SECONDS
            ends += [begin + place for place in found] if begin else found
            begin = end
        return ends

    def _compute_slow(self, backend: Backend, one: Sequence[_State], bits: np.ndarray) -> list[int]:
        """As `_compute`, of one that may take long."""
        (state,) = one
        found: list[int] = []
        if not state.share.is_over:
            begun = time.thread_time()
            found = self._compute_some(backend, one, bits)
            seconds = time.thread_time() - begun
            self._pace(state, seconds)
            allowed = max(MIN_MASK_SECONDS, MASK_SECONDS / max(1, len(self._paced)))
            if seconds > allowed:
                self._excess.charge(state.share, seconds - allowed)
        if state.share.is_over:
            self._settle(state, bits[0], False, GrammarError(_TOO_COMPLEX))
            return []
        return found

    def _pace(self, state: _State, seconds: float) -> None:
        """A mask has taken so long. Of N requests with slow masks each may have a part of 1 / 2N of the time."""
        if seconds <= QUICK_SECONDS:
            self._paced.pop(state.request_id, None)
            return
        self._paced[state.request_id] = state
        now = self._clock()
        state.mask_seconds = seconds
        state.paused_until = now + (2 * len(self._paced) - 1) * seconds
        self._slow_until = now + SLOW_SECONDS

    def _compute_some(self, backend: Backend, states: Sequence[_State], bits: np.ndarray) -> list[int]:
        """As `_compute`, in one go."""
        lost = [state.show_all_but_last() for state in states]
        tokens = [state.unseen[0] if state.unseen else NO_TOKEN for state in states]
        filled = backend.fill_all([state.matcher for state in states], tokens, bits)
        errors = filled.errors
        for i, state in enumerate(states):
            state.unseen.clear()
            if (error := lost[i]) is not None:
                errors[i] = error
        for i, state in enumerate(states):
            if state.put_off and state.position - state.begin < state.min_tokens:
                _forbid(bits[i], state.put_off)
            if state.node is None or state.table is None or i in errors:
                continue
            if i in filled.may_end or i not in filled.dead:
                state.node.may_end = i in filled.may_end
                state.node.only = NO_TOKEN if state.node.may_end else _only(bits[i])
                state.table.keep(state.node, bits[i])
        for place in {*filled.may_end, *filled.dead, *errors}:
            self._settle(states[place], bits[place], place in filled.may_end, errors.get(place))
        return filled.may_end

    @staticmethod
    def _settle(state: _State, row: np.ndarray, may_end: bool, error: GrammarError | None) -> None:
        """Say in the mask whether the request ends there, or why it cannot go on."""
        state.problem = str(error) if error else _end(state, row, may_end)
        if state.problem:
            row[:] = 0xFFFFFFFF  # its token will be dropped

    def _follow(self, state: _State, tokens: Sequence[int]) -> bool:
        """Take in the request's new tokens; False if the next may be any. The matcher sees them when a mask has to be
        computed.
        """
        count = len(tokens)
        if state.openings and self._open(state, tokens):
            return True
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
            self._show(state, tokens)
            return True
        state.mask = None
        for position in range(state.position, count):
            state.take_in(tokens[position])
        state.position = count
        return True

    @staticmethod
    def _open(state: _State, tokens: Sequence[int]) -> bool:
        """Take in tokens of an output that may begin with reasoning or with the answer, until they tell which; False
        then. A tag of one token always opens reasoning; one that is spelled only where the answer cannot begin so.
        """
        while state.openings and state.begin + state.opened < len(tokens):
            token = tokens[state.begin + state.opened]
            left = [opening[1:] for opening in state.openings if opening[0] == token]
            is_open = () in left
            state.reasoning = is_open or state.opened > 0 or (bool(left) and token not in state.own)
            state.openings = left if state.reasoning and not is_open else ()
            state.opened += 1
            state.mask = None
        return bool(state.openings)

    @staticmethod
    def _show(state: _State, tokens: Sequence[int]) -> None:
        """Show the matcher the tokens that stand behind the thoughts, which nobody masked. Raises GrammarError."""
        state.mask = None
        for token in tokens[state.position :]:
            if not state.matcher.accept(token):
                state.node = None  # no kept mask says that it may not be there
                raise refused(token, state.matcher)
            state.take_in(token)
            state.position += 1
        state.unseen.clear()


def _only(row: np.ndarray) -> int:
    """The one token that a mask allows, NO_TOKEN if it is none or several."""
    words = row.nonzero()[0]
    if len(words) != 1 or (word := int(row[words[0]])) & (word - 1):
        return NO_TOKEN
    return int(words[0]) * WORD_BITS + word.bit_length() - 1


def _forbid(row: np.ndarray, tokens: Sequence[int]) -> None:
    """Take tokens out of a mask, unless it allows no others."""
    left = row.copy()
    for token in tokens:
        left[token // WORD_BITS] &= ~np.uint32(1 << (token % WORD_BITS))
    if left.any():
        row[:] = left


def _together_from(states: Sequence[_State], begin: int) -> int:
    """Where those end that are computed in one go. A first mask goes alone: nothing is known of what it takes."""
    end, most = begin + 1, min(len(states), begin + MASKS_AT_ONCE)
    if not states[begin].is_new:
        while end < most and not states[end].is_new:
            end += 1
    return end


def _allow_openings(state: _State) -> None:
    """Add to a mask the tokens that go on opening the reasoning."""
    assert state.mask is not None
    row = state.mask[0][state.mask[1]]
    for token in {opening[0] for opening in state.openings}:
        word, bit = token // WORD_BITS, np.uint32(1 << (token % WORD_BITS))
        if row[word] & bit:
            state.own.add(token)
        row[word] |= bit


def _without_choice(states: list[_State]) -> list[int]:
    """Those whose masks may have one token only: all that have, and perhaps others."""
    found = [i for i, state in enumerate(states) if state.node is not None and state.node.only != NO_TOKEN]
    others = [i for i, state in enumerate(states) if state.node is None]
    if others:
        masks = np.stack([mask[0][mask[1]] for i in others if (mask := states[i].mask) is not None])
        found += [others[i] for i in ((masks != 0).sum(1) == 1).nonzero()[0].tolist()]
    return found


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
