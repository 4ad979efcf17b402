"""The bounds of the waiting queue: a server must refuse before it drowns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig
    from vllm.step.messages import CoreRequest

# Used when the configuration names no bounds. Waiting costs memory and patience, nothing else: these are generous.
DEFAULT_SEQUENCES_PER_SLOT = 8
DEFAULT_QUEUED_TOKENS = 1 << 22


class Admission:
    """Counts what waits: sequences that were sent to the core and have no token yet, and texts being tokenized."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.max_sequences = config.max_num_queued_reqs or DEFAULT_SEQUENCES_PER_SLOT * config.max_num_seqs
        self.max_tokens = config.max_num_queued_tokens or DEFAULT_QUEUED_TOKENS
        self.closed = False
        self._lengths: dict[str, int] = {}  # id in the core -> prompt tokens
        self._tokens = 0
        self._arriving = 0

    @property
    def waiting(self) -> int:
        return len(self._lengths) + self._arriving

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    def check(self, sequences: int = 1, tokens: int = 0) -> None:
        """Raise QueueOverflowError if there is no room; n = 4 counts four times. An empty queue takes anything."""
        if self.closed:
            raise QueueOverflowError("The server is shutting down.")
        waiting = self.waiting
        if not waiting:
            return
        if waiting + sequences > self.max_sequences:
            raise QueueOverflowError(
                f"The waiting queue is full: {waiting} sequences wait, at most {self.max_sequences} may. "
                "Try again later."
            )
        if self._tokens + tokens > self.max_tokens:
            raise MaxQueuedTokensError(
                f"The waiting requests have {self._tokens} prompt tokens, at most {self.max_tokens} may wait. "
                "Try again later."
            )

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Count one request that is still being tokenized."""
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def enter(self, requests: Iterable[CoreRequest]) -> None:
        """Sequences were sent to the core."""
        for request in requests:
            length = len(request.prompt_token_ids)
            self._lengths[request.request_id] = length
            self._tokens += length

    def leave(self, core_id: str) -> None:
        """A sequence has its first token, or has ended; ids that do not wait are ignored."""
        self._tokens -= self._lengths.pop(core_id, 0)

    def clear(self) -> None:
        self._lengths.clear()
        self._tokens = 0
