"""The formats that can be written: how a projection is rounded, which tensors it becomes, and their config."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.awq import NIBBLE_OF_COLUMN
from vllm.model_executor.layers.quantization.gptq import BITS
from vllm.model_executor.layers.quantization.packing import pack
from vllm.ops.quantized_weights import FP8_MAX
from vllm.quantize.rounding import Inputs, Rounded, round_gptq, round_nearest

Stored = tuple[dict[str, Tensor], Tensor]  # tensors by the last part of their names, and the numbers they stand for


@dataclass(frozen=True)
class Target:
    """A format. round: how codes are found.

    settings: from (group size, modules left plain) to config.json's `quantization_config`.
    """

    store: Callable[[Target, Tensor, Inputs], Stored]
    settings: Callable[[Target, list[str]], dict[str, Any]]
    bits: int = 8
    group: int = -1
    symmetric: bool = True
    round: Literal["nearest", "gptq", "awq"] = "nearest"
    act_order: bool = False

    def rounded(self, weight: Tensor, inputs: Inputs) -> Rounded:
        """The weight's codes."""
        group = weight.shape[1] if self.group == -1 else self.group
        if self.round == "gptq":
            return round_gptq(weight, inputs, self.bits, group, self.symmetric, self.act_order)
        return round_nearest(weight, self.bits, group, self.symmetric)


def _fp8(target: Target, weight: Tensor, inputs: Inputs) -> Stored:
    scale = (weight.abs().max() / FP8_MAX).clamp(min=1e-12)
    codes = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.clone()}, codes.float() * scale


def _fp8_channel(target: Target, weight: Tensor, inputs: Inputs) -> Stored:
    scale = (weight.abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    codes = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.clone()}, codes.float() * scale


def _int8(target: Target, weight: Tensor, inputs: Inputs) -> Stored:
    rounded = target.rounded(weight, inputs)
    codes = (rounded.codes.to(torch.int16) - 128).to(torch.int8)
    return {"weight": codes, "weight_scale": rounded.scales.clone()}, rounded.numbers()


def _packed(target: Target, weight: Tensor, inputs: Inputs) -> Stored:
    rounded, shape = target.rounded(weight, inputs), torch.tensor(weight.shape, dtype=torch.int64)
    tensors = {
        "weight_packed": pack(rounded.codes, target.bits, 1),
        "weight_scale": rounded.scales.half(),
        "weight_shape": shape,
    }
    return tensors, rounded.numbers()


def _gptq(target: Target, weight: Tensor, inputs: Inputs) -> Stored:
    rounded = target.rounded(weight, inputs)
    tensors = {
        "qweight": pack(rounded.codes.t(), target.bits, 0),
        "qzeros": pack((rounded.zeros - 1).t().to(torch.uint8), target.bits, 1),
        "scales": rounded.scales.t().half().contiguous(),
        "g_idx": rounded.index.to(torch.int32),
    }
    return tensors, rounded.numbers()


def _awq(target: Target, weight: Tensor, inputs: Inputs) -> Stored:
    rounded = round_nearest(weight, 4, target.group, False)
    order = [NIBBLE_OF_COLUMN.index(nibble) for nibble in range(8)]

    def columns(values: Tensor) -> Tensor:  # [rows, out] -> int32 [rows, out / 8]
        return pack(values.unflatten(1, (-1, 8))[..., order].flatten(1).to(torch.uint8), 4, 1)

    tensors = {
        "qweight": columns(rounded.codes.t()),
        "qzeros": columns(rounded.zeros.t()),
        "scales": rounded.scales.t().half().contiguous(),
    }
    return tensors, rounded.numbers()


def _compressed(target: Target, plain: list[str], layout: str, weights: dict[str, Any], inputs: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**scheme, "input_activations": inputs, "output_activations": None}},
        "ignore": plain,
    }


def _integer_settings(target: Target, plain: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return _compressed(target, plain, "int-quantized", weights, inputs)


def _float_settings(target: Target, plain: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return _compressed(target, plain, "float-quantized", weights, inputs)


def _packed_settings(target: Target, plain: list[str]) -> dict[str, Any]:
    per = {"strategy": "channel"} if target.group == -1 else {"strategy": "group", "group_size": target.group}
    return _compressed(target, plain, "pack-quantized", {"num_bits": target.bits, "type": "int", **per}, None)


def _fp8_settings(target: Target, plain: list[str]) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": plain}


def _gptq_settings(target: Target, plain: list[str]) -> dict[str, Any]:
    dynamic: dict[str, dict[str, Any]] = {
        f"-:{name.replace('.', chr(92) + '.')}$": {} for name in plain if name != "lm_head"
    }
    settings = {
        "quant_method": "gptq", "bits": target.bits, "group_size": target.group, "sym": target.symmetric,
        "desc_act": target.act_order, "lm_head": False, "checkpoint_format": "gptq", "damp_percent": 0.05,
    }  # fmt: skip
    return {**settings, "dynamic": dynamic} if dynamic else settings


def _awq_settings(target: Target, plain: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": target.group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": plain,
    }  # fmt: skip


TARGETS: dict[str, Target] = {
    "fp8": Target(_fp8, _fp8_settings),
    "fp8-dynamic": Target(_fp8_channel, _float_settings),
    "int8": Target(_int8, _integer_settings),
    "w8a16": Target(_packed, _packed_settings, 8, 128),
    "w4a16": Target(_packed, _packed_settings, 4, 128, round="gptq"),
    "gptq": Target(_gptq, _gptq_settings, 4, 128, round="gptq"),
    "awq": Target(_awq, _awq_settings, 4, 128, symmetric=False, round="awq"),
}


def fitted(
    target: Target, group: int | None, sizes: set[int], act_order: bool, nearest: bool, bits: int | None = None
) -> Target:
    """The target with a group size that divides every number of inputs. Raises ValueError if none does."""
    if nearest:
        target = replace(target, round="nearest")
    if act_order:
        if target.round != "gptq" or target.store is not _gptq:
            raise ValueError("--act-order goes with --format gptq only.")
        target = replace(target, act_order=True)
    if bits is not None:
        if target.store is not _gptq or bits not in BITS:
            raise ValueError(f"--bits goes with --format gptq only, and is one of {', '.join(map(str, BITS))}.")
        target = replace(target, bits=bits)
    if target.group == -1:
        if group is not None:
            raise ValueError("--group-size does not go with this format, which has no groups.")
        return target
    wanted = [group] if group is not None else [128, 64, 32]
    for size in wanted:
        if size > 0 and all(count % size == 0 for count in sizes):
            return replace(target, group=size)
    raise ValueError(
        f"Groups of {' or '.join(map(str, wanted))} inputs do not divide the model's layers of {sorted(sizes)} inputs. "
        f"Name a --group-size that divides {math.gcd(*sizes)}."
    )
