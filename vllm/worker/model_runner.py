"""Runs plans: slot table, inputs, forward pass, logits, sampling; owns the weights and the KV cache tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from vllm.distributed.parallel_state import SINGLE, TensorParallel
from vllm.distributed.pipeline import ONE_STAGE, Pipeline
from vllm.model_executor.layers.rope import prompt_stage
from vllm.model_executor.models.traits import Model
from vllm.ops.logprobs import top_logprobs
from vllm.pooling_params import PoolingParams
from vllm.step.inputs import RowView, StepFeatures, StepInputs
from vllm.step.kv_policy import KVLayout
from vllm.step.plan import Column, RowMasks, StepPlan, require_known
from vllm.worker.adapters import WorkerAdapters
from vllm.worker.device import DeviceContext
from vllm.worker.host_tier import create_tier
from vllm.worker.input_builder import Batch, InputBuilder, Laid, within
from vllm.worker.pool import PooledChunk, PooledRun, Pooler
from vllm.worker.sample.sampler import Sampled, Sampler
from vllm.worker.slot_table import SlotTable
from vllm.worker.step_handle import Handle, LateHandle, NothingComputed, PromptLogprobs, Queued, StepHandle
from vllm.worker.step_kind import ANY_NEED, StepKind
from vllm.worker.transfers import run_transfers
from vllm.worker.virtual_tokens import VirtualTokenTable

# Fields of a plan that are run beyond those without a default.
KNOWN = frozenset({"transfers", "writes", "drafts", "exact", "late", "masks", "pooled", "adapters", "exchanged"})
_PROMPT_LOGITS = 1 << 25  # logits of prompt tokens held at once (128 MB in fp32)


class DecodeSteps(Protocol):
    """A faster way through some steps; slot table and sampler have taken in the plan's news before it is asked.

    Rows that are not exact need not be settled before: their lengths on the device are true.
    """

    def accepts(self, plan: StepPlan, kind: StepKind) -> bool: ...

    def execute(self, plan: StepPlan, kind: StepKind) -> Handle:
        """Queue a plan that was accepted; a `LateHandle` waits for masks."""


class MixedSteps(Protocol):
    """A faster way through the forward pass of some steps. handles: the features that they may have."""

    @property
    def handles(self) -> frozenset[str]: ...

    def forward(self, laid: Laid, adapters: np.ndarray | None = None) -> tuple[StepInputs, Tensor] | None:
        """The step's inputs, and what the model gives for its first rows of logits; None for steps not covered.

        adapters: [tokens] int32, as in `RowView`; None if none of them uses one.
        """

    def rounded(self, laid: Laid) -> Laid:
        """A step not covered as it is best computed: perhaps with tokens of nobody behind its own."""


def _known_lengths(plan: StepPlan) -> np.ndarray:
    """Tokens of each row that are no drafts and known when its step begins; 0 for a row that does not sample."""
    lengths = plan.num_computed + plan.num_tokens
    if plan.drafts is not None:
        lengths = lengths - plan.drafts
    known: np.ndarray = np.where(plan.sample, lengths, 0)
    return known


class ModelRunner:
    """One rank's share of a model. Plans are executed in order; on an asynchronous device several may be queued.

    `decode_steps` and `mixed_steps`, if set, run steps that they accept by other means (captured graphs).
    """

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        kv_caches: list[Tensor],
        context: DeviceContext,
        *,
        num_slots: int,
        max_model_len: int,
        vocab_size: int,
        tp: TensorParallel = SINGLE,
        columns: Sequence[Column] = (),
        pooler: Pooler | None = None,
        adapters: WorkerAdapters | None = None,
        pools: Sequence[Sequence[Tensor]] | None = None,
        tier_blocks: int = 0,
        pipeline: Pipeline = ONE_STAGE,
        virtual: VirtualTokenTable | None = None,
        serve_experts: Callable[[], None] | None = None,
        added_tokens: int = 0,
    ) -> None:
        """columns: numbers that every slot has, for capabilities that declare them.   pooler: of a model that pools.

        pools: the memories behind `kv_caches` (`kv_memory.CacheMemory`); None: they are all pages of tokens.
        tier_blocks: of a lower tier in host memory.
        pipeline: this rank's place in it, on the last stage.   virtual: where prompt adapters are served.
        serve_experts: what is done in a step in which only other copies of the engine have tokens.
        added_tokens: the most that an adapter may add to the vocabulary.
        """
        self.model = model
        self.layout = layout
        self.kv_caches = kv_caches
        self._pools = (kv_caches,) if pools is None else pools
        self._tier = create_tier(self._pools[0], tier_blocks, context) if tier_blocks else None
        self.context = context
        self.tp = tp
        self.pipeline = pipeline
        if adapters is not None:
            columns = (*columns, adapters.column)
        self.table = SlotTable(num_slots, max_model_len, layout, context, columns)
        self.adapters = adapters
        if adapters is not None:
            adapters.follow(self.table.columns[adapters.column.name].host)
        self.sampler = Sampler(self.table, vocab_size, context, added_tokens)
        self.builder = InputBuilder(self.table, context, self.sampler.params.wants_prompt, pooler)
        self._pooler = pooler
        self._virtual = virtual
        self._serve_experts = serve_experts
        self.decode_steps: DecodeSteps | None = None
        self.mixed_steps: MixedSteps | None = None
        self._late: LateHandle | None = None  # a step that waits for masks, the last one

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Handle:
        """Queue one step: freed, new, blocks, transfers, writes, forward pass, sampling, in this order."""
        require_known(plan, KNOWN, "This worker")
        if self._late is not None and not self._late.is_complete:
            raise RuntimeError(f"Step {self._late.step_id} waits for its masks: no other step may follow before.")
        self._take_in(plan)
        if self.tp.exchange is not None:
            self.tp.exchange.expect(plan.exchanged)
        if not len(plan.slots):
            if plan.exchanged and self._serve_experts is not None:
                self._serve_experts()
            return NothingComputed(plan.step_id)
        adapted = frozenset[str]() if self.adapters is None else self.adapters.features(plan)
        stages = self._prompt_stages(plan)
        asked = adapted if stages is None else adapted | {"other rotations"}
        virtual = None if self._virtual is None else self._virtual.of(plan)
        kind = None
        if virtual is None and (self.decode_steps is not None or self.mixed_steps is not None):
            kind = StepKind.of(plan, self.sampler.params, asked)
        if self.decode_steps is not None and kind is not None and self.decode_steps.accepts(plan, kind):
            self._note_lengths(plan)
            handle = self.decode_steps.execute(plan, kind)
            if isinstance(handle, LateHandle):
                self._late = handle
            return handle
        plan = self._settled(plan)
        self._note_lengths(plan)
        laid = self.builder.lay_out(plan)
        start = self.context.mark()
        if self.mixed_steps is not None and kind is not None and kind.within(ANY_NEED, self.mixed_steps.handles):
            of_tokens = self.adapters.of_tokens(plan) if adapted and self.adapters is not None else None
            found = self.mixed_steps.forward(laid, of_tokens)
            if found is not None:
                step, hidden = found
                return self.finish(plan, self.builder.batch(plan, laid, step), hidden, start)
        laid = self.builder.filled(laid)
        features = self.adapters.views(plan, laid) if adapted and self.adapters is not None else None
        if self._pooler is not None and (types := self._pooler.token_types(plan, laid.positions)) is not None:
            (token_types,) = self.context.upload([types])
            features = replace(features or StepFeatures(), token_types=token_types)
        if virtual is not None:
            features = replace(features or StepFeatures(), virtual=virtual)
        if stages is not None:
            rows = laid.positions + np.repeat(stages, plan.num_tokens) * self.model.traits.rotary_rows
            (rotary,) = self.context.upload([rows])
            features = replace(features or StepFeatures(), rotary=rotary)
        tokens = len(laid.positions)
        if self.mixed_steps is not None and features is None:
            laid = self.mixed_steps.rounded(laid)
        batch = self.builder.build(plan, laid, features)
        hidden = self._forward(batch.step, tokens)
        return self.finish(plan, batch, hidden, start)

    def _prompt_stages(self, plan: StepPlan) -> np.ndarray | None:
        """The `prompt_stage` of each row, [rows] int64; None if all are 0."""
        known = self.model.traits.known_prompt
        if known is None:
            return None
        lengths: np.ndarray = self.table.num_prompt[plan.slots]
        if not (lengths > known).any():
            return None
        stages: np.ndarray = np.array([prompt_stage(length, known) for length in lengths.tolist()])
        return stages

    def _forward(self, step: StepInputs, tokens: int) -> Tensor:
        """tokens: of the step's own, which are all that stages exchange."""
        if self.pipeline.is_first:
            return self.model(step, self.kv_caches)
        traits, padding = self.model.traits, len(step.positions) - tokens
        stream = self.pipeline.receive(tokens, traits.hidden_size, traits.dtype, self.context.device, padding)
        return self.model(step, self.kv_caches, stream)

    def finish(self, plan: StepPlan, batch: Batch, hidden: Tensor, start: Any) -> Handle:
        """What follows the forward pass: logits, sampling, ids into the slot table, results on their way to the host.

        start: the context's mark of when the forward pass began. With masks that come later, all behind the logits
        waits for `complete`; ranks that do not sample go ahead and wait for the one that does.
        """
        logits = self._logits(hidden, batch)
        end = self.context.mark()

        def rest(masks: RowMasks | None) -> StepHandle:
            return self._finish(plan, batch, hidden, logits, masks, lambda: self.context.seconds(start, end))

        if plan.late is not None and self.tp.is_first:
            self._late = LateHandle(plan, rest)
            return self._late
        return rest(plan.masks)

    @torch.inference_mode()
    def complete(self, step_id: int, masks: RowMasks | None) -> None:
        """Give the last step the masks that it waits for; a row without one may say anything.

        masks: by rows of the plan, which must be among its `late` ones.
        """
        late = self._late
        if late is None or late.step_id != step_id:
            raise ValueError(f"Step {step_id} does not wait for masks.")
        late.complete(masks)
        self._late = None

    def _finish(
        self, plan: StepPlan, batch: Batch, hidden: Tensor, logits: Tensor | None, masks: RowMasks | None,
        seconds: Callable[[], float],
    ) -> StepHandle:  # fmt: skip
        sampled = self._sample(logits, batch, masks)
        accepted = None
        if batch.tries is not None:
            accepted = self._accept(sampled.token_ids, batch, batch.tries)
        elif len(batch.sample_rows):
            (where,) = self.context.upload([self.table.token_index(batch.sample_slots, batch.lengths)])
            self.table.write_tokens(where, sampled.token_ids)
        if self.table.states is not None and accepted is None:
            self.table.keep_states(batch.plan_slots)
        queued = Queued(sampled, accepted, *self._prompt_logprobs(hidden, batch), self._pool(hidden, batch))
        return StepHandle(plan, batch, queued, self.context, seconds)

    def _take_in(self, plan: StepPlan) -> None:
        if self._tier is not None:
            self._tier.settle()  # what the last plan moved may be read and written from now on
        self.sampler.leave(plan.freed)
        if self._virtual is not None:
            self._virtual.leave(plan.freed)
            self._virtual.enter(plan.new)
        if self._pooler is not None:
            self._pooler.leave(plan.freed)
        if plan.new:
            self.table.enter(plan.new)
            self.sampler.enter(plan.new)
            if self._pooler is not None:
                self._pooler.enter(plan.new)
            elif any(isinstance(init.params, PoolingParams) for init in plan.new):
                raise NotImplementedError("The model of this worker does not pool.")
        if self.adapters is not None:
            self.adapters.load(plan.adapters)
        self.table.append_blocks(plan.blocks)
        if plan.transfers:
            run_transfers(plan.transfers, self._pools, self.context, self._tier)
        if plan.writes:
            self.table.write(plan.writes)
            self._recount(plan)

    def _recount(self, plan: StepPlan) -> None:
        """Written tokens are part of the output, as far as they are no drafts."""
        if not self.sampler.counts({write.slot for write in plan.writes}):
            return
        known = dict(zip(plan.slots.tolist(), _known_lengths(plan).tolist(), strict=True))
        for slot in {write.slot for write in plan.writes}:
            self.sampler.recount(slot, known.get(slot, 0) or int(self.table.known_lengths(np.array([slot]))[0]))

    def _settled(self, plan: StepPlan) -> StepPlan:
        """The plan with every row's `num_computed` as it is: rows that are not exact take it from their length, which
        may mean to wait for the device.
        """
        if plan.exact is not None:
            rows = np.flatnonzero(~plan.exact)
            computed = plan.num_computed.copy()
            computed[rows] = self.table.known_lengths(plan.slots[rows]) - 1
            if (computed > plan.num_computed).any():
                raise ValueError("A row of the plan is further than the plan allows for.")
            plan = replace(plan, num_computed=computed, exact=None)
        return plan

    def _note_lengths(self, plan: StepPlan) -> None:
        """The host notes the lengths that it knows without the device, and of which it does not."""
        slots: np.ndarray = plan.slots.astype(np.int64)  # numpy's quick way to index
        lengths = self.table.lengths
        lengths[slots] = np.maximum(lengths[slots], plan.num_computed + plan.num_tokens + plan.sample)
        if self.context.is_async:
            if plan.drafts is not None:
                lengths[slots[plan.drafts > 0]] = -1
            if plan.exact is not None:
                lengths[slots[~plan.exact]] = -1

    def _accept(self, token_ids: Tensor, batch: Batch, tries: np.ndarray) -> Tensor:
        """How many drafts of each row that samples hold: as many as were sampled one after the other. Every token that
        was sampled goes into the slot table; those behind the row's new length are nobody's.

        token_ids: [sum of tries] -> [rows that sample] int64.
        """
        first: np.ndarray = np.cumsum(tries) - tries
        column: np.ndarray = np.arange(max(1, int(tries.max(initial=1)) - 1))
        real = column < tries[:, None] - 1
        slots = batch.plan_slots[batch.sample_rows].astype(np.int64)
        where, index, real, known, owner, place, d_slots = self.context.upload(
            [
                self.table.token_index(batch.sample_slots, batch.lengths),
                np.where(real, first[:, None] + column, 0),
                real,
                batch.lengths[first].astype(np.int64),
                np.repeat(np.arange(len(tries)), tries),
                within(tries).astype(np.int64),
                slots,
            ]
        )
        same = self.table.read_tokens(where) == token_ids
        accepted: Tensor = (same[index] & real).long().cumprod(1).sum(1)
        self.table.write_tokens(where, token_ids)
        self.table.set_lengths(slots, d_slots, known + accepted + 1)
        if self.table.states is not None:
            self.table.keep_states(batch.plan_slots)
            self.table.states.index_copy_(0, d_slots, accepted)
        self.sampler.accept(batch.sample_slots, token_ids, place <= accepted[owner])
        return accepted

    def _logits(self, hidden: Tensor, batch: Batch) -> Tensor | None:
        """Logits of the rows that sample; None if there are none."""
        count = len(batch.sample_slots)
        if not count:
            return None
        slots, rows = batch.sample_slots, min(self.context.product_rows(count), len(hidden))
        if rows > count and self.adapters is not None:
            slots = np.concatenate([slots, np.full(rows - count, slots[-1])])
        return self._head(hidden[:rows], slots)[:count]

    def _head(self, hidden: Tensor, slots: np.ndarray) -> Tensor:
        """Logits of rows that belong to the requests in `slots`."""
        return self.head(hidden, None if self.adapters is None else self.adapters.view_of_slots(slots))

    def head(self, hidden: Tensor, view: RowView | None) -> Tensor:
        """Logits of rows. view: which adapters they use, None if none of them uses one."""
        return self.model.logits(hidden) if view is None else self.model.logits(hidden, view)

    def _sample(self, logits: Tensor | None, batch: Batch, masks: RowMasks | None) -> Sampled:
        """The first rank samples, the others are told. masks: by rows of the plan."""
        device = self.context.device
        if logits is None:
            none = torch.empty(0, dtype=torch.int64, device=device)
            return Sampled(none, none.bool())
        if self.tp.is_first:
            sampled = self.sampler.sample(
                logits, batch.sample_slots, batch.lengths, batch.masks_of_samples(masks), batch.drafted
            )
            self.tp.broadcast(sampled.token_ids)
            return sampled
        ids = torch.empty(len(batch.sample_slots), dtype=torch.int64, device=device)
        self.tp.broadcast(ids)
        return Sampled(ids, torch.ones_like(ids, dtype=torch.bool))

    def _pool(self, hidden: Tensor, batch: Batch) -> list[PooledRun]:
        """What pooled rows come to that end with this step."""
        if self._pooler is None:
            return []
        chunks = [
            PooledChunk(rows.plan_row, int(batch.plan_slots[rows.plan_row]), rows.first, rows.count, rows.start,
                        rows.end, rows.total)
            for rows in batch.pooled_rows
        ]  # fmt: skip
        return self._pooler.pool(hidden, chunks)

    def _prompt_logprobs(self, hidden: Tensor, batch: Batch) -> tuple[list[PromptLogprobs], list[Tensor]]:
        """Logprobs of prompt tokens, a bounded number of logits at a time."""
        items: list[PromptLogprobs] = []
        tensors: list[Tensor] = []
        params = self.sampler.params
        step = max(1, _PROMPT_LOGITS // params.vocab_size)
        for rows in batch.prompt_rows:
            slot = int(batch.plan_slots[rows.plan_row])
            slots: np.ndarray = np.full(len(rows.positions), slot, np.int32)
            (where,) = self.context.upload([self.table.token_index(slots, rows.positions)])
            targets = self.table.read_tokens(where)
            predicting = hidden[rows.first : rows.first + len(rows.positions)]
            parts = 0
            for i in range(0, len(rows.positions), step):
                piece = predicting[i : i + step]
                logits = self._head(piece, slots[: len(piece)])
                if self.tp.is_first:
                    tensors += top_logprobs(logits, targets[i : i + step], int(params.prompt_logprobs[slot]))
                    parts += 1
            items.append(PromptLogprobs(rows.plan_row, parts))
        return items, tensors
