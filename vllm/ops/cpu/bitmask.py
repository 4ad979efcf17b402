"""Masks of allowed tokens on the CPU: row by row, in place, without a branch per token."""

from __future__ import annotations

from functools import cache

import numpy as np
from torch import Tensor

from vllm.ops import bitmask as ops


@cache
def _addends() -> np.ndarray:
    """[256, 8] fp32: what each value of a byte adds to the logits of its eight tokens, lowest bit first."""
    allowed = np.arange(256)[:, None] >> np.arange(8) & 1
    return np.where(allowed == 1, np.float32(0), np.float32(-np.inf))


def apply_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """`vllm.ops.bitmask.apply_bitmask` for the CPU."""
    target, addends = logits.numpy(), _addends()
    octets: np.ndarray = bits.numpy().view(np.uint8)
    vocab = target.shape[1]
    for row, packed in zip(rows.tolist(), octets, strict=True):
        target[row] += addends[packed].reshape(-1)[:vocab]


def register() -> None:
    ops.apply_bitmask.register("cpu", apply_bitmask)
