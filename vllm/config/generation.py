"""Reads generation_config.json: the sampling parameters that a model's makers recommend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import validation
from vllm.config.hf import read_json_object
from vllm.sampling_checks import FIELD_CHECKS

FILE_NAME = "generation_config.json"
_MAX_BYTES = 2**20
# Field of the file -> field of SamplingParams.
_SAMPLING = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def read_generation_config(source: str | None, model_folder: Path, ends: Sequence[int] = ()) -> dict[str, Any]:
    """The file of the model ("auto", "vllm", None) or of the folder `source`.

    ends: the end-of-sequence ids of config.json, which stand for the model's file if there is none.

    Raises ValueError, naming file and field, for a folder without the file and for values that cannot be used. With
    "vllm" and None the file's sampling parameters are not used, and so not checked.
    """
    if source in ("auto", "vllm", None):
        file = model_folder / FILE_NAME
        if not file.is_file():
            return {"eos_token_id": list(ends)} if ends else {}
    else:
        file = Path(str(source)).expanduser() / FILE_NAME
        if not file.is_file():
            raise ValueError(
                f"generation_config={source!r}: there is no {file}. Give a folder that holds {FILE_NAME}, or 'auto' or "
                "'vllm'."
            )
    config = read_json_object(file, max_bytes=_MAX_BYTES)
    _check_ends(config.get("eos_token_id"), f"{file}: eos_token_id")
    if source not in ("vllm", None):
        advice = "Correct the file, or pass generation_config='vllm' to do without its sampling parameters."
        check_sampling_defaults(config, str(file), advice)
    return config


def check_sampling_defaults(config: Mapping[str, Any], where: str, advice: str = "") -> None:
    """Raise ValueError if a sampling parameter has a value that no request could be given."""
    for field, ours in {**_SAMPLING, **{name: name for name in _SAMPLING.values()}}.items():
        if config.get(field) is None:
            continue
        try:
            FIELD_CHECKS[ours](field, config[field])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error} {advice}".rstrip()) from None


def without_effect(config: Mapping[str, Any]) -> list[str]:
    """The fields of a generation config that are no sampling parameters here."""
    return [name for name in config if name not in _SAMPLING and name not in _SAMPLING.values()]


def _check_ends(value: Any, name: str) -> None:
    """One token id or several. Ids that the model cannot produce (some files say -1) are left out of each request."""
    if value is not None:
        for token_id in value if isinstance(value, list) else [value]:
            validation.integer(name, token_id)


def diff_sampling_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a generation config that are sampling parameters, under SamplingParams' names."""
    return {ours: config[theirs] for theirs, ours in _SAMPLING.items() if config.get(theirs) is not None} | {
        ours: config[ours] for ours in _SAMPLING.values() if config.get(ours) is not None
    }
