"""Plans for shared prefixes follow the batch: made when it changes, kept while it does not."""

import numpy as np
import torch

from tests.worker.toy import Ahead
from vllm.ops.attention import plan_batch, plan_gathered
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.step.plan import BlockAppend, SlotInit, StepPlan
from vllm.worker.device import CpuContext
from vllm.worker.input_builder import InputBuilder
from vllm.worker.prefix_sharing import Heads, PrefixSharing, tile_rows, tiles
from vllm.worker.slot_table import SlotTable

HEADS = Heads(query=32, kv=8, size=128, itemsize=2)
LONG = list(range(1, 129))  # blocks of 16 tokens


def enter(table, slot, blocks):
    tokens = [7] * (16 * len(blocks) - 3)
    table.enter([SlotInit("r", slot, tokens, len(tokens), 0, (blocks,), SamplingParams(), 0, ())])


def sharing(requests):
    layout = KVLayout.alike((KVGroup(KVKind.FULL, (0,)),), 16, 8, 128, 2)
    table = SlotTable(40, 4096, layout, CpuContext())
    for slot in range(requests):
        enter(table, slot, [*LONG, 1000 + slot])
    return table, PrefixSharing(table, 0, HEADS, 40, CpuContext())


def cached(table, slots):
    return np.array([16 * 129 - 4] * len(slots), np.int32)


def test_a_batch_with_a_long_common_prefix_shares_it():
    table, prefix = sharing(20)
    slots = np.array([3, 19, 0, *range(4, 12)], np.int32)
    assert prefix.find(slots, cached(table, slots), 16)
    plan = prefix.plan(16)
    assert plan.rows[:11, 0].tolist() == [2048] * 11
    assert plan.members[:11].tolist() == list(range(11))
    assert plan.items[:, 1].sum() == 11 * int((plan.items[:, 1] > 0).sum())
    assert sorted(plan.items[plan.items[:, 1] > 0, 3].tolist())[-1] == 2048
    assert plan.part.shape == (len(plan.items), 8, 64, 128)
    assert not prefix.find(slots[:3], cached(table, slots[:3]), 4), "three requests gain too little"


def test_the_plan_follows_who_is_in_the_batch_and_what_their_slots_hold():
    table, prefix = sharing(20)
    slots = np.arange(20, dtype=np.int32)
    assert prefix.find(slots, cached(table, slots), 24)
    before = prefix.plan(24)
    kept = before.items.clone()
    table.append_blocks([BlockAppend(2, 0, 129, [777])])
    assert prefix.find(slots, cached(table, slots) + 1, 24)
    assert torch.equal(before.items, kept)

    enter(table, 5, list(range(2000, 2129)))
    assert prefix.find(slots, cached(table, slots), 24)
    assert before.rows[:20, 0].tolist() == [0 if i == 5 else 2048 for i in range(20)]
    table.append_blocks([BlockAppend(6, 0, 64, [888])])  # its own copy of a block
    assert prefix.find(slots, cached(table, slots), 24)
    assert before.rows[:20, 0].tolist() == [0 if i in (5, 6) else 2048 for i in range(20)]
    fewer = slots[slots != 7]
    assert prefix.find(fewer, cached(table, fewer), 20)
    assert prefix.plan(20).rows[:19, 0].tolist() == [0 if i in (5, 6) else 2048 for i in range(19)]
    assert before.rows.data_ptr() == prefix.plan(20).rows.data_ptr(), "captured steps keep their addresses"


def test_tiles_hold_whole_requests_and_fill_the_device():
    for heads in (HEADS, Heads(16, 8, 128, 2), Heads(14, 2, 64, 2), Heads(16, 1, 256, 1)):
        for rows in (1, 3, 16, 64, 300):
            shape = tiles(heads, rows)
            assert shape.members * (heads.query // heads.kv) <= tile_rows(heads, rows)
            assert shape.members >= 4
            assert shape.wanted * heads.kv <= 132
            assert shape.items > shape.wanted


def test_prompts_behind_a_cached_prefix_gather_it_once(monkeypatch):
    monkeypatch.setattr(plan_batch, "_kernels", {"cpu": plan_gathered})
    layout = KVLayout.alike((KVGroup(KVKind.FULL, (0,)),), 16, 8, 128, 2)
    table = SlotTable(8, 4096, layout, Ahead())
    computed, counts = [2048, 2048, 0, 2048, 700], [125, 3, 2061, 125, 1]
    for slot, total in enumerate(map(sum, zip(computed, counts, strict=True))):
        blocks = LONG if slot < 4 else [3000 + i for i in range(43)]
        enter(table, slot, [*blocks, *(1000 + 10 * slot + i for i in range(-(-total // 16) - len(blocks)))])
    enter(table, 5, [*LONG, *range(4000, 4008)])
    slots, computed, counts = np.array([0, 1, 2, 3, 4, 5]), np.array([*computed, 2048]), np.array([*counts, 125])
    plan = StepPlan(0, (), (), (), *(x.astype(np.int32) for x in (slots, counts, computed)), np.ones(6, bool))
    gathered = InputBuilder(table, Ahead(), np.zeros(8, bool)).build(plan).step.groups[0].plan
    own = [125, 2061, 125, 125]
    assert gathered.shared
    assert gathered.rows == sum(own) + 2048
    assert gathered.pieces.tolist() == [
        [0, 2048, 125, 0], [2, 0, 2061, 125], [3, 2048, 125, 2186], [5, 2048, 125, 2311], [0, 0, 2048, 2436],
    ]  # fmt: skip
    assert gathered.requests[:, 1].tolist() == [2048, -1, 0, 2048, -1, 2048]
    assert gathered.requests[3].tolist() == [2186 - 2048, 2048, 2436]


def test_layers_that_do_not_say_their_query_heads_read_prefixes_one_by_one() -> None:
    assert HEADS.fit and Heads(8, 8, 128, 2).fit
    assert not Heads(0, 8, 128, 2).fit and not Heads(136, 8, 128, 2).fit
