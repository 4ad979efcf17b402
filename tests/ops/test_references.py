"""The torch references against float64 loops."""

from __future__ import annotations

import pytest
import torch

from tests.ops import brute_force
from vllm.ops.activation import activate, activate_gated
from vllm.ops.attention import AttentionParams, attend, copy_blocks, write_kv
from vllm.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from vllm.ops.rotary import rotate, rotate_and_write_kv

BATCHES = [
    ([1], [1]),
    ([5], [5]),
    ([1, 1, 1], [7, 33, 1]),
    ([3, 1, 17, 1, 0, 2], [40, 9, 17, 64, 6, 2]),
]


@pytest.mark.parametrize("query_lens,seq_lens", BATCHES)
@pytest.mark.parametrize("window", [None, 1, 10])
@pytest.mark.parametrize(
    "softcap,alibi,known", [(None, False, None), (5.0, False, None), (None, True, None), (None, True, 9)]
)
def test_attend_agrees_with_a_loop(query_lens, seq_lens, window, softcap, alibi, known):
    heads, kv_heads, head_dim = 6, 2, 12
    kv_cache, step, group = brute_force.mixed_batch(query_lens, seq_lens, kv_heads, head_dim, 4, torch.float32)
    q = torch.randn(sum(query_lens), heads, head_dim)
    slopes = torch.rand(heads) if alibi else None
    params = AttentionParams(0.3, window, softcap, slopes, k_scale=0.5, v_scale=2.0, alibi_known=known)
    got = attend.reference(q, kv_cache, params, step, group)
    torch.testing.assert_close(got.double(), brute_force.attend(q, kv_cache, params, step, group), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 12])
def test_rotate_and_write_turns_pairs_and_stores_them(interleaved, rotary_dim):
    heads, kv_heads, head_dim = 4, 2, 12
    kv_cache, step, group = brute_force.mixed_batch([3, 1], [9, 4], kv_heads, head_dim, 4, torch.float32)
    angles = torch.rand(16, rotary_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * head_dim)
    q, k, v = qkv.view(4, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    expected_q = brute_force.rotate(q, step.positions, cos_sin, interleaved)
    expected_k = brute_force.rotate(k, step.positions, cos_sin, interleaved)
    got, (own_k, own_v) = rotate_and_write_kv.reference(
        qkv.clone(), heads, step.positions, cos_sin, interleaved, kv_cache, group.slot_mapping
    )
    torch.testing.assert_close(got.double(), expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own_k.double(), expected_k, rtol=1e-5, atol=1e-5)
    assert torch.equal(own_v, v)
    torch.testing.assert_close(
        rotate.reference(k, step.positions, cos_sin, interleaved).double(), expected_k, rtol=1e-5, atol=1e-5
    )
    for t, slot in enumerate(group.slot_mapping.tolist()):
        torch.testing.assert_close(kv_cache[slot // 4, 0, :, slot % 4].double(), expected_k[t], rtol=1e-5, atol=1e-5)
        assert torch.equal(kv_cache[slot // 4, 1, :, slot % 4], v[t])


def test_write_kv_touches_only_its_slots():
    kv_cache = torch.zeros(4, 2, 2, 3, 5)
    k, v = torch.randn(2, 2, 5), torch.randn(2, 2, 5)
    write_kv.reference(k, v, kv_cache, torch.tensor([4, 11]))
    assert torch.equal(kv_cache[1, 0, :, 1], k[0]) and torch.equal(kv_cache[3, 1, :, 2], v[1])
    assert int((kv_cache != 0).sum()) == k.numel() + v.numel()


def test_copy_blocks_copies_keys_and_values():
    kv_cache = torch.randn(5, 2, 2, 3, 4)
    before = kv_cache.clone()
    copy_blocks.reference(kv_cache, torch.tensor([1, 3]), torch.tensor([2, 4]))
    assert torch.equal(kv_cache[2], before[1]) and torch.equal(kv_cache[4], before[3])
    assert torch.equal(kv_cache[:2], before[:2])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activations_follow_their_formulas(kind):
    x = torch.randn(3, 14) * 4
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(
        activate.reference(x, kind).double(), brute_force.activation(x, kind), rtol=1e-5, atol=1e-5
    )
    expected = brute_force.activation(gate, kind) * up.double()
    torch.testing.assert_close(activate_gated.reference(x, kind).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_follow_their_formulas(offset):
    x, residual, weight, bias = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24), torch.randn(24)
    total = (x + residual).double()
    rms = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + offset).double()
    centred = total - total.mean(-1, keepdim=True)
    layer = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + offset).double() + bias.double()
    got_rms, got_sum = add_rms_norm.reference(x, residual, weight, 1e-5, offset)
    torch.testing.assert_close(got_rms.double(), rms, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_sum, x + residual)
    torch.testing.assert_close(
        rms_norm.reference(x + residual, weight, 1e-5, offset).double(), rms, rtol=1e-5, atol=1e-5
    )
    got_layer, got_sum = add_layer_norm.reference(x, residual, weight, bias, 1e-5, offset)
    torch.testing.assert_close(got_layer.double(), layer, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_sum, x + residual)
    torch.testing.assert_close(
        layer_norm.reference(x + residual, weight, bias, 1e-5, offset).double(), layer, rtol=1e-5, atol=1e-5
    )
