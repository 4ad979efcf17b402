"""Counter-based random numbers: a token's uniform is a function of (request seed, position in its sequence) only."""

from __future__ import annotations

import numpy as np

# The increment and the multipliers of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
# 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3, _ONE = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(1)
_ALL_BUT_24, _STEP = np.uint64(40), np.float32(2.0**-24)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's output function: a bijection of 64-bit numbers in which every input bit reaches every output bit."""
    z = (z ^ (z >> _SHIFT_1)) * _MIX_1
    z = (z ^ (z >> _SHIFT_2)) * _MIX_2
    mixed: np.ndarray = z ^ (z >> _SHIFT_3)
    return mixed


def stream_start(seed: np.ndarray) -> np.ndarray:
    """Where the SplitMix64 streams of some seeds start. seed: uint64 array -> uint64 array."""
    return _mix(np.asarray(seed, np.uint64) + _GOLDEN)


def uniform(start: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per (start of a stream, position in it), a multiple of 2**-24.

    start: uint64 array, the `stream_start` of each seed: seeds are mixed first, so that neighbouring ones have
    unrelated streams; position: integers of the same shape, not negative, which pick the elements -> float32 array.
    """
    z = _mix(start + (np.asarray(position).astype(np.uint64) + _ONE) * _GOLDEN)
    numbers: np.ndarray = (z >> _ALL_BUT_24).astype(np.float32) * _STEP
    return numbers
