"""Experts of 4 and 8 bits in Triton's interpreter, against the torch reference on their numbers."""

from __future__ import annotations

import pytest
import torch

from vllm.ops import moe as ops
from vllm.ops.quantized_weights import round_to_fp8, round_to_groups
from vllm.ops.triton import decode_experts, moe, packed_experts
from vllm.ops.triton.decode_linear import Folded, Stream
from vllm.ops.triton.packed_experts import PackedStack, _gather_kernel, pack_experts, tile_rows

CPU = torch.device("cpu")
KINDS = {
    "int4": lambda w: round_to_groups(w, 4, 32),
    "int4 with zeros": lambda w: round_to_groups(w, 4, 64, symmetric=False),
    "int8": lambda w: round_to_groups(w, 8, -1),
    "fp8": lambda w: round_to_fp8(w, "channel"),
}


def stack(kind: str, experts: int, n: int, k: int) -> tuple[PackedStack, torch.Tensor]:
    """Packed weights, and their numbers."""
    rounded = [KINDS[kind](torch.randn(n, k) / k**0.5) for _ in range(experts)]
    packed = pack_experts(rounded, CPU, torch.float32)
    assert isinstance(packed, PackedStack) and packed.shape == (experts, n, k)
    numbers = torch.stack([weight.dequantize() for weight in rounded])
    torch.testing.assert_close(packed.numbers(), numbers, rtol=2e-3, atol=1e-5)
    return packed, numbers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "hidden", "inter", "experts", "top_k"), [(3, 128, 96, 5, 2), (40, 160, 64, 3, 2)])
def test_experts_match_the_reference(tokens, hidden, inter, experts, top_k, kind):
    gate_up, gate_up_numbers = stack(kind, experts, 2 * inter, hidden)
    down, down_numbers = stack(kind, experts, hidden, inter)
    x, logits = torch.randn(tokens, hidden), torch.randn(tokens, experts)
    weights, chosen = ops.route.reference(logits, top_k, True)
    want = ops.expert_mlp.reference(x, weights, chosen, gate_up_numbers, down_numbers, "silu")
    torch.testing.assert_close(moe.expert_mlp(x, weights, chosen, gate_up, down, "silu"), want, rtol=1e-3, atol=1e-4)
    y, weights, home = moe.routed_mlp(x, logits, gate_up, down, top_k, True, "silu")
    torch.testing.assert_close(moe.sum_chosen(y, weights, home), want, rtol=1e-3, atol=1e-4)
    assert torch.allclose(ops.expert_mlp.reference(x, weights, chosen, gate_up, down, "silu"), want, 1e-3, 1e-4)


@pytest.mark.parametrize("tokens", [1, 40])
def test_choices_of_other_ranks_add_nothing(tokens):
    gate_up, gate_up_numbers = stack("int4", 3, 64, 96)
    down, down_numbers = stack("int4", 3, 96, 32)
    x, weights, chosen = torch.randn(tokens, 96), torch.rand(tokens, 2), torch.randint(4, (tokens, 2))
    weights[chosen == 3] = 0.0
    want = ops.expert_mlp.reference(x, weights, chosen, gate_up_numbers, down_numbers, "silu")
    torch.testing.assert_close(moe.expert_mlp(x, weights, chosen, gate_up, down, "silu"), want, rtol=1e-3, atol=1e-4)


def test_very_many_rows_are_multiplied_by_numbers():
    gate_up, gate_up_numbers = stack("int4", 2, 64, 32)
    down, down_numbers = stack("int4", 2, 32, 32)
    chosen = [tile_rows(pairs, gate_up, down, torch.float32) for pairs in (1, 32, 33, 64, 65, 512, 513)]
    assert chosen == [16, 16, 32, 32, 64, 64, 0]
    x, chosen = torch.randn(600, 32), torch.randint(2, (600, 1))
    weights = torch.rand(600, 1)
    want = ops.expert_mlp.reference(x, weights, chosen, gate_up_numbers, down_numbers, "silu")
    torch.testing.assert_close(moe.expert_mlp(x, weights, chosen, gate_up, down, "silu"), want, rtol=1e-3, atol=1e-4)


def test_tiles_where_rows_are_put_in_order(monkeypatch):
    gate_up, down = stack("int4", 2, 64, 32)[0], stack("int4", 2, 32, 32)[0]
    monkeypatch.setattr(packed_experts, "_takes_ordered", lambda *_: True)
    chosen = [tile_rows(2 * each, gate_up, down, torch.bfloat16) for each in (1, 14, 15, 36, 37, 72, 73, 768, 769)]
    assert chosen == [16, 16, 32, 32, 64, 64, 128, 128, 0]


def test_rows_in_sorted_order():
    x, chosen = torch.randn(20, 70), torch.randint(4, (20, 2))  # choices of expert 3 are another rank's
    s, out = moe.sort_pairs(chosen, 3, 16), torch.zeros(40, 70)
    _gather_kernel[(40, 3)](x, s.order, s.tiles, out, s.most, K=70, TOP_K=2, BLOCK=32, PDL=False)
    pairs = torch.cat([(chosen.flatten() == expert).nonzero()[:, 0] for expert in range(3)])
    assert torch.equal(out[: len(pairs)], x[pairs // 2]) and not out[len(pairs) :].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("hidden", "inter", "experts", "top_k", "folded"),
    [(96, 64, 5, 3, False), (96, 64, 5, 3, True), (64, 1024, 3, 2, True)],
)
def test_one_row_of_a_decode_step(hidden, inter, experts, top_k, kind, folded):
    gate_up, gate_up_numbers = stack(kind, experts, 2 * inter, hidden)
    down, down_numbers = stack(kind, experts, hidden, inter)
    none = torch.zeros(1)
    s = Stream(1, hidden, torch.randn(1, hidden), torch.zeros(1, hidden), torch.zeros(1, hidden), *(none,) * 5)
    given, router = torch.randn(1, hidden), torch.randn(experts, hidden)
    x = given
    if folded:  # the norm's weight is in the rows, its factor is not
        given = Folded(x, torch.tensor([[3.0, 2.0]]), 2, 1e-3)
        x = x * torch.rsqrt(torch.tensor(5.0 / hidden + 1e-3))
    room = decode_experts.ChosenExperts.of(experts, top_k, top_k * inter, torch.float32, CPU, down)
    decode_experts.rise(given, gate_up, None, "silu", room, router=decode_experts.Router(router, True))
    before, weight = s.h.clone(), torch.randn(hidden)
    tiles = decode_experts.fall(down, None, room, s, scale=0.5, next_weight=weight)
    weights, chosen = ops.route.reference(x @ router.T, top_k, True)
    want = ops.expert_mlp.reference(x, weights, chosen, gate_up_numbers, down_numbers, "silu")
    torch.testing.assert_close(s.h, before + 0.5 * want, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(s.scaled, s.h * weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(s.squares[0, :tiles].sum(), s.h.square().sum(), rtol=1e-5, atol=0)
    out = torch.empty(1, hidden)
    decode_experts.fall(down, None, room, s, out)
    torch.testing.assert_close(out, want, rtol=2e-3, atol=1e-4)
    assert room.shares is not None and not room.shares[1].any()


def test_unlike_experts_become_numbers():
    plain = torch.randn(32, 64)
    for odd in (plain, round_to_groups(plain, 4, 64), round_to_groups(plain, 8, 32)):
        rounded = round_to_groups(plain, 4, 32)
        got = pack_experts([rounded, odd], CPU, torch.float32)
        want = [w if isinstance(w, torch.Tensor) else w.dequantize() for w in (rounded, odd)]
        assert isinstance(got, torch.Tensor) and torch.equal(got, torch.stack(want))
