"""Counter-based random numbers: a token's uniform is a function of (request seed, position in its sequence) only."""

from __future__ import annotations

import numpy as np

# The increment and the multipliers of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
# 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's output function: a bijection of 64-bit numbers in which every input bit reaches every output bit."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def stream_start(seed: np.ndarray) -> np.ndarray:
    """Where the SplitMix64 streams of some seeds start. seed: uint64 array -> uint64 array."""
    return _mix(np.asarray(seed, np.uint64) + _GOLDEN)


def uniform(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per (seed, position), a multiple of 2**-24.

    seed: uint64 array; position: int64 array of the same shape, not negative -> float32 array.
    The seed is mixed first, so that neighbouring seeds have unrelated streams; then it is the start of a SplitMix64
    stream of which `position` picks the element.
    """
    z = _mix(stream_start(seed) + (np.asarray(position).astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    numbers: np.ndarray = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return numbers
