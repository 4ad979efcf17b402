"""Settings of loading weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Choice, Flag, JsonOr, Text, TextList
from vllm.config.model_source import downloads_nothing

_LOCATION = re.compile(r"(cpu|cuda)(:\d+)?")
_LATER = (
    "mistral",
    "runai_streamer",
    "fastsafetensors",
)
LOAD_FORMATS = (
    "auto", "pt", "safetensors", "npcache", "gguf", "bitsandbytes", "dummy", "sharded_state", "tensorizer", *_LATER
)  # fmt: skip


def _is_location(value: Any) -> bool:
    return isinstance(value, str) and _LOCATION.fullmatch(value) is not None


def _loads_otherwise(*formats: str) -> Callable[[Any], str]:
    def idle(config: Any) -> str:
        name = config.load_config.load_format
        return "" if name in formats else f"load_format={name!r} has no use for it"

    return idle


def _is_quantized(config: Any) -> str:
    return "" if config.model_config.quantized.in_flight else "the model's weights are quantized already"


@dataclass(frozen=True)
class LoadConfig:
    """Where weights come from, and in which format."""

    load_format: str = setting(
        "auto",
        Choice(values=LOAD_FORMATS),
        'The format of the weights: "auto" (safetensors, else PyTorch files, else GGUF), "safetensors", "pt", '
        '"npcache" (PyTorch files, kept as numpy files for the next time), "gguf", "bitsandbytes" (those of '
        'quantization="bitsandbytes"), "sharded_state" (of LLM.save_sharded_state), "tensorizer", or "dummy" (random '
        "values, for profiling).",
        later={name: f"The load format '{name}'" for name in _LATER},
    )
    download_dir: str | None = setting(
        None, Text(optional=True), "Folder for downloads. Default: the cache of Hugging Face.", idle=downloads_nothing
    )
    ignore_patterns: str | list[str] | None = setting(
        None,
        TextList(optional=True),
        "Files of the repository that are not downloaded. Default: original/**/*.",
        idle=downloads_nothing,
    )
    use_tqdm_on_load: bool = setting(True, Flag(), "Show progress on a terminal while weights are loaded.")
    model_loader_extra_config: dict[str, Any] = setting(
        {},
        JsonOr(optional=True, accept=lambda value: hasattr(value, "to_serializable"), expected="a TensorizerConfig"),
        "Settings of the loader: a pattern of file names for sharded_state, a TensorizerConfig's for tensorizer.",
    )
    pt_load_map_location: str | dict[str, str] = setting(
        "cpu",
        JsonOr(accept=_is_location, expected="a device such as 'cpu' or 'cuda:0'", text=True),
        "Device that PyTorch files are read to, or which device stands for which of the file's.",
        idle=_loads_otherwise("auto", "pt", "bitsandbytes"),
    )
    qlora_adapter_name_or_path: str | None = setting(
        None,
        Text(optional=True),
        "Name or path of a QLoRA adapter: of plain weights only the modules that it adapts become quantized.",
        idle=_is_quantized,
    )
