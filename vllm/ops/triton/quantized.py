"""`ops/quantized.py` on CUDA: products of few rows with the packed weight, of many with the weight as numbers, or with
rounded inputs where a format wants that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from vllm.ops.linear import linear
from vllm.ops.quantized import pack_experts, pack_quantized, quantized_linear
from vllm.ops.quantized_weights import GroupedWeight
from vllm.ops.triton import packed_experts
from vllm.ops.triton.activation import KINDS
from vllm.ops.triton.decode_linear import DTYPES, STORE, Product, Stream, Tiling, choose_float8_tiling, run_product
from vllm.ops.triton.decode_parts import has_warp_roles
from vllm.ops.triton.float8 import Float8Weight, float8_weight, rounded_product
from vllm.ops.triton.packed_linear import PackedWords, dequantize, packed_product, packs, wide_packed_product

__all__ = ["PackedWords", "dequantize", "many_rows", "multiply", "pack"]

_FEW_ROWS = 64  # of the kernels that read each weight once
_MANY_ROWS = 256  # beyond it, multiplying takes so long that writing the weight as numbers first does not matter


def pack(weight: GroupedWeight, dtype: torch.dtype) -> Any:
    """Integer codes and 8-bit floats stay as they are where kernels take them; everything else becomes numbers."""
    if weight.codes.dtype == torch.uint8 and packs(weight):
        return PackedWords(weight)
    kept = float8_weight(weight) if dtype in DTYPES else None
    return pack_quantized.reference(weight, dtype) if kept is None else kept


def multiply(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`quantized_linear` on CUDA."""
    if type(weight) is Float8Weight:
        return _float8_product(x, weight, bias, x.dtype if out_dtype is None else out_dtype)
    if type(weight) is not PackedWords:
        out: Tensor = linear(x, weight.weight, bias, out_dtype)
        return out
    n, k = weight.shape
    flat = x.reshape(-1, k)
    flat = flat.contiguous() if weight.order is None else flat.index_select(1, weight.order)
    dtype = x.dtype if out_dtype is None else out_dtype
    if len(flat) > _FEW_ROWS:
        return many_rows(flat, weight, bias, dtype).view(*x.shape[:-1], n)
    return packed_product(flat, weight, bias, dtype).view(*x.shape[:-1], n)


def _float8_product(x: Tensor, weight: Float8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    n, k = weight.shape
    flat = x.reshape(-1, k)
    if len(flat) > _FEW_ROWS or flat.stride(1) != 1:
        out = many_rows(flat, weight, bias, dtype)
    else:
        out = torch.empty(len(flat), n, dtype=dtype, device=x.device)
        if len(flat):
            # one cut for all small batches: a row's sums do not depend on its company
            tiling = choose_float8_tiling(_FEW_ROWS, n, k, STORE)
            run_product(Product(weight, bias, STORE, tiling), _stream(tiling, flat, n), flat.contiguous(), out)
    return out.view(*x.shape[:-1], n)


def many_rows(
    x: Tensor, weight: PackedWords | Float8Weight, bias: Tensor | None, dtype: torch.dtype,
    arrived: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """x [rows, in] @ weight.T + bias for more rows than the kernels for packed weights take.

    arrived: as for `packed_many.many_rows_product`.   pdl: start while the kernel in front still runs, if possible.
    """
    if isinstance(weight, Float8Weight) and weight.inputs is not None:
        return rounded_product(x, weight, bias, dtype)
    if isinstance(weight, PackedWords) and len(x) <= _MANY_ROWS:
        if bias is None and _multiplies_many(x, weight):
            from vllm.ops.triton.packed_many import many_rows_product

            return many_rows_product(x, weight, dtype, arrived=arrived, pdl=pdl)
        return wide_packed_product(x, weight, bias, dtype)
    numbers = weight.numbers(x.dtype) if isinstance(weight, Float8Weight) else dequantize(weight, x.dtype)
    out: Tensor = linear(x, numbers, bias, dtype)
    return out


def _multiplies_many(x: Tensor, weight: PackedWords) -> bool:
    """Whether `packed_many` does, whose language not every Triton has."""
    if not has_warp_roles():
        return False
    from vllm.ops.triton import packed_many

    return packed_many.takes(weight, x.dtype)


def gated_rows(x: Tensor, weight: Any, act: str, out: Tensor, pdl: bool = False) -> bool:
    """out = act(x @ gate.T) * (x @ up.T), the weight's halves, in one kernel; False where there is none for that."""
    if type(weight) is not PackedWords or len(x) > _MANY_ROWS or act not in KINDS or weight.shape[0] % 128:
        return False
    if not _multiplies_many(x, weight):
        return False
    from vllm.ops.triton.packed_many import many_rows_product

    many_rows_product(x, weight, x.dtype, act=act, out=out, pdl=pdl)
    return True


def _stream(t: Tiling, x: Tensor, outputs: int) -> Stream:
    """As much of a stream as a product alone needs."""
    part = t.split * max(16, triton.next_power_of_2(len(x))) * outputs if t.split > 1 else 1
    sums = torch.empty(part, dtype=torch.float32, device=x.device)
    arrived = torch.zeros(-(-outputs // t.rows), dtype=torch.int32, device=x.device)
    return Stream(len(x), 1, x, x, sums, sums, arrived, sums, arrived, sums)


def register(device_type: str) -> None:
    """Put the kernels on the ops."""
    pack_quantized.register(device_type, pack)
    pack_experts.register(device_type, packed_experts.pack_experts)
    quantized_linear.register(device_type, multiply)
