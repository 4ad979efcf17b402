"""Formats without files of their own: plain weights rounded while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import Format, InFlight, Reader, group_size, setting
from vllm.ops.quantized_weights import GroupedWeight, round_to_groups


class ExpertsInt8(Format):
    """`experts_int8`: the experts' weights in 8 bits, each output with a scale."""

    name = "experts_int8"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._reader = InFlight(lambda weight: round_to_groups(weight, 8, -1))

    def reader(self, names: Sequence[str]) -> Reader | None:
        return None

    def experts_reader(self, names: Sequence[str]) -> Reader | None:
        return self._reader


class DeepSpeedFp(Format):
    """`deepspeedfp`: floats of 6 bits (e3m2) or 8 (e4m3) with a scale for groups of 512 weights."""

    name = "deepspeedfp"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        bits = setting(settings, "bits", int, 8, among=(6, 8))
        group = group_size(settings, "group_size", 512)
        self._reader = InFlight(lambda weight: round_to_floats(weight, bits, group))

    def reader(self, names: Sequence[str]) -> Reader | None:
        return self._reader


def round_to_floats(weight: Tensor, bits: int, group: int) -> GroupedWeight:
    """A weight [out, in] in small floats: e4m3 up to 448, or e3m2 up to 28, whose numbers e4m3 holds too."""
    n, k = weight.shape
    group = k if group == -1 else min(group, k)
    padded = torch.nn.functional.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    largest = padded.abs().amax(-1).clamp(min=1e-12)
    if bits == 8:
        scales = largest / 448
        codes = (padded / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return GroupedWeight(codes.view(n, -1)[:, :k].contiguous(), scales, group, 8)
    # two bits of mantissa, exponents from -2 to 4, multiples of 1/16 below 1/4
    scales = largest / 28
    values = padded / scales[..., None]
    exponents = values.abs().clamp(min=0.25).log2().floor().clamp(-2, 4)
    step = torch.exp2(exponents - 2)
    rounded = ((values / step).round() * step).clamp(-28, 28)
    codes = rounded.to(torch.float8_e4m3fn)
    return GroupedWeight(codes.view(n, -1)[:, :k].contiguous(), scales, group, 8)
