"""The native library's kernel of LoRA adapters, and the description of a layer's matrices that it reads."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from vllm.ops import lora as ops
from vllm.ops.cpu.library import DTYPE_CODES, LORA_PARTS, LoraArguments
from vllm.ops.lora import LowRank
from vllm.step.inputs import RowView


def lay_out_b(b: Tensor) -> Tensor:
    """`vllm.ops.lora.lay_out_b`: the outputs of one rank lie one behind the other."""
    return b.transpose(1, 2).contiguous().transpose(1, 2)


def covers(matrices: LowRank) -> bool:
    """Whether the kernel can read a layer's matrices."""
    a, b = matrices.a, matrices.b
    laid_out = a.is_contiguous() and b.transpose(1, 2).is_contiguous()
    return laid_out and a.dtype == b.dtype and a.dtype in DTYPE_CODES and len(matrices.parts) <= LORA_PARTS


def describe(matrices: LowRank) -> LoraArguments:
    """The fields that say what a layer's matrices are; rows are still open."""
    a, b, parts = matrices.a, matrices.b, matrices.parts
    described = LoraArguments(
        a=a.data_ptr(), b=b.data_ptr(), ranks=matrices.ranks.data_ptr(), inputs=a.shape[2], outputs=b.shape[1],
        rank=b.shape[2], parts=len(parts),
    )  # fmt: skip
    for i, (first, count) in enumerate(parts):
        described.starts[i], described.counts[i] = first, count
    return described


class NativeLora:
    """`vllm.ops.lora.add_lora` by one build of the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add = library.vllm_add_lora

    def add_lora(self, out: Tensor, x: Tensor, matrices: LowRank, rows: RowView) -> None:
        dtype = matrices.a.dtype
        types_fit = x.dtype == dtype and out.dtype in (dtype, torch.float32)
        if not (covers(matrices) and types_fit and x.stride(1) == 1 and out.stride(1) == 1):
            ops.add_lora.reference(out, x, matrices, rows)
            return
        call = describe(matrices)
        call.out, call.x, call.adapters = out.data_ptr(), x.data_ptr(), rows.adapters.data_ptr()
        call.rows, call.x_stride, call.out_stride = len(x), x.stride(0), out.stride(0)
        if self._add(ctypes.byref(call), DTYPE_CODES[dtype], DTYPE_CODES[out.dtype]):
            raise MemoryError("add_lora: no memory for what lies between the two products")
