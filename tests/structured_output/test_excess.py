"""The time that masks of slow grammars take from everybody, added up."""

from __future__ import annotations

import pytest

from vllm.structured_output.excess import EXCESS_SECONDS, HALF_LIFE_SECONDS, Excess


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SomeGrammar:
    nbytes = 0

    def start(self) -> None:  # type: ignore[override]
        return None


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_requests_with_one_grammar_share_what_it_takes(clock: Clock) -> None:
    excess, grammar = Excess(clock), SomeGrammar()
    shares = [excess.join(grammar) for _ in range(10)]  # type: ignore[arg-type]
    for share in shares[:9]:
        excess.charge(share, EXCESS_SECONDS / 10)
    assert not any(share.is_over for share in shares)
    excess.charge(shares[9], EXCESS_SECONDS / 5)
    assert all(share.is_over for share in shares)


def test_of_all_grammars_the_one_that_takes_most_is_over(clock: Clock) -> None:
    excess, grammars = Excess(clock), [SomeGrammar() for _ in range(3)]
    one, worst, last = (excess.join(grammar) for grammar in grammars)  # type: ignore[arg-type]
    excess.charge(one, 0.3 * EXCESS_SECONDS)
    excess.charge(worst, 0.5 * EXCESS_SECONDS)
    excess.charge(last, 0.3 * EXCESS_SECONDS)
    assert [share.is_over for share in (one, worst, last)] == [False, True, False]
    excess.charge(last, 0.3 * EXCESS_SECONDS)  # what the worst has taken is paid for
    assert not last.is_over


def test_what_was_long_ago_is_forgotten(clock: Clock) -> None:
    """A grammar that is always in use, and now and then slow, is not over one day."""
    excess, grammar = Excess(clock), SomeGrammar()
    share = excess.join(grammar)  # type: ignore[arg-type]
    for _ in range(1000):
        excess.charge(share, 0.4 * EXCESS_SECONDS)
        clock.now += HALF_LIFE_SECONDS
    assert not share.is_over


def test_a_grammar_that_nobody_uses_any_more_begins_anew(clock: Clock) -> None:
    excess, grammar = Excess(clock), SomeGrammar()
    share = excess.join(grammar)  # type: ignore[arg-type]
    assert excess.join(grammar) is share  # type: ignore[arg-type]
    excess.charge(share, 2 * EXCESS_SECONDS)
    excess.leave(grammar)  # type: ignore[arg-type]
    assert excess.join(grammar).is_over  # type: ignore[arg-type]
    excess.leave(grammar)  # type: ignore[arg-type]
    excess.leave(grammar)  # type: ignore[arg-type]
    assert not excess.join(grammar).is_over  # type: ignore[arg-type]
