"""Doors to `vllm.config.hf` and `vllm.config.generation`, under the names of other versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config.generation import read_generation_config
from vllm.config.hf import HFConfig
from vllm.config.model_source import resolve

__all__ = ["get_config", "get_hf_text_config", "try_get_generation_config"]


def get_config(
    model: str | Path,
    trust_remote_code: bool = False,
    revision: str | None = None,
    code_revision: str | None = None,
    **hf_overrides: Any,
) -> Any:
    """transformers' config object of a model, with fields replaced by `hf_overrides`."""
    folder = resolve(str(model), revision=revision, load_format="dummy", trust_remote_code=trust_remote_code)
    config = HFConfig.load(folder, hf_overrides=hf_overrides, trust_remote_code=trust_remote_code)
    return config.to_transformers(trust_remote_code=trust_remote_code)


def get_hf_text_config(config: Any) -> Any:
    """The text part of transformers' config object (the object itself for text models)."""
    return config.get_text_config()


def try_get_generation_config(
    model: str, trust_remote_code: bool = False, revision: str | None = None
) -> dict[str, Any]:
    """The fields of a model's generation_config.json, empty if it has none."""
    folder = resolve(model, revision=revision, load_format="dummy", trust_remote_code=trust_remote_code)
    return read_generation_config("auto", folder)
