"""Rotary embedding settings of a Hugging Face config: one normalised form for the old and the new spelling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "mrope")

# Fields a kind cannot work without.
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "mrope": ("mrope_section",),
}
_POSITIVE_NUMBERS = (
    "factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale",
    "mscale_all_dim", "short_mscale", "long_mscale",
)  # fmt: skip
_NUMBER_LISTS = ("short_factor", "long_factor", "mrope_section")
_MAX_LIST = 4096
_MAX_NUMBER = 1e12

Fail = Callable[[str, Any, str], ValueError]  # (field, value, expectation) -> the error to raise


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """How positions are rotated.

    `kind` is one of ROPE_KINDS. `params` are the kind's own numbers (`factor`, `low_freq_factor`, `short_factor`, ...);
    for yarn, llama3 and longrope it always holds `original_max_position_embeddings`.
    """

    theta: float = 10000.0
    kind: str = "default"
    params: dict[str, Any] = field(default_factory=dict)
    partial_rotary_factor: float = 1.0


def parse_rope(
    params: Any,
    *,
    where: str,
    theta: float,
    partial_rotary_factor: float,
    original_max_position_embeddings: int | None,
    max_position_embeddings: int | None,
    fail: Fail,
    kinds: Mapping[str, str] | None = None,
) -> RopeSettings:
    """Normalise one rope dictionary (`where` names it in errors).

    `theta` and `partial_rotary_factor` are what holds when the dictionary does not say.
    `original_max_position_embeddings` is the config's own top-level field, which wins over the dictionary's.
    kinds: what the family calls a kind -> its usual name.
    """
    if not isinstance(params, dict):
        raise fail(where, params, "an object")
    kind = _kind(params, where, kinds or {}, fail)
    for name in _REQUIRED.get(kind, ()):
        if params.get(name) is None:
            raise fail(f"{where}.{name}", None, f'a value, because the rope type is "{kind}"')
    theta = _positive(params.get("rope_theta", theta), f"{where}.rope_theta", fail)
    partial = params.get("partial_rotary_factor", partial_rotary_factor)
    partial = _positive(partial, f"{where}.partial_rotary_factor", fail)
    if partial > 1.0:
        raise fail(f"{where}.partial_rotary_factor", partial, "a number in (0, 1]")
    known = {name: value for name, value in params.items() if value is not None}
    for name in ("type", "rope_type", "rope_theta", "partial_rotary_factor"):
        known.pop(name, None)
    for name in _POSITIVE_NUMBERS:
        if name in known:
            known[name] = _positive(known[name], f"{where}.{name}", fail)
    for name in _NUMBER_LISTS:
        if name in known:
            _check_list(known[name], f"{where}.{name}", fail)
    original = original_max_position_embeddings or known.get("original_max_position_embeddings")
    if kind in ("yarn", "llama3", "longrope"):
        original = original or max_position_embeddings
        if original is None:
            raise fail(f"{where}.original_max_position_embeddings", None, "a positive integer")
        known["original_max_position_embeddings"] = original
    is_length = isinstance(original, int) and not isinstance(original, bool) and 0 < original < 2**31
    if original is not None and not is_length:
        raise fail(f"{where}.original_max_position_embeddings", original, "a positive integer")
    return RopeSettings(theta, kind, known, partial)


def _kind(params: dict[str, Any], where: str, kinds: Mapping[str, str], fail: Fail) -> str:
    name = params.get("rope_type") or params.get("type") or "default"
    if not isinstance(name, str):
        raise fail(f"{where}.rope_type", name, f"one of {', '.join(ROPE_KINDS)}")
    name = kinds.get(name, name)
    if name == "su":  # an early name
        name = "longrope"
    if name == "default" and params.get("mrope_section") is not None:
        name = "mrope"
    if name not in ROPE_KINDS:
        raise fail(f"{where}.rope_type", name, f"one of {', '.join(ROPE_KINDS)}")
    return name


def _positive(value: Any, where: str, fail: Fail) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MAX_NUMBER or math.isnan(value):
        raise fail(where, value, "a positive number")
    return float(value)


def _check_list(values: Any, where: str, fail: Fail) -> None:
    if not isinstance(values, list) or not 0 < len(values) <= _MAX_LIST:
        raise fail(where, values, f"a list of 1 to {_MAX_LIST} positive numbers")
    for value in values:
        _positive(value, where, fail)
