"""Rotary frequencies of every scaling kind, and the cos | sin table that the kernels read.

Formulas: RoPE (arXiv 2104.09864), NTK-aware and YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1's model card;
numerically as Hugging Face evaluates them, in fp32. Three kinds depend on the length of a sequence, but a cached key is
rotated once:

- dynamic: the row of position p uses the base of a sequence of p + 1 tokens. Within `original_positions` this is plain
  RoPE; beyond, it is what Hugging Face computes when it generates token by token with a cache.
- longrope: one of two sets of factors for the whole table: the short ones if every position of the table lies within
  `original_positions`, else the long ones. So an engine whose `max_model_len` is at most the original length agrees
  with Hugging Face on every sequence; a longer one agrees on sequences beyond the original length, and rotates shorter
  ones with the long factors too, because keys of both kinds cannot meet in one cache.
- by prompt (Qwen 1): the table of each stage lies behind that of the one before; steps say which a request reads.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from vllm.model_executor.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PromptScaling,
    Rope,
    YarnScaling,
    prompt_stage,
)


def rope_table(rope: Rope, positions: int) -> Tensor:
    """[positions, rope.dim] fp32 on the CPU: cos | sin, dim / 2 each, of positions 0, 1, ...; with `PromptScaling` as
    many rows for each stage that a prompt of so many positions may have.
    """
    if isinstance(rope.scaling, PromptScaling):
        plain = replace(rope, scaling=None)
        stages = range(prompt_stage(positions, rope.scaling.original_positions) + 1)
        # twice the alpha of NTK-aware scaling, and 1, for each doubling (Qwen 1's model code)
        bases = [rope.theta * (2.0 ** (stage + 1) - 1) ** (rope.dim / (rope.dim - 2)) for stage in stages]
        return torch.cat([rope_table(replace(plain, theta=base), positions) for base in bases])
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
        case None | PromptScaling():  # of its first stage
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
            is_long = positions > scaling.original_positions
            chosen = scaling.long_factors if is_long else scaling.short_factors
            if len(chosen) != len(exponents):
                raise ValueError(
                    f"Rope scaling longrope has {len(chosen)} factors, expected {len(exponents)} "
                    f"(half of the {rope.dim} rotated dimensions)."
                )
            factors = torch.tensor(chosen, dtype=torch.float32, device="cpu")
            magnitude = scaling.attention_factor
            if is_long and scaling.long_attention_factor is not None:
                magnitude = scaling.long_attention_factor
            return 1.0 / (factors * rope.theta**exponents), magnitude


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
