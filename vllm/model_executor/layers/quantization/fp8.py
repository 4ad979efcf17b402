"""8-bit floats (e4m3): checkpoints with one scale for a weight or for blocks of 128 x 128, and plain weights in flight.

Layout: `weight` float8_e4m3fn [out, in]; `weight_scale` fp32, one number or [out, 1], or `weight_scale_inv` fp32 [out /
128, in / 128], which multiplies all the same; `input_scale` fp32, one number, if activations have a fixed scale.
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
    is_plain,
    names_of,
    plain_weight,
    setting,
    take,
)
from vllm.ops.quantized_weights import GroupedWeight, InputQuant, round_to_fp8

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = ("weight_scale", "weight_scale_inv", "scale")


@dataclass(frozen=True)
class Fp8Reader(Reader):
    """block: (outputs, inputs) that share a scale, None where a weight or an output has one. static: inputs' scales are
    in the checkpoint. per: what shares a scale if they are not; for weights quantized here also one scale's outputs."""

    block: tuple[int, int] | None = None
    static: bool = False
    inputs: InputQuant | None = InputQuant("fp8", "tensor")
    weights_per: Literal["tensor", "channel"] = "tensor"
    reads_plain: bool = True
    divides: bool = False  # scales divide, as GPTQModel's do

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight | Tensor:
        if "weight" in tensors and is_plain({"weight": tensors["weight"]}):
            scale = next((leaf for leaf in _SCALES if leaf in tensors), None)
            if scale is not None:
                raise ValueError(f"'weight' holds plain numbers, with which {scale!r} does not go")
            weight = plain_weight(tensors, n, k)
            return round_to_fp8(weight, self.weights_per, self.inputs) if self.reads_plain else weight
        codes = take(tensors, "weight", (n, k), torch.float8_e4m3fn)
        scales, group = fp8_scales(tensors, n, k, self.block)
        scales = scales.reciprocal() if self.divides else scales
        return GroupedWeight(codes, scales, group, 8, inputs=self._inputs(tensors))

    def _inputs(self, tensors: Tensors) -> InputQuant | None:
        if not self.static:
            return self.inputs
        leaf = "act_scale" if "act_scale" in tensors else "input_scale"
        return InputQuant("fp8", "tensor", input_scale(tensors, leaf))

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_fp8(weight, self.weights_per, self.inputs)


def input_scale(tensors: Tensors, leaf: str) -> float:
    """The scale of inputs that a checkpoint fixes."""
    scale = float(take(tensors, leaf, (), *FLOATS))
    if not 0 < scale < float("inf"):
        raise ValueError(f"{leaf!r} is {scale}, expected a positive number")
    return scale


def fp8_scales(tensors: Tensors, n: int, k: int, block: tuple[int, int] | None) -> tuple[Tensor, int]:
    """(scales [n, groups] fp32, inputs of a group) from whichever tensor of scales is there."""
    leaf = next((name for name in _SCALES if name in tensors), "weight_scale")
    stored = tensors.get(leaf)
    if stored is not None and stored.numel() == 1 and block is None:
        return take(tensors, leaf, (), *FLOATS).float().expand(n, 1).contiguous(), k
    if block is None:
        shape = (n,) if stored is not None and stored.dim() == 1 else (n, 1)
        return take(tensors, leaf, shape, *FLOATS).float().view(n, 1), k
    rows, group = block
    blocks = take(tensors, leaf, (-(-n // rows), -(-k // group)), *FLOATS).float()
    return blocks.repeat_interleave(rows, 0)[:n].contiguous(), min(group, k)


def block_shape(value: Any, field: str) -> tuple[int, int] | None:
    """A field that says which block of a weight shares a scale."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [int(part) if part.isdigit() else part for part in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(type(v) is int and 0 < v <= 1 << 16 for v in value):
        raise ValueError(f"The quantization config's `{field}` is {value!r}, expected two positive integers.")
    return value[0], value[1]


class Fp8(Format):
    """Checkpoints of AutoFP8, DeepSeek, Qwen and others; without settings, plain weights with a scale each."""

    name = "fp8"
    leaves = ("weight_scale", "weight_scale_inv", "scale", "input_scale", "act_scale")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        block = block_shape(settings.get("weight_block_size"), "weight_block_size")
        scheme = setting(settings, "activation_scheme", str, "dynamic", among=("static", "dynamic"))
        if block is not None and scheme == "static":
            raise ValueError("The quantization config has weight_block_size, with which activations must be dynamic.")
        per: Literal["group", "tensor"] = "tensor" if block is None else "group"
        # Weights that a checkpoint of this format leaves plain stay so.
        in_flight = not settings or setting(settings, "is_checkpoint_fp8_serialized", bool, True) is False
        divides = settings.get("weight_scale_semantics") == "inverse"
        self._reader = Fp8Reader(
            block, scheme == "static", InputQuant("fp8", per), reads_plain=in_flight, divides=divides
        )
        self._plain = {*names_of(settings, "ignored_layers"), *names_of(settings, "modules_to_not_convert")}

    def reader(self, names: Sequence[str]) -> Reader | None:
        return self._reader if self._plain.isdisjoint(names) else None


class ChannelFp8(Format):
    """`ptpc_fp8`: plain weights, each output and each token with a scale of its own."""

    name = "ptpc_fp8"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._reader = Fp8Reader(inputs=InputQuant("fp8", "token"), weights_per="channel")

    def reader(self, names: Sequence[str]) -> Reader | None:
        return self._reader


class FbgemmFp8(Format):
    """`fbgemm_fp8` (Llama 3.1 405B): each output has a scale, each token too, whose largest value is bounded."""

    name = "fbgemm_fp8"
    leaves = ("weight_scale", "input_scale_ub")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        limit = setting(settings, "activation_scale_ub", float, 1200.0)
        self._reader = Fp8Reader(inputs=InputQuant("fp8", "token", limit=limit), reads_plain=False)
        self._plain = set(names_of(settings, "modules_to_not_convert"))

    def reader(self, names: Sequence[str]) -> Reader | None:
        return self._reader if self._plain.isdisjoint(names) else None


class ModelOptFp8(Format):
    """NVIDIA ModelOpt's FP8: one scale for a weight and one for its inputs; modules are left out by patterns with *."""

    name = "modelopt"
    leaves = ("weight_scale", "input_scale")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        inner = settings.get("quantization")
        fields = inner if isinstance(inner, Mapping) else settings
        algorithm = setting(fields, "quant_algo", str)
        if algorithm.upper() != "FP8":
            raise ValueError(f"ModelOpt checkpoints of quant_algo {algorithm!r} are not supported, expected 'FP8'.")
        patterns, plain = Patterns(), (*names_of(fields, "exclude_modules"), *names_of(fields, "ignore"))
        self._plain = [patterns.glob(text) for text in plain]

    def reader(self, names: Sequence[str]) -> Reader | None:
        if any(pattern.matches(name, whole=True) for pattern in self._plain for name in names):
            return None
        return ModelOptReader(reads_plain=False)

    def head_reader(self, names: Sequence[str]) -> Reader | None:
        return self.reader(names)


class ModelOptReader(Fp8Reader):
    """Inputs have a fixed scale if the checkpoint holds one."""

    def _inputs(self, tensors: Tensors) -> InputQuant | None:
        return InputQuant("fp8", "tensor", input_scale(tensors, "input_scale")) if "input_scale" in tensors else None
