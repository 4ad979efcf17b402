"""Latent attention of decode steps in Triton's interpreter against the torch references, over odd sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm.ops import latent_attention as ops
from vllm.ops.triton import decode_latent as kernels
from vllm.step.inputs import GroupInputs, StepInputs

BLOCK = 16


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "nope", "rope", "v", "rank", "splits"),
    [(3, 20, 8, 12, 24, 4), (18, 16, 16, 32, 72, 1), (16, 32, 4, 16, 64, 8)],
)
def test_attention_of_rows_and_padding(heads, nope, rope, v, rank, splits, interleaved, monkeypatch):
    monkeypatch.setattr(kernels, "_TILE", 16)
    lengths, slots, order = [70, 1, 33], torch.tensor([2, 0, -1, 3]).int(), [0, 1, 3]
    rng = torch.Generator().manual_seed(0)
    table = torch.zeros(5, 5, dtype=torch.int32)
    table[torch.tensor([2, 0, 3])] = 1 + torch.randperm(15, generator=rng).view(3, 5).int()
    cache = torch.randn(20, BLOCK, rank + rope, generator=rng)
    twin = cache.clone()
    x = torch.randn(4, heads * (nope + rope) + rank + rope, generator=rng)
    angles = torch.rand(80, rope // 2, generator=rng) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([69, 0, 0, 32]).int()
    weights = torch.randn(heads, nope + v, rank, generator=rng) / 8, torch.rand(rank, generator=rng)
    layer = kernels.LatentDecode(heads, nope, 0.3, cache, *weights, 1e-5, cos_sin, interleaved, 0)
    out = torch.full((4, heads * v), float("nan"))
    kernels.decode_latent(x, out, layer, kernels.LatentRows.of(layer, slots, positions, [table], splits))

    at, rows = positions[order].long(), slots[order].long()
    home = table[rows, at // BLOCK].long() * BLOCK + at % BLOCK
    starts, lens = np.arange(4, dtype=np.int32), np.array(lengths, np.int32)
    group = GroupInputs(home, table[rows])
    step = StepInputs.of(
        at, at, torch.from_numpy(starts), torch.from_numpy(lens), (group,), host_query_starts=starts, host_seq_lens=lens
    )
    q, latent = x[order].split([heads * (nope + rope), rank + rope], -1)
    q = ops.rotate_and_write_latent.reference(
        q.unflatten(-1, (heads, -1)), latent, weights[1], 1e-5, at, cos_sin, interleaved, twin, home
    )
    want = ops.attend_latent.reference(q, twin, weights[0], nope, 0.3, step, group)
    torch.testing.assert_close(cache, twin, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[order], want.flatten(1), rtol=1e-4, atol=1e-5)
