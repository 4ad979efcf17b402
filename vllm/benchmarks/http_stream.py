"""A small HTTP/1.1 client for streamed answers, cheap enough that the server under test stays the bottleneck."""

from __future__ import annotations

import asyncio
import ssl
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple


class HTTPFailure(Exception):
    """The server answered with another status than 200, or the connection broke."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: taken from a URL once."""

    host: str
    port: int
    secure: bool
    path: str

    @classmethod
    def from_url(cls, url: str) -> Target:
        """Raises ValueError unless `url` is an http(s) URL with a host."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"Expected a URL such as http://localhost:8000, got {url!r}.")
        secure = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if secure else 80), secure, parts.path.rstrip("/"))


class Client:
    """Connections to one server, kept for the next request as clients in use keep them. Close it in the end."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._context = ssl.create_default_context() if target.secure else None
        self._idle: list[_Connection] = []

    async def post_events(self, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """POST `body`; yield the payload of each server-sent event. Raises HTTPFailure for anything but a 200.

        Read it to its end: a connection left before that is not used again.
        """
        lines = [f"POST {self._target.path}{path} HTTP/1.1", f"host: {self._target.host}:{self._target.port}"]
        lines += ["content-type: application/json", f"content-length: {len(body)}", "accept: text/event-stream"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        connection, head = await self._exchange("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        complete = False
        try:
            if head.status != 200:
                text = (await connection.reader.read(4096)).decode(errors="replace")
                raise HTTPFailure(f"status {head.status}: {text[:300]}")
            async for payload in _events(connection.reader, head.chunked):
                yield payload
            complete = head.chunked and head.keeps_alive
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise HTTPFailure(f"connection broke: {error}") from error
        finally:
            if complete:
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _exchange(self, request: bytes) -> tuple[_Connection, _Head]:
        """Send a request and read the head of its answer; once more if the server had closed a kept connection."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await _ask(connection, request)
            except (OSError, asyncio.IncompleteReadError) as error:
                connection.writer.close()
                if isinstance(error, asyncio.IncompleteReadError) and error.partial:
                    raise HTTPFailure(f"connection broke: {error}") from error
            except BaseException:
                connection.writer.close()
                raise
        connection = await self._connect()
        try:
            return connection, await _ask(connection, request)
        except BaseException as error:
            connection.writer.close()
            if isinstance(error, (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)):
                raise HTTPFailure(f"connection broke: {error}") from error
            raise

    async def _connect(self) -> _Connection:
        host, port = self._target.host, self._target.port
        try:
            return _Connection(*await asyncio.open_connection(host, port, ssl=self._context, limit=1 << 20))
        except OSError as error:
            raise HTTPFailure(f"cannot connect to {host}:{port}: {error}") from error

    def close(self) -> None:
        """Close the connections that wait for a next request."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _Head(NamedTuple):
    status: int
    chunked: bool
    keeps_alive: bool


async def _ask(connection: _Connection, request: bytes) -> _Head:
    connection.writer.write(request)
    await connection.writer.drain()
    return _parse_head(await connection.reader.readuntil(b"\r\n\r\n"))


async def _events(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The payloads of the events that a body holds. Raises HTTPFailure if it is cut."""
    chunks = ChunkedBody() if chunked else None
    rest = b""
    while data := await reader.read(1 << 16):
        *events, rest = (rest + (data if chunks is None else chunks.feed(data))).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    yield line[6:]
        if chunks is not None and chunks.complete:
            return
    if chunks is not None:
        raise HTTPFailure("connection broke: the answer ended early")


def _parse_head(head: bytes) -> _Head:
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ", 2)
    if not words[0].startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
        raise HTTPFailure(f"not an HTTP/1.1 answer: {lines[0][:100]!r}")
    headers = [line.lower() for line in lines[1:]]
    chunked = any(line.startswith(b"transfer-encoding:") and b"chunked" in line for line in headers)
    closes = any(line.startswith(b"connection:") and b"close" in line for line in headers)
    return _Head(int(words[1]), chunked, words[0] == b"HTTP/1.1" and not closes)


class ChunkedBody:
    """Takes off the framing of a body in chunks. `complete` once the last one was seen; trailers are not looked at."""

    def __init__(self) -> None:
        self._buffer = b""
        self.complete = False

    def feed(self, data: bytes) -> bytes:
        """The chunks that `data` completes. Raises HTTPFailure for what is no chunk."""
        buffer = self._buffer + data
        parts = []
        at = 0
        while not self.complete and (start := buffer.find(b"\r\n", at) + 2) >= 2:
            try:
                end = start + int(buffer[at : start - 2].split(b";")[0], 16)
            except ValueError:
                raise HTTPFailure("connection broke: the answer is not made of chunks") from None
            self.complete = end == start
            if len(buffer) < end + 2:
                break
            parts.append(buffer[start:end])
            at = end + 2
        self._buffer = buffer[at:]
        return b"".join(parts)
