"""Runs plans: slot table, inputs, forward pass, logits, sampling; owns the weights and the KV cache tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.parallel_state import SINGLE, TensorParallel
from vllm.exceptions import NO_TOKEN_POSSIBLE
from vllm.faults import Faults
from vllm.model_executor.models.traits import Model
from vllm.ops.attention import copy_blocks
from vllm.ops.logprobs import to_messages, top_logprobs
from vllm.step.inputs import StepInputs
from vllm.step.kv_policy import KVLayout
from vllm.step.plan import RowMasks, StepPlan, require_known
from vllm.step.result import StepResult, TokenLogprobs
from vllm.worker.device import DeviceContext, Download
from vllm.worker.input_builder import Batch, InputBuilder, Laid
from vllm.worker.sample.sampler import Sampled, Sampler
from vllm.worker.slot_table import SlotTable

KNOWN = frozenset({"masks"})  # fields of a plan beyond those without a default
_PROMPT_LOGITS = 1 << 25  # logits of prompt tokens held at once (128 MB in fp32)
NOT_FINITE = (
    "The model's logits are not finite (NaN or Inf) for this request. The weights may be damaged, or the dtype too "
    "narrow for this model: try dtype='bfloat16' or 'float32'."
)


class Handle(Protocol):
    """A step that has been queued."""

    def wait(self, seconds: float) -> bool:
        """Wait until the step is done, but no longer than that; whether it is."""

    def result(self) -> StepResult:
        """Wait for the step."""


class DecodeSteps(Protocol):
    """A faster way through some steps; slot table and sampler have taken in the plan's news before it is asked."""

    def accepts(self, plan: StepPlan) -> bool: ...

    def execute(self, plan: StepPlan) -> Handle: ...


class MixedSteps(Protocol):
    """A faster way through the forward pass of some steps."""

    def forward(self, laid: Laid) -> tuple[StepInputs, Tensor] | None:
        """The step's inputs, and what the model gives for its first rows of logits; None for steps not covered."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of one request's prompt chunk on their way to the host; each part is three downloaded tensors."""

    plan_row: int
    parts: int


class StepHandle:
    """A step that has been queued. `result()` waits for it."""

    def __init__(
        self,
        plan: StepPlan,
        batch: Batch,
        sampled: Sampled,
        prompt: list[PromptLogprobs],
        download: Download,
        seconds: Callable[[], float],
    ) -> None:
        self._plan = plan
        self._batch = batch
        self._sampled = sampled
        self._prompt = prompt
        self._download = download
        self._seconds = seconds

    def wait(self, seconds: float) -> bool:
        """Wait until the step is done, but no longer than that; whether it is."""
        return self._download.wait_for(seconds)

    def result(self) -> StepResult:
        """What the step brought, once it is done."""
        arrays = iter(self._download.wait())
        sampled, rows = self._sampled, self._batch.sample_rows
        token_ids: np.ndarray = np.full(len(self._plan.slots), -1, np.int64)
        ids, finite = next(arrays), next(arrays)
        possible = finite if sampled.possible is None else next(arrays)
        errors = {int(rows[i]): message for i, message in sampled.errors.items()}
        good = finite & possible
        if not good.all():
            for i in np.flatnonzero(~good).tolist():
                if not finite[i]:
                    errors[int(rows[i])] = NOT_FINITE
                else:
                    errors.setdefault(int(rows[i]), NO_TOKEN_POSSIBLE)
        token_ids[rows] = ids
        logprobs: dict[int, TokenLogprobs] = {}
        for group in sampled.logprobs:
            messages = to_messages(next(arrays), next(arrays), next(arrays))
            logprobs.update(zip(rows[group.rows].tolist(), messages, strict=True))
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for item in self._prompt:
            found = prompt_logprobs.setdefault(item.plan_row, [])
            for _ in range(item.parts):
                found += to_messages(next(arrays), next(arrays), next(arrays))
        for row in errors:
            token_ids[row] = -1
            logprobs.pop(row, None)
        return StepResult(self._plan.step_id, token_ids.tolist(), logprobs, prompt_logprobs, errors, self._seconds())


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
    ) -> None:
        self.model = model
        self.layout = layout
        self.kv_caches = kv_caches
        self.context = context
        self.tp = tp
        self.table = SlotTable(num_slots, max_model_len, layout, context)
        self.sampler = Sampler(self.table, vocab_size, context)
        self.builder = InputBuilder(self.table, context, self.sampler.params.wants_prompt)
        self.decode_steps: DecodeSteps | None = None
        self.mixed_steps: MixedSteps | None = None
        self._faults = Faults.from_env()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Handle:
        """Queue one step: freed, new, blocks, copies, forward pass, sampling, in this order."""
        require_known(plan, KNOWN, "This worker")
        self._take_in(plan)
        if self.decode_steps is not None and not self._faults and self.decode_steps.accepts(plan):
            return self.decode_steps.execute(plan)
        laid = self.builder.lay_out(plan)
        start = self.context.mark()
        if self.mixed_steps is not None and not self._faults:
            found = self.mixed_steps.forward(laid)
            if found is not None:
                step, hidden = found
                return self.finish(plan, self.builder.batch(plan, laid, step), hidden, start)
        batch = self.builder.build(plan, laid)
        hidden = self.model(batch.step, self.kv_caches)
        return self.finish(plan, batch, hidden, start)

    def finish(self, plan: StepPlan, batch: Batch, hidden: Tensor, start: Any) -> StepHandle:
        """What follows the forward pass: logits, sampling, ids into the slot table, results on their way to the host.

        start: the context's mark of when the forward pass began.
        """
        logits = self._logits(hidden, batch)
        end = self.context.mark()
        if self._faults and logits is not None:
            self._faults.spoil(logits)
        sampled = self._sample(logits, batch, plan.masks)
        if len(batch.sample_rows):
            (where,) = self.context.upload([self.table.token_index(batch.sample_slots, batch.lengths)])
            self.table.write_tokens(where, sampled.token_ids)
        prompt, tensors = self._prompt_logprobs(hidden, batch)
        flat = [sampled.token_ids, sampled.finite]
        flat += [] if sampled.possible is None else [sampled.possible]
        flat += [t for group in sampled.logprobs for t in group.tensors]
        download = self.context.download(flat + tensors)
        return StepHandle(plan, batch, sampled, prompt, download, lambda: self.context.seconds(start, end))

    def _take_in(self, plan: StepPlan) -> None:
        self.sampler.leave(plan.freed)
        if plan.new:
            for init in plan.new:
                if init.columns:
                    raise NotImplementedError("This worker cannot run requests with slot columns.")
            self.table.enter(plan.new)
            self.sampler.enter(plan.new)
        self.table.append_blocks(plan.blocks)
        if plan.copies:
            src, dst = self.context.upload(
                [np.array([c.src for c in plan.copies], np.int64), np.array([c.dst for c in plan.copies], np.int64)]
            )
            for cache in self.kv_caches:
                copy_blocks(cache, src, dst)

    def _logits(self, hidden: Tensor, batch: Batch) -> Tensor | None:
        """Logits of the rows that sample; None if there are none."""
        count = len(batch.sample_rows)
        if not count:
            return None
        return self.model.logits(hidden[:count])

    def _sample(self, logits: Tensor | None, batch: Batch, masks: RowMasks | None) -> Sampled:
        """The first rank samples, the others are told. masks: by rows of the plan."""
        device = self.context.device
        if logits is None:
            none = torch.empty(0, dtype=torch.int64, device=device)
            return Sampled(none, none.bool())
        if self.tp.is_first:
            sampled = self.sampler.sample(logits, batch.sample_slots, batch.lengths, batch.masks_of_samples(masks))
            self.tp.broadcast(sampled.token_ids)
            return sampled
        ids = torch.empty(len(batch.sample_rows), dtype=torch.int64, device=device)
        self.tp.broadcast(ids)
        return Sampled(ids, torch.ones_like(ids, dtype=torch.bool))

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
                logits = self.model.logits(predicting[i : i + step])
                if self.tp.is_first:
                    tensors += top_logprobs(logits, targets[i : i + step], int(params.prompt_logprobs[slot]))
                    parts += 1
            items.append(PromptLogprobs(rows.plan_row, parts))
        return items, tensors
