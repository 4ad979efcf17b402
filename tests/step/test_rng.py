"""The counter-based random numbers."""

from __future__ import annotations

import numpy as np

from vllm.step.rng import stream_start, uniform


def reference(seed: int, position: int) -> float:
    """SplitMix64 in Python integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    start = mix(seed + 0x9E3779B97F4A7C15 & mask)
    return (mix(start + (position + 1) * 0x9E3779B97F4A7C15 & mask) >> 40) / 2**24


def test_splitmix64_of_known_seed() -> None:
    # The first output of SplitMix64 started at 1234567, as published with the generator.
    from vllm.step.rng import _GOLDEN, _mix

    assert int(_mix(np.array([1234567], np.uint64) + _GOLDEN)[0]) == 6457827717110365317


def test_equals_a_plain_computation() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 1234567]
    positions = [0, 1, 2, 131072, 2**40]
    pairs = [(s, p) for s in seeds for p in positions]
    found = uniform(stream_start(np.array([s for s, _ in pairs], np.uint64)), np.array([p for _, p in pairs], np.int64))
    assert found.dtype == np.float32
    assert found.tolist() == [reference(s, p) for s, p in pairs]


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    seeds, positions = np.arange(100, dtype=np.uint64), np.arange(100, dtype=np.int32) * 7
    together = uniform(stream_start(seeds), positions)
    alone = [uniform(stream_start(seeds[i : i + 1]), positions[i : i + 1])[0] for i in range(100)]
    assert together.tolist() == alone


def test_uniform_over_positions_and_over_seeds_and_uncorrelated() -> None:
    n = 1 << 16
    over_positions = uniform(stream_start(np.full(n, 5, np.uint64)), np.arange(n))
    over_seeds = uniform(stream_start(np.arange(n, dtype=np.uint64)), np.full(n, 5))
    neighbour = uniform(stream_start(np.full(n, 6, np.uint64)), np.arange(n))
    for numbers in (over_positions, over_seeds):
        assert numbers.min() >= 0.0 and numbers.max() < 1.0
        counts = np.bincount((numbers * 64).astype(int), minlength=64)
        assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 * (1 - 2 / 567 + 3.72 * (2 / 567) ** 0.5) ** 3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / n**0.5
    assert abs(np.corrcoef(over_positions, neighbour)[0, 1]) < 4 / n**0.5
