"""Rotary embeddings as data: which dimensions turn, how fast, and how the frequencies are scaled. Without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base grows with the sequence, once it is longer than `original_positions`."""

    factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies interpolated or kept by how often they turn within `original_positions`; cos and sin scaled."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by its own factor; cos and sin scaled, with long factors by
    `long_attention_factor` if there is one.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float
    long_attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class PromptScaling:
    """The base grows with the prompt, in stages: the first for those of up to `original_positions` tokens, each further
    one for those of up to twice as many as the one before. What is generated stays with the stage of its prompt.
    """

    original_positions: int


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | PromptScaling


def prompt_stage(length: int, original_positions: int) -> int:
    """The stage of `PromptScaling` that a prompt of `length` tokens has: 0, 1, ..."""
    return (max(0, length - 1) // original_positions).bit_length()


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `dim` dimensions of a head.

    interleaved: pairs are (2i, 2i + 1) instead of (i, i + dim / 2).
    """

    dim: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: Scaling | None = None


def scaling_from_params(kind: str, params: dict[str, Any], max_positions: int | None) -> Scaling | None:
    """The scaling that a config's normalised rope parameters describe (`vllm.config.hf.RopeSettings`).

    `max_positions` is the config's `max_position_embeddings`. Raises ValueError for a kind that text models do not
    have.
    """
    original = params.get("original_max_position_embeddings") or max_positions
    factor = params.get("factor")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(params["factor"]))
    if kind == "mrope":  # of text, all parts of the rotation have the same position
        return None
    if original is None or max_positions is None:
        raise ValueError(f'Rope scaling "{kind}" needs max_position_embeddings in the model\'s config.')
    if kind == "dynamic":
        return DynamicScaling(float(params["factor"]), max_positions)
    if kind == "llama3":
        return Llama3Scaling(float(params["factor"]), params["low_freq_factor"], params["high_freq_factor"], original)
    if factor is None:
        factor = max_positions / original
    if kind == "yarn":
        return YarnScaling(
            float(factor),
            original,
            float(params.get("beta_fast") or 32.0),
            float(params.get("beta_slow") or 1.0),
            _yarn_attention_factor(float(factor), params),
            bool(params.get("truncate", True)),
        )
    if kind == "longrope":
        attention_factor = params.get("attention_factor")
        if attention_factor is None:
            if original < 2:
                raise ValueError(f"original_max_position_embeddings is {original}, expected at least 2.")
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
        return LongRopeScaling(
            tuple(params["short_factor"]),
            tuple(params["long_factor"]),
            original,
            float(params.get("short_mscale") or attention_factor),
            params.get("long_mscale"),
        )
    raise ValueError(f'Rope scaling "{kind}" is not supported for this model.')


def _yarn_attention_factor(factor: float, params: dict[str, Any]) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    numerator, denominator = params.get("mscale"), params.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(float(numerator)) / magnitude(float(denominator))
    return magnitude(1.0)
