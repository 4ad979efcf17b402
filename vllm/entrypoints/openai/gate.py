"""The gate before what costs the event loop time in a request, so that answers in progress go on between."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 4  # requests


class Gate:
    """Lets few pass per turn of the event loop, in the order in which they came: a thousand clients that send at the
    same moment would otherwise share a turn, of seconds, in which nobody is sent a token.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passed = 0  # in this turn
        self._counting = False

    async def enter(self) -> None:
        """Returns when the caller may go on."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_turn)
        if self._passed < PER_TURN:
            self._passed += 1
            return
        future = loop.create_future()
        self._waiting.append(future)
        await future

    def _next_turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < PER_TURN:
            future = self._waiting.popleft()
            if not future.done():  # else its client has left
                future.set_result(None)
                self._passed += 1
        self._counting = self._passed > 0
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_turn)
