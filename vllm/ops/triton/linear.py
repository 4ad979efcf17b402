"""Dense products on a GPU: cuBLAS, with fp32 out of it where fp32 is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.ops import linear as ops


def linear(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`vllm.ops.linear.linear` for CUDA; sums leave the product unrounded when fp32 is asked for."""
    if out_dtype is not torch.float32 or x.dtype == torch.float32 or x.dim() != 2 or not isinstance(weight, Tensor):
        return ops.linear.reference(x, weight, bias, out_dtype)
    out = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return out if bias is None else out + bias


def register(device_type: str) -> None:
    ops.linear.register(device_type, linear)
