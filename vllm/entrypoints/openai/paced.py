"""Answers that cost the event loop time to make, and that anybody may ask for as often as they like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

SHARE = 0.1  # of the event loop's time, at most, that making one such answer takes


class Paced:
    """Bytes that are made anew for those who ask, but for at most `SHARE` of the time: who asks too soon behind the
    time before waits, and all who wait share what is made then.
    """

    def __init__(self, make: Callable[[], Awaitable[bytes]], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock = make, clock
        self._free_at = float("-inf")
        self._making = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """What is made after this call. Raises what making it raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._later())
        return await asyncio.shield(self._next)

    async def _later(self) -> bytes:
        async with self._making:
            await asyncio.sleep(max(0.0, self._free_at - self._clock()))
            self._next = None  # who asks from here on wants what is made later
            begin = self._clock()
            try:
                return await self._make()
            finally:
                end = self._clock()
                self._free_at = end + (end - begin) * (1 / SHARE - 1)
