"""What others are spared while one account crowds the batch: long waits for its steps, and its long steps."""

from __future__ import annotations

from vllm.core.waiting import WaitingQueue

EXPRESS_SHARE = 0.125  # of the time, for steps that leave the crowd out
TOKENS_SHARE = 0.125  # of a step's tokens, for the crowd's prompts
_LONGEST_CREDIT_S = 0.25
_MEMORY_S = 1.0  # for which others count as there after they were


class Crowd:
    """Keeps account of others beside the account with the most sequences.

    A step of hundreds of sequences takes many times as long as the prompt of a newcomer, who would wait for the rest of
    one such step and all of the next. So newcomers start in a small step of their own, in which the crowd waits; how
    long these take is measured, and bounded by a share of the time. And while others are there, few tokens of the
    crowd's prompts go into one step.
    """

    def __init__(self, waiting: WaitingQueue, max_num_batched_tokens: int) -> None:
        self._waiting = waiting
        self._tokens = max(1, int(max_num_batched_tokens * TOKENS_SHARE))
        self._credit = 0.0  # seconds that steps of newcomers may take
        self._others_seen = 0.0
        self.account: str | None = None  # that crowds the batch
        self.tokens = max_num_batched_tokens  # that its prompts may still have in this step

    def begin(self, now: float, num_running: int, budget: int) -> None:
        """A step is planned at `now` seconds, with `num_running` requests in their slots."""
        waiting = self._waiting
        self.account, self.tokens = waiting.crowd() if waiting.has_accounts else None, budget
        if self.account is None:
            return
        first = waiting.first()
        if waiting.held(self.account) < num_running or (first is not None and first.account != self.account):
            self._others_seen = now
        if now - self._others_seen < _MEMORY_S:
            self.tokens = self._tokens

    @property
    def may_wait(self) -> bool:
        """Whether the next step may leave the crowd out."""
        return self.account is not None and self._credit > 0.0

    def took(self, seconds: float, express: bool) -> None:
        """A step has ended; `express`: it left the crowd out."""
        self._credit = min(self._credit + (-seconds if express else seconds * EXPRESS_SHARE), _LONGEST_CREDIT_S)
