"""Turns a plan and the slot table into the tensors of one step, with vectorised numpy and one upload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from torch import Tensor

from vllm.ops.attention import HostBatch, Planned, plan_batch
from vllm.step.inputs import GroupInputs, StepFeatures, StepInputs
from vllm.step.kv_policy import KVKind
from vllm.step.plan import RowMasks, StepPlan
from vllm.worker.device import DeviceContext
from vllm.worker.pool import Pooler
from vllm.worker.slot_table import SlotTable


class PromptRows(msgspec.Struct, frozen=True):
    """A row of the plan that wants the logprobs of its prompt: which tokens predict, and what they should have.

    plan_row: row of the plan.  first, count: where this request's rows stand in `StepInputs.logits_rows`.
    positions: [count] position in the sequence of each predicted token.
    """

    plan_row: int
    first: int
    positions: np.ndarray


class PooledRows(msgspec.Struct, frozen=True):
    """A row of the plan that is pooled: its tokens `start` to `end` of `total`, of which some states are wanted.

    plan_row: row of the plan.   first, count: where the wanted ones stand in `StepInputs.logits_rows`.
    """

    plan_row: int
    first: int
    count: int
    start: int
    end: int
    total: int


class Batch(msgspec.Struct, frozen=True):
    """A step's inputs and what the host knows about them.

    sample_rows: plan rows that sample, in order; their logits come first.
    sample_slots: [rows] slots of these rows of logits, one for each plan row, or more behind drafts.
    lengths: [rows] tokens before the one to be sampled, which is also its position; drafts count.
    plan_slots: the slots of all rows.   prompt_rows: requests that want prompt logprobs in this step.
    pooled_rows: requests that are pooled.
    tries: per plan row that samples how many rows of logits it has, drafts + 1; None: one each.
    """

    step: StepInputs
    plan_slots: np.ndarray
    sample_rows: np.ndarray
    sample_slots: np.ndarray
    lengths: np.ndarray
    prompt_rows: tuple[PromptRows, ...]
    tries: np.ndarray | None = None
    pooled_rows: tuple[PooledRows, ...] = ()

    @property
    def drafted(self) -> np.ndarray | None:
        """Per row of logits how many draft tokens stand before its own; None for none at all."""
        return None if self.tries is None else within(self.tries)

    def masks_of_samples(self, masks: RowMasks | None) -> RowMasks | None:
        """Masks by rows of the plan as masks by rows of logits. Raises ValueError for a row that does not sample."""
        if masks is None or not len(masks.rows):
            return None
        if self.tries is None and len(masks.rows) == len(self.sample_rows) == len(self.plan_slots):
            return masks
        rows = np.asarray(np.searchsorted(self.sample_rows, masks.rows))
        if (self.sample_rows.take(rows, mode="clip") != masks.rows).any():
            raise ValueError("A plan has a mask for a row that does not sample.")
        if self.tries is not None:
            if (self.tries[rows] > 1).any():
                raise ValueError("A plan has a mask for a row with drafts, each of whose tokens would need its own.")
            rows = np.asarray(np.cumsum(self.tries) - self.tries)[rows]
        return RowMasks(rows.astype(np.int32), masks.bits)


def within(counts: np.ndarray) -> np.ndarray:
    """0 .. count - 1 for each of the counts, one after the other. counts: [n] -> [sum] int32."""
    ends: np.ndarray = np.cumsum(counts)
    index: np.ndarray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return index.astype(np.int32)


def longer(array: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    """The array, `value` behind it up to so many rows."""
    padded: np.ndarray = np.full((size, *array.shape[1:]), value, array.dtype)
    padded[: len(array)] = array
    return padded


class Laid(msgspec.Struct, frozen=True):
    """A plan as the host's numbers, before anything is uploaded.

    index, positions: [tokens] int64, where tokens stand in the slot table and in their sequences.
    starts: [requests + 1], lens: [requests] int32.   logits_rows: [rows] int64.   slots: [requests] int64.
    Prompts that share a row of the plan are requests of their own here.
    mappings: per KV group [tokens] int64; for recurrent layers [requests, pages] int64, each request's pages; for cross
        attention [tokens of encoders] int64.
    max_query_len, max_seq_len: no request has more.   every: `logits_rows` are all tokens, in order.
    entering, key_lens, drafts: as in `GroupInputs`, on the host; None where no group asks for it.
    """

    index: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    lens: np.ndarray
    logits_rows: np.ndarray
    slots: np.ndarray
    mappings: tuple[np.ndarray, ...]
    sample_rows: np.ndarray
    max_query_len: int
    max_seq_len: int
    prompt_rows: tuple[PromptRows, ...]
    pooled_rows: tuple[PooledRows, ...] = ()
    every: bool = False
    entering: tuple[int, ...] = ()
    key_lens: np.ndarray | None = None
    drafts: np.ndarray | None = None

    @property
    def arrays(self) -> list[np.ndarray]:
        """What is uploaded."""
        arrays = [self.index, self.positions, self.starts, self.lens, self.logits_rows, self.slots, *self.mappings]
        return arrays + [x for x in (self.key_lens, self.drafts) if x is not None]

    def padded(self, tokens: int, requests: int) -> Laid:
        """The same, up to so many tokens and requests, of which there must be more than now.

        The last request owns all new tokens, and their keys go to the null block; requests before it are empty. The
        states of both are the null page.
        """

        starts, lens = longer(self.starts, requests + 1, int(self.starts[-1])), longer(self.lens, requests)
        starts[-1], lens[-1] = tokens, tokens - int(self.starts[-1])
        return Laid(
            longer(self.index, tokens),
            longer(self.positions, tokens),
            starts,
            lens,
            longer(self.logits_rows, requests),
            longer(self.slots, requests),
            tuple(longer(mapping, requests if mapping.ndim == 2 else tokens) for mapping in self.mappings),
            self.sample_rows,
            max(self.max_query_len, int(lens[-1])),
            max(self.max_seq_len, int(lens[-1])),
            self.prompt_rows,
            self.pooled_rows,
        )

    def followed(self, tokens: int) -> Laid:
        """The same with tokens of nobody behind, up to so many: no request has them, and their keys go to the null
        block.
        """
        index, positions = longer(self.index, tokens), longer(self.positions, tokens)
        return replace(self, index=index, positions=positions, mappings=tuple(longer(m, tokens) for m in self.mappings))


class InputBuilder:
    """Builds `Batch`es over one slot table. `wants_prompt`: [slots] bool, owned by the sampler's table."""

    def __init__(
        self, table: SlotTable, context: DeviceContext, wants_prompt: np.ndarray, pooler: Pooler | None = None
    ) -> None:
        self._pooler = pooler
        self._table = table
        self._context = context
        self._wants_prompt = wants_prompt
        self._all_usual = all(table.usual)
        # the groups that an attention backend may plan for
        self._attended = [g for g, group in enumerate(table.groups) if group.kind in (KVKind.FULL, KVKind.SLIDING)]
        self._plans = plan_batch.kernel(context.device.type) is not plan_batch.reference
        self._rows: np.ndarray = np.arange(table.num_slots, dtype=np.int64)
        self._starts: np.ndarray = np.arange(table.num_slots + 1, dtype=np.int32)

    def lay_out(self, plan: StepPlan) -> Laid:
        """The numbers of `plan`; the slot table must have taken in its new rows and blocks already."""
        table = self._table
        slots: np.ndarray = plan.slots.astype(np.int64)  # numpy's quick way to index
        lens = plan.num_computed + plan.num_tokens
        max_query, max_len = int(plan.num_tokens.max()), int(lens.max())
        table.require_width(max_len + 1)
        starts: np.ndarray
        positions: np.ndarray
        if max_query == 1:
            starts = self._starts[: len(slots) + 1]
            positions, token_slots = plan.num_computed.astype(np.int64), slots
        else:
            starts = np.zeros(len(slots) + 1, np.int32)
            np.cumsum(plan.num_tokens, out=starts[1:])
            num_tokens = int(starts[-1])
            shift: np.ndarray = np.repeat((plan.num_computed - starts[:-1]).astype(np.int64), plan.num_tokens)
            positions, token_slots = np.arange(num_tokens, dtype=np.int64) + shift, np.repeat(slots, plan.num_tokens)
        block: np.ndarray = positions // table.block_size
        offset = positions - block * table.block_size
        mappings = [
            t.reshape(-1).take(token_slots * t.shape[1] + block) * np.int64(table.block_size) + offset
            if usual
            else np.empty(0, np.int64)
            for t, usual in zip(table.host_tables, table.usual, strict=True)
        ]
        special = {} if self._all_usual else self._special(plan, mappings, token_slots, positions)
        sample_rows: np.ndarray
        if max_query == 1 and plan.sample.all():
            sample_rows = logits_rows = self._rows[: len(slots)]
        else:
            (sample_rows,) = plan.sample.nonzero()
            logits_rows = starts[1:][sample_rows].astype(np.int64) - 1
        if plan.drafts is not None:
            tries = plan.drafts[sample_rows] + 1
            logits_rows = np.repeat(logits_rows - plan.drafts[sample_rows], tries) + within(tries)
        prompt_rows: tuple[PromptRows, ...] = ()
        if np.count_nonzero(self._wants_prompt[slots]):
            prompt_rows, logits_rows = self._prompt_rows(plan, starts, logits_rows)
        pooled_rows: tuple[PooledRows, ...] = ()
        if plan.pooled is not None:
            pooled_rows, logits_rows = self._pooled_rows(plan, plan.pooled, starts, logits_rows)
        index = table.token_index(token_slots, positions)
        parts = {init.slot: init.parts for init in plan.new if init.parts}
        if parts:
            owners = [
                parts.get(slot) or ((count, -1),)
                for slot, count in zip(slots.tolist(), plan.num_tokens.tolist(), strict=True)
            ]
            lens = np.array([length for several in owners for length, _ in several], np.int32)
            starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
            max_query = max_len = int(lens.max())
            positions, slots = within(lens).astype(np.int64), np.repeat(slots, [len(several) for several in owners])
        return Laid(
            index, positions, starts, lens, logits_rows, slots,
            tuple(mappings), sample_rows, max_query, max_len, prompt_rows, pooled_rows, logits_rows is sample_rows,
            **special,
        )  # fmt: skip

    def filled(self, laid: Laid) -> Laid:
        """`laid` with further wanted rows behind its own, where the device's products are better of a few more."""
        if laid.every:
            return laid
        rows, tokens = laid.logits_rows, len(laid.positions)
        more = min(self._context.product_rows(len(rows)), tokens) - len(rows)
        if more <= 0:
            return laid
        others: np.ndarray = np.ones(tokens, bool)
        others[rows] = False
        return replace(laid, logits_rows=np.concatenate([rows, others.nonzero()[0][:more]]))

    def _special(
        self, plan: StepPlan, mappings: list[np.ndarray], token_slots: np.ndarray, positions: np.ndarray
    ) -> dict[str, Any]:
        """Put in the mappings of groups that are not one block table of the usual blocks, and return what these groups
        ask for beside them.

        token_slots, positions: [tokens] int64.
        """
        table = self._table
        found: dict[str, Any] = {}
        for g, (group, blocks) in enumerate(zip(table.groups, table.host_tables, strict=True)):
            if table.usual[g]:
                continue
            size = table.block_size * group.units
            if group.kind is KVKind.RECURRENT:
                mappings[g] = blocks[plan.slots, : table.pages].astype(np.int64)
                if plan.drafts is not None:
                    found["drafts"] = plan.drafts.astype(np.int64)
                continue
            owners, where = token_slots, positions
            if group.kind is KVKind.CROSS:
                new = {init.slot for init in plan.new}
                found["key_lens"] = table.encoder_lens[plan.slots]
                found["entering"] = tuple(row for row, slot in enumerate(plan.slots.tolist()) if slot in new)
                counts = found["key_lens"][list(found["entering"])]
                owners = np.repeat(plan.slots[list(found["entering"])], counts).astype(np.int64)
                where = within(counts).astype(np.int64)
            block: np.ndarray = where // size
            mappings[g] = blocks.reshape(-1).take(owners * blocks.shape[1] + block) * size + (where - block * size)
        return found

    def build(self, plan: StepPlan, laid: Laid | None = None, features: StepFeatures | None = None) -> Batch:
        """The inputs of `plan`, on the device. laid: what `lay_out` has made of it, if that was called already.

        features: what the step brings beyond that.
        """
        laid = self.lay_out(plan) if laid is None else laid
        table, arrays = self._table, laid.arrays
        planned = self._planned(plan, laid)
        device = self._context.upload(arrays if planned is None else [*arrays, *planned.arrays])
        plans: Sequence[Any] = () if planned is None else planned.make(device[len(arrays) :])
        if plans and len(self._attended) < len(table.groups):
            found = dict(zip(self._attended, plans, strict=True))
            plans = [found.get(g) for g in range(len(table.groups))]
        step = self.inputs(laid, device[: len(arrays)], laid.max_seq_len, plans, features)
        return self.batch(plan, laid, step)

    def _planned(self, plan: StepPlan, laid: Laid) -> Planned | None:
        """What the attention backend makes of the step, for the groups whose every token has a key."""
        table = self._table
        if not self._attended or not self._plans:
            return None
        planned: Planned | None = plan_batch(
            HostBatch(
                plan.num_tokens, plan.num_computed, laid.lens, plan.slots,
                table.host_tables if len(self._attended) == len(table.groups) else self._tables_attended(),
                table.block_size, self._context.device,
            )
        )  # fmt: skip
        return planned

    def _tables_attended(self) -> list[np.ndarray]:
        return [self._table.host_tables[g] for g in self._attended]

    def inputs(
        self,
        laid: Laid,
        device: Sequence[Tensor],
        longest: int,
        plans: Sequence[Any] = (),
        features: StepFeatures | None = None,
    ) -> StepInputs:
        """A step over `laid`, whose arrays are on the device, and over what it reads out of the slot table there.

        longest: no sequence has more tokens.   plans: the attention backend's, per KV group; empty for none.
        """
        table = self._table
        index, positions, starts, lens, rows, slots, *mappings = device
        extras, mappings = mappings[len(table.groups) :], mappings[: len(table.groups)]
        blocks = -(-longest // table.block_size)
        groups = [
            GroupInputs(mapping, table.block_rows(g, laid.slots, slots, blocks), plans[g] if plans else None)
            if table.usual[g]
            else self._special_inputs(g, mapping, laid, slots, longest, plans[g] if plans else None, extras)
            for g, mapping in enumerate(mappings)
        ]
        return StepInputs.of(
            token_ids=table.read_tokens(index),
            positions=positions,
            query_starts=starts,
            seq_lens=lens,
            logits_rows=None if laid.every else rows,
            groups=groups,
            max_query_len=laid.max_query_len,
            max_seq_len=longest,
            host_query_starts=laid.starts,
            host_seq_lens=laid.lens,
            features=features,
        )

    def _special_inputs(
        self, g: int, mapping: Tensor, laid: Laid, slots: Tensor, longest: int, plan: Any, extras: list[Tensor]
    ) -> GroupInputs:
        """The view of a group that is not one block table of the usual blocks. extras: as `Laid.arrays` ends."""
        table, group = self._table, self._table.groups[g]
        if group.kind is KVKind.RECURRENT:
            first = None
            if table.states is not None:
                first = mapping.gather(1, table.states.index_select(0, slots)[:, None])[:, 0]
            return GroupInputs(mapping, mapping, None, first, None if laid.drafts is None else extras[-1])
        lens = None
        if group.kind is KVKind.CROSS:
            longest, lens = int(laid.key_lens.max(initial=1)) if laid.key_lens is not None else 1, extras[0]
        rows = table.block_rows(g, laid.slots, slots, -(-longest // (table.block_size * group.units)))
        return GroupInputs(mapping, rows, plan, key_lens=lens, entering=laid.entering if lens is not None else ())

    def batch(self, plan: StepPlan, laid: Laid, step: StepInputs) -> Batch:
        """`step`, with what the host knows about the rows of `plan`."""
        rows = laid.sample_rows
        slots, lens = plan.slots[rows].astype(np.int64), laid.lens[rows]
        if plan.drafts is None:
            return Batch(step, plan.slots, rows, slots, lens, laid.prompt_rows, None, laid.pooled_rows)
        tries = plan.drafts[rows] + 1
        lens = np.repeat(lens - plan.drafts[rows], tries) + within(tries)
        return Batch(step, plan.slots, rows, np.repeat(slots, tries), lens, laid.prompt_rows, tries, laid.pooled_rows)

    def _pooled_rows(
        self, plan: StepPlan, pooled: np.ndarray, starts: np.ndarray, logits_rows: np.ndarray
    ) -> tuple[tuple[PooledRows, ...], np.ndarray]:
        """Append the rows whose hidden states are pooled."""
        if self._pooler is None:
            raise NotImplementedError("The model of this worker does not pool.")
        if (pooled & plan.sample).any():
            raise ValueError("A row of a plan is either pooled or sampled from, not both.")
        found: list[PooledRows] = []
        pieces, first = [logits_rows], len(logits_rows)
        for row in np.flatnonzero(pooled).tolist():
            start, total = int(plan.num_computed[row]), int(self._table.num_prompt[plan.slots[row]])
            end = start + int(plan.num_tokens[row])
            wanted = self._pooler.wanted(int(plan.slots[row]), start, end, total)
            pieces.append(int(starts[row]) - start + wanted)
            found.append(PooledRows(row, first, len(wanted), start, end, total))
            first += len(wanted)
        return tuple(found), np.concatenate(pieces)

    def _prompt_rows(
        self, plan: StepPlan, starts: np.ndarray, logits_rows: np.ndarray
    ) -> tuple[tuple[PromptRows, ...], np.ndarray]:
        """Append the rows that predict prompt tokens: token t predicts position t + 1, if that is in the prompt."""
        found: list[PromptRows] = []
        pieces, first = [logits_rows], len(logits_rows)
        for row in np.flatnonzero(self._wants_prompt[plan.slots]):
            computed = int(plan.num_computed[row])
            end = min(computed + int(plan.num_tokens[row]), int(self._table.num_prompt[plan.slots[row]]) - 1)
            if end <= computed:
                continue
            pieces.append(int(starts[row]) + np.arange(end - computed, dtype=np.int64))
            found.append(PromptRows(int(row), first, np.arange(computed + 1, end + 1, dtype=np.int64)))
            first += end - computed
        return tuple(found), np.concatenate(pieces)
