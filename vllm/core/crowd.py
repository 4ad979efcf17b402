"""What others are spared while one account crowds the batch: long waits for its steps, and its long steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from vllm.core.request import Request
from vllm.core.waiting import WaitingQueue

EXPRESS_SHARE = 0.125  # of the time, for steps that leave the crowd out
LONGEST = 4.5  # times as long as a newcomer's step may those with the crowd take, while others are there
SHORT_SECONDS = 0.006  # a step that takes no longer is not made shorter
MOST_PARTS = 4
PROMPTS_SHARE = 0.125  # of the crowd's tokens in a step, for its prompts, at least
UNMEASURED_SHARE = 0.0625  # of a step's tokens, for the crowd while it is not known what they take
_LONGEST_CREDIT_S = 0.25
_MEMORY_S = 1.0  # for which others count as there after they were
_KEPT = 0.9  # of what earlier steps took, in a mean, with each later one


class Crowd:
    """Keeps account of others beside the account with the most sequences.

    A step of hundreds of sequences takes many times as long as the prompt of a newcomer, who would wait for the rest of
    one such step and all of the next. So newcomers start in a small step of their own, in which the crowd waits; how
    long these take is measured, and bounded by a share of the time. And while others are there, the crowd computes no
    more tokens in a step than measured steps say take `LONGEST` times as long as a newcomer's: its sequences take turns
    in `parts`, and few tokens of its prompts go into one step. Where a step costs about the same however many sequences
    it has, all of them are in each.
    """

    def __init__(self, waiting: WaitingQueue, max_num_batched_tokens: int) -> None:
        self._waiting = waiting
        self._most = max_num_batched_tokens
        self._credit = 0.0  # seconds that steps of newcomers may take
        self._others_seen = -math.inf
        self._ended = 0.0  # when the last step did
        self._newcomers, self._crowded = _Times(), _Times()
        self._turn = 0
        self.account: str | None = None  # that crowds the batch
        self.tokens = max_num_batched_tokens  # that it may have in this step
        self.parts = 1  # of its sequences, of which one is computed in this step

    def begin(self, now: float, num_running: int, budget: int, num_resting: int = 0) -> None:
        """A step is planned at `now` seconds, with `num_running` requests in their slots; `num_resting` of them compute
        nothing.
        """
        waiting = self._waiting
        self.account, self.tokens, self.parts = waiting.crowd() if waiting.has_accounts else None, budget, 1
        if self.account is None:
            return
        held, first = waiting.held(self.account), waiting.first()
        if held < num_running or (first is not None and first.account != self.account):
            self._others_seen = now
        if self.has_company(now):
            held, most = max(1, held - num_resting), self._tokens_beside_others()
            self.parts = min(MOST_PARTS, -(-held // most)) or 1
            self.tokens = min(budget, most)

    def tokens_of_prompts(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> int:
        """How many tokens of its prompts may go into a step that has so many of these requests already."""
        return max(1, self.tokens - self._taken(requests, num_tokens), int(self.tokens * PROMPTS_SHARE))

    def came(self, request: Request, now: float) -> None:
        """A request has come at `now` seconds."""
        if request.account is None:
            self._others_seen = now

    def has_company(self, now: float) -> bool:
        """Whether others are there at `now` seconds, or were a moment ago and may come back."""
        return now - self._others_seen < _MEMORY_S

    def _tokens_beside_others(self) -> int:
        """Of the crowd, in one step."""
        newcomers, crowded = self._newcomers, self._crowded
        if not (newcomers.steps and crowded.steps):
            return max(1, int(self._most * UNMEASURED_SHARE))
        longest = max(SHORT_SECONDS, LONGEST * newcomers.seconds / newcomers.steps)
        return max(1, min(self._most, int(longest * crowded.tokens / crowded.seconds)))

    def next_turn(self) -> int:
        """Which of the parts has its turn: those whose slot's number leaves this when divided by `parts`."""
        self._turn += 1
        return self._turn % self.parts

    @property
    def may_wait(self) -> bool:
        """Whether the next step may leave the crowd out."""
        return self.account is not None and self._credit > 0.0

    def took(
        self, begun: float, now: float, requests: Sequence[Request], num_tokens: Sequence[int], express: bool
    ) -> None:
        """A step of so many tokens of each request, planned at `begun`, has ended; `express`: it left the crowd out.

        What a step takes in which others have most of the tokens, as while the crowd waits for those forked from it,
        says nothing of the crowd's.
        """
        seconds, self._ended = now - max(begun, self._ended), now
        self._credit = min(self._credit + (-seconds if express else seconds * EXPRESS_SHARE), _LONGEST_CREDIT_S)
        if self.account is None or seconds <= 0.0:
            return
        tokens = sum(num_tokens)
        if express:
            self._newcomers.add(seconds, tokens)
        elif 2 * self._taken(requests, num_tokens) >= tokens:
            self._crowded.add(seconds, tokens)

    def _taken(self, requests: Iterable[Request], num_tokens: Iterable[int]) -> int:
        """The crowd's tokens among these."""
        account = self.account
        return sum(n for request, n in zip(requests, num_tokens, strict=True) if request.account == account)


class _Times:
    """What steps took, the newest with the most weight."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.seconds = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.steps = _KEPT * self.steps + 1
        self.tokens = _KEPT * self.tokens + tokens
        self.seconds = _KEPT * self.seconds + seconds
