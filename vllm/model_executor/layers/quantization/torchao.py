"""torchao: a tensor class's parts under names of their own (safetensors files since torchao 0.14).

`{module}._weight_qdata`, `_weight_scale`, `_weight_zero_point` (older: `{module}.weight:qdata`, ...): 8-bit integers or
floats [out, in] with a scale, and perhaps an integer zero point, for each output or for groups of its inputs.
w = (q - zero_point) * scale. Which class a module has, with its settings, is in config.json's `quant_type`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import (
    Format,
    Patterns,
    Reader,
    Tensors,
    setting,
    take,
)
from vllm.ops.quantized_weights import GroupedWeight, InputQuant, round_to_fp8, round_to_groups

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FIELDS = ("qdata", "scale", "zero_point")
_KINDS: dict[str, tuple[str, InputQuant | None]] = {  # configuration -> what codes are, how inputs are rounded
    "Int8WeightOnlyConfig": ("int8", None),
    "Int8DynamicActivationInt8WeightConfig": ("int8", InputQuant("int8")),
    "IntxWeightOnlyConfig": ("intx", None),
    "Int8DynamicActivationIntxWeightConfig": ("intx", InputQuant("int8")),
    "Float8WeightOnlyConfig": ("fp8", None),
    "Float8DynamicActivationFloat8WeightConfig": ("fp8", InputQuant("fp8")),
}


@dataclass(frozen=True)
class TorchaoReader(Reader):
    """kind: "int8", "intx" (integers of `bits` bits, in 8) or "fp8".   inputs: how inputs are rounded."""

    kind: str
    bits: Literal[4, 8]
    inputs: InputQuant | None

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        parts = {field: _named(tensors, field) for field in _FIELDS}
        dtype = torch.float8_e4m3fn if self.kind == "fp8" else torch.int8
        codes = take(tensors, parts["qdata"], (n, k), dtype)
        groups, each = self._groups(tensors, parts["scale"], n, k)
        scales = take(tensors, parts["scale"], each, *_FLOATS).float().expand(n, groups).contiguous()
        group = k // groups
        if self.kind == "fp8":
            return GroupedWeight(codes, scales, group, 8, inputs=self.inputs)
        middle, offsets = 1 << (self.bits - 1), None
        if self.bits == 4 and not (int(codes.min()) >= -8 and int(codes.max()) <= 7):
            raise ValueError(f"{parts['qdata']!r} holds numbers that are not of 4 bits")
        if parts["zero_point"] in tensors:
            zeros = (
                take(tensors, parts["zero_point"], each, torch.int8, torch.int32, *_FLOATS).float().expand(n, groups)
            )
            offsets = -zeros * scales if bool(zeros.any()) else None
        shifted = (codes.to(torch.int16) + middle).to(torch.uint8)
        return GroupedWeight(shifted, scales, group, self.bits, middle, offsets, inputs=self.inputs)

    def _groups(self, tensors: Tensors, leaf: str, n: int, k: int) -> tuple[int, tuple[int, ...]]:
        """(scales of a row, the shape of the tensor of scales)."""
        if leaf in tensors and tensors[leaf].numel() == 1:  # one scale in all
            return 1, (1,)
        shape = tuple(tensors[leaf].shape) if leaf in tensors else (n, 1)
        whole = len(shape) == 2 and shape[0] in (1, n) and shape[1] > 0 and k % shape[1] == 0
        return (shape[1], (shape[0], shape[1])) if whole else (1, (n, 1))

    def example(self, weight: Tensor) -> GroupedWeight:
        if self.kind == "fp8":
            return round_to_fp8(weight, "channel", self.inputs)
        return round_to_groups(weight, self.bits, 32 if self.bits == 4 else -1)


def _named(tensors: Tensors, field: str) -> str:
    return f"weight:{field}" if f"weight:{field}" in tensors else f"_weight_{field}"


class Torchao(Format):
    """Modules by their own configuration, by "_default", or all alike.

    `modules_to_not_convert` is not read: releases of transformers understand it differently, and tensors tell.
    """

    name = "torchao"
    leaves = (*(f"_weight_{field}" for field in _FIELDS), *(f"weight:{field}" for field in _FIELDS))

    def __init__(self, settings: Mapping[str, Any]) -> None:
        kinds = setting(settings, "quant_type", dict)
        given = kinds.get("default")
        if not isinstance(given, Mapping):
            raise ValueError(
                "The quantization config's `quant_type` has no object `default`: torchao before 0.10 wrote it."
            )
        self._rules: dict[str, Reader | None] = {}
        data = given.get("_data") if isinstance(given.get("_data"), Mapping) else {}
        assert isinstance(data, Mapping)
        table = next((data[name] for name in ("fqn_to_config", "module_fqn_to_config") if name in data), None)
        if isinstance(table, Mapping):
            self._rules = {name: None if value is None else _reader(value) for name, value in table.items()}
            self._default = self._rules.pop("_default", None)
        else:
            self._default = _reader(given)
        patterns = Patterns()
        self._patterns = [(patterns.of(rule[3:]), r) for rule, r in self._rules.items() if rule.startswith("re:")]

    def reader(self, names: Sequence[str]) -> Reader | None:
        for name in names:
            called = (f"{name}.weight", name)  # rules name parameters or modules
            for rule in called:
                if rule in self._rules:
                    return self._rules[rule]
            for rule in called:
                for pattern, reader in self._patterns:
                    if pattern.matches(rule, whole=True):
                        return reader
        return self._default

    def head_reader(self, names: Sequence[str]) -> Reader | None:
        return self.reader(names)


def _reader(given: Any) -> Reader:
    """How modules of one configuration are stored. Raises ValueError for a configuration that is not known."""
    kind = given.get("_type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise ValueError(f"torchao's configuration {kind!r} is not supported. Supported: {known}.")
    what, inputs = _KINDS[kind]
    data = given.get("_data")
    dtype = data.get("weight_dtype") if isinstance(data, Mapping) else None
    text = dtype.get("_data") if isinstance(dtype, Mapping) else None
    bits: Literal[4, 8] = 8
    if what == "intx":
        if text not in [f"int{n}" for n in range(1, 9)]:
            raise ValueError(f"torchao's `weight_dtype` is {text!r}, expected int1 to int8.")
        bits = 4 if int(text.removeprefix("int")) <= 4 else 8
    return TorchaoReader(what, bits, inputs)
