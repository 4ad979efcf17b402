"""ALiBi (arXiv 2108.12409): a bias on scores that grows with distance, by a slope for each head."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(heads: int, largest_exponent: float = 8.0) -> Tensor:
    """[heads] fp32 on the CPU: the slope of each head of the whole model; score(q, k) gets slope * (k - q).

    For p heads, p a power of two, slope i is 2 ** -(largest_exponent * i / p), i = 1 .. p. Otherwise p is the next
    power of two: first every second slope of its series (i = 2, 4, ..), then the others (i = 1, 3, ..), as many as
    needed.
    """
    p = 1 << (heads - 1).bit_length()
    series = [2.0 ** -(largest_exponent * i / p) for i in range(1, p + 1)]
    if p != heads:
        series = (series[1::2] + series[::2])[:heads]
    return torch.tensor(series, dtype=torch.float32, device="cpu")
