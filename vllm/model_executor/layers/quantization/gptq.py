"""GPTQ: integer codes of 2, 3, 4 or 8 bits with scales and zero points for groups of inputs, which may be in any order.

Layout (AutoGPTQ, GPTQModel): `qweight` int32 [in * bits / 32, out], packed along the inputs; `qzeros` int32
[groups, out * bits / 32], packed along the outputs; `scales` [groups, out]; `g_idx` int32 [in], each input's group.
w = scale * (code - zero). Files of the first version store zero - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import (
    Format,
    Pattern,
    Patterns,
    Reader,
    Tensors,
    by_index,
    group_size,
    setting,
    take,
    word_bits,
)
from vllm.model_executor.layers.quantization.marlin import MarlinReader
from vllm.model_executor.layers.quantization.packing import unpack
from vllm.ops.quantized_weights import GroupedWeight, round_to_groups

BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GptqReader(Reader):
    """group: -1 for one of all inputs.   symmetric: None if the settings do not say.   added_to_zero: to a stored zero
    point.   act_order: inputs' groups are in `g_idx`, whatever their places."""

    bits: int
    group: int
    symmetric: bool | None
    added_to_zero: int
    act_order: bool = False

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        bits, size = self.bits, k if self.group == -1 else self.group
        if k * bits % 32 or n * bits % 32:
            raise ValueError(f"{bits}-bit codes of a weight of {n} x {k} do not fill whole words")
        groups = -(-k // size)
        codes = unpack(take(tensors, "qweight", (k * bits // 32, n), torch.int32), bits, 0).t()
        scales = take(tensors, "scales", (groups, n), torch.float16, torch.bfloat16, torch.float32).t().float()
        stored = take(tensors, "qzeros", (groups, n * bits // 32), torch.int32)
        offsets, zero = None, 2 ** (bits - 1)
        zeros = unpack(stored, bits, 1).t().float()
        # where all are alike it need not matter which version the file says it is of
        alike = bool((zeros == zeros[0, 0]).all())
        middle = alike and (self.symmetric is True or int(zeros[0, 0]) in (zero - 1, zero))
        if self.symmetric is False or not middle:
            offsets, zero = -((zeros + self.added_to_zero) % 2**bits) * scales, 0
        scales, bits = scales.contiguous(), word_bits(bits)
        weight = GroupedWeight(codes.contiguous(), scales, min(size, k), bits, zero, offsets)
        return by_index(weight, tensors, "g_idx", needed=self.act_order)

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_groups(weight, word_bits(self.bits), self.group, symmetric=self.symmetric is not False)


class Gptq(Format):
    """Also what `gptq_marlin`, `gptq_bitblas` and `moe_wna16` read; `marlin` where the file is in that layout."""

    name = "gptq"
    leaves = ("qweight", "qzeros", "scales", "g_idx", "B", "s")
    ignored = ("workspace", "weight_format")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        bits = setting(settings, "bits wbits", int, among=BITS)
        layout = setting(settings, "checkpoint_format format", str, "gptq")
        marlin = layout == "marlin" or setting(settings, "is_marlin_format", bool, False)
        if layout not in ("gptq", "gptq_v2", "marlin"):
            raise ValueError(f"GPTQ files in the layout {layout!r} are not supported, expected gptq, gptq_v2, marlin.")
        group = group_size(settings, "group_size groupsize", 128)
        symmetric, act_order = setting(settings, "sym", bool, None), setting(settings, "desc_act", bool, False)
        self._reader: Reader = GptqReader(bits, group, symmetric, int(layout != "gptq_v2"), act_order)
        if marlin:
            if bits != 4 or symmetric is False:
                raise ValueError("Marlin files hold symmetric codes of 4 bits; this one says otherwise.")
            self._reader = MarlinReader(group)
        self._quantizes_head = setting(settings, "lm_head", bool, False)
        self._rules = _rules(settings.get("dynamic") or {})

    def reader(self, names: Sequence[str]) -> Reader | None:
        for plain, pattern, changes in self._rules:
            if any(pattern.matches(name) for name in names):
                return None if plain else self._changed(changes)
        return self._reader

    def head_reader(self, names: Sequence[str]) -> Reader | None:
        return self.reader(names) if self._quantizes_head else None

    def _changed(self, changes: Mapping[str, Any]) -> Reader:
        base = self._reader
        if not isinstance(base, GptqReader):
            raise ValueError("The quantization config's `dynamic` does not go with the Marlin layout.")
        return replace(
            base,
            bits=setting(changes, "bits", int, base.bits, among=BITS),
            group=group_size(changes, "group_size", base.group),
            symmetric=setting(changes, "sym", bool, base.symmetric),
            act_order=setting(changes, "desc_act", bool, base.act_order),
        )


def _rules(dynamic: Any) -> list[tuple[bool, Pattern, dict[str, Any]]]:
    """(leave plain, what names it is about, other settings), the first that matches decides."""
    rules, patterns = [], Patterns()
    if not isinstance(dynamic, dict) or len(dynamic) > 10_000:
        raise ValueError("The quantization config's `dynamic` must be an object of patterns.")
    for pattern, changes in dynamic.items():
        plain = pattern.startswith("-:")
        compiled = patterns.of(pattern.removeprefix("-:").removeprefix("+:"))
        rules.append((plain, compiled, changes if isinstance(changes, dict) else {}))
    return rules
