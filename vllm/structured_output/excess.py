"""The time that masks of slow grammars have taken from everybody: for each grammar and for all of them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm.structured_output.grammar import Grammar

# The slow masks of a step may take so long together, and so may those of tokens that must follow. What a mask takes
# beyond its part of that is added up.
MASK_SECONDS = 0.025
EXCESS_SECONDS = 1.0
HALF_LIFE_SECONDS = 10.0  # half of it is forgotten in that time


class FirstMask(NamedTuple):
    """Which tokens a text of a grammar may begin with. row: [words] uint32.   seconds: that computing it has taken."""

    row: np.ndarray
    may_end: bool
    seconds: float


class Share:
    """What all requests with one grammar have, and have taken, together. seconds: beyond what they may; is_over: too
    much.
    """

    def __init__(self) -> None:
        self.first: FirstMask | None = None
        self.seconds = 0.0
        self.num_users = 0
        self.is_over = False


class Excess:
    """Nobody gets a token while a mask is computed, whoever's it is. So what counts is the sum: when that comes to
    EXCESS_SECONDS, the grammar that has taken most of it is over, with all of its requests: as many as one asks for
    (`n`) take no more than one of them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shares: dict[int, Share] = {}  # by the identity of grammars in use
        self._looked = 0.0

    def join(self, grammar: Grammar) -> Share:
        """The share of a grammar that one more request uses, until it leaves."""
        share = self._shares.setdefault(id(grammar), Share())
        share.num_users += 1
        return share

    def leave(self, grammar: Grammar) -> None:
        """A request that had joined has ended."""
        share = self._shares[id(grammar)]
        share.num_users -= 1
        if not share.num_users:
            del self._shares[id(grammar)]

    def charge(self, share: Share, seconds: float) -> None:
        """A mask has taken so much longer than it may."""
        now = self._clock()
        kept = 0.5 ** ((now - self._looked) / HALF_LIFE_SECONDS)
        self._looked = now
        for other in self._shares.values():
            other.seconds *= kept
        share.seconds += seconds
        if sum(other.seconds for other in self._shares.values()) > EXCESS_SECONDS:
            worst = max(self._shares.values(), key=lambda other: other.seconds)
            worst.is_over, worst.seconds = True, 0.0
