"""Answers kernels that wait for another GPU which will never answer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _answer_kernel(pads, rank, rounds, COUNT: tl.constexpr):
    """One program for each rank's pad: ours is full, then empty, and so on; the others' are empty."""
    pad = tl.load(pads + tl.program_id(0)).to(tl.pointer_type(tl.int32)) + tl.arange(0, COUNT)
    first = tl.where(tl.program_id(0) == rank, 1, 0) + tl.zeros([COUNT], tl.int32)
    value = first
    for _ in range(rounds):
        before = tl.atomic_xchg(pad, value, sem="relaxed", scope="sys")
        value = tl.where(before == -1, 0, first - value)  # never so: makes each round wait for the last


def answer_signals(pads: Tensor, count: int, rank: int, rounds: int) -> None:
    """Set signals in a loop: 0, what was sent has been seen, in the others' pads; in this rank's 1, somebody has
    arrived, and 0 in turn, because the rank sends signals to itself too.

    pads: [world] int64, addresses of int32 signals.   count: signals in each, a power of 2.   rounds: of a microsecond
    or two; 0 only loads the kernel.
    """
    _answer_kernel[(pads.numel(),)](pads, rank, rounds, COUNT=count)
