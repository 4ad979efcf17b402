"""The head of a model that pools: dense layers over pooled states, in fp32 and whole on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.model_executor.layers.activation import activation_kind
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.sharding import REPLICATED, ShardedParameter
from vllm.model_executor.models.spec import Dense, PoolHead
from vllm.ops.activation import activate


class PoolDense(nn.Module):
    """One `Dense`. Pooled states are few: fp32 costs nothing, and scores keep all their digits."""

    def __init__(self, spec: Dense, inputs: int) -> None:
        super().__init__()
        self.act = spec.act if spec.act in (None, "tanh") else activation_kind(spec.act)
        self.weight = ShardedParameter.empty((spec.outputs, inputs), REPLICATED, 0, 1, torch.float32)
        self.bias = ShardedParameter.empty((spec.outputs,), REPLICATED, 0, 1, torch.float32) if spec.bias else None
        self.norm = None
        if spec.norm is not None:
            if spec.norm.kind != "layer":
                raise ValueError(f"A pooling head has layer norms only, got {spec.norm.kind!r}.")
            norm = spec.norm
            self.norm = LayerNorm(
                spec.outputs, norm.eps, has_weight=norm.weight, has_bias=norm.bias, dtype=torch.float32
            )

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, inputs] fp32 -> [rows, outputs] fp32."""
        x = F.linear(x, self.weight, self.bias)
        if self.act is not None:
            x = x.tanh() if self.act == "tanh" else activate(x, self.act)
        return x if self.norm is None else self.norm.norm(x)


class PoolLayers(nn.ModuleList):
    """The layers of a `PoolHead`; none leaves pooled states as they are."""

    def __init__(self, spec: PoolHead, hidden_size: int) -> None:
        widths = [hidden_size, *(layer.outputs for layer in spec.layers)]
        super().__init__(PoolDense(layer, width) for layer, width in zip(spec.layers, widths, strict=False))
        self.spec = spec

    def forward(self, states: Tensor) -> Tensor:
        """[rows, hidden] fp32 -> [rows, outputs] fp32."""
        for layer in self:
            states = layer(states)
        return states
