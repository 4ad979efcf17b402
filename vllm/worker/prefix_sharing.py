"""Which requests of a decode batch share their first blocks, and the static buffers through which kernels learn it.

Captured steps read the buffers at fixed addresses; what stands in them changes only when the batch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm.model_executor.models.traits import Traits
from vllm.ops.shared_prefix import ITEM, ROW, Group, SharedPlan, Tiles, cut, find_groups, worthwhile
from vllm.ops.triton.decode_parts import processors
from vllm.step.kv_policy import KVKind, KVLayout
from vllm.worker.device import DeviceContext
from vllm.worker.slot_table import SlotTable

_SPARE = 16  # items beyond those that equal shares need, for tiles of small groups


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a model's attention: query heads, heads of the cache, their size, and bytes of one cached number."""

    query: int
    kv: int
    size: int
    itemsize: int

    @classmethod
    def of(cls, traits: Traits, layout: KVLayout) -> Heads | None:
        """Those of a rank's layers in the first KV group; None if these differ, are not known, or see less than the
        whole sequence.
        """
        if not layout.groups or not traits.query_heads:
            return None
        group = layout.groups[0]
        kinds = {(traits.query_heads[layer], traits.kv[layer]) for layer in group.layers}
        heads, need = next(iter(kinds))
        if group.kind is not KVKind.FULL or group.units > 1 or len(kinds) != 1 or need is None:
            return None
        (tensor,) = need.tensors
        if len(tensor.shape) != 4:
            return None  # latents, which all heads share
        _, kv_heads, _, head_dim = tensor.shape
        return cls(heads, kv_heads, head_dim, layout.bytes_per_element)

    @property
    def fit(self) -> bool:
        """Whether a tile holds enough requests for sharing to gain anything; not where query heads are not known."""
        return 1 <= self.query // self.kv <= 16

    @property
    def bytes_per_key(self) -> int:
        """Of one layer's keys and values."""
        return 2 * self.kv * self.size * self.itemsize


def tile_rows(heads: Heads, rows: int) -> int:
    """Query rows of a tile, for a batch of `rows`."""
    wide = heads.size > 128 or heads.itemsize > 2  # more would not fit into the registers
    return 128 if rows * (heads.query // heads.kv) > 64 and not wide else 64


def tiles(heads: Heads, rows: int) -> Tiles:
    """How the groups of a batch of up to `rows` rows are cut."""
    members = tile_rows(heads, rows) // (heads.query // heads.kv)
    wanted = max(1, processors() // heads.kv)  # with more, there is more to merge
    return Tiles(members, wanted + -(-rows // members) + _SPARE, wanted)


def static_plans(heads: Heads, largest: int, device: torch.device) -> SharedPlan:
    """Room for the plan of any batch of up to `largest` rows; part and lse are flat."""
    shapes = [(tiles(heads, n).items, tile_rows(heads, n)) for n in [1 << i for i in range(largest.bit_length())]]
    shapes.append((tiles(heads, largest).items, tile_rows(heads, largest)))
    items, count = max(n for n, _ in shapes), max(n * height for n, height in shapes) * heads.kv
    rows, members, work = (
        torch.zeros(n, dtype=torch.int32, device=device) for n in (largest * ROW, largest, items * ITEM)
    )
    part, lse = (torch.empty(n, dtype=torch.float32, device=device) for n in (count * heads.size, count))
    return SharedPlan(rows.view(largest, ROW), members, work.view(items, ITEM), part, lse)


def plan_views(heads: Heads, rows: int, room: SharedPlan) -> SharedPlan:
    """The plan of batches of `rows` rows in `static_plans`' room."""
    items, height = tiles(heads, rows).items, tile_rows(heads, rows)
    count = items * heads.kv * height
    part = room.part[: count * heads.size].view(items, heads.kv, height, heads.size)
    lse = room.lse[:count].view(items, heads.kv, height)
    return SharedPlan(room.rows[:rows], room.members, room.items[:items], part, lse)


class PrefixSharing:
    """The shared prefixes of one runner's decode batches, by the block table of one KV group."""

    def __init__(self, table: SlotTable, group: int, heads: Heads, largest: int, context: DeviceContext) -> None:
        """largest: the most rows of a batch."""
        self._table, self._group, self._heads, self._largest, self._context = table, group, heads, largest, context
        self._room: SharedPlan | None = None  # made when it is needed first
        self._plans: dict[int, SharedPlan] = {}
        self._slots: np.ndarray = np.zeros(0, np.int64)
        self._version = -1
        self._shares = False
        self._sent = -1  # size of the batch whose plan stands in the buffers; -1 for none that is valid
        self._groups: list[Group] = []

    def find(self, slots: np.ndarray, cached: np.ndarray, size: int) -> bool:
        """Whether a step of these slots gains by reading common keys once; if so, its plan is on its way to the device.

        cached: [rows] tokens in the cache.   size: rows of the step, padding included.
        """
        same = self._version == self._table.version and np.array_equal(slots, self._slots)
        if not same:
            members = tiles(self._heads, size).members
            self._groups = find_groups(
                self._table.host_tables[self._group], slots, cached, self._table.block_size, members
            )
            self._shares = worthwhile(self._groups, members, self._heads.bytes_per_key)
            self._slots, self._version, self._sent = slots.copy(), self._table.version, -1
        if self._shares and self._sent != size:
            self._send(len(slots), size)
        return self._shares

    def plan(self, size: int) -> SharedPlan:
        """The plan of batches of `size` rows, at addresses that stay."""
        if size not in self._plans:
            if self._room is None:
                self._room = static_plans(self._heads, self._largest, self._context.device)
            self._plans[size] = plan_views(self._heads, size, self._room)
        return self._plans[size]

    def _send(self, rows: int, size: int) -> None:
        """Write the groups' plan over the last one, in the device's queue."""
        plan = self.plan(size)
        work = cut(self._groups, rows, tiles(self._heads, size))
        items: np.ndarray = np.zeros(plan.items.shape, np.int32)
        items[: len(work.items)] = work.items
        per_row, members, all_items = self._context.upload([work.rows, work.members, items])
        plan.rows[:rows] = per_row
        plan.members[: len(members)] = members
        plan.items.copy_(all_items)
        self._sent = size
