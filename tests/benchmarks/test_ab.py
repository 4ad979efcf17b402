"""The comparison of two trees: what pairs and rounds of them say."""

import random

import pytest

from benchmarks.ab import ROUNDS, interval, row


def test_the_interval_holds_the_median_as_often_as_it_says():
    numbers = random.Random(0)
    for n in (6, 10, 25):
        held = 0
        for _ in range(2000):
            low, high = interval([numbers.gauss(1.0, 0.1) for _ in range(n)])
            held += low <= 1.0 <= high
        assert held >= 0.935 * 2000


@pytest.mark.parametrize("rounds", (1, ROUNDS))
def test_rounds_that_differ_are_not_taken_for_pairs(rounds):
    """Each round has a luck of its own, within which all pairs are alike."""
    lucks = [0.9, 1.1, 0.95, 1.05, 1.0, 1.02][:rounds]
    found = row("prefill any", [([1.0] * 40, [luck] * 40) for luck in lucks])
    assert found["interval"] == [min(lucks), max(lucks)]
    assert found["within"] == (max(lucks) <= found["limit"])
