"""Latent attention on the device: DeepSeek-V2's and V3's sizes against the fp32 reference, and inside a CUDA graph."""

import numpy as np
import pytest
import torch

from tests.ops.triton.batches import make_batch
from vllm.ops import attention, latent_attention, moe
from vllm.step.inputs import GroupInputs

NOPE, ROPE, V, RANK = 128, 64, 128, 512
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def make(query_lens, seq_lens, heads, dtype, gathers):
    batch = make_batch(query_lens, seq_lens, heads, 1, RANK + ROPE, 16, dtype, device="cuda")
    cache = batch.cache[:, 0, 0].contiguous()
    q = torch.randn(sum(query_lens), heads, NOPE + ROPE, device="cuda").to(dtype)
    kv_b = (torch.randn(heads, NOPE + V, RANK, device="cuda") * RANK**-0.5).to(dtype)
    group = batch.group
    if gathers:
        found = attention.plan_gathering(np.array(query_lens), np.array(seq_lens))
        runs = attention.dense_runs(np.array(query_lens), np.array(seq_lens))
        pieces, requests = (torch.from_numpy(x).cuda() for x in (found.pieces, found.requests))
        group = GroupInputs(group.slot_mapping, group.block_table, found.on_device(pieces, requests, runs))
    return q, cache, kv_b, NOPE, 0.07, batch.step, group


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "gathers"),
    [
        ([1] * 5, [1, 17, 300, 4000, 33], False),
        ([1] * 300, [200] * 300, False),
        ([40, 1, 7], [400, 90, 7], False),
        ([1, 600, 2, 300, 1], [50, 1200, 9, 300, 700], True),
        ([1, 2048, 2048, 5], [50, 2048, 2048, 9], True),  # whole prompts, which a library takes
        ([1950], [1950], True),
    ],
)
def test_attention_matches_the_reference(query_lens, seq_lens, gathers, heads, dtype):
    q, cache, kv_b, nope, scale, step, group = make(query_lens, seq_lens, heads, dtype, gathers)
    got = latent_attention.attend_latent(q, cache, kv_b, nope, scale, step, group)
    clean = cache.float().nan_to_num()
    want = latent_attention.attend_latent.reference(q.float(), clean, kv_b.float(), nope, scale, step, group)
    assert not torch.isnan(got).any()
    assert ((got.float() - want).norm() / want.norm()).item() < TOLERANCE[dtype]
    again = latent_attention.attend_latent(q, cache, kv_b, nope, scale, step, group)
    assert torch.equal(again, got), "twice the same"


def test_a_graph_follows_its_inputs():
    inputs = make([1] * 9, [700] * 9, 16, torch.bfloat16, False)
    latent_attention.attend_latent(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = latent_attention.attend_latent(*inputs)
    for seed in range(3):
        torch.manual_seed(seed)
        inputs[0].normal_()
        graph.replay()
        assert torch.equal(out, latent_attention.attend_latent(*inputs))


def test_rotation_and_write_match_the_reference():
    batch = make_batch([3, 1], [20, 9], 1, 1, 8, 16, device="cuda")
    fused = torch.randn(4, 16 * (NOPE + ROPE) + RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    table, weight = torch.randn(30, ROPE, device="cuda"), torch.randn(RANK, device="cuda", dtype=torch.bfloat16)
    results = []
    for run in (latent_attention.rotate_and_write_latent.reference, latent_attention.rotate_and_write_latent):
        q, latent = fused.clone().split([16 * (NOPE + ROPE), RANK + ROPE], -1)
        cache = torch.zeros(12, 16, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
        args = (weight, 1e-6, batch.step.positions, table, True, cache, batch.group.slot_mapping)
        results.append((run(q.unflatten(-1, (16, -1)), latent, *args), cache))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "choice",
    [
        moe.Choice(6, renormalize=False),
        moe.Choice(8, "sigmoid", scale=2.5, groups=8, top_groups=4, group_best=2),
        moe.Choice(6, renormalize=False, scale=16.0, groups=8, top_groups=3),
    ],
)
def test_routing_by_score_matches_the_reference(choice):
    logits, bias = torch.randn(200, 160, device="cuda"), torch.randn(160, device="cuda")
    got, want = (f(logits, bias, choice) for f in (moe.route_by_score, moe.route_by_score.reference))
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])
