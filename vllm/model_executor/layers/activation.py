"""Activation layers, plain and gated."""

from __future__ import annotations

from torch import Tensor, nn

from vllm.ops.activation import activate, activate_gated

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
    """Our name of a Hugging Face activation. Raises ValueError for an unknown one."""
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


def get_act_fn(act_fn_name: str, *_: object) -> nn.Module:
    """The activation layer called `act_fn_name`."""
    return Activation(act_fn_name)


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
