"""A queued step, and what becomes of its numbers once they are on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm.exceptions import NO_TOKEN_POSSIBLE
from vllm.ops.logprobs import to_messages
from vllm.step.plan import RowMasks, StepPlan
from vllm.step.result import Logprobs, News, Pooled, StepResult, TokenLogprobs
from vllm.worker.device import DeviceContext, Download
from vllm.worker.input_builder import Batch, within
from vllm.worker.pool import PooledRun
from vllm.worker.sample.sampler import Sampled

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


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of one request's prompt chunk on their way to the host; each part is three downloaded tensors."""

    plan_row: int
    parts: int


class Queued(msgspec.Struct, frozen=True):
    """What a step has queued, on the device.

    accepted: [plan rows that sample] int64, drafts that hold; None if there were none.   prompt: with the tensors of
    its parts in `prompt_tensors`.   pooled: results of pooled rows.
    """

    sampled: Sampled
    accepted: Tensor | None
    prompt: list[PromptLogprobs]
    prompt_tensors: list[Tensor]
    pooled: list[PooledRun]


class StepHandle:
    """A step that has been queued. `result()` waits for it."""

    def __init__(
        self, plan: StepPlan, batch: Batch, queued: Queued, context: DeviceContext, seconds: Callable[[], float]
    ) -> None:
        self._plan, self._batch, self._queued, self._seconds = plan, batch, queued, seconds
        sampled = queued.sampled
        tensors = [sampled.token_ids, sampled.finite]
        tensors += [t for t in (sampled.possible, queued.accepted) if t is not None]
        tensors += [t for group in sampled.logprobs for t in group.tensors]
        tensors += queued.prompt_tensors
        self._download: Download = context.download(tensors + [run.values for run in queued.pooled])

    def wait(self, seconds: float) -> bool:
        """Wait until the step is done, but no longer than that; whether it is."""
        return self._download.wait_for(seconds)

    def result(self) -> StepResult:
        """What the step brought, once it is done."""
        arrays = iter(self._download.wait())
        sampled = self._queued.sampled
        ids, finite = next(arrays), next(arrays)
        possible = finite if sampled.possible is None else next(arrays)
        if self._queued.accepted is not None:
            return self._with_counts(ids, finite, possible, next(arrays), arrays)
        rows = self._batch.sample_rows
        errors = self._errors(rows, finite, possible)
        token_ids: list[int] = ids.tolist()
        if len(rows) < len(self._plan.slots):
            token_ids = [-1] * len(self._plan.slots)
            for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                token_ids[row] = token
        logprobs = {int(rows[i]): entry for i, entry in self._logprobs(arrays)}
        prompt_logprobs = self._prompt_logprobs(arrays)
        pooled = self._pooled(arrays, errors)
        for row in errors:
            token_ids[row] = -1
            logprobs.pop(row, None)
        return StepResult(
            self._plan.step_id, token_ids, logprobs, prompt_logprobs, errors, self._seconds(), news=pooled
        )

    def _with_counts(
        self, ids: np.ndarray, finite: np.ndarray, possible: np.ndarray, accepted: np.ndarray,
        arrays: Iterator[np.ndarray],
    ) -> StepResult:  # fmt: skip
        """The result of a step with drafts: a row has the token after each draft that holds, beginning with the token
        after what was known.
        """
        batch = self._batch
        tries = batch.tries if batch.tries is not None else np.ones(len(batch.sample_rows), np.int64)
        holds = within(tries) <= np.repeat(accepted, tries)
        owners: np.ndarray = np.repeat(batch.sample_rows, tries)
        errors = self._errors(owners, finite | ~holds, possible | ~holds)
        counts: np.ndarray = np.zeros(len(self._plan.slots), np.int64)
        counts[batch.sample_rows] = accepted + 1
        entries: dict[int, list[tuple[int, TokenLogprobs]]] = {}
        for i, entry in self._logprobs(arrays):
            if holds[i]:
                entries.setdefault(int(owners[i]), []).append((i, entry))
        prompt_logprobs = self._prompt_logprobs(arrays)
        pooled = self._pooled(arrays, errors)
        for row in errors:
            counts[row] = 0
            entries.pop(row, None)
        kept = holds & ~np.isin(owners, list(errors))
        news: tuple[News, ...] = tuple(
            Logprobs(row, [entry for _, entry in sorted(found, key=lambda item: item[0])])
            for row, found in entries.items()
        )
        return StepResult(
            self._plan.step_id, ids[kept].tolist(), {}, prompt_logprobs, errors, self._seconds(),
            counts=counts.tolist(), news=(*news, *pooled),
        )  # fmt: skip

    def _pooled(self, arrays: Iterator[np.ndarray], errors: dict[int, str]) -> tuple[News, ...]:
        """The results of pooled rows; those that are no numbers become errors."""
        news: list[News] = []
        for run in self._queued.pooled:
            found = next(arrays)
            fine = bool(np.isfinite(found).all())
            for row, values in zip(run.plan_rows, run.parts(found), strict=True):
                if fine or np.isfinite(values).all():
                    news.append(Pooled(row, values.tobytes(), values.shape, values.dtype.name))
                else:
                    errors[row] = NOT_FINITE.replace("logits", "hidden states")
        return tuple(news)

    def _errors(self, owners: np.ndarray, finite: np.ndarray, possible: np.ndarray) -> dict[int, str]:
        """Why rows of the plan failed. owners: the plan row of each row of logits."""
        errors: dict[int, str] = {}
        for i, message in self._queued.sampled.errors.items():
            errors.setdefault(int(owners[i]), message)
        good = finite if possible is finite else finite & possible
        if not good.all():
            for i in np.flatnonzero(~good).tolist():
                if not finite[i]:
                    errors[int(owners[i])] = NOT_FINITE
                else:
                    errors.setdefault(int(owners[i]), NO_TOKEN_POSSIBLE)
        return errors

    def _logprobs(self, arrays: Iterator[np.ndarray]) -> Iterator[tuple[int, TokenLogprobs]]:
        """Rows of logits that asked for logprobs, with theirs."""
        for group in self._queued.sampled.logprobs:
            yield from zip(group.rows.tolist(), to_messages(next(arrays), next(arrays), next(arrays)), strict=True)

    def _prompt_logprobs(self, arrays: Iterator[np.ndarray]) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        for item in self._queued.prompt:
            entries = found.setdefault(item.plan_row, [])
            for _ in range(item.parts):
                entries += to_messages(next(arrays), next(arrays), next(arrays))
        return found


class NothingComputed(msgspec.Struct, frozen=True):
    """A step without rows: what else its plan asked for is queued before any later step."""

    step_id: int

    def wait(self, seconds: float) -> bool:
        """There is nothing to wait for."""
        return True

    def result(self) -> StepResult:
        """No token."""
        return StepResult(self.step_id, [])


class LateHandle:
    """A step whose forward pass has been queued, and which waits for masks before it goes on."""

    def __init__(self, plan: StepPlan, rest: Callable[[RowMasks | None], Handle]) -> None:
        """rest: queues what follows, given the masks of all rows."""
        self.step_id = plan.step_id
        self._plan, self._rest = plan, rest
        self._handle: Handle | None = None

    @property
    def is_complete(self) -> bool:
        return self._handle is not None

    def complete(self, masks: RowMasks | None) -> None:
        """Go on. Raises ValueError, with nothing done, for a mask of a row that is not late."""
        known, late = self._plan.masks, self._plan.late
        if masks is not None and (late is None or not late[masks.rows].all()):
            raise ValueError("A mask came late for a row that was not said to be late.")
        if masks is not None and known is not None:
            rows = np.concatenate([known.rows, masks.rows])
            order = np.argsort(rows)
            masks = RowMasks(rows[order], np.concatenate([known.bits, masks.bits])[order])
        self._handle = self._rest(known if masks is None else masks)

    def wait(self, seconds: float) -> bool:
        """Wait until the step is done, but no longer than that; whether it is."""
        return self._handle is None or self._handle.wait(seconds)

    def result(self) -> StepResult:
        """What the step brought. Raises RuntimeError if nobody has completed it; then it goes on without the masks, so
        that other ranks do not wait for ever, and its tokens are lost.
        """
        if self._handle is None:
            with torch.inference_mode():
                self.complete(None)
            raise RuntimeError(f"The result of step {self.step_id} was asked for before its masks had come.")
        return self._handle.result()
