"""HQQ: codes with floating-point zero points for groups of the flattened weight, packed in halves far apart.

Layout (axis 1): the weight as rows of one group each, [out * in / group, group]; 4-bit codes of the first half of these
rows stand in the high half of the bytes of `W_q`, those of the second half in the low one (8 / bits parts likewise);
3-bit codes ten to an int32. Axis 0: groups are columns, [group, out * in / group], packed along the first axis too.
w = (code - zero) * scale.
"""

from __future__ import annotations

import math
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
    word_bits,
)
from vllm.ops.quantized_weights import GroupedWeight, round_to_groups

_PER_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}


@dataclass(frozen=True)
class HqqReader(Reader):
    """group: -1 for a row of the weight, or, on axis 0, a column."""

    bits: int
    group: int
    axis: int

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        group = self.group if self.group != -1 else k if self.axis == 1 else n
        if n * k % group:
            raise ValueError(f"a weight of {n} x {k} is not made of whole groups of {group}")
        count = n * k // group
        shape = (count, group) if self.axis == 1 else (group, count)
        codes = self._unpack(tensors, shape)
        scales, zeros = (self._numbers(tensors, leaf, count) for leaf in ("scale", "zero"))
        if self.axis == 0:
            spread_scales, spread_zeros = scales.expand(group, count), zeros.expand(group, count)
            each = [value.reshape(n, k) for value in (codes, spread_scales, spread_zeros)]
            return GroupedWeight(each[0], each[1].contiguous(), 1, word_bits(self.bits), offsets=-each[2] * each[1])
        inner = math.gcd(group, k)  # groups may go over the end of a row
        scales, zeros = (value.repeat_interleave(group // inner).view(n, -1) for value in (scales, zeros))
        return GroupedWeight(
            codes.reshape(n, k), scales.contiguous(), inner, word_bits(self.bits), offsets=-zeros * scales
        )

    def _unpack(self, tensors: Tensors, shape: tuple[int, int]) -> Tensor:
        packed, per = tensors.get("W_q"), _PER_WORD[self.bits]
        rows = -(-shape[0] // per)
        dtype = torch.int32 if self.bits == 3 else torch.uint8
        if packed is None or packed.dtype != dtype or tuple(packed.shape) != (rows, shape[1]):
            found = "missing" if packed is None else f"{packed.dtype} {list(packed.shape)}"
            raise ValueError(f"'W_q' is {found}, expected {dtype} {[rows, shape[1]]}")
        fields = [(packed >> self.bits * (per - 1 - i)) & (2**self.bits - 1) for i in range(per)]
        return torch.cat(fields)[: shape[0]].to(torch.uint8)

    def _numbers(self, tensors: Tensors, leaf: str, count: int) -> Tensor:
        values = tensors.get(leaf)
        if values is None or not values.is_floating_point() or values.numel() != count:
            raise ValueError(f"{leaf!r} is missing, or is not {count} floating-point numbers")
        return values.float().flatten()

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_groups(weight, word_bits(self.bits), self.group, symmetric=False)


class Hqq(Format):
    """One setting for all modules, or settings by the end of their names (`dynamic_config`)."""

    name = "hqq"
    leaves = ("W_q", "scale", "zero")
    ignored = (
        "nbits", "group_size", "shape", "axis", "packing", "channel_wise", "optimize", "round_zero", "view_as_float",
        "unpack_view_dtype", "quant_scale", "quant_zero", "compute_dtype", "encoded_state_dict", "stores_quant_config",
        "offload_meta",
    )  # fmt: skip

    def __init__(self, settings: Mapping[str, Any]) -> None:
        inner = setting(settings, "quant_config", dict, dict(settings))
        self._plain = names_of(settings, "skip_modules")
        by_name = setting(settings, "dynamic_config", dict, {}) or (
            inner if "weight_quant_params" not in inner else None
        )
        self._readers = {"": self._of(inner)} if by_name is None else {n: self._of(v) for n, v in by_name.items()}

    def _of(self, fields: Any) -> Reader:
        params = fields.get("weight_quant_params", fields) if isinstance(fields, Mapping) else None
        if not isinstance(params, Mapping):
            raise ValueError("The quantization config's `weight_quant_params` must be an object.")
        bits = setting(params, "nbits bits", int, 4, among=tuple(_PER_WORD))
        size = group_size(params, "group_size", -1 if "group_size" in params else 64)  # null: no groups
        return HqqReader(bits, size, setting(params, "axis", int, 1, among=(0, 1)))

    def reader(self, names: Sequence[str]) -> Reader | None:
        if any(plain in name.split(".") for plain in self._plain for name in names):
            return None
        return next((r for end, r in self._readers.items() if any(name.endswith(end) for name in names)), None)
