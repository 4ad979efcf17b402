"""The outermost layer of the server, in this order: header size, key, content length, body size, time.

It is plain ASGI, below routing: whatever the path looks like, nothing inside is reached without passing here.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.errors import error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Exactly these raw paths are open without a key. Everything else needs one, however it is spelled.
OPEN_PATHS = frozenset({b"/health", b"/ping", b"/version"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request. Sizes in bytes, times in seconds."""

    max_header_bytes: int = 32 * 1024
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout: float = 30.0
    write_timeout: float = 30.0


class KeyChecker:
    """Compares bearer tokens in constant time, as digests, with every key there is."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    @property
    def active(self) -> bool:
        return bool(self._digests)

    def accepts(self, authorization: bytes | None) -> bool:
        scheme, _, token = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


class LimitsMiddleware:
    """Refuses before work is done; see the module's first line for the order."""

    def __init__(self, app: App, limits: Limits, keys: KeyChecker, open_paths: frozenset[bytes] = OPEN_PATHS) -> None:
        self._app = app
        self._limits = limits
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) + 4 for name, value in headers) > self._limits.max_header_bytes:
            await _refuse(send, 431, "The request headers are too large.", "RequestHeaderFieldsTooLarge")
            return
        if not self._authorised(scope, headers):
            await _refuse_json(send, 401, {**error_body("Unauthorized", "AuthenticationError", 401)})
            return
        lengths = [value for name, value in headers if name == b"content-length"]
        if any(not v.isdigit() for v in lengths) or len(set(lengths)) > 1:
            await _refuse(send, 400, "The Content-Length header is not a number.", "BadRequestError")
            return
        if lengths and int(lengths[0]) > self._limits.max_body_bytes:
            await _refuse(send, 413, self._too_large(), "RequestTooLargeError")
            return
        guarded = _Guard(receive, send, self._limits)
        try:
            await self._app(scope, guarded.receive, guarded.send)
        except BodyTooLargeError:
            if not guarded.started:
                await _refuse(send, 413, self._too_large(), "RequestTooLargeError")
        except BodyTimeoutError:
            if not guarded.started:
                await _refuse(send, 408, "The request body did not arrive in time.", "TimeoutError")

    def _authorised(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> bool:
        if not self._keys.active or scope["method"] == "OPTIONS":
            return True
        if scope.get("raw_path", scope["path"].encode()) in self._open_paths:
            return True
        values = [value for name, value in headers if name == b"authorization"]
        return len(values) == 1 and self._keys.accepts(values[0])

    def _too_large(self) -> str:
        return f"The request body is larger than {self._limits.max_body_bytes} bytes."


class BodyTooLargeError(Exception):
    """More of the body arrived than is allowed."""


class BodyTimeoutError(Exception):
    """The body did not arrive in time."""


class SlowReaderError(ConnectionError):
    """The client does not take what is sent."""


class _Guard:
    """Counts and times what flows in and out of one request."""

    def __init__(self, receive: Receive, send: Send, limits: Limits) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self._received = 0
        self._body_done = False
        self._deadline = asyncio.get_running_loop().time() + limits.body_timeout
        self.started = False

    async def receive(self) -> Message:
        if self._body_done:
            return await self._receive()
        remaining = self._deadline - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), max(remaining, 0.001))
        except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
            raise BodyTimeoutError from None
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            if self._received > self._limits.max_body_bytes:
                raise BodyTooLargeError
            self._body_done = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self.started = True
        task = asyncio.current_task()
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            if task is not None:
                task.cancel()

        timer = asyncio.get_running_loop().call_later(self._limits.write_timeout, expire)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if expired:
                raise SlowReaderError("The client does not read what is sent.") from None
            raise
        finally:
            timer.cancel()


async def _refuse(send: Send, status: int, message: str, type: str) -> None:
    await _refuse_json(send, status, error_body(message, type, status))


async def _refuse_json(send: Send, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if status in (408, 413, 431):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
