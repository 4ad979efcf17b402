"""Reads generation_config.json: the sampling parameters that a model's makers recommend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm import validation
from vllm.config.hf import read_json_object

FILE_NAME = "generation_config.json"
_MAX_BYTES = 2**20


def _token_id_or_list(name: str, value: Any) -> Any:
    return validation.token_ids(name, value) if isinstance(value, list) else validation.integer(name, value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "repetition_penalty": validation.finite,
    "temperature": validation.finite,
    "top_k": validation.integer,
    "top_p": validation.finite,
    "min_p": validation.finite,
    "max_new_tokens": validation.integer,
    "eos_token_id": _token_id_or_list,
}
# Field of the file -> field of SamplingParams.
_SAMPLING = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def read_generation_config(source: str | None, model_folder: Path) -> dict[str, Any]:
    """The file of the model ("auto", "vllm", None: an empty dict if there is none) or of the folder `source`.

    Raises ValueError for a folder without the file and for values of the wrong type.
    """
    if source in ("auto", "vllm", None):
        file = model_folder / FILE_NAME
        if not file.is_file():
            return {}
    else:
        file = Path(str(source)).expanduser() / FILE_NAME
        if not file.is_file():
            raise ValueError(
                f"generation_config={source!r}: there is no {file}. Give a folder that holds {FILE_NAME}, or 'auto' or "
                "'vllm'."
            )
    config = read_json_object(file, max_bytes=_MAX_BYTES)
    check_generation_config(config, str(file))
    return config


def check_generation_config(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a field that the engine uses has the wrong type."""
    for name, check in _CHECKS.items():
        if config.get(name) is not None:
            check(f"{where}: {name}", config[name])


def diff_sampling_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a generation config that are sampling parameters, under SamplingParams' names."""
    return {ours: config[theirs] for theirs, ours in _SAMPLING.items() if config.get(theirs) is not None} | {
        ours: config[ours] for ours in _SAMPLING.values() if config.get(ours) is not None
    }
