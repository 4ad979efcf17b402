"""Rows that never move: declared columns, tokens written by the host, lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.toy import Ahead
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.step.plan import BlockAppend, Column, SlotInit, TokenWrite
from vllm.worker.device import CpuContext
from vllm.worker.slot_table import SlotTable

LAYOUT = KVLayout.alike((KVGroup(KVKind.FULL, (0,)),), 16, 1, 8, 4)
COLUMNS = (Column("adapter", "int32", 0), Column("delta", "int64", -7))
CONTEXTS = pytest.mark.parametrize("context", [CpuContext(), Ahead()])


def init(slot: int, tokens: list[int], columns: tuple[int, ...] = ()) -> SlotInit:
    return SlotInit(f"r{slot}", slot, tokens, len(tokens), 0, ([1],), SamplingParams(), 0, (), columns=columns)


@CONTEXTS
def test_columns_follow_who_is_in_the_slot(context: CpuContext) -> None:
    table = SlotTable(4, 100, LAYOUT, context, COLUMNS)
    table.enter([init(2, [1], (5, 9)), init(0, [1])])
    table.enter([init(3, [1], (6, 1))])
    for name, want in {"adapter": [0, 0, 5, 6], "delta": [-7, -7, 9, 1]}.items():
        assert table.columns[name].host.tolist() == table.columns[name].device.tolist() == want
    assert table.columns["adapter"].device.dtype == torch.int32
    table.enter([init(2, [1])])
    assert table.columns["adapter"].device.tolist() == [0, 0, 0, 6]
    assert table.columns["delta"].host.tolist() == [-7, -7, -7, 1]


@pytest.mark.parametrize(("declared", "brought"), [((), (1,)), (COLUMNS, (1,)), (COLUMNS[:1], (1, 2))])
def test_columns_that_were_not_declared_are_refused(declared: tuple[Column, ...], brought: tuple[int, ...]) -> None:
    table = SlotTable(4, 100, LAYOUT, CpuContext(), declared)
    with pytest.raises(ValueError, match="declared are"):
        table.enter([init(2, [1], brought)])


@CONTEXTS
def test_the_last_write_counts_and_lengths_only_grow(context: CpuContext) -> None:
    table = SlotTable(3, 10_000, LAYOUT, context)
    table.enter([init(1, [1, 2, 3])])
    table.write([TokenWrite(1, 2, [8, 9]), TokenWrite(1, 3, [7]), TokenWrite(2, 0, [4]), TokenWrite(1, 0, [6])])
    assert table.tokens[1, :5].tolist() == [6, 2, 8, 7, 0] and table.tokens[2, 0] == 4
    assert table.known_lengths(np.array([1, 2, 0])).tolist() == [4, 1, 0]
    long = list(range(5000))
    table.write([TokenWrite(0, 1, long)])
    assert table.tokens[0, 1:5001].tolist() == long and table.tokens[1, :4].tolist() == [6, 2, 8, 7]


@CONTEXTS
def test_a_length_that_the_device_found_is_read_from_it(context: CpuContext) -> None:
    table = SlotTable(3, 100, LAYOUT, context)
    table.enter([init(0, [1, 2, 3]), init(2, [1])])
    slots = np.array([2])
    table.set_lengths(slots, torch.tensor([2]), torch.tensor([9]))
    assert table.known_lengths(np.array([0, 2])).tolist() == [3, 9]
    table.write([TokenWrite(2, 4, [1]), TokenWrite(2, 11, [1])])
    assert table.known_lengths(slots).tolist() == [12]
    table.enter([init(2, [1, 2])])
    assert table.known_lengths(slots).tolist() == [2]


@CONTEXTS
@pytest.mark.parametrize("seed", range(3))
def test_block_tables_are_what_was_appended_one_by_one(context: CpuContext, seed: int) -> None:
    """Of two groups; rows that begin anew, grow by a block or several, or have blocks replaced, many in one plan."""
    groups = KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.SLIDING, (1,), window=32)
    table = SlotTable(6, 5000, KVLayout.alike(groups, 16, 1, 8, 4), context)
    want: list[list[list[int]]] = [[[] for _ in range(6)] for _ in groups]
    rng = np.random.default_rng(seed)
    for step in range(60):
        appends = []
        fresh = bool(rng.random() < 0.3)
        for slot in rng.permutation(6)[: rng.integers(1, 7)].tolist():
            for g, rows in enumerate(want):
                known = 0 if fresh else len(rows[slot])
                blocks = rng.integers(1, 999, rng.integers(0 if fresh else 1, 300 if step == 40 else 4)).tolist()
                start = max(0, known - 1) if rng.random() < 0.2 else known
                rows[slot] = (rows[slot][:start] if not fresh else []) + blocks
                appends.append(BlockAppend(slot, g, start, blocks))
        version = table.version
        table.append_blocks(appends, fresh=fresh)
        assert (table.version > version) or not fresh
        for g, rows in enumerate(want):
            columns = table.host_tables[g].shape[1]
            whole = np.array([blocks + [0] * (columns - len(blocks)) for blocks in rows])
            assert (table.host_tables[g] == whole).all() and (table.tables[g].numpy() == whole).all()
