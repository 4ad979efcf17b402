"""AWQ: 4-bit codes with scales and zero points for groups of inputs, in the layouts of AutoAWQ and llm-awq.

gemm: `qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8], eight columns to a word in a fixed order;
`scales` [groups, out].   gemv: `qweight` int32 [out, in / 8], `qzeros` int32 [out, padded groups / 8], `scales`
[out, padded groups].   gemv_fast: int16 tiles, and zeros as -scale * zero.   w = scale * (code - zero).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import (
    Format,
    Reader,
    Tensors,
    group_size,
    names_of,
    setting,
    take,
)
from vllm.model_executor.layers.quantization.packing import unpack
from vllm.ops.quantized_weights import GroupedWeight, round_to_groups

# The nibble of a word that holds each of its eight columns.
NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class AwqReader(Reader):
    """group: -1 for one of all inputs.   version: "gemm", "gemv" or "gemv_fast"."""

    group: int
    version: str

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        group = k if self.group == -1 else self.group
        if n % 8 or k % 8 or k % group:
            raise ValueError(f"a weight of {n} x {k} cannot be stored by AWQ with groups of {group} inputs")
        layouts = {"gemm": self._gemm, "gemv": self._gemv, "gemv_fast": self._gemv_fast}
        codes, scales, offsets = layouts[self.version](tensors, n, k, group)
        return GroupedWeight(codes.contiguous(), scales.contiguous(), group, 4, offsets=offsets.contiguous())

    def _gemm(self, tensors: Tensors, n: int, k: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
        codes = _columns(take(tensors, "qweight", (k, n // 8), torch.int32)).t()
        zeros = _columns(take(tensors, "qzeros", (k // group, n // 8), torch.int32)).t()
        scales = take(tensors, "scales", (k // group, n), *_FLOATS).t().float()
        return codes, scales, -zeros.float() * scales

    def _gemv(self, tensors: Tensors, n: int, k: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
        groups, words = k // group, _padded_words(k, group)
        codes = unpack(take(tensors, "qweight", (n, k // 8), torch.int32), 4, 1)
        zeros = unpack(take(tensors, "qzeros", (n, words), torch.int32), 4, 1)[:, :groups]
        scales = take(tensors, "scales", (n, 8 * words), *_FLOATS)[:, :groups].float()
        return codes, scales, -zeros.float() * scales

    def _gemv_fast(self, tensors: Tensors, n: int, k: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
        groups, words = k // group, _padded_words(k, group)
        if k % 64 or n % 4:
            raise ValueError(f"a weight of {n} x {k} cannot be in AWQ's gemv_fast layout")
        packed = take(tensors, "qweight", (n // 4, k), torch.int16).int()
        codes = torch.stack([(packed >> 4 * i) & 15 for i in range(4)], -1).to(torch.uint8)
        # four rows interleaved for each 64 inputs -> [out, in]
        codes = codes.view(n // 4, k // 64, 4, 64).transpose(1, 2).reshape(n, k // 8, 8)
        codes = codes[..., list(NIBBLE_OF_COLUMN)].reshape(n, k // 32, 4, 4, 2).transpose(2, 3).reshape(n, k)
        scales = take(tensors, "scales", (8 * words, n), *_FLOATS)[:groups].t().float()
        return codes, scales, take(tensors, "qzeros", (8 * words, n), *_FLOATS)[:groups].t().float()

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_groups(weight, 4, self.group, symmetric=False)


def _columns(words: Tensor) -> Tensor:
    """int32 [rows, columns / 8] -> codes [rows, columns]."""
    found: Tensor = unpack(words, 4, 1).unflatten(1, (-1, 8))[..., list(NIBBLE_OF_COLUMN)].flatten(1)
    return found


def _padded_words(k: int, group: int) -> int:
    """Words of zero points for each output in the gemv layouts."""
    multiple = {64: 2, 32: 4}.get(group, 1)
    words = -(-(k // group) // 8)
    return -(-words // multiple) * multiple


class Awq(Format):
    """Also what `awq_marlin` and `moe_wna16` read."""

    name = "awq"
    leaves = ("qweight", "qzeros", "scales")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        setting(settings, "bits w_bit", int, 4, among=(4,))
        version = setting(settings, "version", str, "gemm").lower()
        readable = {"gemm": "gemm", "exllama": "gemm", "ipex": "gemm", "gemv": "gemv", "gemv_fast": "gemv_fast"}
        if version not in readable:
            raise ValueError(f"AWQ files of version {version!r} are not supported, expected {', '.join(readable)}.")
        self._reader = AwqReader(group_size(settings, "group_size q_group_size", 128), readable[version])
        self._plain = names_of(settings, "modules_to_not_convert")
        self._quantizes_head = setting(settings, "lm_head", bool, False)

    def reader(self, names: Sequence[str]) -> Reader | None:
        return None if any(plain in name for plain in self._plain for name in names) else self._reader

    def head_reader(self, names: Sequence[str]) -> Reader | None:
        return self.reader(names) if self._quantizes_head else None
