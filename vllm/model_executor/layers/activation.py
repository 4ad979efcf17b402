"""Activation layers, plain and gated."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor, nn

from vllm.distributed import current_tensor_parallel
from vllm.model_executor.layers.sharding import REPLICATED, Part, ShardedParameter, ShardSpec
from vllm.ops.activation import FATRELU, activate, activate_gated

# Hugging Face's names -> ours (vllm.ops.activation)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}


def activation_kind(hf_name: str) -> str:
    """Our name of a Hugging Face activation; "fatrelu" has its threshold behind it. Raises ValueError for an unknown
    one.
    """
    if hf_name.startswith(FATRELU):
        return hf_name
    try:
        return ACTIVATIONS[hf_name]
    except KeyError:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"Activation function {hf_name!r} is not supported. Expected one of {known}.") from None


class Activation(nn.Module):
    """An elementwise activation by Hugging Face's name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.kind = activation_kind(name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = activate(x, self.kind)
        return out


def get_act_fn(act_fn_name: str, *_: object, **__: object) -> nn.Module:
    """The activation layer called `act_fn_name`. Further arguments, about quantized activations, change nothing."""
    return Activation(act_fn_name)


def get_act_and_mul_fn(act_fn_name: str) -> nn.Module:
    """The gated activation layer: act(gate) * up, for x = [gate | up]."""
    return ActivationAndMul(act_fn_name)


class ActivationAndMul(nn.Module):
    """act(gate) * up, for x = [gate | up], by Hugging Face's name. [..., 2 * dim] -> [..., dim]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.kind = activation_kind(name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = activate_gated(x, self.kind)
        return out


class MulAndSilu(nn.Module):
    """up * silu(gate), for x = [up | gate]."""

    def forward(self, x: Tensor) -> Tensor:
        up, gate = x.chunk(2, -1)
        out: Tensor = up * activate(gate, "silu")
        return out


class FatreluAndMul(nn.Module):
    """gate * up where gate is above a threshold, else 0, for x = [gate | up]."""

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.threshold(gate, self.threshold, 0.0) * up


class SwigluOAIAndMul(nn.Module):
    """gate * sigmoid(alpha gate) * (up + 1), gate at most `limit` and up within it, for x = [gate, up, gate, ...]."""

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
        return gate * (gate * self.alpha).sigmoid() * (up + 1)


class GeluAndMulSparse(nn.Module):
    """gelu(gate) * up, where of gate only the part above a floor is left, for x = [gate | up]. The floor is so many
    deviations above the mean that a normal distribution has its share `activation_sparsity` below it.
    """

    def __init__(self, activation_sparsity: float, approximate: str = "none") -> None:
        super().__init__()
        if not 0.0 < activation_sparsity < 1.0:
            raise ValueError(f"activation_sparsity must be between 0 and 1, got {activation_sparsity}.")
        self.kind = GeluAndMul(approximate).kind
        self.deviations = statistics.NormalDist().inv_cdf(activation_sparsity)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        floor = gate.mean(-1, keepdim=True) + self.deviations * gate.std(-1, keepdim=True, unbiased=False)
        out: Tensor = activate((gate - floor).relu(), self.kind) * up
        return out


class ReLUSquaredActivation(Activation):
    """relu(x) squared."""

    def __init__(self) -> None:
        super().__init__("relu2")


class ScaledActivation(nn.Module):
    """An activation divided by a learned scale for each of this rank's channels."""

    def __init__(
        self,
        act_module: nn.Module,
        intermediate_size: int,
        input_is_parallel: bool = True,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        tp = current_tensor_parallel()
        self.act = act_module
        spec = ShardSpec(0, (Part(intermediate_size, intermediate_size),)) if input_is_parallel else REPLICATED
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.scales = ShardedParameter.empty((intermediate_size,), spec, tp.rank, tp.world, dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(x) / self.scales
        return out


class SiluAndMul(nn.Module):
    """silu(gate) * up, for x = [gate | up]. [..., 2 * dim] -> [..., dim]."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = activate_gated(x, "silu")
        return out


class GeluAndMul(nn.Module):
    """gelu(gate) * up, for x = [gate | up]. approximate: "none" (erf) or "tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f'GeluAndMul: approximate is {approximate!r}, expected "none" or "tanh".')
        self.kind = "gelu" if approximate == "none" else "gelu_tanh"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = activate_gated(x, self.kind)
        return out


class NewGELU(Activation):
    """GELU by its tanh approximation."""

    def __init__(self) -> None:
        super().__init__("gelu_new")


class FastGELU(Activation):
    """GELU by its tanh approximation, factored differently; equal up to rounding."""

    def __init__(self) -> None:
        super().__init__("gelu_fast")


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.702 * x).sigmoid()
