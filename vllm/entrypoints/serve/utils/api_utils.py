"""For routes of a user's own: handlers that end when their client goes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request

__all__ = ["with_cancellation"]

_Handler = Callable[..., Awaitable[Any]]


def with_cancellation(handler: _Handler) -> _Handler:
    """`handler`, a route of FastAPI, cancelled when its client disconnects; then None is returned, to nobody.

    The request is looked for in `raw_request`, else among the other arguments. Its body must have been read, as FastAPI
    does for handlers with a parsed body: what is waited for is the next message. Raises TypeError when it is called
    without a request, and whatever the handler raises.
    """

    @functools.wraps(handler)
    async def ends_with_its_client(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs.get("raw_request"), *kwargs.values(), *args]
        request = next((value for value in given if isinstance(value, Request)), None)
        if request is None:
            raise TypeError("with_cancellation is for handlers that take the request, expected a fastapi.Request.")
        work, gone = asyncio.ensure_future(handler(*args, **kwargs)), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    return ends_with_its_client


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
