"""Codes out of packed words."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words -> uint8 codes of `bits` bits along `dim`, lowest bits first, as one stream of bits along `dim`."""
    words = words.movedim(dim, -1)
    if WORD % bits == 0:
        shifts = torch.arange(0, WORD, bits, device=words.device, dtype=torch.int32)
        codes = (words[..., None] >> shifts) & (2**bits - 1)
        found: Tensor = codes.flatten(-2).to(torch.uint8).movedim(-1, dim)
        return found
    stream = (words[..., None] >> torch.arange(WORD, device=words.device, dtype=torch.int32)) & 1
    stream = stream.flatten(-2).to(torch.uint8)
    stream = stream[..., : stream.shape[-1] // bits * bits].unflatten(-1, (-1, bits))
    weights = 2 ** torch.arange(bits, device=words.device)
    summed: Tensor = (stream * weights.to(torch.uint8)).sum(-1, dtype=torch.uint8)
    return summed.movedim(-1, dim)


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """uint8 codes -> int32 words, the inverse of `unpack`. Their number along `dim` fills whole words."""
    codes = codes.movedim(dim, -1)
    stream = (codes[..., None] >> torch.arange(bits, device=codes.device, dtype=torch.uint8)) & 1
    stream = stream.flatten(-2).unflatten(-1, (-1, WORD)).to(torch.int64)
    words = (stream << torch.arange(WORD, device=codes.device)).sum(-1)
    found: Tensor = words.to(torch.int32).movedim(-1, dim).contiguous()  # wraps to the same 32 bits
    return found


def nibbles(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """uint8 [..., n] -> codes [..., 2 n]: of each byte the low half first, or the high half."""
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return torch.stack(halves, -1).flatten(-2)
