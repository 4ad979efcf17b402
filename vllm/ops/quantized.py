"""Products with quantized weights: packing for a device, the product, and what both mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.ops.linear import linear, pack_weight
from vllm.ops.quantized_weights import GroupedWeight
from vllm.ops.registry import op

__all__ = ["DenseWeight", "GroupedWeight", "pack_quantized", "quantized_linear"]


class DenseWeight:
    """A weight that no kernel of its device takes as it is: numbers again. `weight`: as `linear` takes it."""

    __slots__ = ("num_bytes", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.num_bytes = weight.numel() * weight.element_size()
        self.weight = pack_weight(weight)


@op
def pack_quantized(weight: GroupedWeight, dtype: torch.dtype) -> Any:
    """Repack a weight for `quantized_linear` with inputs of `dtype`, once at load. The original may be freed."""
    return DenseWeight(weight.dequantize(dtype))


@op
def quantized_linear(
    x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x @ weight.T + bias. x: [..., in]; weight: what `pack_quantized` returned; bias: [out]; out_dtype: as there."""
    out: Tensor = linear(x, weight.weight, bias, out_dtype)
    return out
