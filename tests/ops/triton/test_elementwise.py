"""Norm and activation kernels against the torch references."""

import pytest
import torch

from vllm.ops import activation as activation_ops
from vllm.ops import norm as norm_ops
from vllm.ops.triton import activation, norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [7, 64, 1500])
def test_norms_match_the_references(dim, dtype):
    x, w, b = torch.randn(5, dim).to(dtype), torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for weight in (w, None):
        torch.testing.assert_close(
            norm.rms_norm(x, weight, 1e-5, 1.0), norm_ops.rms_norm.reference(x, weight, 1e-5, 1.0), **close
        )
        torch.testing.assert_close(
            norm.layer_norm(x, weight, b, 1e-5), norm_ops.layer_norm.reference(x, weight, b, 1e-5), **close
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_residual_is_added_before_the_norm(dtype):
    x, r, w = (torch.randn(4, 48).to(dtype) for _ in range(3))
    want, total = norm_ops.add_rms_norm.reference(x, r, w[0], 1e-6)
    got, left = norm.add_rms_norm(x, r.clone(), w[0], 1e-6)
    assert torch.equal(left, total)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    want, total = norm_ops.add_layer_norm.reference(x, r, w[0], w[1], 1e-6)
    got, left = norm.add_layer_norm(x, r.clone(), w[0], w[1], 1e-6)
    assert torch.equal(left, total)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [48, 1500])
def test_a_branch_is_normalised_before_it_is_added(dim, dtype):
    y, r, first, second = torch.randn(5, dim), torch.randn(5, dim), torch.randn(dim), torch.randn(dim)
    y, r, first, second = (t.to(dtype) for t in (y, r, first, second))
    total = r + norm_ops.rms_norm.reference(y, first, 1e-6, 1.0)
    want = norm_ops.rms_norm.reference(total, second, 1e-6, 1.0)
    for add_branch in (norm.add_branch, norm_ops.add_branch.reference):
        got, left = add_branch(y, r.clone(), first, second, 1e-6, 1.0)
        torch.testing.assert_close(left, total, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_norm_of_heads_inside_a_fused_projection():
    fused = torch.randn(5, 9, 32)
    x, w = fused[:, 2:5], torch.randn(32)
    got = norm.rms_norm(x, w, 1e-6)
    assert got.is_contiguous()
    torch.testing.assert_close(got, norm_ops.rms_norm.reference(x, w, 1e-6))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activations_match_the_references(kind):
    x = torch.randn(3, 2, 1030) * 4
    torch.testing.assert_close(
        activation.activate(x, kind), activation_ops.activate.reference(x, kind), rtol=1e-4, atol=1e-5
    )
    got = activation.activate_gated(x, kind)
    torch.testing.assert_close(got, activation_ops.activate_gated.reference(x, kind), rtol=1e-4, atol=1e-5)
