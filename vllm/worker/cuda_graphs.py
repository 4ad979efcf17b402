"""Replays whole decode steps as CUDA graphs: batches in which every request computes one token and samples the next.

A graph covers all from the slot table back to it: inputs gathered on the device, forward pass, and the choice of the
tokens, greedy or drawn. Its last kernel writes the ids into the host's memory and moves each row on to its next
position: while a batch stays together, the host launches graphs and uploads nothing. Where rows want more (penalties,
logprobs), a graph ends with the hidden states.
Batches are padded up to one of a few sizes; a size gets its graph in an idle moment, or else when it has been used a
few times, and all graphs share one memory pool. The usual model runs the fused program (`decode_program`), every other
its own forward pass.
"""

from __future__ import annotations

import enum
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm.logger import init_logger
from vllm.ops.shared_prefix import SharedPlan
from vllm.ops.triton.decode_step import Drawing, argmax_tiles, choose_tokens, draw_tokens, gather_inputs
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.step.plan import StepPlan
from vllm.step.result import StepResult
from vllm.step.rng import stream_start
from vllm.worker.decode_program import DecodeProgram, ProgramWeights, read_weights
from vllm.worker.device import passed
from vllm.worker.input_builder import Batch
from vllm.worker.prefix_sharing import Heads, PrefixSharing
from vllm.worker.sample.params import Needs, ParamsTable

if TYPE_CHECKING:
    from vllm.ops.triton.precompile import Precompilation
    from vllm.worker.model_runner import Handle, ModelRunner

logger = init_logger(__name__)

SPANS = (1024, 4096, 16384, 65536)  # how long sequences may be in a graph: sets how far their keys are split
_READY_SPANS = 2  # so many of them are captured before anybody asks
_EAGER_USES = 3  # so often a step runs before it is captured: sizes that batches only pass through are not worth it
_RING = 8  # steps whose pinned buffers may be in use; more than are ever in flight


class _Kind(enum.Enum):
    """How a step ends."""

    GREEDY = enum.auto()  # with the most likely tokens
    DRAWN = enum.auto()  # with tokens drawn by temperature, min_p, top_k and top_p
    HIDDEN = enum.auto()  # with hidden states, for the sampler


def buffer_width(sizes: Sequence[int]) -> int:
    """Columns of the buffers that steps of these sizes share: their rows begin at multiples of 16 bytes."""
    return -(-sizes[-1] // 4) * 4


@dataclass(slots=True)
class _Entry:
    """A step over static buffers, and its graph once it has been used often enough to be worth one."""

    run: Callable[[], None]
    step: StepInputs | None
    keep: tuple[Any, ...]  # what must live as long as the graph
    graph: torch.cuda.CUDAGraph | None = None
    uses: int = 0


class ReplayHandle:
    """A replayed step whose ids are on their way to the host."""

    def __init__(self, plan: StepPlan, ids: Tensor, done: torch.cuda.Event, begun: float, not_finite: str) -> None:
        self._plan, self._ids, self._done, self._begun, self._not_finite = plan, ids, done, begun, not_finite

    def wait(self, seconds: float) -> bool:
        """Wait until the step is done, but no longer than that; whether it is."""
        return passed(self._done, seconds)

    def result(self) -> StepResult:
        """The sampled ids, once they are here."""
        self._done.synchronize()
        token_ids = self._ids[: len(self._plan.slots)].tolist()
        errors = {i: self._not_finite for i, token in enumerate(token_ids) if token < 0} if min(token_ids) < 0 else {}
        seconds = time.perf_counter() - self._begun
        return StepResult(self._plan.step_id, token_ids, {}, {}, errors, seconds)


class _Inputs:
    """What stands in the static inputs on the device, as far as the host can tell."""

    def __init__(self, device: Tensor) -> None:
        """device: [3, largest size] int32: slots (-1 for padding), positions, turns."""
        self._device = device
        self._uploads = [torch.empty(device.shape, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._arrays = [t.numpy() for t in self._uploads]
        self._known: tuple[np.ndarray, np.ndarray, int] | None = None  # slots, positions, turn
        self._next: tuple[np.ndarray, np.ndarray, int] | None = None

    def require(self, slots: np.ndarray, positions: np.ndarray, turn: int, size: int) -> None:
        """Upload a step's inputs, unless they are there."""
        known, self._known = self._known, None  # whatever the step does to them, or whether it fails
        self._next = slots.copy(), positions + 1, (turn + 1) % _RING
        if known is not None and known[2] == turn and all(map(np.array_equal, known[:2], (slots, positions))):
            return
        host, rows = self._arrays[turn], len(slots)
        host[0, :rows], host[0, rows:size] = slots, -1
        host[1, :rows], host[2, :rows] = positions, turn
        self._device.copy_(self._uploads[turn], non_blocking=True)

    def clear(self) -> None:
        """Let there be nothing but padding."""
        self._known = None
        self._device[0].fill_(-1)

    def advance(self) -> None:
        """The step that has been queued leaves each row's next position and turn."""
        self._known = self._next


class _DrawingInputs:
    """The rows' sampling parameters at fixed addresses on the device, uploaded when they have changed."""

    def __init__(self, largest: int, device: torch.device) -> None:
        """largest: rows, an even number."""
        self._device = torch.zeros((6, largest), dtype=torch.int32, device=device)
        self._uploads = [torch.empty((6, largest), dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._there: np.ndarray = np.zeros((6, 0), np.int32)

    def rows(self, size: int) -> Drawing:
        """Where the parameters of the first `size` rows stand."""
        temperature, min_p, top_p = (self._device[i, :size].view(torch.float32) for i in range(3))
        starts = self._device[4:].view(-1).view(torch.int64)[:size]
        return Drawing(temperature, min_p, self._device[3, :size], top_p, starts)

    def require(self, params: ParamsTable, slots: np.ndarray, turn: int, size: int) -> None:
        """Upload the parameters of some slots, unless they are there. Of padding nothing is drawn."""
        rows = len(slots)
        wanted: np.ndarray = np.zeros((6, size), np.int32)
        for i, values in enumerate((params.temperature, params.min_p, params.top_p)):
            wanted[i, :rows] = values[slots].view(np.int32)
        wanted[0, rows:] = np.float32(1.0).view(np.int32)  # temperature
        wanted[3, :rows], wanted[3, rows:] = params.top_k[slots], -1
        wanted[4:].reshape(-1)[: 2 * rows] = stream_start(params.seed[slots]).view(np.int32)
        if np.array_equal(wanted, self._there):
            return
        host = self._uploads[turn].numpy()
        host[:4, :size] = wanted[:4]
        host[4:].reshape(-1)[: 2 * size] = wanted[4:].reshape(-1)
        self._device.copy_(self._uploads[turn], non_blocking=True)
        self._there = wanted


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One per device and process: cuBLAS keeps a workspace for every stream that it has ever seen."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """The decode steps of one runner."""

    def __init__(
        self,
        runner: ModelRunner,
        sizes: Sequence[int],
        max_seq_len: int,
        not_finite: str,
        compiling: Precompilation | None = None,
    ) -> None:
        """sizes: batch sizes that get a graph, ascending. max_seq_len: longer sequences are left to the eager path.

        compiling: where the kernels of these steps may still be under way.
        """
        self._compiling = compiling
        self._runner, self._max_seq_len, self._not_finite = runner, max_seq_len, not_finite
        self._table, self._params = runner.table, runner.sampler.params
        self._sizes = list(sizes)
        self._weights: ProgramWeights | None = read_weights(runner.model, runner.kv_caches)
        self._sharing = self._prefix_sharing()
        self._graphs: dict[tuple[int, _Kind, int, bool], _Entry] = {}  # by size, kind, span, shared prefix
        self._width = self._table.width
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = capture_stream(runner.context.device)
        device, largest = runner.context.device, buffer_width(self._sizes)
        # slots, positions, and the vector of `_ids` that a row's id goes to: a step's upload is one copy
        self._inputs = torch.full((3, largest), -1, dtype=torch.int32, device=device)
        self._there = _Inputs(self._inputs)
        self._drawing = _DrawingInputs(largest, device)
        self._hidden: Tensor | None = None
        self._ids = torch.empty((_RING, largest), dtype=torch.int32, pin_memory=True)
        self._events = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0
        with torch.cuda.stream(self._stream):  # its cuBLAS workspace must not come to lie in a graph's memory
            one = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
            torch.mm(one, one)

    def close(self) -> None:
        """Destroy the graphs, without waiting for the device."""
        for entry in self._graphs.values():
            if entry.graph is not None:
                entry.graph.reset()
        self._graphs.clear()

    def accepts(self, plan: StepPlan) -> bool:
        """Whether the plan is a uniform decode batch that a graph covers."""
        rows = len(plan.slots)
        if rows == 0 or rows > self._sizes[-1] or (rows > self._sizes[0] and self._still_compiling()):
            return False
        if int(plan.num_tokens.max()) != 1 or not plan.sample.all():
            return False
        if int(plan.num_computed.max()) + 1 > self._max_seq_len:
            return False
        return not self._params.wants_prompt[plan.slots].any()

    def _still_compiling(self) -> bool:
        """Whether kernels of larger batches are under way: nobody waits for them, there are others.

        Of several ranks one compiles, but all must take the same path: they wait.
        """
        if self._compiling is not None and self._runner.tp.world > 1:
            self._compiling.finish()
        if self._compiling is not None and self._compiling.finished:
            self._compiling = None
        return self._compiling is not None

    def prepare(self, first: bool = False) -> bool:
        """Run or capture, over nothing but padding, one step that batches will need: the largest first, or with `first`
        only those of the smallest batch. Whether there are more. Nothing may be in flight.
        """
        if not first and self._still_compiling():
            return True
        sizes = self._sizes[:1] if first else self._sizes[::-1]
        spans = SPANS[:1] if first else SPANS[:_READY_SPANS]
        spans = spans[: 1 + sum(span < min(self._width, self._max_seq_len) for span in spans)]
        wanted = itertools.product(spans, sizes, (_Kind.GREEDY, _Kind.DRAWN))
        missing = ((size, kind, span, False) for span, size, kind in wanted)
        key = next((k for k in missing if k not in self._graphs or self._graphs[k].graph is None), None)
        if key is None:
            return False
        entry = self._graphs.get(key)
        if entry is None:
            entry = self._graphs[key] = self._prepare(*key)
        self._there.clear()
        self._drawing.require(self._params, np.zeros(0, np.int32), self._turn, key[0])
        if entry.uses:
            self._capture(entry)
        else:
            entry.run()
            entry.uses += 1
        return True

    def execute(self, plan: StepPlan) -> Handle:
        """Queue a plan that `accepts` took, after the slot table has taken in its rows and blocks. Returns a step
        handle.
        """
        begun = time.perf_counter()
        rows = len(plan.slots)
        longest = int(plan.num_computed.max()) + 1
        self._table.require_width(longest + 1)
        if self._table.width != self._width:  # the table moved to other memory
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # the old pool ends with its last graph
            self._width = self._table.width
        masked = plan.masks is not None or plan.late is not None
        kind = _Kind.HIDDEN if masked else self._kind(plan.slots)
        size = next(s for s in self._sizes if s >= rows)
        turn = self._turn
        self._turn = (turn + 1) % _RING
        self._there.require(plan.slots, plan.num_computed, turn, size)
        if kind is _Kind.DRAWN:
            self._drawing.require(self._params, plan.slots, turn, size)
        span = next((s for s in SPANS if s >= longest), self._width)
        shared = self._sharing is not None and self._sharing.find(plan.slots, plan.num_computed, size)
        entry = self._graphs.get((size, kind, span, shared))
        if entry is None:
            entry = self._graphs[size, kind, span, shared] = self._prepare(size, kind, span, shared)
        entry.uses += 1
        if entry.graph is None and entry.uses > _EAGER_USES:
            self._capture(entry)
        if entry.graph is None:
            entry.run()
        else:
            entry.graph.replay()
        if kind is not _Kind.HIDDEN:
            self._there.advance()
            done = self._events[turn]
            done.record()
            return ReplayHandle(plan, self._ids[turn], done, begun, self._not_finite)
        return self._sample(plan, size, entry)

    def _kind(self, slots: np.ndarray) -> _Kind:
        """How the step of a batch ends."""
        needs = int(np.bitwise_or.reduce(self._params.needs[slots]))
        if not needs:
            return _Kind.GREEDY
        return _Kind.DRAWN if needs == Needs.DRAW else _Kind.HIDDEN

    def _sample(self, plan: StepPlan, size: int, entry: _Entry) -> Handle:
        """Logits and sampling of a batch whose hidden states a graph has computed."""
        rows = len(plan.slots)
        step = entry.step if entry.step is not None else self._static_step(size, 1)[0]
        batch = Batch(step, plan.slots, np.arange(rows), plan.slots, plan.num_computed + 1, ())
        if self._hidden is None:
            raise RuntimeError("A graph without hidden states cannot be sampled from.")
        return self._runner.finish(plan, batch, self._hidden[:rows], self._runner.context.mark())

    def _prefix_sharing(self) -> PrefixSharing | None:
        """What finds common prefixes in batches, by the first KV group; None if the model has no use for it."""
        runner = self._runner
        heads = Heads.of(runner.model.traits, runner.layout)
        if heads is None or not heads.fit:
            return None
        return PrefixSharing(self._table, 0, heads, self._sizes[-1], runner.context)

    def _prepare(self, size: int, kind: _Kind, span: int, shared: bool) -> _Entry:
        """The step of one size and kind, not captured yet."""
        if kind is _Kind.HIDDEN and self._hidden is None:
            self._hidden = self._hidden_buffer()
        plan = self._sharing.plan(size) if shared and self._sharing is not None else None
        if self._weights is not None:
            return _Entry(*self._fused(size, kind, span, plan))
        return _Entry(*self._general(size, kind, span, plan))

    def _capture(self, entry: _Entry) -> None:
        """Capture a step that has run before, so that its kernels exist."""
        start = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                entry.run()
            finally:
                graph.capture_end()
        main.wait_stream(self._stream)
        entry.graph = graph
        logger.debug("Captured a decode step in %.3f s.", time.perf_counter() - start)

    def _hidden_buffer(self) -> Tensor:
        """[largest size, hidden] for hidden states that leave a graph."""
        traits, device = self._runner.model.traits, self._runner.context.device
        return torch.empty(self._sizes[-1], traits.hidden_size, dtype=traits.dtype, device=device)

    def _fused(
        self, size: int, kind: _Kind, span: int, shared: SharedPlan | None
    ) -> tuple[Callable[[], None], StepInputs | None, tuple[Any, ...]]:
        if self._weights is None:
            raise RuntimeError("This model has no fused step.")
        slots, positions = self._inputs[0, :size], self._inputs[1, :size]
        program = DecodeProgram(self._weights, size, span, slots, positions, shared=shared)
        outputs: dict[str, Any] = {"token_ids": self._ids, "turns": self._inputs[2, :size]}
        if kind is _Kind.DRAWN:
            outputs["drawing"] = self._drawing.rows(size)
        elif kind is _Kind.HIDDEN:
            outputs = {"hidden": None if self._hidden is None else self._hidden[:size]}
        return lambda: program.run(self._table, **outputs), None, (program,)

    def _general(
        self, size: int, kind: _Kind, span: int, plan: SharedPlan | None
    ) -> tuple[Callable[[], None], StepInputs, tuple[Any, ...]]:
        """The model's own forward pass over static inputs."""
        runner, table = self._runner, self._table
        model = runner.model
        step, fill = self._static_step(size, span, plan)
        vocab = self._params.vocab_size
        tiles = -(-vocab // 4096)
        device = runner.context.device
        best, sums = (torch.empty(size, tiles, dtype=torch.float32, device=device) for _ in range(2))
        best_at = torch.empty(size, tiles, dtype=torch.int32, device=device)
        slots, positions, turns = (self._inputs[i, :size] for i in range(3))
        drawing = self._drawing.rows(size)

        def run() -> None:
            fill()
            hidden = model(step, runner.kv_caches)
            if self._hidden is not None and kind is _Kind.HIDDEN:
                self._hidden[:size].copy_(hidden)
                return
            if kind is _Kind.DRAWN:
                draw_tokens(model.logits(hidden), slots, positions, drawing, table.tokens, self._ids, turns)
                return
            count = argmax_tiles(model.logits(hidden), best, best_at, sums)
            choose_tokens(slots, positions, best, best_at, sums, count, vocab, table.tokens, self._ids, turns)

        return run, step, (step, best, best_at, sums)

    def _static_step(
        self, size: int, span: int, plan: SharedPlan | None = None
    ) -> tuple[StepInputs, Callable[[], None]]:
        """Inputs of a step at fixed addresses, and the function that queues the kernels which fill them.

        span: no sequence is longer.   plan: for common keys of the first group.
        """
        table, device = self._table, self._runner.context.device
        starts: np.ndarray = np.arange(size + 1, dtype=np.int32)
        int64, int32 = torch.int64, torch.int32
        columns = -(-span // table.block_size)
        groups = tuple(
            GroupInputs(
                slot_mapping=torch.zeros(size, dtype=int64, device=device),
                block_table=torch.zeros(size, columns, dtype=int32, device=device),
                plan=plan if g == 0 else None,
            )
            for g in range(len(table.tables))
        )
        step = StepInputs.of(
            token_ids=torch.zeros(size, dtype=int64, device=device),
            positions=torch.zeros(size, dtype=int64, device=device),
            query_starts=torch.arange(size + 1, dtype=int32, device=device),
            seq_lens=torch.ones(size, dtype=int32, device=device),
            groups=groups,
            max_query_len=1,
            max_seq_len=span,
            host_query_starts=starts,
            host_seq_lens=np.full(size, span, np.int32),
        )
        shared = (step.token_ids, step.positions, step.seq_lens)
        slots, positions = self._inputs[0, :size], self._inputs[1, :size]

        def fill() -> None:
            for g, (group, blocks) in enumerate(zip(groups, table.tables, strict=True)):
                gather_inputs(
                    slots,
                    positions,
                    table.tokens,
                    blocks,
                    shared,
                    group.slot_mapping,
                    group.block_table,
                    table.block_size,
                    g == 0,
                )

        return step, fill
