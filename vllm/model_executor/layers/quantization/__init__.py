"""Formats of quantized weights, one file each; the interface they fill in is `base_config.Format`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vllm.config.model import QuantizationMethods
from vllm.config.quantization import Quantization
from vllm.model_executor.layers.linear_method import QuantizationConfig

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import Format

__all__ = ["QuantizationConfig", "QuantizationMethods", "format_of"]

# method -> (module in this package, class)
_FORMATS = {
    "gptq": ("gptq", "Gptq"),
    "awq": ("awq", "Awq"),
    "fp8": ("fp8", "Fp8"),
    "compressed-tensors": ("compressed_tensors", "CompressedTensors"),
    "bitsandbytes": ("bitsandbytes", "BitsAndBytes"),
    "gguf": ("gguf", "Gguf"),
    "ptpc_fp8": ("fp8", "ChannelFp8"),
    "fbgemm_fp8": ("fp8", "FbgemmFp8"),
    "modelopt": ("fp8", "ModelOptFp8"),
    "hqq": ("hqq", "Hqq"),
    "squeezellm": ("codebooks", "SqueezeLlm"),
    "aqlm": ("codebooks", "Aqlm"),
    "experts_int8": ("in_flight", "ExpertsInt8"),
    "deepspeedfp": ("in_flight", "DeepSpeedFp"),
    "mxfp4": ("mxfp4", "Mxfp4"),
    "auto-round": ("auto_round", "AutoRound"),
    "torchao": ("torchao", "Torchao"),
    "gptq_marlin_24": ("marlin", "GptqMarlin24"),
    "qqq": ("marlin", "Qqq"),
}


def format_of(quantization: Quantization) -> Format:
    """The format that a resolved configuration names, with the checkpoint's settings."""
    if quantization.method not in _FORMATS:
        raise ValueError(f"Quantization {quantization.name!r} is not supported by this version.")
    module, name = _FORMATS[quantization.method]
    found = getattr(importlib.import_module(f"vllm.model_executor.layers.quantization.{module}"), name)
    made: Format = found(quantization.settings)
    return made
