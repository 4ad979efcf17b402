"""Linear layers through oneDNN on weights repacked once: what plain torch offers without the native library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.ops.embedding import embedding, pack_table
from vllm.ops.linear import linear, pack_weight


class OneDnnWeight:
    """A [out, in] weight in oneDNN's own blocked layout. `shape` and `dtype` are those of the original.

    table: the original, for those that are also looked up.
    """

    # Small batches gain most from packing; larger ones run on the same layout at full speed.
    _TYPICAL_ROWS = 32

    def __init__(self, weight: Tensor, table: Tensor | None = None) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        self.table = table
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._TYPICAL_ROWS)


def _multiplies(dtype: torch.dtype) -> bool:
    # bf16: only where the processor has AVX-512, and an error elsewhere.   fp16: on most machines not at all.
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def _gains(weight: Tensor) -> bool:
    # oneDNN costs some 15 us a call: small weights stay as they are.
    return weight.dim() == 2 and weight.numel() >= 1 << 18 and _multiplies(weight.dtype)


def _pack(weight: Tensor) -> Any:
    return OneDnnWeight(weight) if _gains(weight) else weight


def _pack_table(table: Tensor) -> Any:
    return OneDnnWeight(table, table.clone()) if _gains(table) else table  # the original may be a view of a file


def _embedding(ids: Tensor, table: Any) -> Tensor:
    return embedding.reference(ids, table.table if isinstance(table, OneDnnWeight) else table)


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    if not isinstance(weight, OneDnnWeight):
        return linear.reference(x, weight, bias, out_dtype)
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=out_dtype)
    out = torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")
    return out if out_dtype is None else out.to(out_dtype)


def register() -> None:
    """Use oneDNN for linear layers on the CPU, if this torch was built with it."""
    if torch.backends.mkldnn.is_available():
        pack_weight.register("cpu", _pack)
        pack_table.register("cpu", _pack_table)
        linear.register("cpu", _linear)
        embedding.register("cpu", _embedding)
