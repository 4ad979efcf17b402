"""The outermost layer of the server, in this order: header size, Host, key, content length, body size, time.

It is plain ASGI, below routing: whatever the path looks like, nothing inside is reached without passing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.connection import LINGER_SECONDS, MAX_HEADER_FIELDS
from vllm.entrypoints.openai.context import echoed_id
from vllm.entrypoints.openai.errors import APIError, error_body
from vllm.entrypoints.openai.gate import Gate

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Exactly these raw paths are open without a key. Everything else needs one, however it is spelled.
OPEN_PATHS = frozenset({b"/health", b"/ping", b"/version"})
# Names of fields that the server does not know, for the client that has sent them.
UNKNOWN_FIELDS_HEADER = b"x-unknown-fields"

# Of the bodies of all requests at work: as many of the largest size as may be there at once. Small bodies are always
# taken; the number of connections bounds them.
LARGEST_BODIES = 32
SMALL_BODY_BYTES = 64 * 1024

# A name or an IPv4 address, or an IPv6 address in brackets, and a port (RFC 3986, 3.2.2); it may be empty.
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Za-z:.%]+\])(?::[0-9]*)?")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]")


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
        self._bodies = Bodies(LARGEST_BODIES * limits.max_body_bytes)
        self._gate = Gate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # GET, without the body: that part is the connection's
            scope = {**scope, "method": "GET"}
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if size > self._limits.max_header_bytes or len(headers) > MAX_HEADER_FIELDS:
            text = "The request headers are too large."
            await _refuse(scope, receive, send, 431, text, "RequestHeaderFieldsTooLarge")
            return
        if problem := _wrong_host(scope, headers):
            await _refuse(scope, receive, send, 400, problem, "BadRequestError")
            return
        if not self._authorised(scope, headers):
            await _refuse(scope, receive, send, 401, "Unauthorized", "AuthenticationError")
            return
        lengths = [value for name, value in headers if name == b"content-length"]
        if any(not v.isdigit() for v in lengths) or len(set(lengths)) > 1:
            await _refuse(scope, receive, send, 400, "The Content-Length header is not a number.", "BadRequestError")
            return
        if lengths and (len(lengths[0]) > 18 or int(lengths[0]) > self._limits.max_body_bytes):
            error = too_large(self._limits)
            await _refuse(scope, receive, send, error.status, error.message, error.type)
            return
        # What has a body waits when that is there.
        if scope["method"] != "POST" and not scope["path"].endswith("/health"):
            await self._gate.enter()
        guarded = _Guard(scope, receive, send, self._limits, self._bodies)
        try:
            await self._app(scope, guarded.receive, guarded.send)
        except SlowReaderError:
            return  # the connection is gone
        finally:
            self._bodies.held -= guarded.received

    def _authorised(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> bool:
        if not self._keys.active or scope["method"] == "OPTIONS":
            return True
        if scope.get("raw_path", scope["path"].encode()) in self._open_paths:
            return True
        values = [value for name, value in headers if name == b"authorization"]
        if not values and scope["path"].startswith("/v1/messages"):  # as Anthropic's clients send it
            values = [b"Bearer " + value for name, value in headers if name == b"x-api-key"]
        return len(values) == 1 and self._keys.accepts(values[0])


class RequestIdMiddleware:
    """Answers with X-Request-Id: the client's own if it is harmless, else a new one."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        header = (b"x-request-id", echoed_id(given.decode("latin-1")).encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), header]
            await send(message)

        await self._app(scope, receive, send_with_id)


def too_large(limits: Limits) -> APIError:
    """413, and the end of the connection: the rest of the body is not read."""
    text = f"The request body is larger than {limits.max_body_bytes} bytes."
    return APIError(413, text, "RequestTooLargeError", headers={"connection": "close"})


def too_many_bytes() -> APIError:
    """503, and the end of the connection."""
    text = "The bodies of other requests take all the memory that there is for bodies. Try again later."
    return APIError(503, text, "ServiceUnavailableError", headers={"connection": "close", "retry-after": "1"})


def too_slow() -> APIError:
    """408, and the end of the connection."""
    text = "The request body did not arrive in time."
    return APIError(408, text, "TimeoutError", headers={"connection": "close"})


@dataclass(slots=True)
class Bodies:
    """Bytes of the bodies of all requests at work, and how many there may be."""

    most: int
    held: int = 0


class SlowReaderError(ConnectionError):
    """The client does not take what is sent."""


class _Guard:
    """Counts and times what flows in and out of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, bodies: Bodies) -> None:
        self._scope = scope
        self._drop: Callable[[], None] | None = scope.get("state", {}).get("drop_connection")
        self._receive = receive
        self._send = send
        self._limits = limits
        self._bodies = bodies
        self.received = 0
        self._body_done = False
        self._deadline = asyncio.get_running_loop().time() + limits.body_timeout

    async def receive(self) -> Message:
        if self._body_done:
            return await self._receive()
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            if task is not None:
                task.cancel()

        # A timer instead of `wait_for`, which makes a task: most bodies are there already.
        timer = loop.call_at(max(self._deadline, loop.time() + 0.001), expire)
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            if expired:
                take_back_cancel(task)
                raise too_slow() from None
            raise
        finally:
            timer.cancel()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.received += size
            self._bodies.held += size
            if self.received > self._limits.max_body_bytes:
                raise too_large(self._limits)
            if self.received > SMALL_BODY_BYTES and self._bodies.held > self._bodies.most:
                raise too_many_bytes()
            self._body_done = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and (unknown := self._scope.get("unknown_fields")):
            message["headers"] = [*message.get("headers", []), (UNKNOWN_FIELDS_HEADER, safe_names(unknown))]
        task = asyncio.current_task()
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            if self._drop is not None:
                self._drop()
            if task is not None:
                task.cancel()

        timer = asyncio.get_running_loop().call_later(self._limits.write_timeout, expire)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if expired:
                take_back_cancel(task)
                raise SlowReaderError("The client does not read what is sent.") from None
            raise
        finally:
            timer.cancel()


def take_back_cancel(task: asyncio.Task[Any] | None) -> None:
    """The cancellation was our own and has become an error: nobody above may take the task for cancelled."""
    if task is not None and hasattr(task, "uncancel"):  # Python 3.11
        task.uncancel()


def _wrong_host(scope: Scope, headers: list[tuple[bytes, bytes]]) -> str | None:
    """What is wrong with the version of HTTP or with the Host header (RFC 9112, 3.2); None if nothing is."""
    version = scope.get("http_version", "1.1")
    if version == "0.9":
        return "HTTP/0.9 is not served: send a version, such as HTTP/1.1."
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (version == "1.1" and not hosts):
        return f"A request has exactly one Host header, got {hosts}."
    if any(name == b"host" and not _HOST.fullmatch(value) for name, value in headers):
        return "The Host header is no host, or host:port."
    return None


def safe_names(names: Iterable[str], limit: int = 512) -> bytes:
    """Names for a header: what a header cannot hold is a question mark, and the whole is of bounded length."""
    return ", ".join(_UNSAFE.sub("?", name[:64]) for name in names)[:limit].encode()


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, message: str, type: str) -> None:
    """Answer at once; then look away for a while as the body arrives, since many clients read only after writing."""
    data = json.dumps(error_body(message, type, status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": True})
    ended = False
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_discard(receive), LINGER_SECONDS)
        ended = True
    await send({"type": "http.response.body", "body": b""})
    drop: Callable[[], None] | None = scope.get("state", {}).get("drop_connection")
    if not ended and drop is not None:
        drop()


async def _discard(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
