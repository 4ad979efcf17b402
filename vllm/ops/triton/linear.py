"""Dense products on a GPU: cuBLAS, with fp32 out of it where fp32 is wanted. And what they are on "meta" tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.ops import embedding as embedding_ops
from vllm.ops import linear as ops


def linear(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`vllm.ops.linear.linear` for CUDA; sums leave the product unrounded when fp32 is asked for."""
    if out_dtype is not torch.float32 or x.dtype == torch.float32 or x.dim() != 2 or not isinstance(weight, Tensor):
        return ops.linear.reference(x, weight, bias, out_dtype)
    out = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return out if bias is None else out + bias


def shape_only(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """The result's shape and dtype, for "meta" tensors; torch's own way there imports sympy, which takes seconds."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


def embedding_shape_only(token_ids: Tensor, weight: Any) -> Tensor:
    """`vllm.ops.embedding.embedding` for "meta" tensors."""
    return weight.new_empty((*token_ids.shape, weight.shape[1]))


def register(device_type: str) -> None:
    if device_type == "meta":
        ops.linear.register(device_type, shape_only)
        embedding_ops.embedding.register(device_type, embedding_shape_only)
    else:
        ops.linear.register(device_type, linear)
