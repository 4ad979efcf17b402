"""Products with quantized weights: packing for a device, the product, and what both mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.ops.linear import linear, pack_weight
from vllm.ops.quantized_weights import GroupedWeight, StoredRows, grouped
from vllm.ops.registry import op

__all__ = [
    "DenseWeight", "GroupedWeight", "StoredRows", "pack_experts", "pack_quantized", "packs_experts", "packs_stored",
    "quantized_linear",
]  # fmt: skip


class DenseWeight:
    """A weight that no kernel of its device takes as it is: numbers again. `weight`: as `linear` takes it."""

    __slots__ = ("num_bytes", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.num_bytes = weight.numel() * weight.element_size()
        self.weight = pack_weight(weight)


@op
def pack_quantized(weight: GroupedWeight | StoredRows, dtype: torch.dtype) -> Any:
    """Repack a weight for `quantized_linear` with inputs of `dtype`, once at load. The original may be freed."""
    return DenseWeight(grouped(weight).dequantize(dtype))


@op
def packs_stored(weight: StoredRows, dtype: torch.dtype) -> bool:
    """Whether `pack_quantized` takes a weight as its file stores it; asked of the device that packs it."""
    return False


@op
def pack_experts(weights: Sequence[GroupedWeight | Tensor], device: torch.device, dtype: torch.dtype) -> Any:
    """The weights [out, in] of all experts as one object on `device`, which `moe.expert_mlp` takes with inputs of
    `dtype` (numbers, where no kernel takes them as they are).
    """
    return torch.stack([(w if isinstance(w, Tensor) else w.dequantize(dtype)).to(device, dtype) for w in weights])


def packs_experts(device: torch.device) -> bool:
    """Whether a device multiplies all experts at once; else each by itself."""
    return pack_experts.kernel(device.type) is not pack_experts.reference


@op
def quantized_linear(
    x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x @ weight.T + bias. x: [..., in]; weight: what `pack_quantized` returned; bias: [out]; out_dtype: as there."""
    out: Tensor = linear(x, weight.weight, bias, out_dtype)
    return out
