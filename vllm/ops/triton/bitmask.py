"""Triton kernel that applies masks of allowed tokens to logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import bitmask as ops

_TILE = 4096


@triton.jit
def _mask_kernel(logits, stride, rows, bits, words, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Grid (masked, tiles): forbidden tokens of one tile of one row."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = tl.load(bits + i * words + t // 32, mask=t < VOCAB, other=0)
    forbidden = ((word >> (t % 32)) & 1) == 0
    tl.store(logits + row * stride + t, -float("inf"), mask=forbidden & (t < VOCAB))


def apply_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """`vllm.ops.bitmask.apply_bitmask` for CUDA."""
    if logits.stride(1) != 1:
        ops.apply_bitmask.reference(logits, rows, bits)
        return
    if len(rows):
        vocab = logits.shape[1]
        _mask_kernel[(len(rows), triton.cdiv(vocab, _TILE))](
            logits, logits.stride(0), rows, bits, bits.shape[1], VOCAB=vocab, TILE=_TILE, num_warps=4
        )


def register(device_type: str) -> None:
    ops.apply_bitmask.register(device_type, apply_bitmask)
