"""A streamed response: the first event decides the status, then events flow until the client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from vllm.entrypoints.openai.completions import DONE
from vllm.entrypoints.openai.context import as_api_error
from vllm.entrypoints.openai.errors import stream_error
from vllm.entrypoints.openai.limits import SlowReaderError

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Sends events as they come. An error before the first event is an HTTP error; a later one is an event, the last.

    The generator is closed when the client is gone, which aborts the request in the engine.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        self._events = events
        self._extra = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        self.background = None

    async def start(self) -> None:
        """Wait for the first event; whatever it raises is raised here, while the status can still say so."""
        self._first: bytes | None = await anext(self._events, None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not sender.done():
                sender.cancel()
            with suppress(asyncio.CancelledError, SlowReaderError, ConnectionError):
                await sender
        finally:
            watcher.cancel()
            sender.cancel()
            await self._events.aclose()

    async def _send_all(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS + self._extra})
        try:
            if self._first is not None:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except (SlowReaderError, ConnectionError):
            raise
        except Exception as error:
            problem = as_api_error(error)
            tail = stream_error(problem.message, problem.type, problem.status) + DONE
            await send({"type": "http.response.body", "body": tail, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_disconnect(receive: Any) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
