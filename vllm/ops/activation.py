"""Activations of the feed-forward layers, plain and gated."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from vllm.ops.registry import op

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


FATRELU = "fatrelu "  # and a number: what is above it is left, all else is 0


def _function(kind: str) -> Callable[[Tensor], Tensor]:
    if kind.startswith(FATRELU):
        threshold = float(kind.removeprefix(FATRELU))
        return lambda x: F.threshold(x, threshold, 0.0)
    return _ACTIVATIONS[kind]


@op
def activate(x: Tensor, kind: str) -> Tensor:
    """Elementwise `kind`: silu | gelu | gelu_tanh | quick_gelu | relu | relu2 | fatrelu NUMBER. x: [..., dim]."""
    return _function(kind)(x)


@op
def activate_gated(x: Tensor, kind: str, limit: float | None = None) -> Tensor:
    """activate(gate) * up, where x = [gate | up] along the last dimension. x: [..., 2 * dim] -> [..., dim].

    limit: gate is at most that and up within it on either side, and 1 is added to up (gpt-oss, Phi-3-small).
    """
    gate, up = x.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    return _function(kind)(gate) * up
