"""A small HTTP/1.1 client for streamed answers, cheap enough that the server under test stays the bottleneck."""

from __future__ import annotations

import asyncio
import ssl
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass


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


async def post_events(target: Target, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """POST `body`; yield the payload of each server-sent event. Raises HTTPFailure for anything but a 200."""
    context = ssl.create_default_context() if target.secure else None
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context, limit=1 << 20)
    except OSError as error:
        raise HTTPFailure(f"cannot connect to {target.host}:{target.port}: {error}") from error
    try:
        lines = [f"POST {target.path}{path} HTTP/1.1", f"host: {target.host}:{target.port}", "connection: close"]
        lines += ["content-type: application/json", f"content-length: {len(body)}", "accept: text/event-stream"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        status, chunked = await _read_head(reader)
        if status != 200:
            text = (await reader.read(4096)).decode(errors="replace")
            raise HTTPFailure(f"status {status}: {text[:300]}")
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
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise HTTPFailure(f"connection broke: {error}") from error
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ", 2)
    if not words[0].startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
        raise HTTPFailure(f"not an HTTP/1.1 answer: {lines[0][:100]!r}")
    status = int(words[1])
    headers = [line.lower() for line in lines[1:]]
    chunked = any(line.startswith(b"transfer-encoding:") and b"chunked" in line for line in headers)
    return status, chunked


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
