"""Rotary frequencies of every scaling kind, and the cos | sin table that the kernels read.

Formulas: RoPE (arXiv 2104.09864), NTK-aware and YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1's model card;
numerically as Hugging Face evaluates them, in fp32. Two kinds depend on the length of a sequence, but a cached key is
rotated once:

- dynamic: the row of position p uses the base of a sequence of p + 1 tokens. Within `original_positions` this is plain
  RoPE; beyond, it is what Hugging Face computes when it generates token by token with a cache.
- longrope: one of two sets of factors for the whole table: the short ones if every position of the table lies within
  `original_positions`, else the long ones. So an engine whose `max_model_len` is at most the original length agrees
  with Hugging Face on every sequence; a longer one agrees on sequences beyond the original length, and rotates shorter
  ones with the long factors too, because keys of both kinds cannot meet in one cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
    """Each frequency divided by its own factor; cos and sin scaled."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


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
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
        return LongRopeScaling(
            tuple(params["short_factor"]), tuple(params["long_factor"]), original, float(attention_factor)
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


def rope_table(rope: Rope, positions: int) -> Tensor:
    """[positions, rope.dim] fp32 on the CPU: cos | sin, dim / 2 each, of positions 0, 1, ..."""
    steps = torch.arange(positions, dtype=torch.float32, device="cpu")
    # [dim / 2], or [positions, dim / 2] where the frequencies depend on the position
    frequencies, factor = _frequencies(rope, positions)
    angles = steps[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1) * factor


def _frequencies(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """(inverse frequencies, the factor of cos and sin)."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device="cpu") / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    match scaling:
        case None:
            return plain, 1.0
        case LinearScaling():
            return plain / scaling.factor, 1.0
        case DynamicScaling():
            return _dynamic(rope, scaling, positions, exponents), 1.0
        case Llama3Scaling():
            return _llama3(plain, scaling), 1.0
        case YarnScaling():
            return _yarn(rope, scaling, exponents), scaling.attention_factor
        case LongRopeScaling():
            chosen = scaling.long_factors if positions > scaling.original_positions else scaling.short_factors
            if len(chosen) != len(exponents):
                raise ValueError(
                    f"Rope scaling longrope has {len(chosen)} factors, expected {len(exponents)} "
                    f"(half of the {rope.dim} rotated dimensions)."
                )
            factors = torch.tensor(chosen, dtype=torch.float32, device="cpu")
            return 1.0 / (factors * rope.theta**exponents), scaling.attention_factor


def _dynamic(rope: Rope, scaling: DynamicScaling, positions: int, exponents: Tensor) -> Tensor:
    lengths = torch.arange(1, positions + 1, dtype=torch.float32, device="cpu").clamp_min(scaling.original_positions)
    growth = scaling.factor * lengths / scaling.original_positions - (scaling.factor - 1)
    base = rope.theta * growth ** (rope.dim / (rope.dim - 2))
    return 1.0 / (base[:, None] ** exponents)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 at the longest wavelength that is fully scaled, 1 at the shortest that is interpolated
    smooth = (scaling.original_positions / wavelengths - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    scaled = torch.where(wavelengths > scaling.original_positions / low, plain / scaling.factor, between)
    return torch.where(wavelengths < scaling.original_positions / high, plain, scaled)


def _yarn(rope: Rope, scaling: YarnScaling, exponents: Tensor) -> Tensor:
    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times within the original length."""
        turns = math.log(scaling.original_positions / (rotations * 2 * math.pi))
        return rope.dim * turns / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    periods = rope.theta**exponents
    kept = 1 - ramp  # the share of the unscaled frequency
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
