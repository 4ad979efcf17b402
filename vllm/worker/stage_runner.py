"""Runs plans on a pipeline stage before the last: takes the stream in, computes its layers, hands the stream on.
The first stage also takes in what the last one has sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from vllm.distributed.parallel_state import SINGLE, TensorParallel
from vllm.distributed.pipeline import Link, Pipeline
from vllm.model_executor.models.traits import Model
from vllm.step.known import Known, is_told
from vllm.step.kv_policy import KVLayout
from vllm.step.plan import Column, StepPlan, require_known
from vllm.worker.adapters import ROWS_WITH_ADAPTERS, WorkerAdapters
from vllm.worker.device import DeviceContext
from vllm.worker.input_builder import InputBuilder
from vllm.worker.model_runner import MixedSteps
from vllm.worker.slot_table import SlotTable
from vllm.worker.transfers import run_transfers

# Fields of a plan that are run beyond those without a default. Masks and what is late are the sampling rank's business.
KNOWN = frozenset({"transfers", "writes", "drafts", "adapters", "pooled"})


class StageSteps(Protocol):
    """A faster way through some steps; the slot table has taken in the plan's news before it is asked."""

    def forward(self, plan: StepPlan, adapted: bool) -> Tensor | None:
        """[tokens, hidden] of a plan, which the next one overwrites; None for a plan that is not covered."""


class StageTokens:
    """The way of sampled tokens from the last stage to the first, without the host.

    A step's tokens are sent as soon as they are sampled, and received when a plan needs them.
    """

    def __init__(self, table: SlotTable, context: DeviceContext, link: Link) -> None:
        self._table, self._context, self._link = table, context, link
        self._awaited: deque[tuple[int, np.ndarray, np.ndarray]] = deque()  # step, slots and positions of its tokens
        self._entered: np.ndarray = np.full(table.num_slots, -1, np.int64)  # by slot: the step in which it was filled

    def send(self, plan: StepPlan) -> None:
        """On the last stage, behind a step: its tokens are on their way."""
        if plan.late is not None:
            raise NotImplementedError("Masks of a pipeline's steps are known when these begin.")
        if is_told(plan):
            (index,) = self._context.upload([self._table.token_index(*_sampled(plan))])
            self._link.send(self._table.read_tokens(index))

    def expect(self, plan: StepPlan) -> None:
        """On the first stage: a step has begun."""
        for init in plan.new:
            self._entered[init.slot] = plan.step_id
        if is_told(plan):
            self._awaited.append((plan.step_id, *_sampled(plan)))

    def receive(self, count: int) -> None:
        """Take in the tokens of the oldest steps. Those of requests that have left their slot are nobody's."""
        for _ in range(count):
            step, slots, positions = self._awaited.popleft()
            kept = np.flatnonzero(self._entered[slots] <= step)
            index, rows = self._context.upload([self._table.token_index(slots[kept], positions[kept]), kept])
            ids = self._link.receive(torch.empty(len(slots), dtype=torch.int64, device=self._context.device))
            self._table.write_tokens(index, ids if len(kept) == len(slots) else ids[rows])


def _sampled(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Slots and positions of the tokens that a step samples."""
    rows = plan.sample
    return plan.slots[rows], (plan.num_computed + plan.num_tokens)[rows]


class StageRunner:
    """One rank's share of the layers of a stage. It samples nothing: it is told each token."""

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        kv_caches: list[Tensor],
        context: DeviceContext,
        pipeline: Pipeline,
        *,
        num_slots: int,
        max_model_len: int,
        tp: TensorParallel = SINGLE,
        columns: Sequence[Column] = (),
        adapters: WorkerAdapters | None = None,
        pools: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """pools: see `ModelRunner`."""
        self._pools = (kv_caches,) if pools is None else pools
        self.tp = tp
        self.model, self.kv_caches, self.context, self.pipeline = model, kv_caches, context, pipeline
        self.layout = layout
        if adapters is not None:
            columns = (*columns, adapters.column)
        self.table = SlotTable(num_slots, max_model_len, layout, context, columns)
        if self.table.states is not None:
            raise NotImplementedError("Drafts of models with recurrent states cannot be verified in a pipeline.")
        self.adapters = adapters
        if adapters is not None:
            adapters.follow(self.table.columns[adapters.column.name].host)
        self.builder = InputBuilder(self.table, context, np.zeros(num_slots, bool))
        self._tokens = None if pipeline.tokens is None else StageTokens(self.table, context, pipeline.tokens)
        self.decode_steps: StageSteps | None = None
        self.mixed_steps: MixedSteps | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan, known: Known | None = None, told: int = 0) -> None:
        """Compute a step's tokens. known: tokens that the host has got to know since the plan before.   told: of so
        many steps, the oldest ones, the last stage's tokens are taken in before.
        """
        require_known(plan, KNOWN, "A pipeline stage")
        if self._tokens is not None:
            self._tokens.receive(told)
            self._tokens.expect(plan)
        if known is not None:
            index, ids = self.context.upload(
                [self.table.token_index(known.slots, known.positions), np.array(known.token_ids)]
            )
            self.table.write_tokens(index, ids)
        if plan.new:
            self.table.enter(plan.new)
        if self.adapters is not None:
            self.adapters.load(plan.adapters)
        self.table.append_blocks(plan.blocks)
        if plan.transfers:
            run_transfers(plan.transfers, self._pools, self.context)
        if plan.writes:
            self.table.write(plan.writes)
        if not len(plan.slots):
            return
        features = frozenset[str]() if self.adapters is None else self.adapters.features(plan)
        adapted = ROWS_WITH_ADAPTERS in features
        captured = features <= {ROWS_WITH_ADAPTERS}
        graphs = self.decode_steps if captured else None
        if graphs is not None and (found := graphs.forward(plan, adapted)) is not None:
            self.pipeline.send(found.clone())  # the next step may write before this has arrived
            return
        laid = self.builder.lay_out(replace(plan, pooled=None))  # every token goes on, whoever wants it
        of_tokens = self.adapters.of_tokens(plan) if adapted and self.adapters is not None else None
        if self.mixed_steps is not None and captured:
            mixed = self.mixed_steps.forward(laid, of_tokens)
            if mixed is not None:
                self.pipeline.send(mixed[1][: len(laid.positions)].clone())
                return
        views = self.adapters.views(plan, laid) if adapted and self.adapters is not None else None
        tokens, traits = len(laid.positions), self.model.traits
        if self.mixed_steps is not None and views is None:
            laid = self.mixed_steps.rounded(laid)
        step = self.builder.build(plan, laid, views).step
        padding = len(step.positions) - tokens
        stream = self.pipeline.receive(tokens, traits.hidden_size, traits.dtype, self.context.device, padding)
        self.pipeline.send(self.model(step, self.kv_caches, stream)[:tokens])
