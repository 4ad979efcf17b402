"""Which quantization format a model has: what its files say, what the user says, and whether the two agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config.fields import UnsupportedSettingError
from vllm.config.hf import HFConfig, read_json_object

# Files beside config.json that some tools write instead of its `quantization_config`.
SIDE_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json")

# The format that a checkpoint names -> the names under which users may ask for it.
_NAMES: dict[str, tuple[str, ...]] = {
    "gptq": ("gptq", "gptq_marlin", "marlin", "gptq_bitblas", "bitblas", "moe_wna16", "ipex", "auto-round"),
    "awq": ("awq", "awq_marlin", "moe_wna16", "ipex", "auto-round"),
    "auto-round": ("auto-round", "gptq", "gptq_marlin", "awq", "awq_marlin"),
    "fp8": ("fp8",),
    "fbgemm_fp8": ("fbgemm_fp8",),
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes",),
    "gguf": ("gguf",),
    "modelopt": ("modelopt",),
    "hqq": ("hqq",),
    "squeezellm": ("squeezellm",),
    "aqlm": ("aqlm",),
    "deepspeedfp": ("deepspeedfp",),
    "experts_int8": ("experts_int8",),
    "mxfp4": ("mxfp4",),
    "torchao": ("torchao",),
    "gptq_marlin_24": ("gptq_marlin_24", "gptq", "marlin"),
    "qqq": ("qqq",),
}
_SPELLINGS = {"compressed_tensors": "compressed-tensors", "intel/auto-round": "auto-round", "marlin": "gptq"}
# Formats that can be made of plain weights while they are loaded.
IN_FLIGHT = ("fp8", "ptpc_fp8", "bitsandbytes", "experts_int8", "deepspeedfp")
_OTHER_HARDWARE = {"tpu_int8": "a Google TPU", "neuron_quant": "AWS Neuron (Inferentia or Trainium)"}


@dataclass(frozen=True)
class Quantization:
    """method: the format.   name: what to call it in messages.   settings: what the checkpoint says about it; if its
    weights are plain and become quantized while they are loaded (`in_flight`), which of them, {} for all."""

    method: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    in_flight: bool = False


def resolve_quantization(
    wanted: str | None, hf: HFConfig, folder: Path, targets: tuple[str, ...] = ()
) -> Quantization | None:
    """How the weights in `folder` are stored, None if plainly. wanted: the `quantization` argument.

    targets: the modules that become quantized if the weights are plain, () for all.

    Raises ValueError if the argument and the files disagree, UnsupportedSettingError for what this package cannot do.
    """
    if wanted in _OTHER_HARDWARE:
        raise UnsupportedSettingError(
            f"quantization={wanted!r} is not supported here: it works on {_OTHER_HARDWARE[wanted]} only. Use another "
            "format on this device, for example quantization='fp8', or none.",
            parameter="quantization",
            value=wanted,
        )
    settings, source = stored_settings(hf, folder)
    if settings is None:
        return None if wanted is None else _in_flight(wanted, hf, targets)
    method = method_of(settings, source)
    if wanted is not None and wanted not in _NAMES.get(method, (method,)):
        raise ValueError(
            f"Quantization method specified in the model config ({method}) does not match the quantization method "
            f"specified in the `quantization` argument ({wanted})."
        )
    if method not in _NAMES:
        raise UnsupportedSettingError(
            f"{source}: the checkpoint is quantized with {method!r}, which is not supported. Supported: "
            f"{', '.join(sorted(_NAMES))}. Use another version of the model.",
            parameter="quantization",
            value=method,
        )
    return Quantization(method, wanted or method, settings)


def _in_flight(wanted: str, hf: HFConfig, targets: tuple[str, ...]) -> Quantization:
    if wanted not in IN_FLIGHT:
        raise ValueError(
            f"quantization={wanted!r} needs a checkpoint in that format, but {hf.file} has no `quantization_config`. "
            f"Plain weights can be quantized while they are loaded with: {', '.join(IN_FLIGHT)}. If the weights are in "
            'that format, add it to the file, or pass hf_overrides={"quantization_config": {"quant_method": ..., ...}}.'
        )
    settings = {"target_modules": list(targets)} if targets else {}
    return Quantization(wanted, wanted, settings, in_flight=True)


def stored_settings(hf: HFConfig, folder: Path) -> tuple[dict[str, Any] | None, Path]:
    """(what the model's files say about quantization, the file that says it), (None, config.json) if nothing does."""
    settings = hf.quantization_config
    if settings is not None:
        return settings, hf.file
    own = folder / "config.json"
    if own != hf.file and own.is_file():  # `hf_config_path`: the weights are stored as their own folder says
        settings = read_json_object(own).get("quantization_config")
        if isinstance(settings, dict):
            return settings, own
    found = [folder / name for name in SIDE_FILES if (folder / name).is_file()]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{folder} holds several descriptions of its quantization: {names}. Keep one of them.")
    if not found:
        return None, hf.file
    return read_json_object(found[0]), found[0]


def method_of(settings: Mapping[str, Any], source: Path) -> str:
    """The format that a quantization config describes. Raises ValueError if it cannot be told."""
    method = settings.get("quant_method", settings.get("method"))
    if method is None:
        method = _guess(settings, source)
    if not isinstance(method, str):
        raise ValueError(f"{source}: `quant_method` is {method!r}, expected the name of a quantization format.")
    method = method.lower()
    method = _SPELLINGS.get(method, method)
    layout = settings.get("checkpoint_format", settings.get("format"))
    if method == "gptq" and layout == "marlin_24":
        return "gptq_marlin_24"
    return method


def _guess(settings: Mapping[str, Any], source: Path) -> str:
    """The format of older configs, which do not name it: each has fields of its own."""
    inner = settings.get("quantization")
    if isinstance(inner, Mapping) and ("quant_algo" in inner or "producer" in settings):
        return "modelopt"
    if "config_groups" in settings or "sparsity_config" in settings:
        return "compressed-tensors"
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    if "w_bit" in settings or "zero_point" in settings:
        return "awq"
    if "quant_config" in settings:
        return "hqq"
    if "wbits" in settings:
        return "qqq" if "group_size" in settings else "squeezellm"
    if "bits" in settings:
        return "gptq"
    known = ", ".join(sorted(_NAMES))
    raise ValueError(f"{source} does not say how the weights are quantized. Set its `quant_method` to one of {known}.")
