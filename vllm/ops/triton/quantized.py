"""`ops/quantized.py` on CUDA: products of few rows with the packed weight, of many with the weight as numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.ops.linear import linear
from vllm.ops.quantized import pack_quantized, quantized_linear
from vllm.ops.quantized_weights import GroupedWeight
from vllm.ops.triton.packed_linear import PackedWords, dequantize, packed_product, packs

__all__ = ["PackedWords", "dequantize", "multiply", "pack"]

_FEW_ROWS = 64  # beyond it, multiplying takes longer than writing the weight as numbers


def pack(weight: GroupedWeight, dtype: torch.dtype) -> Any:
    """Integer codes that the kernels take stay packed; everything else becomes numbers. So does float8, though kernels
    know it: batches of more rows than they take would write it as numbers in every step, twice the bytes of a dense
    weight, while of 4 bits less is read otherwise.
    """
    integers = weight.codes.dtype == torch.uint8
    return PackedWords(weight) if integers and packs(weight) else pack_quantized.reference(weight, dtype)


def multiply(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`quantized_linear` on CUDA."""
    if type(weight) is not PackedWords:
        out: Tensor = linear(x, weight.weight, bias, out_dtype)
        return out
    n, k = weight.shape
    flat = x.reshape(-1, k)
    flat = flat.contiguous() if weight.order is None else flat.index_select(1, weight.order)
    dtype = x.dtype if out_dtype is None else out_dtype
    if len(flat) > _FEW_ROWS:
        wide: Tensor = linear(flat, dequantize(weight, x.dtype), bias, dtype)
        return wide.view(*x.shape[:-1], n)
    return packed_product(flat, weight, bias, dtype).view(*x.shape[:-1], n)


def register(device_type: str) -> None:
    """Put the kernels on the ops."""
    pack_quantized.register(device_type, pack)
    quantized_linear.register(device_type, multiply)
