"""Normalisation layers, alone or fused with the residual addition before them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.sharding import REPLICATED, ShardedParameter
from vllm.ops.norm import add_branch, add_layer_norm, add_rms_norm, layer_norm, rms_norm


def _parameter(size: int, dtype: torch.dtype | None, fill: float) -> ShardedParameter:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return ShardedParameter(torch.full((size,), fill, dtype=dtype), (size,), REPLICATED, 0, 1)


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset). With `residual`: (norm(x + residual), x + residual).

    `offset` is 1 for models that store weight - 1 (Gemma).
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.variance_epsilon, self.offset = hidden_size, eps, offset
        self.weight = _parameter(hidden_size, dtype, 1.0 - offset) if has_weight else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.norm(x)
        return self.add_norm(x, residual)

    def norm(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size]."""
        out: Tensor = rms_norm(x, self.weight, self.variance_epsilon, self.offset)
        return out

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); both arguments may be overwritten."""
        out: tuple[Tensor, Tensor] = add_rms_norm(x, residual, self.weight, self.variance_epsilon, self.offset)
        return out

    def add_branch(self, y: Tensor, residual: Tensor, after: RMSNorm) -> tuple[Tensor, Tensor]:
        """(after(total), total) of total = residual + self(y); both tensors may be overwritten. after: of the same
        size, epsilon and offset.
        """
        out: tuple[Tensor, Tensor] = add_branch(
            y, residual, self.weight, after.weight, self.variance_epsilon, self.offset
        )
        return out

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


class GemmaRMSNorm(RMSNorm):
    """RMSNorm whose stored weight is the factor minus 1."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps, offset=1.0)


class LayerNorm(nn.Module):
    """(x - mean) / std * (weight + offset) + bias. With `residual`: (norm(x + residual), x + residual)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        offset: float = 0.0,
        has_weight: bool = True,
        has_bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.variance_epsilon, self.offset = hidden_size, eps, offset
        self.weight = _parameter(hidden_size, dtype, 1.0 - offset) if has_weight else None
        self.bias = _parameter(hidden_size, dtype, 0.0) if has_bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.norm(x)
        return self.add_norm(x, residual)

    def norm(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size]."""
        out: Tensor = layer_norm(x, self.weight, self.bias, self.variance_epsilon, self.offset)
        return out

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); both arguments may be overwritten."""
        out: tuple[Tensor, Tensor] = add_layer_norm(
            x, residual, self.weight, self.bias, self.variance_epsilon, self.offset
        )
        return out

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"
