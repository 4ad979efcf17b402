"""GGUF: rows of blocks of some type, which may differ from tensor to tensor. The loader calls them `gguf_{type}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import Format, Reader, Tensors, is_plain
from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_TYPES, check_blocks, read_blocks
from vllm.ops.quantized_weights import GroupedWeight, StoredRows, round_to_groups

LEAF = "gguf_"


class GgufReader(Reader):
    """One tensor of blocks; the name says of which type."""

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        return read_blocks(*self._rows(tensors, n), k)

    def stored(self, tensors: Tensors, n: int, k: int) -> StoredRows | None:
        if is_plain(tensors):
            return None
        kind, raw = self._rows(tensors, n)
        check_blocks(kind, raw, k)
        return StoredRows(kind, (raw,), torch.Size((n, k)), read_blocks)

    def _rows(self, tensors: Tensors, n: int) -> tuple[str, Tensor]:
        """The type of blocks and the rows."""
        if len(tensors) != 1:
            raise ValueError(f"expected one tensor, there are {', '.join(sorted(tensors))}")
        ((leaf, raw),) = tensors.items()
        if len(raw) != n:
            raise ValueError(f"the tensor has {len(raw)} rows, expected {n}")
        return leaf.removeprefix(LEAF), raw

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_groups(weight, 8, 32)


class Gguf(Format):
    """Every projection may be quantized; those that are not come as plain weights."""

    name = "gguf"
    by_tensor = True
    rows_apart = True
    leaves = tuple(LEAF + kind for kind in BLOCK_TYPES)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._reader = GgufReader()

    def reader(self, names: Sequence[str]) -> Reader | None:
        return self._reader

    def head_reader(self, names: Sequence[str]) -> Reader | None:
        return self.reader(names)
