"""How many tokens a step may have while answers are in progress: as many as measured steps say take no longer than a
limit.
"""

from __future__ import annotations

_SHARE = 0.3  # of the newest measurement in the estimate
_LEAST = 512  # tokens beside those of the answers: prompts go on, whatever a step takes
_ANSWER = 16  # tokens a step computes of a request that answers, drafts included, at most


class Pace:
    """Bounds the time between two tokens of an answer where other requests' prompts share its steps.

    The time of a step is counted from the end of the one before, where the device was busy with that, so that steps in
    flight are not counted twice.
    """

    def __init__(self, limit: float, max_num_batched_tokens: int) -> None:
        """limit: seconds, 0 for none."""
        self._limit, self._most = limit, max_num_batched_tokens
        self._per_token = 0.0  # seconds; 0: not known yet
        self._ended = 0.0  # when the last step did
        self._answers = 0  # in the newest plan

    def budget(self) -> int:
        """Tokens that the next step may have."""
        if not (self._limit and self._answers):
            return self._most
        wanted = int(self._limit / self._per_token) if self._per_token else 0  # a small step tells what tokens take
        return min(self._most, max(wanted, self._answers + _LEAST))

    def planned(self, num_tokens: list[int]) -> None:
        """A step of so many tokens of each request has been planned."""
        if self._limit:
            self._answers = _answers(num_tokens)

    def took(self, begun: float, now: float, num_tokens: list[int]) -> None:
        """A step of so many tokens of each request, planned at `begun`, has ended."""
        seconds, self._ended = now - max(begun, self._ended), now
        if not self._limit:
            return
        tokens = sum(num_tokens)
        if tokens >= _answers(num_tokens) + _LEAST:  # what other steps take says nothing of prompts
            found = seconds / tokens
            self._per_token = found if not self._per_token else self._per_token + _SHARE * (found - self._per_token)


def _answers(num_tokens: list[int]) -> int:
    """How many of the requests compute as few tokens as one that answers."""
    return sum(n <= _ANSWER for n in num_tokens)
