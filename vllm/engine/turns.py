"""The gate of a front end through which calls with many prompts begin them, so that others have their turn between."""

from __future__ import annotations

import asyncio
import time
from collections import deque

PER_TURN = 16  # prompts
AT_ONCE = 64  # of a call, before there is also a rest after each of its turns
LONGEST_SECONDS = 0.005  # that a rest takes, or a turn before another call has the next one


class Turns:
    """Whose turn it is, in rounds over calls, one at a time. A turn of a call with many is followed by a rest as long
    as itself: the core has enough to do, and needs the processor for others, too.

    A call that has ended or waits for something has its turn taken from it soon; one whose task is cancelled while it
    waits for its turn has none.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Call, asyncio.Future[None]]] = deque()
        self._holder: Call | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the next turn

    def call(self) -> Call:
        """A new call, whose first few prompts need not wait."""
        return Call(self)

    async def wait(self, call: Call, rest: float) -> None:
        """Wait for the turn of a call whose last one, if it has had one, shall be followed by a rest."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((call, future))
        if self._timer is None or self._holder is call:
            self._give_after(rest)
        await future

    def _give_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._give)

    def _give(self) -> None:
        self._timer = self._holder = None
        while self._waiting:
            call, future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                self._holder = call
                self._give_after(LONGEST_SECONDS)
                return


class Call:
    """A call with many prompts."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._count, self._since = 0, time.perf_counter()

    async def next(self) -> None:
        """Wait until another prompt may begin, or be made ready for that."""
        if self._count and self._count % PER_TURN == 0:
            worked = time.perf_counter() - self._since
            await self._turns.wait(self, min(worked, LONGEST_SECONDS) if self._count > AT_ONCE else 0.0)
            self._since = time.perf_counter()
        self._count += 1
