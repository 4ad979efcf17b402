"""The bounds of the waiting queue: a server must refuse before it drowns, and nobody may take all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.engine.request_stream import Apart
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig
    from vllm.engine.tally import Tally
    from vllm.step.messages import CoreRequest

# Used when the configuration names no bounds. Waiting costs memory and patience, nothing else: these are generous.
DEFAULT_SEQUENCES_PER_SLOT = 8
DEFAULT_QUEUED_TOKENS = 1 << 22
# Of the queue, for one account: no more than the slots that it could have if it were alone.
ACCOUNT_SHARE = 4
COLUMNS = 4  # of a tally: sequences that wait, tokens of their prompts, requests held back, sequences with a token
# Requests held back of all accounts, for each sequence that may wait: those of calls that are let in although the queue
# has no room for all of them.
HELD_PER_PLACE = 4


class Account:
    """What one call of a user (n > 1, beams, many prompts) has in the queue, and what it may not have there yet."""

    __slots__ = ("apart", "held_back", "requests", "tokens", "waiting")

    def __init__(self) -> None:
        self.requests = 0  # in progress
        self.waiting = 0  # sequences in the queue
        self.tokens = 0  # of their prompts
        self.apart = Apart()
        self.held_back: dict[str, None] = {}  # requests with sequences that were not sent to the core, in order


class Admission:
    """Counts what waits: sequences that were sent to the core and have no token yet, and texts being tokenized.

    An account may have a share of the queue; its further sequences are held back until those have left, and take no
    place from others.
    """

    def __init__(self, config: SchedulerConfig, engines: int = 1, in_core: Callable[[], int] | None = None) -> None:
        """engines: that share the queue, each as often as it has stages.   in_core: how many sequences the core has, at
        least; what waits for the slots that they leave free needs no place. None: all slots are taken.
        """
        self.slots = slots = engines * config.max_num_seqs
        self._in_core = in_core
        self.max_sequences = config.max_num_queued_reqs or DEFAULT_SEQUENCES_PER_SLOT * slots
        self.max_tokens = config.max_num_queued_tokens or DEFAULT_QUEUED_TOKENS
        self.share = max(1, min(slots, self.max_sequences // ACCOUNT_SHARE))
        self.share_of_tokens = max(1, self.max_tokens // ACCOUNT_SHARE)
        self.closed = False
        self._waiting: dict[str, tuple[int, Account | None]] = {}  # id in the core -> prompt tokens, account
        self._tokens = 0
        self._arriving = 0
        self._held = 0  # requests held back
        self._tally: Tally | None = None

    def count_with(self, tally: Tally) -> None:
        """Share the queue with other front ends of the same core. Of those that ask at the same moment each may still
        get the last place.
        """
        self._tally = tally

    def _tell(self) -> None:
        if self._tally is not None:
            self._tally.put(0, self.waiting)
            self._tally.put(1, self._tokens)
            self._tally.put(2, self._held)
            self._tally.put(3, self._running)

    def step_taken(self) -> None:
        """Sequences have perhaps ended."""
        if self._tally is not None:
            self._tally.put(3, self._running)

    @property
    def _running(self) -> int:
        """Sequences with a token."""
        return self.slots if self._in_core is None else max(0, self._in_core() - len(self._waiting))

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._arriving

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    def check(self, sequences: int = 1, tokens: int = 0, short: bool = False) -> None:
        """Raise QueueOverflowError if there is no room. An empty queue takes anything, and free slots what fits them.

        A call needs a place for each of its sequences (n = 4 counts four times), or only for the first as long as no
        other call has any held back: then its others are.

        short: each takes one step. Then there need be room for the first, and to hold the others back.
        """
        if self.closed:
            raise QueueOverflowError("The server is shutting down.")
        counts = [self.waiting, self._tokens, self._held, self._running]
        if self._tally is not None:
            counts = [own + self._tally.others(i) for i, own in enumerate(counts)]
        waiting, queued, held, running = counts
        if not waiting:
            return
        most = HELD_PER_PLACE * self.max_sequences
        if short and sequences > 1 and self._held + sequences > most:
            raise QueueOverflowError(
                f"{self._held} prompts are held back until the queue has room for them, at most {most} may be. "
                "Try again later."
            )
        places = self.max_sequences + max(0, self.slots - running)
        if waiting + (min(1, sequences) if short or not held else sequences) > places:
            raise QueueOverflowError(
                f"The waiting queue is full: {waiting} sequences wait, this request has {sequences}, and at most "
                f"{places} may wait together. Try again later."
            )
        if queued + tokens > self.max_tokens:
            raise MaxQueuedTokensError(
                f"The waiting requests have {queued} prompt tokens, this one has {tokens}, and at most "
                f"{self.max_tokens} may wait together. Try again later."
            )

    def room(self, account: Account, tokens: int) -> int:
        """How many sequences with prompts of so many tokens the account may add to the queue. All accounts together
        leave half of it to those who come with a single one.
        """
        others = 0 if self._tally is None else self._tally.others(0)
        shared = self.max_sequences // 2 - self.waiting - others
        room = min(self.share - account.waiting, shared, (self.share_of_tokens - account.tokens) // max(1, tokens))
        return max(room, 0 if account.waiting else 1)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Count one request that is still being tokenized."""
        self._arriving += 1
        self._tell()
        try:
            yield
        finally:
            self._arriving -= 1
            self._tell()

    def hold_back(self, account: Account, request_id: str) -> None:
        """Not all of a request was sent to the core."""
        account.held_back[request_id] = None
        self._held += 1
        self._tell()

    def let_go(self, account: Account, request_id: str) -> None:
        """All of it was sent, or it has ended."""
        if request_id in account.held_back:
            del account.held_back[request_id]
            self._held -= 1
            self._tell()

    def enter(self, requests: Iterable[CoreRequest], account: Account | None = None) -> None:
        """Sequences were sent to the core."""
        for request in requests:
            length = len(request.prompt_token_ids)
            self._waiting[request.request_id] = length, account
            self._tokens += length
            if account is not None:
                account.waiting += 1
                account.tokens += length
        self._tell()

    def leave(self, core_id: str) -> Account | None:
        """A sequence has its first token, or has ended; ids that do not wait are ignored.

        Returns its account, if that has others held back.
        """
        length, account = self._waiting.pop(core_id, (0, None))
        self._tokens -= length
        if length:
            self._tell()
        if account is None:
            return None
        account.waiting -= 1
        account.tokens -= length
        return account if account.held_back else None

    def clear(self) -> None:
        self._waiting.clear()
        self._tokens = 0
        self._tell()
