"""The order in which logits become tokens.

1. logprobs are of the raw logits;
2. the request's own processors, masks of allowed tokens, allowed ids, biases, bad words, no stop token before
   min_tokens, then penalties (repetition, frequency, presence);
3. greedy rows take the maximum; the others are divided by their temperature, cut by min_p, top_k, top_p, and drawn
   from.

Nothing here looks from one row to another: a row's token and logprobs do not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm.ops.bitmask import apply_bitmask, apply_bitmask_and_finite, greedy_under_masks
from vllm.ops.draw import DrawParams, draw_and_finite
from vllm.ops.greedy import finite_rows, greedy_and_finite
from vllm.ops.logprobs import top_logprobs
from vllm.step.plan import RowMasks, SlotInit
from vllm.step.rng import uniform
from vllm.worker.device import DeviceContext
from vllm.worker.sample.constraints import apply_bad_words, apply_constraints, forbid
from vllm.worker.sample.params import CHANGES, Needs, ParamsTable
from vllm.worker.sample.penalties import OutputCounts, penalize_output, penalize_repetition
from vllm.worker.slot_table import SlotTable


class LogprobGroup(msgspec.Struct, frozen=True):
    """Rows that asked for the same number of logprobs. tensors: as `top_logprobs` returns them."""

    rows: np.ndarray
    tensors: tuple[Tensor, Tensor, Tensor]


class Sampled(msgspec.Struct, frozen=True):
    """What one step sampled, on the device.

    token_ids: [rows] int64, always below the vocabulary's size.   finite: [rows] bool, the model's logits were finite.
    possible:  [rows] bool or None, some token was left after masks and processors.
    errors: rows that failed on the host, with the reason.
    """

    token_ids: Tensor
    finite: Tensor
    possible: Tensor | None = None
    logprobs: tuple[LogprobGroup, ...] = ()
    errors: dict[int, str] = msgspec.field(default_factory=dict)


class Sampler:
    """Owns the sampling parameters and output counts of every slot."""

    def __init__(self, table: SlotTable, vocab_size: int, context: DeviceContext, added: int = 0) -> None:
        """added: tokens that adapters may add to the vocabulary: logits of steps with such rows have more columns."""
        self.params = ParamsTable(table.num_slots, vocab_size, added)
        self._table = table
        self._context = context
        self._counts = OutputCounts(vocab_size + added, table, context)

    def leave(self, slots: Sequence[int]) -> None:
        """Forget requests that left their slots."""
        for slot in slots:
            self.params.leave(slot)
            self._counts.leave(slot)

    def enter(self, new: Sequence[SlotInit]) -> None:
        """Take in requests whose tokens are in the slot table already."""
        for init in new:
            self._counts.leave(init.slot)
            if self.params.enter(init) & Needs.COUNTS:
                self._counts.enter(init.slot, len(init.token_ids))

    def sample(
        self,
        logits: Tensor,
        slots: np.ndarray,
        lengths: np.ndarray,
        masks: RowMasks | None = None,
        drafted: np.ndarray | None = None,
    ) -> Sampled:
        """One token per row. logits: [rows, vocab] fp32, changed in place; slots, lengths (tokens so far): [rows].

        masks: what some of these rows may say; its `rows` are those of the logits.   drafted: [rows], how many of the
        last of these tokens are drafts; what is sampled is then not counted before `accept` says what holds.
        """
        needs, union = self.params.needs[slots], self.params.union(slots)
        if not union:
            if masks is None:
                return Sampled(*greedy_and_finite(logits))
            return Sampled(*greedy_under_masks(logits, *self._uploaded(logits, masks)))
        wanting = np.flatnonzero(needs & Needs.LOGPROBS) if union & Needs.LOGPROBS else np.zeros(0, np.int64)
        changes = bool(union & CHANGES)
        raw = self._raw_logits(logits, wanting, changes or masks is not None)
        possible, errors = None, {}
        if masks is not None and not changes:
            finite = apply_bitmask_and_finite(logits, *self._uploaded(logits, masks))
            token_ids, possible = self._choose(logits, slots, lengths, needs)
        elif changes:
            finite = finite_rows(logits)  # what is forbidden is infinite afterwards
            logits = logits.contiguous()  # those of a padded head are a slice, which has no flat view
            errors = self._change(logits, slots, lengths, needs, masks, drafted)
            token_ids, _ = self._choose(logits, slots, lengths, needs)
            possible = logits.gather(1, token_ids[:, None]).squeeze(1) > -torch.inf
            if union & Needs.PROCESSORS:  # which may return NaN, beside which any token may have been found
                possible &= ~torch.isnan(logits.amax(-1))
        else:
            token_ids, finite = self._choose(logits, slots, lengths, needs)
        if union & Needs.COUNTS and drafted is None:
            counted = np.flatnonzero(needs & Needs.COUNTS)
            self._counts.add(slots[counted], self._pick(token_ids, counted))
        groups = self._logprobs(raw, wanting, token_ids, slots) if raw is not None else ()
        return Sampled(token_ids, finite, possible, groups, errors)

    def counts(self, slots: Iterable[int]) -> bool:
        """Whether any of these has penalties for which its output is counted."""
        return any(self.params.needs[slot] & Needs.COUNTS for slot in slots)

    def recount(self, slot: int, length: int) -> None:
        """A slot's tokens were changed by the host; count its output again, up to `length` tokens."""
        if self.params.needs[slot] & Needs.COUNTS:
            self._counts.leave(slot)
            self._counts.enter(slot, length)

    def accept(self, slots: np.ndarray, token_ids: Tensor, accepted: Tensor) -> None:
        """Of tokens sampled behind drafts, those of `accepted` hold. slots, token_ids, accepted (bool): [rows]."""
        counted = np.flatnonzero(self.params.needs[slots] & Needs.COUNTS)
        if len(counted):
            self._counts.add(slots[counted], self._pick(token_ids, counted), self._pick(accepted, counted))

    def _pick(self, x: Tensor, rows: np.ndarray) -> Tensor:
        """Some rows of a device tensor; all of them without a copy."""
        if len(rows) == len(x):
            return x
        (index,) = self._context.upload([rows])
        return x.index_select(0, index)

    def _raw_logits(self, logits: Tensor, rows: np.ndarray, will_change: bool) -> Tensor | None:
        if not len(rows):
            return None
        picked = self._pick(logits, rows)
        return picked.clone() if will_change and picked is logits else picked

    def _change(
        self,
        logits: Tensor,
        slots: np.ndarray,
        lengths: np.ndarray,
        needs: np.ndarray,
        masks: RowMasks | None,
        drafted: np.ndarray | None,
    ) -> dict[int, str]:
        """Everything that changes logits before temperature, in place. Returns rows whose own processors failed."""
        params, table, context = self.params, self._table, self._context
        errors: dict[int, str] = {}
        for row in np.flatnonzero(needs & Needs.PROCESSORS).tolist():
            try:
                self._run_processors(logits, row, int(slots[row]), int(lengths[row]))
            except Exception as error:  # the request's own code: whatever it raises fails this request alone
                errors[row] = f"A logits processor of the request failed: {type(error).__name__}: {error}"
        if masks is not None:
            apply_bitmask(logits, *self._uploaded(logits, masks))
        rows = np.flatnonzero(needs & Needs.CONSTRAINTS)
        if len(rows):
            items = [params.constraints[s] for s in slots[rows].tolist()]
            apply_constraints(logits, rows, items, context)
            if any(len(c.last_ids) for c in items):
                apply_bad_words(logits, rows, items, slots[rows], lengths[rows], table, context)
        early = (needs & Needs.MIN_TOKENS).astype(bool) & (lengths - table.num_prompt[slots] < params.min_tokens[slots])
        if early.any():
            forbid(logits, [(r, params.stop_ids[int(slots[r])]) for r in np.flatnonzero(early).tolist()], context)
        rows = np.flatnonzero(needs & Needs.REPETITION)
        if len(rows):
            penalize_repetition(logits, rows, slots[rows], lengths[rows], params, table, context)
        rows = np.flatnonzero(needs & Needs.COUNTS)
        if len(rows):
            behind = None if drafted is None else drafted[rows]
            penalize_output(logits, rows, slots[rows], lengths[rows], params, self._counts, table, context, behind)
        return errors

    def _uploaded(self, logits: Tensor, masks: RowMasks) -> list[Tensor]:
        """Rows and bits on the device. Raises ValueError if they do not fit the logits.

        Masks know nothing of tokens that adapters add: none of them is allowed where there is a mask.
        """
        words, own = -(-logits.shape[1] // 32), -(-self.params.vocab_size // 32)
        if masks.bits.shape != (len(masks.rows), own):
            raise ValueError(f"Masks of shape {masks.bits.shape}, expected ({len(masks.rows)}, {own}).")
        packed = np.ascontiguousarray(masks.bits, np.uint32).view(np.int32)
        if words > own:
            packed = np.pad(packed, ((0, 0), (0, words - own)))
            if self.params.vocab_size % 32:
                packed[:, own - 1] &= (1 << (self.params.vocab_size % 32)) - 1
        return self._context.upload([masks.rows.astype(np.int64), packed])

    def _run_processors(self, logits: Tensor, row: int, slot: int, length: int) -> None:
        """The functions want Python lists: on an asynchronous device this row waits for the steps before."""
        tokens = self._table.tokens[slot, :length].tolist()
        prompt = int(self._table.num_prompt[slot])
        logits[row] = self.params.processors[slot](tokens[:prompt], tokens[prompt:], logits[row].clone())

    def _choose(
        self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray, needs: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Token ids, and which rows are finite. Greedy rows among drawn ones are drawn too, with top_k = 1."""
        chosen: tuple[Tensor, Tensor]
        if not (needs & Needs.DRAW).any():
            chosen = greedy_and_finite(logits)
            return chosen
        params = self.params
        top_k, top_p = params.top_k[slots], params.top_p[slots]
        numbers = uniform(params.stream[slots], lengths)
        temperature, min_p, d_top_k, d_top_p, u = self._context.upload(
            [params.temperature[slots], params.min_p[slots], top_k, top_p, numbers]
        )
        chosen = draw_and_finite(logits, DrawParams(temperature, min_p, d_top_k, d_top_p, u, top_k, top_p))
        return chosen

    def _logprobs(
        self, raw: Tensor, rows: np.ndarray, token_ids: Tensor, slots: np.ndarray
    ) -> tuple[LogprobGroup, ...]:
        """raw: the raw logits of `rows` only."""
        asked = self.params.logprobs[slots[rows]]
        groups = []
        for count in np.unique(asked).tolist():
            members = np.flatnonzero(asked == count)
            tensors = top_logprobs(self._pick(raw, members), self._pick(token_ids, rows[members]), count)
            groups.append(LogprobGroup(rows[members], tensors))
        return tuple(groups)
