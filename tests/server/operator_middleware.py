"""What an operator may name with --middleware: a class and a coroutine function. See test_http_flags.py."""

from __future__ import annotations

from typing import Any


class Stamp:
    """Plain ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            await send(message)

        await self._app(scope, receive, stamped)


async def mark(request: Any, call_next: Any) -> Any:
    """For `@app.middleware("http")`."""
    response = await call_next(request)
    response.headers["x-mark"] = "function"
    return response


NEITHER = 5
