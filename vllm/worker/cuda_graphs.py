"""Replays whole decode steps as recorded graphs: batches in which every request computes its last token, and drafts
behind it, and samples what follows.

A graph covers all from the slot table back to it: inputs gathered on the device, forward pass, and the choice of the
tokens, greedy or drawn, of which as many are kept as drafts allow. Its last kernel writes the ids into the host's
memory, the slots' lengths, and moves each row on to its next position: while a batch stays together, the host launches
graphs and uploads nothing.
What masks allow may be known late: such a step is two graphs, the forward pass and the end, and the masks are uploaded
in between; rows without one are not held up. Where rows want more (penalties, logprobs), a graph ends with the hidden
states, and the sampler goes on.
Batches are padded up to one of a few sizes; a size gets its graph in an idle moment, or else when it has been used a
few times, and all graphs share one memory pool. The usual model runs the fused program (`decode_program`), every other
its own forward pass.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from vllm.exceptions import NO_TOKEN_POSSIBLE
from vllm.logger import init_logger
from vllm.ops.shared_prefix import SharedPlan
from vllm.ops.triton.decode_step import (
    ARGMAX_BLOCK,
    IMPOSSIBLE,
    NOTHING,
    Drawing,
    argmax_tiles,
    choose_tokens,
    draw_tokens,
    resume_rows,
    verify_tokens,
)
from vllm.step.inputs import StepFeatures
from vllm.step.plan import RowMasks, StepPlan
from vllm.step.result import StepResult
from vllm.worker.decode_program import DecodeProgram, ProgramWeights
from vllm.worker.device import Event, RecordingContext, passed
from vllm.worker.input_builder import Batch
from vllm.worker.sample.params import Needs, ParamsTable
from vllm.worker.static_steps import SPANS, Entry, StaticSteps, buffer_width
from vllm.worker.step_handle import NOT_FINITE, Handle, LateHandle
from vllm.worker.step_kind import ANY_NEED, StepKind

if TYPE_CHECKING:
    from vllm.ops.triton.precompile import Precompilation
    from vllm.worker.model_runner import ModelRunner

logger = init_logger(__name__)

_RING = 8  # steps whose pinned buffers may be in use; more than are ever in flight, but for long pipelines


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a step ends, and which steps may end so: those that have no other needs and features.

    uniform: rows may compute several tokens, all as many.   alone: on one rank only.
    """

    name: str
    needs: int
    features: frozenset[str]
    uniform: bool = False
    alone: bool = False

    def covers(self, kind: StepKind, ranks: int) -> bool:
        fits = kind.within(self.needs, self.features)
        return fits and (kind.query == 1 or (self.uniform and kind.query > 1)) and (ranks == 1 or not self.alone)


_ADAPTED = "rows with adapters"
_PLAIN = _Ending("plain", Needs.DRAW, frozenset({"exact", _ADAPTED}))  # with one token a row
# with those that drafts allow
_VERIFIED = _Ending("verified", Needs.DRAW, frozenset({"exact", "drafts", _ADAPTED}), uniform=True)
# with hidden states, from which another graph goes on when the masks are there
_MASKED = _Ending("masked", Needs.DRAW, frozenset({"masks", "late", _ADAPTED}), alone=True)
_HIDDEN = _Ending("hidden", ANY_NEED, frozenset({"masks", "late", _ADAPTED}))  # with hidden states, for the sampler
_ENDINGS = (_PLAIN, _VERIFIED, _MASKED, _HIDDEN)  # what comes first is preferred


class _Key(NamedTuple):
    """One graph: rows, tokens of each, how it ends, whether tokens are drawn, how long sequences may be, whether a
    prefix is shared, whether rows use adapters.
    """

    size: int
    query: int
    ending: str
    drawn: bool
    span: int
    shared: bool
    adapted: bool


class ReplayHandle:
    """A replayed step whose ids are on their way to the host."""

    def __init__(self, plan: StepPlan, ids: Tensor, query: int, done: Event, begun: float) -> None:
        """ids: [rows * query or more] int32, of each row its tokens and then NOTHING."""
        self._plan, self._ids, self._query, self._done, self._begun = plan, ids, query, done, begun

    def wait(self, seconds: float) -> bool:
        """Wait until the step is done, but no longer than that; whether it is."""
        return passed(self._done, seconds)

    def result(self) -> StepResult:
        """The sampled ids, once they are here."""
        self._done.synchronize()
        rows = len(self._plan.slots)
        token_ids = self._ids[: rows * self._query].tolist()
        if self._query > 1 or self._plan.drafts is not None:
            return self._with_counts(token_ids)
        errors: dict[int, str] = {}
        if min(token_ids) < 0:
            errors = {i: _MESSAGES[token] for i, token in enumerate(token_ids) if token < 0}
            token_ids = [max(token, -1) for token in token_ids]
        return StepResult(self._plan.step_id, token_ids, {}, {}, errors, time.perf_counter() - self._begun)

    def _with_counts(self, ids: list[int]) -> StepResult:
        found: list[int] = []
        counts: list[int] = []
        errors: dict[int, str] = {}
        for row in range(len(self._plan.slots)):
            own = [token for token in ids[row * self._query : (row + 1) * self._query] if token != NOTHING]
            if own[-1] < 0:
                errors[row] = _MESSAGES[own[-1]]
                own = []
            found += own
            counts.append(len(own))
        seconds = time.perf_counter() - self._begun
        return StepResult(self._plan.step_id, found, {}, {}, errors, seconds, counts=counts)


_MESSAGES = {-1: NOT_FINITE, IMPOSSIBLE: NO_TOKEN_POSSIBLE}


class _Inputs:
    """What stands in the static inputs on the device, as far as the host can tell."""

    def __init__(self, device: Tensor, context: RecordingContext, ring: int) -> None:
        """device: [4, largest size] int32: slots (-1 for padding), positions, turns, drafts.   ring: turns."""
        self._device = device
        self._uploads = [context.pinned(*device.shape) for _ in range(ring)]
        self._arrays = [t.numpy() for t in self._uploads]
        self._known: tuple[np.ndarray, np.ndarray, int] | None = None  # slots, positions, turn, where no row has drafts
        self._next: tuple[np.ndarray, np.ndarray, int] | None = None

    def require(
        self, slots: np.ndarray, positions: np.ndarray, turn: int, size: int, drafts: np.ndarray | None = None
    ) -> None:
        """Upload a step's inputs, unless they are there. positions: below 0 where only the device knows."""
        known, self._known = self._known, None  # whatever the step does to them, or whether it fails
        certain = drafts is None and int(positions.min()) >= 0
        self._next = (slots.copy(), positions + 1, (turn + 1) % len(self._uploads)) if certain else None
        if (
            certain
            and known is not None
            and known[2] == turn
            and all(map(np.array_equal, known[:2], (slots, positions)))
        ):
            return
        host, rows = self._arrays[turn], len(slots)
        host[0, :rows], host[0, rows:size] = slots, -1
        host[1, :rows], host[2, :rows], host[3, :rows] = positions, turn, 0 if drafts is None else drafts
        self._device.copy_(self._uploads[turn], non_blocking=True)

    def clear(self) -> None:
        """Let there be nothing but padding."""
        self._known = None
        self._device[0].fill_(-1)

    def advance(self) -> None:
        """The step that has been queued leaves each row's next position and turn."""
        self._known = self._next


class _MaskInputs:
    """The masks of a step at fixed addresses on the device. They are copied beside the forward pass that they wait for.

    read: passed when the last step has read its masks; each step with masks puts its own end there.
    """

    def __init__(self, largest: int, vocab: int, context: RecordingContext) -> None:
        """largest: rows."""
        self._context, self._largest, self._words = context, largest, -(-vocab // 32)
        self._device = torch.full((largest * (1 + self._words),), -1, dtype=torch.int32, device=context.device)
        self.read: Event = context.event()
        self.read.record()

    def index(self, size: int) -> Tensor:
        """[size] which of the masks is a row's, -1 for none."""
        return self._device[:size]

    @property
    def bits(self) -> Tensor:
        """[masks, words]"""
        return self._device[self._largest :].view(self._largest, self._words)

    def upload(self, masks: RowMasks | None) -> None:
        """Put the masks of the next step there. Raises ValueError for masks of another vocabulary."""
        count = 0 if masks is None else len(masks.rows)
        sent = self._context.pinned(self._largest + count * self._words)
        host = sent.numpy()
        host[: self._largest] = -1
        if masks is not None and count:
            if masks.bits.shape != (count, self._words):
                raise ValueError(f"Masks of shape {masks.bits.shape}, expected ({count}, {self._words}).")
            host[masks.rows] = np.arange(count)
            host[self._largest :] = np.ascontiguousarray(masks.bits, np.uint32).view(np.int32).reshape(-1)
        self._context.copy_beside(self._device[: len(sent)], sent, self.read)


class _DrawingInputs:
    """The rows' sampling parameters at fixed addresses on the device, uploaded when they have changed."""

    def __init__(self, largest: int, context: RecordingContext, ring: int) -> None:
        """largest: rows, an even number.   ring: turns."""
        self._device = torch.zeros((6, largest), dtype=torch.int32, device=context.device)
        self._uploads = [context.pinned(6, largest) for _ in range(ring)]
        self._there: np.ndarray = np.zeros((6, 0), np.int32)

    def rows(self, size: int) -> Drawing:
        """Where the parameters of the first `size` rows stand."""
        temperature, min_p, top_p = (self._device[i, :size].view(torch.float32) for i in range(3))
        starts = self._device[4:].view(-1).view(torch.int64)[:size]
        return Drawing(temperature, min_p, self._device[3, :size], top_p, starts)

    def require(self, params: ParamsTable, slots: np.ndarray, turn: int, size: int) -> None:
        """Upload the parameters of some slots, one for each row, unless they are there. Of padding nothing is drawn."""
        rows = len(slots)
        wanted: np.ndarray = np.zeros((6, size), np.int32)
        for i, values in enumerate((params.temperature, params.min_p, params.top_p)):
            wanted[i, :rows] = values[slots].view(np.int32)
        wanted[0, rows:] = np.float32(1.0).view(np.int32)  # temperature
        wanted[3, :rows], wanted[3, rows:] = params.top_k[slots], -1
        wanted[4:].reshape(-1)[: 2 * rows] = params.stream[slots].view(np.int32)
        if np.array_equal(wanted, self._there):
            return
        host = self._uploads[turn].numpy()
        host[:4, :size] = wanted[:4]
        host[4:].reshape(-1)[: 2 * size] = wanted[4:].reshape(-1)
        self._device.copy_(self._uploads[turn], non_blocking=True)
        self._there = wanted


class DecodeGraphs(StaticSteps[_Key]):
    """The decode steps of one runner."""

    _runner: ModelRunner

    def __init__(
        self,
        runner: ModelRunner,
        context: RecordingContext,
        sizes: Sequence[int],
        max_seq_len: int,
        compiling: Precompilation | None = None,
    ) -> None:
        """sizes: batch sizes that get a graph, ascending. max_seq_len: longer sequences are left to the eager path.

        compiling: where the kernels of these steps may still be under way.
        """
        super().__init__(runner, context, sizes, max_seq_len, compiling)
        self._params = runner.sampler.params
        largest = buffer_width(self._sizes)
        ring = max(_RING, runner.pipeline.world + 2)  # one more step is in flight than there are stages
        self._there = _Inputs(self._inputs, context, ring)
        self._drawing = _DrawingInputs(largest, context, ring)
        self._masks: _MaskInputs | None = None
        self._hidden: Tensor | None = None
        self._ids = context.pinned(ring, largest)
        self._events = [context.event() for _ in range(ring)]
        self._turn = 0

    def accepts(self, plan: StepPlan, kind: StepKind) -> bool:
        """Whether the plan is a decode batch that a graph covers."""
        rows = len(plan.slots)
        if self._ending(kind) is None or self._size(rows, kind.query) is None:
            return False
        if rows > self._sizes[0] and self._still_compiling():
            return False
        if self._stream is not None and bool((plan.num_tokens != kind.query).any()):  # stages exchange no padding
            return False
        # what pads behind drafts must have room in the slot table, too
        return int(plan.num_computed.max()) + kind.query <= min(self._max_seq_len, self._table.max_width - 1)

    def _ending(self, kind: StepKind) -> _Ending | None:
        return next((e for e in _ENDINGS if e.covers(kind, self._runner.tp.world)), None)

    def prepare(self, first: bool = False) -> bool:
        """Run or capture, over nothing but padding, one step that batches will need: the largest first, or with `first`
        only those of the smallest batch. Whether there are more. Nothing may be in flight.
        """
        if not first and self._still_compiling():
            return True
        adapted = (False,) if self._runner.adapters is None else (False, True)
        wanted = itertools.product(adapted, self._ready_spans(first), self._ready_sizes(first), (False, True))
        return self._prepare_one(
            _Key(size, 1, _PLAIN.name, drawn, span, False, uses) for uses, span, size, drawn in wanted
        )

    def _pad(self, key: _Key) -> None:
        self._there.clear()
        self._drawing.require(self._params, np.zeros(0, np.int32), self._turn, key.size)

    def execute(self, plan: StepPlan, kind: StepKind) -> Handle:
        """Queue a plan that `accepts` took, after the slot table has taken in its rows and blocks. Returns a step
        handle, which may wait for masks.
        """
        begun = time.perf_counter()
        ending, size, query = self._ending(kind), self._size(len(plan.slots), kind.query), kind.query
        if ending is None or size is None:
            raise ValueError(f"No graph covers {kind}.")
        longest = int(plan.num_computed.max()) + query
        self._require_width(longest + 1)
        drawn, turn = bool(kind.needs) and ending is not _HIDDEN, self._turn
        self._turn = (turn + 1) % len(self._events)
        positions = plan.num_computed if plan.exact is None else np.where(plan.exact, plan.num_computed, -1)
        self._there.require(plan.slots, positions, turn, size, plan.drafts if ending is _VERIFIED else None)
        if plan.exact is not None:
            resume_rows(self._inputs[0, :size], self._inputs[1, :size], self._table.device_lengths)
        if drawn:
            slots = plan.slots if query == 1 else np.repeat(plan.slots, query)
            self._drawing.require(self._params, slots, turn, size * query)
        span = next((s for s in SPANS if s >= longest), self._width)
        shared = False
        if self._sharing is not None and query == 1 and plan.exact is None:
            shared = self._sharing.find(plan.slots, plan.num_computed, size)
        adapted = _ADAPTED in kind.features
        self._receive(len(plan.slots) * query)
        if ending is _MASKED or ending is _HIDDEN:
            entry = self._use(_Key(size, 1, _HIDDEN.name, False, span, shared, adapted))
            if ending is _HIDDEN:
                return self._sample(plan, size, entry)
            return self._masked(plan, _Key(size, 1, _MASKED.name, drawn, span, shared, adapted), turn, begun)
        self._use(_Key(size, query, ending.name, drawn, span, shared, adapted))
        return self._delivered(plan, query, turn, begun)

    def _delivered(self, plan: StepPlan, query: int, turn: int, begun: float) -> ReplayHandle:
        """The ids of what was queued last are under way."""
        self._there.advance()
        done = self._events[turn]
        done.record()
        return ReplayHandle(plan, self._ids[turn], query, done, begun)

    def _masked(self, plan: StepPlan, key: _Key, turn: int, begun: float) -> Handle:
        """The end of a step whose forward pass was queued, once there are its masks."""
        if self._masks is None:
            self._masks = _MaskInputs(buffer_width(self._sizes), self._params.vocab_size, self._context)
        inputs = self._masks

        def rest(masks: RowMasks | None) -> Handle:
            inputs.upload(masks)
            self._use(key)
            handle = self._delivered(plan, 1, turn, begun)
            inputs.read = self._events[turn]
            return handle

        return rest(plan.masks) if plan.late is None else LateHandle(plan, rest)

    def _sample(self, plan: StepPlan, size: int, entry: Entry) -> Handle:
        """Logits and sampling of a batch whose hidden states a graph has computed."""
        rows = len(plan.slots)
        step = entry.step if entry.step is not None else self._static_step(size, 1, 1)[0]
        batch = Batch(step, plan.slots, np.arange(rows), plan.slots, plan.num_computed + 1, ())
        return self._runner.finish(plan, batch, self._hidden_states(rows), self._context.mark())

    def _hidden_states(self, rows: int) -> Tensor:
        """[rows, hidden] where graphs that end with hidden states leave them."""
        if self._hidden is None:
            traits = self._runner.model.traits
            self._hidden = torch.empty(
                self._sizes[-1], traits.hidden_size, dtype=traits.dtype, device=self._context.device
            )
        return self._hidden[:rows]

    def _prepare(self, key: _Key) -> Entry:
        """The step of one kind, not captured yet."""
        if key.ending == _MASKED.name:
            return self._finish(key)
        plan = self._sharing.plan(key.size) if key.shared and self._sharing is not None else None
        weights = self._weights
        if weights is not None and key.query == 1 and weights.covers(key.size, key.adapted):
            return self._fused(key, weights, plan)
        return self._general(key, plan)

    def _fused(self, key: _Key, weights: ProgramWeights, shared: SharedPlan | None) -> Entry:
        size = key.size
        slots, positions = self._inputs[0, :size], self._inputs[1, :size]
        by_slot = self._adapters_by_slot() if key.adapted else None
        program = DecodeProgram(
            weights, size, key.span, slots, positions, shared=shared, stream=self._received(size), adapters=by_slot
        )  # fmt: skip
        outputs: dict[str, Any] = {"token_ids": self._ids, "turns": self._inputs[2, :size]}
        if key.ending == _HIDDEN.name:
            outputs = {"hidden": self._hidden_states(size)}
        elif key.drawn:
            outputs["drawing"] = self._drawing.rows(size)
        return Entry(lambda: program.run(self._table, **outputs), None, (program,))

    def _general(self, key: _Key, plan: SharedPlan | None) -> Entry:
        """The model's own forward pass over static inputs."""
        runner, table, size = self._runner, self._table, key.size
        step, fill = self._static_step(size, key.span, key.query, plan)
        view = self._adapters(size, key.query) if key.adapted else None
        if view is not None:
            step = replace(step, features=StepFeatures(adapters=(view, view)))
        slots, positions, turns, drafts = (self._inputs[i, :size] for i in range(4))
        drawing = self._drawing.rows(size * key.query) if key.drawn else None
        hidden_out = self._hidden_states(size) if key.ending == _HIDDEN.name else None

        def run() -> None:
            fill()
            self._fill_adapters(view, slots)
            hidden = self._run_model(step)
            if hidden_out is not None:
                hidden_out.copy_(hidden)
            elif key.ending == _VERIFIED.name:
                verify_tokens(
                    runner.head(hidden, view), slots, positions, drafts, table.tokens, table.device_lengths,
                    self._ids, turns, places=step.positions, drawing=drawing,
                )  # fmt: skip
            else:
                self._choose(runner.head(hidden, view), drawing, None)

        return Entry(run, step, (step,))

    def _finish(self, key: _Key) -> Entry:
        """What follows the forward pass: the tokens that masks allow, out of the hidden states. The fused program goes
        on by itself, so that rows without a mask get the tokens that they get alone, from the same logits.
        """
        hidden, masks = self._hidden_states(key.size), self._masks
        if masks is None:
            raise RuntimeError("A step with masks ends before it has room for them.")
        drawing = self._drawing.rows(key.size) if key.drawn else None
        index, bits = masks.index(key.size), masks.bits
        forward = self._graphs.get(key._replace(ending=_HIDDEN.name, drawn=False))
        program = None if forward is None else next((p for p in forward.keep if isinstance(p, DecodeProgram)), None)
        if program is not None and program.weights.vocab_size == self._params.vocab_size:
            ids, turns, finish = self._ids, self._inputs[2, : key.size], program.finish
            return Entry(lambda: finish(self._table, ids, turns, (index, bits), drawing), None, (masks, program))
        view, slots = self._adapters(key.size, 1) if key.adapted else None, self._inputs[0, : key.size]

        def run() -> None:
            self._fill_adapters(view, slots)
            self._choose(self._runner.head(hidden, view), drawing, (index, bits))

        return Entry(run, None, (masks,))

    def _choose(self, logits: Tensor, drawing: Drawing | None, masks: tuple[Tensor, Tensor] | None) -> None:
        """Deliver a token for each row of logits. masks: index and bits as for `draw_rows`."""
        size, table, device = len(logits), self._table, self._context.device
        slots, positions, turns = (self._inputs[i, :size] for i in range(3))
        if drawing is not None:
            draw_tokens(logits, slots, positions, drawing, table.tokens, table.device_lengths, self._ids, turns, masks)
            return
        pieces = -(-self._params.vocab_size // ARGMAX_BLOCK)
        best, sums = (torch.empty(size, pieces, dtype=torch.float32, device=device) for _ in range(2))
        best_at = torch.empty(size, pieces, dtype=torch.int32, device=device)
        tiles = argmax_tiles(logits, best, best_at, sums, masks)
        choose_tokens(
            slots, positions, best, best_at, sums, tiles, self._params.vocab_size, table.tokens, table.device_lengths,
            self._ids, turns, masked=masks is not None,
        )  # fmt: skip
