"""Formats whose codes are indices of tables: SqueezeLLM (16 values for each output) and AQLM (sums of vectors)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import Format, Reader, Tensors, names_of, setting, take
from vllm.model_executor.layers.quantization.fp8 import FLOATS
from vllm.model_executor.layers.quantization.packing import unpack
from vllm.ops.quantized_weights import GroupedWeight


@dataclass(frozen=True)
class SqueezeReader(Reader):
    """`qweight` int32 [in / 8, out], packed along the inputs; `lookup_table` [out, 16]."""

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        if "rows" in tensors or "vals" in tensors:
            raise ValueError("the sparse part of a dense-and-sparse file is not supported")
        codes = unpack(take(tensors, "qweight", (k // 8, n), torch.int32), 4, 0).t().contiguous()
        table = take(tensors, "lookup_table", (n, 16), torch.float16, torch.bfloat16, torch.float32).float()
        return GroupedWeight(codes, torch.ones(n, 1), k, 4, table=table)


class SqueezeLlm(Format):
    """https://arxiv.org/abs/2306.07629, 4 bits."""

    name = "squeezellm"
    leaves = ("qweight", "lookup_table", "rows", "cols", "vals")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        setting(settings, "wbits bits", int, 4, among=(4,))

    def reader(self, names: Sequence[str]) -> Reader | None:
        return SqueezeReader()


@dataclass(frozen=True)
class AqlmReader(Reader):
    """`codes` [out / out_group, in / in_group, books]; `codebooks` [books, 2 ** bits, out_group, in_group]; `scales`
    [out / out_group, 1, 1, 1]: a group of weights is the sum of one vector of each book, times the scale."""

    in_group: int
    out_group: int
    books: int
    bits: int

    def read(self, tensors: Tensors, n: int, k: int) -> Tensor:
        ig, og, size = self.in_group, self.out_group, 2**self.bits
        if k % ig or n % og:
            raise ValueError(f"a weight of {n} x {k} is not made of groups of {og} x {ig}")
        codes = take(tensors, "codes", (n // og, k // ig, self.books), torch.int8, torch.int16, torch.uint8).long()
        books = take(tensors, "codebooks", (self.books, size, og, ig), *FLOATS).float()
        scales = take(tensors, "scales", (n // og, 1, 1, 1), *FLOATS).float()
        total = sum(books[i][codes[..., i] & (size - 1)] for i in range(self.books))
        assert isinstance(total, Tensor)
        # [out groups, in groups, og, ig] -> [out, in]
        return (total * scales).transpose(1, 2).reshape(n, k)

    def example(self, weight: Tensor) -> Tensor:
        return weight


class Aqlm(Format):
    """https://arxiv.org/abs/2401.06118."""

    name = "aqlm"
    leaves = ("codes", "codebooks", "scales")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._reader = AqlmReader(
            setting(settings, "in_group_size", int, 8, among=(1, 2, 4, 8, 16, 32)),
            setting(settings, "out_group_size", int, 1, among=(1, 2, 4, 8)),
            setting(settings, "num_codebooks", int, 1, among=tuple(range(1, 17))),
            setting(settings, "nbits_per_codebook", int, 16, among=tuple(range(1, 17))),
        )
        self._plain = {name.removesuffix(".weight") for name in names_of(settings, "linear_weights_not_to_quantize")}

    def reader(self, names: Sequence[str]) -> Reader | None:
        return self._reader if self._plain.isdisjoint(names) else None
