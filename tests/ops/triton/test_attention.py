"""Paged attention kernels against the torch reference."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.ops.triton.batches import make_batch
from vllm.ops import attention as ops
from vllm.ops.shared_prefix import Group
from vllm.ops.triton import attention as kernels
from vllm.ops.triton.prefill import can_gather


def gather_plan(queries, lens, groups=()):
    """The plan of a batch that gathers."""
    found = ops.plan_gathering(np.array(queries), np.array(lens), groups)
    return found.on_device(torch.from_numpy(found.pieces), torch.from_numpy(found.requests))


def check(batch, params, tolerance=2e-3):
    got = kernels.attend(batch.q, batch.cache, params, batch.step, batch.group)
    clean = batch.cache.float().nan_to_num()  # the reference multiplies what nobody sees by zero
    want = ops.attend.reference(batch.q.float(), clean, params, batch.step, batch.group)
    assert not torch.isnan(got).any()
    assert (got.float() - want.float()).norm() / want.float().norm() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1, 1, 1], [1, 17, 70]),  # decode
        ([33, 5], [33, 5]),  # fresh prompts
        ([1, 40, 1, 19], [65, 90, 3, 19]),  # a chunk behind a cached prefix among decodes
    ],
)
def test_mixed_batches_match_the_reference(query_lens, seq_lens, dtype):
    batch = make_batch(query_lens, seq_lens, heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=dtype)
    check(batch, ops.AttentionParams(scale=0.25))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (7, 1), (6, 2), (20, 1)])
def test_every_grouping_of_heads(heads, kv_heads):
    batch = make_batch([1, 22, 2], [40, 30, 2], heads=heads, kv_heads=kv_heads, head_dim=16, block_size=8)
    check(batch, ops.AttentionParams(scale=0.3))


@pytest.mark.parametrize(
    "params",
    [
        {"sinks": torch.tensor([2.0, -1.0, 0.5, 4.0])},
        {"sinks": torch.tensor([2.0, -1.0, 0.5, 4.0]), "window": 9},
        {"chunk": 12},
        {"sparse": ops.SparseBlocks(8, 2, 3, torch.tensor([5, 2, 0, 7], dtype=torch.int32))},
    ],
    ids=["sinks", "sinks and window", "chunk", "sparse"],
)
def test_what_only_some_families_have(params):
    """In decode (the long one in splits), for prompts, and for a chunk behind a cached prefix."""
    batch = make_batch(
        [1, 1, 40, 2, 19], [300, 13, 90, 24, 19], heads=4, kv_heads=2, head_dim=16, block_size=8,
        window=params.get("window"),
    )  # fmt: skip
    check(batch, ops.AttentionParams(scale=0.25, **params), 1e-5)


@pytest.mark.parametrize("head_dim", [24, 80, 256])
def test_odd_and_large_head_sizes(head_dim):
    batch = make_batch([1, 9], [35, 20], heads=2, kv_heads=1, head_dim=head_dim, block_size=32)
    check(batch, ops.AttentionParams(scale=head_dim**-0.5))


@pytest.mark.parametrize("window", [1, 7, 32])
def test_sliding_window_never_reads_behind_itself(window):
    batch = make_batch([1, 30, 3], [50, 80, 3], heads=4, kv_heads=2, head_dim=16, block_size=8, window=window)
    check(batch, ops.AttentionParams(scale=0.25, window=window))


def test_softcap_and_alibi():
    batch = make_batch([1, 21], [33, 40], heads=4, kv_heads=2, head_dim=16, block_size=8)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    check(batch, ops.AttentionParams(scale=0.25, softcap=3.0))
    check(batch, ops.AttentionParams(scale=0.25, alibi_slopes=slopes))
    check(batch, ops.AttentionParams(scale=0.25, alibi_slopes=slopes, softcap=5.0, window=9))
    check(batch, ops.AttentionParams(scale=0.25, alibi_slopes=slopes * 9, alibi_known=7))


def test_keys_of_one_query_are_split_over_programs():
    batch = make_batch([1, 1], [300, 129], heads=2, kv_heads=1, head_dim=16, block_size=16)
    assert kernels.choose_splits(2, 300, None) == 4
    check(batch, ops.AttentionParams(scale=0.25))
    check(batch, ops.AttentionParams(scale=0.25, window=200))


def test_queries_may_be_a_view_of_the_fused_projection():
    batch = make_batch([1, 12], [20, 12], heads=4, kv_heads=2, head_dim=16, block_size=8)
    fused = torch.randn(13, 8, 16)
    fused[:, :4] = batch.q
    got = kernels.attend(fused[:, :4], batch.cache, ops.AttentionParams(scale=0.25), batch.step, batch.group)
    want = kernels.attend(batch.q, batch.cache, ops.AttentionParams(scale=0.25), batch.step, batch.group)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_cache_saturates_and_is_scaled_back(dtype):
    batch = make_batch([1, 6], [30, 6], heads=4, kv_heads=2, head_dim=16, block_size=8)
    cache = torch.zeros(batch.cache.shape, dtype=dtype)
    tokens = int(batch.step.host_query_starts[-1])
    # numbers of the format itself: the interpreter rounds others wrongly (the device's rounding is tested in tests/gpu)
    k, v = ((torch.randn(tokens, 2, 16) * 3).to(dtype).float() * 0.25 for _ in range(2))
    k[0, 0, 0], v[0, 0, 0] = 1e6, -1e6
    slot = batch.group.slot_mapping
    kernels.write_kv(k, v, cache, slot, k_scale=0.25, v_scale=0.25)
    stored = cache.float()[slot // 8, :, :, slot % 8].transpose(0, 1)  # [2, tokens, kv_heads, head_dim]
    limit = torch.finfo(dtype).max
    assert torch.equal(stored[0], (k * 4).clamp(-limit, limit))
    assert torch.equal(stored[1], (v * 4).clamp(-limit, limit))
    cache = torch.randn(batch.cache.shape).to(dtype)
    params = ops.AttentionParams(scale=0.25, k_scale=0.5, v_scale=3.0)
    batch.cache = cache
    check(batch, params)


def test_write_kv_touches_only_its_slots():
    cache = torch.full((5, 2, 2, 8, 24), 7.0)
    k, v = torch.randn(3, 2, 24), torch.randn(3, 4, 24)[:, 1:3]
    want = cache.clone()
    slots = torch.tensor([9, 39, 16])
    ops.write_kv.reference(k, v, want, slots)
    kernels.write_kv(k, v, cache, slots)
    assert torch.equal(cache, want)


def test_splits_grow_with_idle_processors_and_stop_at_short_shares():
    assert kernels.choose_splits(2048, 100_000, None) == 1
    assert kernels.choose_splits(8, 100_000, None) == 64
    assert kernels.choose_splits(8, 100, None) == 1
    assert kernels.choose_splits(8, 100_000, 128) == 2
    assert all(np.log2(kernels.choose_splits(p, n, None)).is_integer() for p in (1, 3, 500) for n in (1, 700, 9000))


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e5m2])
def test_long_queries_read_gathered_keys(cache_dtype):
    batch = make_batch(
        [260, 1, 30, 12], [260, 40, 100, 12], heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16
    )
    batch.group = replace(batch.group, plan=gather_plan([260, 1, 30, 12], [260, 40, 100, 12]))
    batch.cache = batch.cache.nan_to_num().to(cache_dtype)
    scales = {} if cache_dtype == torch.float16 else {"k_scale": 0.5, "v_scale": 2.0}
    check(batch, ops.AttentionParams(scale=0.125, **scales))


@pytest.mark.parametrize("window", [None, 5, 64, 130, 300, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("cached", [0, 90], ids=["fresh", "chunk"])
def test_long_queries_with_windows_and_soft_caps(cached, softcap, window):
    """Of a windowed group, blocks behind the window are the null block, which holds what is not a number."""
    own = [290, 1, 140]
    lens = [n + cached for n in own]
    batch = make_batch(own, lens, 2, 1, 64, 16, torch.float16, window)
    batch.cache[1:].nan_to_num_()
    batch.group = replace(batch.group, plan=gather_plan(own, lens))
    assert can_gather(batch.q, batch.cache, ops.AttentionParams(0.25, window, softcap), batch.group.plan)
    check(batch, ops.AttentionParams(0.25, window, softcap))
    if window in (None, 64):
        check(batch, ops.AttentionParams(0.25, window, softcap, sinks=torch.tensor([3.0, -1.0])))


@pytest.mark.parametrize("head_dim", [72, 80, 96, 128, 256])
def test_long_queries_of_any_head_size(head_dim):
    own, heads, kv_heads = [270, 1, 33], 4, 2
    batch = make_batch(own, own, heads, kv_heads, head_dim, 16, torch.float16)
    batch.group = replace(batch.group, plan=gather_plan(own, own))
    params = ops.AttentionParams(head_dim**-0.5)
    gathered = kernels.attend(batch.q, batch.cache, params, batch.step, batch.group)
    check(batch, params)
    # inside a fused projection, where the next head's numbers follow, and the step's own keys
    fused = torch.randn(sum(own), heads + 2 * kv_heads, head_dim).half()
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    q.copy_(batch.q)
    slot = batch.group.slot_mapping
    for mine, side in ((k, 0), (v, 1)):
        mine.copy_(batch.cache[:, side][slot // 16, :, slot % 16])
    own_keys = kernels.attend(q, batch.cache, params, batch.step, batch.group, (k, v))
    torch.testing.assert_close(own_keys, gathered)


@pytest.mark.parametrize("own", [[40, 1, 300, 130, 20, 5], [130, 128, 100, 120, 1, 256]])
def test_common_keys_are_gathered_once(own):
    """Chunks behind cached tokens of their own, behind a common prefix, or both; and a decode among them."""
    common, members = 256, [0, 2, 3]
    cached = [300, 60, 256, 290, 10, 17]
    lens = [c + n for c, n in zip(cached, own, strict=True)]
    batch = make_batch(own, lens, heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16)
    table = batch.group.block_table
    for r in members[1:]:
        table[r, : common // 16] = table[0, : common // 16]
    group = Group(np.array(members), common)
    batch.group = replace(batch.group, plan=gather_plan(own, lens, [group]))
    assert batch.group.plan.rows == sum(n for n, q in zip(lens, own, strict=True) if q > 16) - 2 * common
    check(batch, ops.AttentionParams(scale=0.125))


def test_gathering_needs_many_queries_and_few_cached_keys():
    def gathers(queries, lens, groups=()):
        return ops.plan_gathering(np.array(queries), np.array(lens), groups) is not None

    assert not gathers([1, 1], [500, 9000])
    assert not gathers([128, 16], [128, 16])
    assert not gathers([256], [5000])
    assert gathers([256, 9], [1000, 9])
    everybody = [Group(np.arange(64), 4096)]
    assert gathers([128] * 64, [4224] * 64, everybody), "common keys count once"
    assert not gathers([128] * 64, [4224] * 64)
    assert not gathers([40] * 64, [4136] * 64, everybody), "tiles would hold more padding than queries"
    plan = ops.plan_gathering(np.array([256, 9, 20]), np.array([1000, 9, 21]))
    assert plan.pieces.tolist() == [[0, 0, 1000, 0], [2, 0, 21, 1000]]
    assert plan.requests.tolist() == [[0, 0, 0], [0, -1, 0], [1000, 0, 0]]


def test_runs_of_equal_fresh_prompts_are_dense():
    def runs(queries, lens):
        return [tuple(run) for run in ops.dense_runs(np.array(queries), np.array(lens))]

    assert runs([2048] * 5, [2048] * 5) == [(0, 0, 4, 2048, 2048), (8192, 8192, 1, 2048, 2048)]
    assert runs([1, 4000, 3, 2048], [90, 4000, 50, 2048]) == [(1, 0, 1, 4000, 4096), (4004, 4000, 1, 2048, 2048)]
    assert runs([2048, 2048], [2048, 4096]) == [], "a cached prefix"
    assert runs([2048, 100], [2048, 100]) == [], "a short prompt"
    assert runs([2200], [2200]) == [], "too much padding"
