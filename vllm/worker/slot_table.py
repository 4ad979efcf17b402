"""The worker's copy of every running request: one row each, which never moves; a batch is a vector of row indices."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.step.plan import BlockAppend, Column, SlotInit, TokenWrite
from vllm.worker.device import DeviceContext

_FIRST_WIDTH = 4096  # tokens per row at start; doubled whenever a request may outgrow it


@dataclass(frozen=True, slots=True)
class SlotColumn:
    """A declared number of every slot: [slots] on the host and on the device; on the CPU both are the same memory.

    A step takes the values of its rows by their slots, on the device too, so that a captured step gathers them itself.
    """

    column: Column
    host: np.ndarray
    device: Tensor


class SlotTable:
    """Token ids and block tables of `num_slots` rows.

    tokens:  [slots, width] int32 on the device, the only place where every token is known: sampled ids are written
             there by the device and read back by the next step before the host has seen them.
    tables:  per KV group [slots, blocks] int32, on the device and as a host mirror (`host_tables`). Blocks are always
             the host's decision, so the mirror is complete. On the CPU both are the same memory.
    version: changes whenever blocks that a row had, or the request that it holds, are replaced.
    lengths: [slots] int32 on the host, tokens known of each row, sampled ones included; -1 where only the device knows,
             in `device_lengths`, since a step in flight may accept fewer or more of a draft.
    columns: the declared columns, by name.
    usual:   per KV group whether it is one of tokens that all have keys, `block_size` of them in a block.
    encoder_lens: [slots] int32 on the host, tokens of each row's encoder.   pages: of recurrent state that a row has.
    states: [slots] int64 on the device, which of a row's pages of recurrent state is true: as many as drafts were
             accepted in its last step. None where a row has one.

    Rows are as wide as the longest request so far may become, not as `max_model_len`: a table of 256 rows for 128k
    tokens would take 134 MB that most workloads never touch.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        layout: KVLayout,
        context: DeviceContext,
        columns: Sequence[Column] = (),
    ) -> None:
        self.num_slots = num_slots
        self.max_width = max_model_len + 1  # the last token is sampled, never computed
        self.width = min(self.max_width, _FIRST_WIDTH)
        self.block_size = layout.block_size
        self._context = context
        self.tokens = torch.zeros((num_slots, self.width), dtype=torch.int32, device=context.device)
        self.version = 0
        self.num_prompt: np.ndarray = np.zeros(num_slots, np.int32)
        self.lengths: np.ndarray = np.zeros(num_slots, np.int32)
        self.device_lengths = self._on_device(self.lengths)
        self.columns = {column.name: self._column(column) for column in columns}
        self.groups, self.pages = layout.groups, layout.policy.states_per_slot
        attention = (KVKind.FULL, KVKind.SLIDING)
        self.usual = tuple(group.kind in attention and group.units == 1 for group in layout.groups)
        self.encoder_lens: np.ndarray = np.zeros(num_slots, np.int32)
        self.states: Tensor | None = None
        if layout.policy.states_per_slot > 1 and any(g.kind is KVKind.RECURRENT for g in layout.groups):
            self.states = torch.zeros(num_slots, dtype=torch.int64, device=context.device)
        self._policy = layout.policy
        self.host_tables = [self._empty_table(group) for group in layout.groups]
        self.tables = [self._on_device(t) for t in self.host_tables]
        # columns that may be non-zero: [groups, slots]
        self._num_blocks: np.ndarray = np.zeros((len(layout.groups), num_slots), np.int32)

    def _column(self, column: Column) -> SlotColumn:
        host: np.ndarray = np.full(self.num_slots, column.neutral, column.dtype)
        return SlotColumn(column, host, self._on_device(host))

    def _empty_table(self, group: KVGroup) -> np.ndarray:
        """All tables are as wide as one of blocks of one unit, and as their own blocks need it."""
        policy = self._policy
        wide = {
            KVKind.CROSS: -(-policy.max_encoder_tokens // self.block_size),
            KVKind.RECURRENT: policy.states_per_slot,
        }
        return np.zeros((self.num_slots, max(-(-self.width // self.block_size) + 1, wide.get(group.kind, 0))), np.int32)

    def _on_device(self, table: np.ndarray) -> Tensor:
        if self._context.is_async:
            return torch.from_numpy(table).to(self._context.device, copy=True)
        return torch.from_numpy(table)

    def require_width(self, tokens: int) -> None:
        """Make room for rows of `tokens` tokens."""
        if tokens <= self.width:
            return
        if tokens > self.max_width:
            raise ValueError(f"A request of {tokens} tokens exceeds the slot table's limit of {self.max_width}.")
        self.width = min(self.max_width, 1 << (tokens - 1).bit_length())
        old = self.tokens
        self.tokens = torch.zeros((self.num_slots, self.width), dtype=torch.int32, device=old.device)
        self.tokens[:, : old.shape[1]] = old
        for g, table in enumerate(self.host_tables):
            grown = self._empty_table(self.groups[g])
            grown[:, : table.shape[1]] = table
            self.host_tables[g] = grown
            self.tables[g] = self._on_device(grown)

    def enter(self, new: Sequence[SlotInit]) -> None:
        """Fill the rows of requests that enter a slot."""
        if not new:
            return
        self.require_width(max(len(init.token_ids) for init in new) + 1)
        slots = np.array([init.slot for init in new], np.int64)
        lengths = np.array([len(init.token_ids) for init in new], np.int64)
        total = int(lengths.sum())
        ids = np.concatenate([np.frombuffer(array("i", init.token_ids), np.int32) for init in new])
        where = np.arange(total) + np.repeat(slots * self.width - (np.cumsum(lengths) - lengths), lengths)
        self.tokens.view(-1).index_copy_(0, *self._context.upload([where, ids]))
        self.num_prompt[slots] = [init.num_prompt_tokens for init in new]
        self.lengths[slots] = lengths
        self.encoder_lens[slots] = [init.encoder_tokens for init in new]
        self.keep_states(slots)
        if self.columns or any(init.columns for init in new):
            self._enter_columns(new)
        appends = [BlockAppend(init.slot, g, 0, blocks) for init in new for g, blocks in enumerate(init.block_ids)]
        self.append_blocks(appends, fresh=True)

    def _enter_columns(self, new: Sequence[SlotInit]) -> None:
        """Set the columns of rows that enter: the values they bring, or neutral ones."""
        declared = list(self.columns.values())
        for init in new:
            if init.columns and len(init.columns) != len(declared):
                names = ", ".join(self.columns) or "none"
                raise ValueError(
                    f"Request {init.request_id} brings {len(init.columns)} slot columns, but declared are: {names}."
                )
        slots = np.array([init.slot for init in new], np.int64)
        for i, entry in enumerate(declared):
            entry.host[slots] = [init.columns[i] if init.columns else entry.column.neutral for init in new]
        if self._context.is_async:
            index, *values = self._context.upload([slots, *(entry.host[slots] for entry in declared)])
            for entry, value in zip(declared, values, strict=True):
                entry.device[index] = value

    def write(self, writes: Sequence[TokenWrite]) -> None:
        """Put tokens that the host knows into rows, in order; a row's length becomes at least where they end."""
        self.require_width(max(start + len(ids) for _, start, ids in writes) + 1)
        # where a place is written twice, the last write counts: an indexed copy promises no order
        placed: dict[int, int] = {}
        for slot, start, ids in writes:
            placed.update(enumerate(ids, slot * self.width + start))
        count = len(placed)
        index, values = self._context.upload(
            [np.fromiter(placed, np.int64, count), np.fromiter(placed.values(), np.int32, count)]
        )
        self.tokens.view(-1).index_copy_(0, index, values)
        for slot, start, written in writes:
            end = start + len(written)
            if self.lengths[slot] < 0:
                self.device_lengths[slot].clamp_(min=end)
            else:
                self.lengths[slot] = max(self.lengths[slot], end)

    def set_lengths(self, slots: np.ndarray, device_slots: Tensor, lengths: Tensor) -> None:
        """What the device has found the lengths of some rows to be. lengths: [n], on the device."""
        self.device_lengths.index_copy_(0, device_slots, lengths.to(torch.int32))
        if self._context.is_async:
            self.lengths[slots] = -1

    def keep_states(self, slots: np.ndarray) -> None:
        """The recurrent states of these rows are in their first page now."""
        if self.states is not None:
            (index,) = self._context.upload([slots.astype(np.int64)])
            self.states.index_fill_(0, index, 0)

    def known_lengths(self, slots: np.ndarray) -> np.ndarray:
        """The lengths of some rows, [n] int32; waits for the device where only it knows."""
        lengths: np.ndarray = self.lengths[slots]
        if (lengths < 0).any():
            (index,) = self._context.upload([slots.astype(np.int64)])
            (found,) = self._context.download([self.device_lengths.index_select(0, index)]).wait()
            lengths = np.where(lengths < 0, found, lengths)
        return lengths

    def append_blocks(self, appends: Sequence[BlockAppend], fresh: bool = False) -> None:
        """Extend block tables; `fresh` rows start empty, whatever the slot's last request left behind becomes 0."""
        if not appends:
            return
        for group in range(len(self.host_tables)):
            own = appends if len(self.host_tables) == 1 else [a for a in appends if a.group == group]
            if own:
                self._append(group, own, fresh)

    def _append(self, group: int, appends: Sequence[BlockAppend], fresh: bool) -> None:
        """As `append_blocks`, of one group: once for all rows, which often need their next block in the same step."""
        slots, _, starts, blocks = zip(*appends, strict=True)
        rows, first = np.array(slots, np.int64), np.array(starts, np.int64)
        counts: np.ndarray = np.fromiter(map(len, blocks), np.int64, len(blocks))
        values: np.ndarray = np.fromiter(chain.from_iterable(blocks), np.int32, int(counts.sum()))
        ends = first + counts
        longest = int(ends.max())
        if longest > self.host_tables[group].shape[1]:
            self.require_width(min(self.max_width, longest * self.block_size * self.groups[group].units))
        known = self._num_blocks[group, rows]
        self.version += len(rows) if fresh else int((first < known).sum())
        if fresh:
            self._num_blocks[group, rows] = ends
            counts = np.maximum(ends, known) - first
        else:
            np.maximum.at(self._num_blocks[group], rows, ends)
        table = self.host_tables[group]
        column = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        where = np.repeat(rows * table.shape[1] + first, counts) + column
        if len(where) > len(values):  # zeros behind the blocks
            padded: np.ndarray = np.zeros(len(where), np.int32)
            padded[column < np.repeat(ends - first, counts)] = values
            values = padded
        table.reshape(-1)[where] = values
        if self._context.is_async:
            self.tables[group].view(-1).index_copy_(0, *self._context.upload([where, values]))

    def token_index(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where tokens stand in `tokens.view(-1)`. slots, positions: [n] -> [n] int64."""
        index: np.ndarray = slots.astype(np.int64) * self.width + positions
        return index

    def read_tokens(self, index: Tensor) -> Tensor:
        """Token ids at `token_index` positions, as int64."""
        return self.tokens.view(-1).index_select(0, index).long()

    def write_tokens(self, index: Tensor, token_ids: Tensor) -> None:
        """Store sampled ids at `token_index` positions. token_ids: [n] int64."""
        self.tokens.view(-1).index_copy_(0, index, token_ids.to(torch.int32))

    def block_rows(self, group: int, slots: np.ndarray, device_slots: Tensor, blocks: int) -> Tensor:
        """[requests, blocks] int32: the first columns of some rows of a group's block table."""
        if self._context.is_async:
            return self.tables[group][:, :blocks].index_select(0, device_slots)
        return torch.from_numpy(self.host_tables[group][:, :blocks][slots])

    @property
    def device_bytes(self) -> int:
        """Device memory that the table holds now."""
        return sum(t.numel() * t.element_size() for t in (self.tokens, *self.tables))
