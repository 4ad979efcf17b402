"""FusedMoE, as models from outside the tree use it, beside a loop over experts in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vllm.distributed import TensorParallel, use_tensor_parallel
from vllm.model_executor.layers.fused_moe import FusedMoE, SharedFusedMoE, fused_moe, fused_topk, grouped_topk

EXPERTS, TOP, HIDDEN, INNER = 6, 2, 20, 14


def by_loop(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, logits: Tensor, renormalize: bool, allowed: Tensor
) -> Tensor:
    rows = []
    for row, scores, mask in zip(x, logits.softmax(-1), allowed, strict=True):
        chosen = scores.masked_fill(~mask, 0).topk(TOP)
        weights = chosen.values / chosen.values.sum() if renormalize else chosen.values
        rows.append(
            sum(
                w * (down[e] @ (F.silu(gate[e] @ row) * (up[e] @ row)))
                for w, e in zip(weights, chosen.indices, strict=True)
            )
        )
    return torch.stack(rows)


@pytest.fixture
def weights() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(EXPERTS, INNER, HIDDEN, generator=generator) for _ in range(2))
    return gate, up, torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)


def filled(weights: tuple[Tensor, Tensor, Tensor], **options: object) -> FusedMoE:
    """A layer filled as a model's load_weights does it."""
    layer = FusedMoE(EXPERTS, TOP, HIDDEN, INNER, params_dtype=torch.float32, **options)  # type: ignore[arg-type]
    checkpoint = {
        f"model.layers.0.mlp.experts.{e}.{name}.weight": tensor[e]
        for name, tensor in zip(("gate_proj", "up_proj", "down_proj"), weights, strict=True)
        for e in range(EXPERTS)
    }
    parameters = {f"model.layers.0.mlp.experts.{name}": p for name, p in layer.named_parameters()}
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", EXPERTS)
    for name, tensor in checkpoint.items():
        param_part, weight_part, expert, shard = next(entry for entry in mapping if entry[1] in name)
        parameter = parameters[name.replace(weight_part, param_part)]
        parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)  # type: ignore[attr-defined]
    return layer


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_layer_computes_what_a_loop_does(renormalize: bool, grouped: bool, weights: tuple[Tensor, ...]) -> None:
    x, logits = torch.randn(9, HIDDEN), torch.randn(9, EXPERTS)
    allowed = torch.ones(9, EXPERTS, dtype=torch.bool)
    if grouped:  # of 3 groups of 2 the best two, by their best expert
        best = logits.softmax(-1).view(9, 3, 2).amax(-1).topk(2).indices
        allowed = torch.zeros(9, 3, dtype=torch.bool).scatter_(1, best, True).repeat_interleave(2, 1)
    options = {"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 2} if grouped else {}
    layer = filled(weights, renormalize=renormalize, **options)  # type: ignore[arg-type]
    expected = by_loop(x, *weights, logits, renormalize, allowed)
    torch.testing.assert_close(layer(x, logits), expected, rtol=1e-4, atol=1e-4)
    w13, w2 = torch.cat(weights[:2], 1), weights[2]
    again = x.clone()
    fused_moe(again, w13, w2, logits, TOP, renormalize, inplace=True, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


def test_ranks_parts_add_up(weights: tuple[Tensor, ...]) -> None:
    x, logits = torch.randn(5, HIDDEN), torch.randn(5, EXPERTS)
    parts = []
    for rank in range(2):
        with use_tensor_parallel(TensorParallel(rank, 2)):
            parts.append(filled(weights)(x, logits))  # type: ignore[arg-type]
    torch.testing.assert_close(sum(parts), filled(weights)(x, logits), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


def test_choices_are_int32_and_wrong_settings_are_errors() -> None:
    logits = torch.randn(3, EXPERTS)
    for ids in (fused_topk(logits, logits, TOP, True)[1], grouped_topk(logits, logits, TOP, True, 3, 1)[1]):
        assert ids.dtype == torch.int32 and ids.shape == (3, TOP)
    with pytest.raises(ValueError, match="needs num_expert_group and topk_group"):
        FusedMoE(EXPERTS, TOP, HIDDEN, INNER, use_grouped_topk=True)
    with pytest.raises(ValueError, match="quant_config must be None"):
        FusedMoE(EXPERTS, TOP, HIDDEN, INNER, quant_config=object())
    with pytest.raises(ValueError, match="tp_size=4, but 1 ranks"):
        FusedMoE(EXPERTS, TOP, HIDDEN, INNER, tp_size=4)


def by_choice(x: Tensor, weights: Tensor, chosen: Tensor, parts: tuple[Tensor, ...], biases: list[Tensor]) -> Tensor:
    """Expert by expert, each with biases."""
    (gate, up, down), (gate_bias, up_bias, down_bias) = parts, biases
    return torch.stack(
        [
            sum(
                w * (down[e] @ (F.gelu(gate[e] @ row + gate_bias[e]) * (up[e] @ row + up_bias[e])) + down_bias[e])
                for w, e in zip(ws, es, strict=True)
            )
            for row, ws, es in zip(x, weights, chosen, strict=True)
        ]
    )


def test_biases_another_activation_and_scores_with_a_correction(weights: tuple[Tensor, ...]) -> None:
    x, logits, correction = torch.randn(7, HIDDEN), torch.randn(7, EXPERTS), torch.randn(EXPERTS)
    biases = [torch.randn(EXPERTS, INNER), torch.randn(EXPERTS, INNER), torch.randn(EXPERTS, HIDDEN)]
    options = {
        "use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1, "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5, "e_score_correction_bias": correction, "activation": "gelu", "has_bias": True,
    }  # fmt: skip
    scores = logits.sigmoid()
    ranked = (scores + correction).view(7, 2, 3)
    best = ranked.topk(2).values.sum(-1).argmax(-1)  # a group is as good as its best two
    inside = ranked[torch.arange(7), best].topk(TOP).indices + 3 * best[:, None]
    kept = scores.gather(-1, inside)
    expected = by_choice(x, 2.5 * kept / kept.sum(-1, keepdim=True), inside, weights, biases)
    found = []
    for world in (1, 2):
        parts = []
        for rank in range(world):
            with use_tensor_parallel(TensorParallel(rank, world)):
                layer = filled(weights, **options)
                for shard, bias in zip(("w1", "w3", "w2"), biases, strict=True):
                    parameter = layer.w2_bias if shard == "w2" else layer.w13_bias
                    for e in range(EXPERTS):
                        assert layer.weight_loader(parameter, bias[e], "bias", shard, e, return_success=True)
                parts.append(layer(x, logits))
        found.append(sum(parts))
    for out in found:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_a_model_may_choose_experts_itself_and_weigh_what_they_get(weights: tuple[Tensor, ...]) -> None:
    """As Llama 4 does: one expert, whose input the sigmoid of its logit multiplies."""
    x, logits = torch.randn(5, HIDDEN), torch.randn(5, EXPERTS)

    def choose(hidden: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        best = logits.topk(top_k)
        return best.values.sigmoid(), best.indices

    layer = filled(weights, custom_routing_function=choose, apply_router_weight_on_input=True)
    layer.top_k = 1
    gate, up, down = weights
    chosen = logits.argmax(-1)
    rows = x * logits.max(-1, keepdim=True).values.sigmoid()
    want = [down[e] @ (F.silu(gate[e] @ row) * (up[e] @ row)) for row, e in zip(rows, chosen, strict=True)]
    torch.testing.assert_close(layer(x, logits), torch.stack(want), rtol=1e-4, atol=1e-4)
    layer.top_k = 2
    with pytest.raises(ValueError, match="for one expert per token"):
        layer(x, logits)
    sigmoid, ids = fused_topk(x, logits, TOP, False, "sigmoid")
    torch.testing.assert_close(sigmoid, logits.sigmoid().gather(-1, ids.long()))
    with pytest.raises(ValueError, match="scoring_func must be"):
        fused_topk(x, logits, TOP, False, "relu")


def test_shared_experts_stand_beside(weights: tuple[Tensor, ...]) -> None:
    x, gate, shared = torch.randn(5, HIDDEN), torch.nn.Linear(HIDDEN, EXPERTS), torch.nn.Linear(HIDDEN, HIDDEN)
    sizes = {"num_experts": EXPERTS, "top_k": TOP, "hidden_size": HIDDEN, "intermediate_size": INNER}
    layer = SharedFusedMoE(shared, gate=gate, params_dtype=torch.float32, use_overlapped=True, **sizes)
    layer.load_state_dict(filled(weights).state_dict())
    with torch.no_grad():
        beside, routed = layer(x, torch.empty(0))
        assert torch.equal(beside, shared(x))
        torch.testing.assert_close(routed, filled(weights)(x, gate(x)))
    named = {"ckpt_gate_proj_name": "g", "ckpt_down_proj_name": "d", "ckpt_up_proj_name": "u", "num_experts": 2}
    mapping = FusedMoE.make_expert_params_mapping(layer, **named)
    assert (
        mapping == FusedMoE.make_expert_params_mapping("g", "d", "u", 2) == FusedMoE.make_expert_params_mapping(**named)
    )
    assert mapping[0] == ("experts.w13_", "experts.0.g.", 0, "w1") and len(mapping) == 6
