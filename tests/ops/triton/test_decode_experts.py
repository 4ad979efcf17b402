"""Experts of one row in Triton's interpreter against the torch references: odd sizes, ties, numbers that are none."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from vllm.ops import moe as ops
from vllm.ops.triton import decode_experts as kernels
from vllm.ops.triton.decode_linear import Folded, Stream


def stream(hidden: int) -> Stream:
    none = torch.zeros(1)
    room = torch.zeros(1, hidden), torch.zeros(1, kernels.fall_tiles(hidden))
    return Stream(1, hidden, torch.randn(1, hidden), *room, none, none, none, none, none)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    ("hidden", "inter", "experts", "top_k", "shared"),
    [(72, 40, 5, 3, 0), (40, 16, 6, 2, 0), (64, 36, 8, 2, 50), (40, 16, 3, 3, 32)],
)
def test_experts_and_the_shared_one(hidden, inter, experts, top_k, shared, folded, monkeypatch):
    monkeypatch.setattr(kernels, "_RISE", (2, 32, 1))
    monkeypatch.setattr(kernels, "_FALL", (4, 64, 1, 8))
    monkeypatch.setattr(kernels, "_FALL_WHOLE", (2, 64, 1, 8))
    s, x = stream(hidden), torch.randn(1, hidden)
    given: torch.Tensor | Folded = x
    if folded:  # the norm's weight is in the rows, its factor is not
        given = Folded(x, torch.tensor([[3.0, 2.0]]), 2, 1e-3)
        x = x * torch.rsqrt(torch.tensor(5.0 / hidden + 1e-3))
    router, gate_up = torch.randn(experts, hidden), torch.randn(experts, 2 * inter, hidden) / 8
    down = torch.randn(experts, hidden, inter) / 8
    up, back = torch.randn(2 * shared, hidden) / 8, torch.randn(hidden, shared) / 8
    room = kernels.ChosenExperts.of(experts, top_k, top_k * inter + shared, torch.float32, torch.device("cpu"))
    for renormalize in (True, False):
        before = s.h.clone()
        kernels.choose_experts(given, router, room, renormalize)
        kernels.rise(given, gate_up, up if shared else None, "silu", room)
        weight = torch.randn(hidden)
        kernels.fall(down, back if shared else None, room, s, scale=0.5, next_weight=weight)
        weights, chosen = ops.route.reference(x @ router.T, top_k, renormalize)
        assert room.experts.tolist() == chosen[0].tolist()
        assert room.logits.tolist() == [kernels.MISSING] * experts  # as before, for the next layer
        want = ops.expert_mlp.reference(x, weights, chosen, gate_up, down, "silu")
        if shared:
            gate, rise = (x @ up.T).chunk(2, -1)
            want = want + (F.silu(gate) * rise) @ back.T
        torch.testing.assert_close(s.h, before + 0.5 * want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(s.scaled, s.h * weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(s.squares.sum(), s.h.square().sum(), rtol=1e-5, atol=0)
        out = torch.empty(1, hidden)
        kernels.fall(down, back if shared else None, room, s, out)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("processors", [1, 132])
def test_tiles_of_2048_inputs(processors, monkeypatch):
    monkeypatch.setattr(kernels, "processors", lambda: processors)
    x, gate_up = torch.randn(1, 2048), torch.randn(3, 24, 2048) / 45
    room = kernels.ChosenExperts.of(3, 2, 24, torch.float32, torch.device("cpu"))
    room.experts.copy_(torch.tensor([2, 0]))
    kernels.rise(x, gate_up, None, "silu", room)
    gate, rise = (x @ gate_up[[2, 0]].mT).chunk(2, -1)
    torch.testing.assert_close(room.activated, (F.silu(gate) * rise).flatten(), rtol=1e-4, atol=1e-5)


def test_of_equal_experts_the_lowest_and_none_twice():
    room = kernels.ChosenExperts.of(6, 4, 8, torch.float32, torch.device("cpu"))
    kernels.choose_by_logits(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]]), room, True)
    assert room.experts.tolist() == [1, 3, 0, 2]
    assert room.weights.sum().item() == pytest.approx(1.0)
    kernels.choose_by_logits(torch.full((1, 6), float("nan")), room, False)
    assert sorted(room.experts.tolist()) == [0, 1, 2, 3] and bool(room.weights.isnan().all())
