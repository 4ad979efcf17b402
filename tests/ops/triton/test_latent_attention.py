"""Kernels of latent attention against the torch reference, and that against attention over expanded keys."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.ops.triton.batches import make_batch
from vllm.ops import attention, latent_attention
from vllm.ops.shared_prefix import Group
from vllm.ops.triton import latent_attention as kernels
from vllm.ops.triton.prefill import attend_runs

NOPE, ROPE, V, RANK, HEADS = 24, 8, 16, 40, 5


def make(query_lens, seq_lens, dtype=torch.float32, heads=HEADS, groups=None):
    """A batch, its cache of latents [blocks, 8, RANK + ROPE] with NaN where nothing was written, queries, kv_b."""
    batch = make_batch(query_lens, seq_lens, heads, 1, RANK + ROPE, 8, dtype)
    cache = batch.cache[:, 0, 0].contiguous()
    q = torch.randn(len(batch.q), heads, NOPE + ROPE).to(dtype)
    kv_b = (torch.randn(heads, NOPE + V, RANK) * RANK**-0.5).to(dtype)
    group = batch.group
    if groups is not None:
        found = attention.plan_gathering(np.array(query_lens), np.array(seq_lens), groups)
        assert found is not None
        plan = found.on_device(torch.from_numpy(found.pieces), torch.from_numpy(found.requests))
        group = type(group)(group.slot_mapping, group.block_table, plan)
    return q, cache, kv_b, batch.step, group


def check(q, cache, kv_b, step, group, tolerance):
    got = kernels.attend_latent(q, cache, kv_b, NOPE, 0.2, step, group)
    want = latent_attention.attend_latent.reference(q.float(), cache.float(), kv_b.float(), NOPE, 0.2, step, group)
    assert not torch.isnan(got).any()
    assert (got.float() - want).norm() / want.norm() < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 3e-3)])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1, 1, 1], [1, 17, 700]),  # decode, the long one in splits
        ([33, 5], [33, 5]),  # fresh prompts
        ([1, 20, 1, 3], [65, 90, 3, 19]),  # a chunk behind a cached prefix among decodes
    ],
)
def test_few_queries_read_the_latents_themselves(query_lens, seq_lens, dtype, tolerance):
    check(*make(query_lens, seq_lens, dtype), tolerance)


@pytest.mark.parametrize("heads", [1, 17, 40])
def test_every_number_of_heads(heads):
    check(*make([1, 2], [40, 30], heads=heads), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 3e-3)])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([260], [260]), ([1, 300, 2, 18, 1], [50, 420, 2, 18, 9]), ([18, 257], [40, 257])]
)
def test_many_queries_are_expanded(query_lens, seq_lens, dtype, tolerance):
    check(*make(query_lens, seq_lens, dtype, heads=2, groups=()), tolerance)


@pytest.mark.parametrize(("query_lens", "v_dim"), [([1930], NOPE + ROPE), ([2048, 2048, 5], V)])
def test_prompts_that_are_computed_whole_are_left_to_a_library(query_lens, v_dim, monkeypatch):
    """Here torch's own for the processor, which wants values as wide as keys."""
    q, cache, _, step, group = make(query_lens, query_lens, torch.float16, heads=2, groups=())
    kv_b = (torch.randn(2, NOPE + v_dim, RANK) * RANK**-0.5).half()
    runs = attention.dense_runs(np.array(query_lens), np.array(query_lens))
    assert [run.prompts for run in runs] == ([1] if len(query_lens) == 1 else [2])
    group = type(group)(group.slot_mapping, group.block_table, dataclasses.replace(group.plan, runs=runs))
    seen = []
    monkeypatch.setattr(kernels, "attend_runs", lambda *args: seen.append(args[2].shape[2]) or attend_runs(*args))
    wider = torch.zeros(len(q), 2 * (NOPE + ROPE) + 8, dtype=q.dtype)  # as a part of a product
    wider[:, : q[0].numel()] = q.flatten(1)
    q = wider[:, : q[0].numel()].view(q.shape)
    check(q, cache, kv_b, step, group, 3e-3)
    assert seen == [NOPE + ROPE]
    monkeypatch.setattr(kernels, "library_takes", lambda *_: False)
    assert kernels._width_taken(q, v_dim) == 0


def test_heads_of_odd_sizes_are_not_expanded(monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_TILE", 4)  # which lets few queries be expanded
    q, cache, kv_b, step, group = make([40, 44], [168, 172], torch.float16, 2, [Group(np.array([0, 1]), 128)])
    group.block_table[1, :16] = group.block_table[0, :16]
    check(q, cache, kv_b[:, : NOPE + 9].contiguous(), step, group, 3e-3)


def test_prompts_with_a_common_prefix_gather_it_once():
    q, cache, kv_b, step, group = make([258, 260], [386, 388], heads=2, groups=[Group(np.array([0, 1]), 128)])
    group.block_table[1, :16] = group.block_table[0, :16]
    check(q, cache, kv_b, step, group, 1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "stored"), [(torch.float32, torch.float32), (torch.float16, torch.float8_e4m3fn)])
def test_queries_are_rotated_and_latents_written(interleaved, dtype, stored):
    batch = make_batch([3, 1], [20, 9], 1, 1, 8, 8)
    fused = torch.randn(4, HEADS * (NOPE + ROPE) + RANK + ROPE).to(dtype)
    table = torch.randn(30, ROPE)
    weight = torch.randn(RANK).to(dtype)
    results = []
    for run in (latent_attention.rotate_and_write_latent.reference, kernels.rotate_and_write_latent):
        q, latent = fused.clone().split([HEADS * (NOPE + ROPE), RANK + ROPE], -1)
        cache = torch.zeros(12, 8, RANK + ROPE, dtype=stored)
        q = run(
            q.unflatten(-1, (HEADS, -1)), latent, weight, 1e-6, batch.step.positions, table, interleaved, cache,
            batch.group.slot_mapping,
        )  # fmt: skip
        results.append((q.float(), cache.float()))
    for got, want in zip(*results, strict=True):
        # The interpreter cuts to 8 bits, and halves what rounds up to a power of two; on a device: tests/gpu.
        assert ((got - want).abs() <= (1e-5 if dtype == torch.float32 else want.abs() + 0.02)).all()
        assert (got - want).norm() / want.norm() < (1e-6 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("queries", [1, 4, 60])
def test_the_reference_is_attention_over_expanded_keys(queries):
    q, cache, kv_b, step, group = make([queries], [70], torch.float64)
    keys = cache[group.block_table[0].long()].flatten(0, 1)[:70]
    wide = torch.einsum("kr,hor->hko", keys[:, :RANK], kv_b)
    k = torch.cat([wide[..., :NOPE], keys[None, :, RANK:].expand(HEADS, -1, -1)], -1)
    scores = torch.einsum("qhd,hkd->hqk", q, k) * 0.2
    hidden = torch.ones(queries, 70, dtype=torch.bool).triu(70 - queries + 1)
    want = torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), wide[..., NOPE:])
    got = latent_attention.attend_latent.reference(q, cache, kv_b, NOPE, 0.2, step, group)
    assert (got - want).norm() / want.norm() < 1e-6
