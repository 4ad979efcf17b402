"""Mixture of experts against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm.ops.moe import expert_mlp, route


def by_token(x, weights, experts, gate_up, down, act):  # type: ignore[no-untyped-def]
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], experts[t], strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            out[t] += weight * (down[e] @ (act(gate) * up))
    return out


@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
@pytest.mark.parametrize(("hidden", "inter", "experts", "top_k"), [(8, 12, 5, 2), (7, 11, 3, 3), (16, 4, 9, 1)])
def test_experts_equal_a_loop_over_tokens(tokens, hidden, inter, experts, top_k):  # type: ignore[no-untyped-def]
    torch.manual_seed(tokens * 100 + hidden)
    x = torch.randn(tokens, hidden)
    gate_up, down = torch.randn(experts, 2 * inter, hidden), torch.randn(experts, hidden, inter)
    weights, chosen = route(torch.randn(tokens, experts), top_k, True)
    for name, act in (("silu", F.silu), ("gelu", F.gelu)):
        expected = by_token(x, weights, chosen, gate_up, down, act)
        torch.testing.assert_close(
            expert_mlp.reference(x, weights, chosen, gate_up, down, name), expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_takes_the_largest_of_the_softmax(renormalize: bool) -> None:
    logits = torch.randn(17, 6)
    weights, experts = route(logits, 3, renormalize)
    for row, chosen, weight in zip(logits, experts, weights, strict=True):
        probabilities = row.exp() / row.exp().sum()
        best = sorted(range(6), key=lambda e: -probabilities[e])[:3]
        assert chosen.tolist() == best
        scale = probabilities[best].sum() if renormalize else 1.0
        torch.testing.assert_close(weight, probabilities[best] / scale)


def test_bfloat16_experts_add_up_in_fp32() -> None:
    torch.manual_seed(0)
    x, gate_up, down = (torch.randn(*shape).bfloat16() for shape in ((20, 16), (4, 24, 16), (4, 16, 12)))
    weights, chosen = route(torch.randn(20, 4), 2, True)
    expected = by_token(x.float(), weights, chosen, gate_up.float(), down.float(), F.silu)
    out = expert_mlp(x, weights, chosen, gate_up, down, "silu")
    assert out.dtype == torch.bfloat16
    assert ((out.float() - expected).norm() / expected.norm()) < 0.01
