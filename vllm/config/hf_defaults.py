"""What a field missing from config.json means: the default values of Hugging Face's own configuration classes.

They stand in `hf_class_defaults.json`, which `tools/hf_class_defaults.py` writes.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    document: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hf_class_defaults.json").read_text())
    return document


def known_fields() -> frozenset[str]:
    """Every field that the class of any model sets by default."""
    return frozenset(name for entry in _table().values() for name in entry.get("defaults", ()))


def class_defaults(model_type: str) -> dict[str, Any]:
    """Field -> value for models of `model_type`. A field whose class default is None (or is computed) is not listed."""
    defaults: dict[str, Any] = _table().get(model_type, {}).get("defaults", {})
    return defaults


def architecture_of(model_type: str) -> str | None:
    """The architecture of transformers' causal language models of `model_type`, None if there is none."""
    return _table().get(model_type, {}).get("architecture")


def model_types() -> list[str]:
    """The types of transformers' causal language models."""
    return list(_table())
