"""Steps over static buffers that can be captured as CUDA graphs: their inputs, entries, and memory pool.

What a kind of steps computes is its own: `cuda_graphs` has whole decode steps, `stage_graphs` those of a pipeline's
stages before the last. A stage takes the stream of the one before out of a static buffer, which is filled before the
step is replayed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm.logger import init_logger
from vllm.ops.shared_prefix import SharedPlan
from vllm.ops.triton.decode_step import gather_inputs
from vllm.step.inputs import GroupInputs, RowView, StepInputs
from vllm.step.kv_policy import KVKind, KVLayout
from vllm.worker.decode_program import ProgramWeights, read_weights
from vllm.worker.decode_weights import refusal
from vllm.worker.device import RecordingContext, Replay
from vllm.worker.prefix_sharing import Heads, PrefixSharing

if TYPE_CHECKING:
    from vllm.ops.triton.precompile import Precompilation
    from vllm.worker.model_runner import ModelRunner
    from vllm.worker.stage_runner import StageRunner

logger = init_logger(__name__)

SPANS = (1024, 4096, 16384, 65536)  # how long sequences may be in a graph: sets how far their keys are split
_READY_SPANS = 2  # so many of them are captured before anybody asks
_EAGER_USES = 3  # so often a step runs before it is captured: sizes that batches only pass through are not worth it

Key = TypeVar("Key", bound=Hashable)


def buffer_width(sizes: Sequence[int]) -> int:
    """Columns of the buffers that steps of these sizes share: their rows begin at multiples of 16 bytes."""
    return -(-sizes[-1] // 4) * 4


def graphs_know(layout: KVLayout) -> bool:
    """Whether the steps of a model with such a cache can be graphs: they read the block tables of attention over the
    request's own tokens, in blocks of one size, and the first page of recurrent states.
    """
    known = (KVKind.FULL, KVKind.SLIDING, KVKind.RECURRENT)
    recurrent = any(group.kind is KVKind.RECURRENT for group in layout.groups)
    if recurrent and layout.policy.states_per_slot > 1:  # the device says which page is true
        return False
    return all(group.kind in known and (group.units == 1 or group.kind is KVKind.RECURRENT) for group in layout.groups)


@dataclass(slots=True)
class Entry:
    """A step over static buffers, and its graph once it has been used often enough to be worth one."""

    run: Callable[[], None]
    step: StepInputs | None
    keep: tuple[Any, ...]  # what must live as long as the graph
    graph: Replay | None = None
    uses: int = 0


class StaticSteps(ABC, Generic[Key]):
    """The steps of one runner, by key."""

    def __init__(
        self,
        runner: ModelRunner | StageRunner,
        context: RecordingContext,
        sizes: Sequence[int],
        max_seq_len: int,
        compiling: Precompilation | None = None,
    ) -> None:
        """sizes: batch sizes that get a graph, ascending. max_seq_len: longer sequences are left to the eager path.

        compiling: where the kernels of these steps may still be under way.
        """
        self._compiling = compiling
        self._runner, self._context, self._max_seq_len = runner, context, max_seq_len
        self._table, self._sizes = runner.table, list(sizes)
        self._weights: ProgramWeights | None = read_weights(runner.model, runner.kv_caches)
        if self._weights is None:
            why = refusal(runner.model, runner.kv_caches) or "its kernels cannot read the weights of a layer"
            logger.info("Decode steps run the model's own layers, no fused step: %s.", why)
        self._sharing = self._prefix_sharing()
        self._graphs: dict[Key, Entry] = {}
        self._width = self._table.width
        self._pool = context.new_pool()
        # slots, positions, where a row's ids go (for steps that sample), drafts: a step's upload is one copy
        self._inputs = torch.full((4, buffer_width(sizes)), -1, dtype=torch.int32, device=context.device)
        self._stream: Tensor | None = None
        if runner.pipeline.world > 1:
            traits = runner.model.traits
            shape = sizes[-1], traits.hidden_size
            self._stream = torch.zeros(shape, dtype=traits.dtype, device=context.device)

    @abstractmethod
    def _prepare(self, key: Key) -> Entry:
        """The step of one kind, not captured yet."""

    def prepare(self, first: bool = False) -> bool:
        """Do a piece of what later steps would have to wait for; whether there is more."""
        return False

    def _ready_sizes(self, first: bool) -> list[int]:
        """The sizes that are captured before anybody asks, the largest first; of `first` only the smallest."""
        return self._sizes[:1] if first else self._sizes[::-1]

    def _ready_spans(self, first: bool) -> tuple[int, ...]:
        """The same for spans."""
        spans = SPANS[:1] if first else SPANS[:_READY_SPANS]
        return spans[: 1 + sum(span < min(self._width, self._max_seq_len) for span in spans)]

    def _prepare_one(self, keys: Iterable[Key]) -> bool:
        """Run the first of these steps that has no graph over nothing but padding, or capture it if it has run; False
        if there is none.
        """
        key = next((k for k in keys if k not in self._graphs or self._graphs[k].graph is None), None)
        if key is None:
            return False
        entry = self._graphs.get(key)
        if entry is None:
            entry = self._graphs[key] = self._prepare(key)
        self._pad(key)
        if entry.uses:
            self._capture(entry)
        else:
            entry.run()
            entry.uses += 1
        return True

    def _pad(self, key: Key) -> None:
        """Let the inputs of a step be nothing but padding."""
        self._inputs[0].fill_(-1)

    def close(self) -> None:
        """Destroy the graphs, without waiting for the device."""
        for entry in self._graphs.values():
            if entry.graph is not None:
                entry.graph.reset()
        self._graphs.clear()

    def _size(self, rows: int, query: int) -> int | None:
        """The size of a graph for so many rows of so many tokens."""
        return next((s for s in self._sizes if s >= rows and s * query <= self._sizes[-1]), None)

    def _require_width(self, tokens: int) -> None:
        """Make room in the slot table."""
        self._table.require_width(tokens)
        if self._table.width != self._width:  # the table moved to other memory
            self._graphs.clear()
            self._pool = self._context.new_pool()  # the old pool ends with its last graph
            self._width = self._table.width

    def _use(self, key: Key) -> Entry:
        """Queue a step, by its graph if it has one or is worth one."""
        entry = self._graphs.get(key)
        if entry is None:
            entry = self._graphs[key] = self._prepare(key)
        entry.uses += 1
        if entry.graph is None and entry.uses > _EAGER_USES:
            self._capture(entry)
        if entry.graph is None:
            entry.run()
        else:
            entry.graph.replay()
        return entry

    def _capture(self, entry: Entry) -> None:
        """Capture a step that has run before, so that its kernels exist."""
        start = time.perf_counter()
        entry.graph = self._context.record(entry.run, self._pool)
        logger.debug("Captured a decode step in %.3f s.", time.perf_counter() - start)

    def _still_compiling(self) -> bool:
        """Whether kernels of larger batches are under way: nobody waits for them, there are others.

        Of several ranks one compiles, but all must take the same path: they wait.
        """
        if self._compiling is not None and self._runner.tp.world > 1:
            self._compiling.finish()
        if self._compiling is not None and self._compiling.finished:
            self._compiling = None
        return self._compiling is not None

    def _receive(self, rows: int) -> None:
        """Let what the stage before has computed come to where the step that follows will read it."""
        if self._stream is not None:
            self._runner.pipeline.receive_into(self._stream[:rows])

    def _received(self, rows: int) -> Tensor | None:
        """[rows, hidden]: where the stream of a pipeline stands; None without one."""
        return None if self._stream is None else self._stream[:rows]

    def _run_model(self, step: StepInputs) -> Tensor:
        """What the model computes of a static step."""
        runner = self._runner
        if self._stream is None or runner.pipeline.is_first:
            return runner.model(step, runner.kv_caches)
        return runner.model(step, runner.kv_caches, self._received(len(step.positions)))

    def _prefix_sharing(self) -> PrefixSharing | None:
        """What finds common prefixes in batches, by the first KV group; None if the model has no use for it."""
        runner = self._runner
        heads = Heads.of(runner.model.traits, runner.layout)
        if heads is None or not heads.fit:
            return None
        return PrefixSharing(self._table, 0, heads, self._sizes[-1], runner.context)

    def _adapters(self, size: int, query: int) -> RowView:
        """The view of a step's tokens, at a fixed address."""
        return RowView(torch.full((size * query,), -1, dtype=torch.int32, device=self._context.device), ())

    def _fill_adapters(self, view: RowView | None, slots: Tensor) -> None:
        """Queue what looks up the adapter of each row, whose slot is -1 for padding."""
        by_slot = self._adapters_by_slot()
        if view is None or by_slot is None:
            return
        found = torch.where(slots >= 0, by_slot.index_select(0, slots.clamp(min=0)), -1)
        view.adapters.view(len(slots), -1).copy_(found[:, None])

    def _adapters_by_slot(self) -> Tensor | None:
        """[slots] int32, -1 for none; None without adapters."""
        adapters = self._runner.adapters
        return None if adapters is None else self._table.columns[adapters.column.name].device

    def _static_step(
        self, size: int, span: int, query: int, plan: SharedPlan | None = None
    ) -> tuple[StepInputs, Callable[[], None]]:
        """Inputs of a step at fixed addresses, and the function that queues the kernels which fill them.

        span: no sequence is longer.   query: tokens of each row.   plan: for common keys of the first group.
        """
        table, device = self._table, self._context.device
        tokens = size * query
        int64, int32 = torch.int64, torch.int32
        columns = -(-span // table.block_size)
        groups = tuple(
            GroupInputs(
                slot_mapping=torch.zeros(tokens, dtype=int64, device=device),
                block_table=torch.zeros(size, columns, dtype=int32, device=device),
                plan=plan if g == 0 else None,
            )
            for g in range(len(table.tables))
        )
        step = StepInputs.of(
            token_ids=torch.zeros(tokens, dtype=int64, device=device),
            positions=torch.zeros(tokens, dtype=int64, device=device),
            query_starts=torch.arange(0, tokens + 1, query, dtype=int32, device=device),
            seq_lens=torch.full((size,), query, dtype=int32, device=device),
            groups=groups,
            max_query_len=query,
            max_seq_len=span,
            host_query_starts=np.arange(0, tokens + 1, query, dtype=np.int32),
            host_seq_lens=np.full(size, span, np.int32),
        )
        shared = (step.token_ids, step.positions, step.seq_lens)
        slots, positions = self._inputs[0, :size], self._inputs[1, :size]
        drafts = self._inputs[3, :size] if query > 1 else None

        def fill() -> None:
            for g, (group, blocks) in enumerate(zip(groups, table.tables, strict=True)):
                gather_inputs(
                    slots, positions, table.tokens, blocks, shared, group.slot_mapping, group.block_table,
                    table.block_size, g == 0, drafts,
                )  # fmt: skip

        return step, fill
