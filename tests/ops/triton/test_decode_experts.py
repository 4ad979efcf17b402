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


@pytest.mark.parametrize("rounds", [0, 1, 2])  # tiles of a program that chooses, or none of these
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    ("hidden", "inter", "experts", "top_k", "shared"),
    [(72, 40, 5, 3, 0), (40, 16, 6, 2, 0), (64, 36, 8, 2, 50), (40, 16, 3, 3, 32)],
)
def test_experts_and_the_shared_one(hidden, inter, experts, top_k, shared, folded, rounds, monkeypatch):
    monkeypatch.setattr(kernels, "_RISE", (2, 32, 1))
    tiling = kernels.RiseTiling(2, 32, 1, rounds) if rounds else None
    monkeypatch.setattr(kernels, "_tiling_of_choosers", lambda *_: tiling)
    monkeypatch.setattr(kernels, "_CHOOSE_WARPS", 1)
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
        choice = kernels.Router(router, renormalize)
        kernels.rise(given, gate_up, up if shared else None, "silu", room, router=choice)
        weight = torch.randn(hidden)
        kernels.fall(down, back if shared else None, room, s, scale=0.5, next_weight=weight)
        weights, chosen = ops.route.reference(x @ router.T, top_k, renormalize)
        assert room.experts.tolist() == chosen[0].tolist()
        torch.testing.assert_close(room.weights, weights[0], rtol=1e-4, atol=1e-6)
        want = ops.expert_mlp.reference(x, weights, chosen, gate_up, down, "silu")
        if shared:
            gate, rise = (x @ up.T).chunk(2, -1)
            want = want + (F.silu(gate) * rise) @ back.T
        assert not room.keys.any()  # as before, for the next layer
        torch.testing.assert_close(s.h, before + 0.5 * want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(s.scaled, s.h * weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(s.squares.sum(), s.h.square().sum(), rtol=1e-5, atol=0)
        out = torch.empty(1, hidden)
        kernels.fall(down, back if shared else None, room, s, out)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("processors", "inter"), [(1, 24), (132, 24), (1, 32), (132, 32)])
def test_tiles_of_2048_inputs(processors, inter, monkeypatch):
    monkeypatch.setattr(kernels, "processors", lambda: processors)
    x, gate_up, router = torch.randn(1, 2048), torch.randn(3, 2 * inter, 2048) / 45, torch.randn(3, 2048)
    room = kernels.ChosenExperts.of(3, 2, 2 * inter, torch.float32, torch.device("cpu"))
    kernels.rise(x, gate_up, None, "silu", room, router=kernels.Router(router, True))
    _, chosen = ops.route.reference(x @ router.T, 2, True)
    assert room.experts.tolist() == chosen[0].tolist()
    gate, rise = (x @ gate_up[chosen[0]].mT).chunk(2, -1)
    torch.testing.assert_close(room.activated, (F.silu(gate) * rise).flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "inter", "programs", "registers"),
    [(8, 768, 256, None), (8, 1024, 256, None), (8, 1408, 704, None), (12, 768, 384, 80), (8, 512, 256, None),
     (2, 512, None, None), (8, 500, None, None)],
)  # fmt: skip
def test_programs_that_choose_are_all_under_way_at_once_or_many(groups, inter, programs, registers, monkeypatch):
    monkeypatch.setattr(kernels, "processors", lambda: 132)
    t = kernels._tiling_of_choosers(groups, inter, 2048)
    assert programs == (t and groups * inter // (t.outputs * t.rounds))
    assert registers == (t and t.registers)
    assert kernels._tiling_of_choosers(groups, inter, 1536) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_of_equal_experts_the_lowest_and_none_twice(dtype):
    room = kernels.ChosenExperts.of(6, 4, 8, dtype, torch.device("cpu"))

    def choose(logits: list[float], renormalize: bool) -> list[int]:
        kernels.choose_by_logits(torch.tensor([logits], dtype=dtype), room, renormalize)
        return room.experts.tolist()

    none, least = float("nan"), -float("inf")
    assert choose([1.0, 2.0, 1.0, 2.0, 1.0, 0.0], True) == [1, 3, 0, 2]
    assert room.weights.sum().item() == pytest.approx(1.0)
    assert choose([-0.5, -0.0, -2.0, 0.0, -0.25, 3.0], False) == [5, 1, 3, 4]
    assert choose([none, least, 1.0, none, -60000.0, 2.0], True) == [5, 2, 4, 1]
    assert room.weights.tolist()[3] == 0.0
    assert choose([none] * 6, False) == [0, 1, 2, 3]
    assert bool(room.weights.isnan().all())
