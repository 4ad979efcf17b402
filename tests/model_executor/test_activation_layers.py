"""Activation layers, as models from outside the tree use them, beside their formulas."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.distributed import TensorParallel, use_tensor_parallel
from vllm.model_executor.layers import activation as layers


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def oai(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=0.7), x[..., 1::2].clamp(-0.7, 0.7)
    return gate * torch.sigmoid(1.5 * gate) * (up + 1)


def sparse(x: Tensor) -> Tensor:
    gate, up = halves(x)
    cut = (
        gate.mean(-1, keepdim=True)
        + statistics.NormalDist().inv_cdf(0.7) * gate.var(-1, correction=0)[..., None].sqrt()
    )
    return F.gelu(torch.where(gate > cut, gate - cut, 0.0), approximate="tanh") * up


GATED: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
    "silu": (layers.SiluAndMul(), lambda x: F.silu(halves(x)[0]) * halves(x)[1]),
    "silu behind": (layers.MulAndSilu(), lambda x: halves(x)[0] * F.silu(halves(x)[1])),
    "gelu": (layers.GeluAndMul(), lambda x: F.gelu(halves(x)[0]) * halves(x)[1]),
    "gelu tanh": (layers.GeluAndMul("tanh"), lambda x: F.gelu(halves(x)[0], approximate="tanh") * halves(x)[1]),
    "fatrelu": (layers.FatreluAndMul(0.3), lambda x: torch.where(halves(x)[0] > 0.3, halves(x)[0], 0.0) * halves(x)[1]),
    "oai": (layers.SwigluOAIAndMul(alpha=1.5, limit=0.7), oai),
    "sparse": (layers.GeluAndMulSparse(0.7, "tanh"), sparse),
    "by name": (layers.get_act_and_mul_fn("relu"), lambda x: halves(x)[0].clamp(min=0) * halves(x)[1]),
}  # fmt: skip
PLAIN: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
    "relu2": (layers.ReLUSquaredActivation(), lambda x: x.clamp(min=0) ** 2),
    "quick": (layers.QuickGELU(), lambda x: x / (1 + torch.exp(-1.702 * x))),
    "new": (layers.NewGELU(), lambda x: F.gelu(x, approximate="tanh")),
    "fast": (layers.FastGELU(), lambda x: F.gelu(x, approximate="tanh")),
    "by name": (layers.get_act_fn("silu", quant_config=None), F.silu),
}


@pytest.mark.parametrize("kind", GATED)
def test_gated_activations(kind: str) -> None:
    layer, formula = GATED[kind]
    x = 2 * torch.randn(3, 5, 14)
    torch.testing.assert_close(layer(x), formula(x))
    assert layer(x).shape == (3, 5, 7)


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_activations(kind: str) -> None:
    layer, formula = PLAIN[kind]
    x = 2 * torch.randn(5, 9)
    torch.testing.assert_close(layer(x), formula(x))


def test_channels_are_divided_by_their_scales_on_every_rank() -> None:
    x, scales = torch.randn(4, 6), torch.rand(6) + 0.5
    parts = []
    for rank in range(2):
        with use_tensor_parallel(TensorParallel(rank, 2)):
            layer = layers.ScaledActivation(nn.GELU(), 6, params_dtype=torch.float32)
        layer.scales.weight_loader(layer.scales, scales)
        parts.append(layer(x[:, 3 * rank : 3 * rank + 3]))
    torch.testing.assert_close(torch.cat(parts, -1), F.gelu(x) / scales)


def test_wrong_settings_are_errors() -> None:
    with pytest.raises(ValueError, match="activation_sparsity must be between 0 and 1"):
        layers.GeluAndMulSparse(1.0)
    with pytest.raises(ValueError, match="'swooshr' is not supported"):
        layers.get_act_and_mul_fn("swooshr")
