"""Rotation fused with norm and cache write against the torch reference."""

import pytest
import torch

from vllm.ops import rotary as ops
from vllm.ops.triton import rotary as kernels


def table(rotary_dim, positions=64):
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(rotary_dim // 2) / (rotary_dim / 2))
    return torch.cat([angle.cos(), angle.sin()], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 12), (80, 32)])
def test_rotation_matches_the_reference(head_dim, rotary_dim, interleaved):
    x, positions = torch.randn(5, 3, head_dim), torch.randint(0, 64, (5,))
    want = ops.rotate.reference(x.clone(), positions, table(rotary_dim), interleaved)
    torch.testing.assert_close(kernels.rotate(x, positions, table(rotary_dim), interleaved), want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", ["none", "each", "joint"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 12), (40, 40)])
def test_rotate_and_write_matches_the_reference(head_dim, rotary_dim, norm, interleaved):
    heads, kv_heads, block = 6, 3, 8
    qkv = torch.randn(5, (heads + 2 * kv_heads) * head_dim)
    positions, slots = torch.randint(0, 64, (5,)), torch.tensor([9, 8, 33, 20, 16])
    weights = None
    if norm != "none":
        sizes = (heads * head_dim, kv_heads * head_dim) if norm == "joint" else (head_dim, head_dim)
        weights = ops.QKNorm(*(torch.randn(n) for n in sizes), 1e-5, 1.0, joint=norm == "joint")
    caches = [torch.full((5, 2, kv_heads, block, head_dim), 3.0) for _ in range(2)]
    q = [
        f(qkv.clone(), heads, positions, table(rotary_dim), interleaved, cache, slots, qk_norm=weights)
        for f, cache in zip((kernels.rotate_and_write_kv, ops.rotate_and_write_kv.reference), caches, strict=True)
    ]
    for ours, reference in zip(*((found[0], *found[1]) for found in q), strict=True):
        torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(caches[0], caches[1])


def test_float8_cache_is_scaled_and_saturates():
    # numbers of the format itself and no rotation: the interpreter rounds others wrongly
    qkv = (torch.randn(4, 4 * 16) * 40).to(torch.float8_e4m3fn).float()
    qkv[1, 2 * 16], qkv[2, 3 * 16] = 5000.0, -5000.0
    positions, slots = torch.zeros(4, dtype=torch.int64), torch.arange(8, 12)
    cache = torch.zeros(3, 2, 1, 8, 16, dtype=torch.float8_e4m3fn)
    kernels.rotate_and_write_kv(qkv.clone(), 2, positions, table(16), False, cache, slots, 0.5, 2.0)
    k, v = qkv.view(4, 4, 16)[:, 2:].unbind(1)
    assert torch.equal(cache[1, 0, 0, :4].float(), (k * 2).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert torch.equal(cache[1, 1, 0, :4].float(), (v / 2).clamp(-448, 448))
