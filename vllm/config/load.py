"""Settings of loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Choice, Flag, Json, JsonOr, Text, TextList

_LATER = (
    "npcache",
    "tensorizer",
    "sharded_state",
    "mistral",
    "runai_streamer",
    "fastsafetensors",
)
LOAD_FORMATS = ("auto", "pt", "safetensors", "gguf", "bitsandbytes", "dummy", *_LATER)


@dataclass(frozen=True)
class LoadConfig:
    """Where weights come from, and in which format."""

    load_format: str = setting(
        "auto",
        Choice(values=LOAD_FORMATS),
        'The format of the weights: "auto" (safetensors, else PyTorch files, else GGUF), "safetensors", "pt", "gguf", '
        '"bitsandbytes" (those of quantization="bitsandbytes"), or "dummy" (random values, for profiling).',
        later={name: f"The load format '{name}'" for name in _LATER},
    )
    download_dir: str | None = setting(
        None, Text(optional=True), "Folder for downloads. Default: the cache of Hugging Face."
    )
    ignore_patterns: str | list[str] | None = setting(
        None, TextList(optional=True), "Files of the repository that are not downloaded. Default: original/**/*."
    )
    use_tqdm_on_load: bool = setting(True, Flag(), "Show progress on a terminal while weights are loaded.")
    model_loader_extra_config: dict[str, Any] = setting(
        {},
        Json(optional=True),
        "Settings of the loader of the chosen load format.",
        later="Settings of special model loaders (model_loader_extra_config)",
    )
    pt_load_map_location: str | dict[str, str] = setting(
        "cpu",
        JsonOr(accept=lambda value: isinstance(value, str), expected="a device", text=True),
        "Device that PyTorch files are read to.",
        later="Reading PyTorch files to a device (pt_load_map_location)",
    )
    qlora_adapter_name_or_path: str | None = setting(
        None, Text(optional=True), "Name or path of a QLoRA adapter.", later="QLoRA adapters"
    )
