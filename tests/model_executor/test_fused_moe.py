"""FusedMoE, as models from outside the tree use it, beside a loop over experts in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vllm.distributed import TensorParallel, use_tensor_parallel
from vllm.model_executor.layers.fused_moe import FusedMoE, fused_moe, fused_topk, grouped_topk

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
