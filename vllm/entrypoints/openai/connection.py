"""The connection layer: bounds what one connection may send or leave unread before any request exists."""

from __future__ import annotations

import asyncio
import heapq
import json
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl

from vllm.entrypoints.openai.errors import error_body
from vllm.entrypoints.openai.upgrades import NoUpgrades
from vllm.logger import init_logger

logger = init_logger(__name__)

# Bytes that bring a request no further: an unfinished head, chunk extensions, trailers.
MAX_IDLE_BYTES = 64 * 1024
# Fields of a head. A field of four bytes takes thirty times as much memory.
MAX_HEADER_FIELDS = 256
# Of a body whose request was answered already, so that a client which sends first and reads later sees the answer.
MAX_IGNORED_BYTES = 2 * 1024 * 1024
# Of what a client has sent, looked at per turn of the event loop: hundreds of requests, thousands of chunks.
BYTES_PER_TURN = 16 * 1024
# How many connections are closed at once to make room: looking for them takes as long as serving a few requests.
CLOSED_AT_ONCE = 64
# How long a client that was answered before its body was read may take to send the rest: many read only after writing.
LINGER_SECONDS = 2.0
# When to look whether a client that sends nothing more is still there.
LOOK_SECONDS = (0.02, 0.1, 0.5, 2.0)
LOOK_EVERY = 0.5  # seconds, while requests wait behind another on their connection
_TCP_CLOSED, _TCP_CLOSE_WAIT = 7, 8
# Of an answer that the kernel does not take, before its writer is told to wait: the kernel's own buffer holds plenty.
MAX_UNSENT_BYTES = 16 * 1024


class ChunkWriter(Protocol):
    """A connection that takes chunks of the body that is being sent, at once and without a turn of the event loop.

    In this order: `watch`, `hold_head`, the application's sending of the head, `open` if `takes_chunks`, chunks,
    `close`.
    """

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Before anything is sent: have `on_lost` called when the connection ends, at once if it has; None: no more."""

    def hold_head(self, scope: Any) -> None:
        """Keep the head of the response to `scope` until the first chunk, `close` or the end goes with it: one write
        costs, and wakes the client, once.
        """

    def takes_chunks(self, scope: Any) -> bool:
        """Whether chunks of the response to `scope` may be written: the head was sent, and leaves that open."""

    @property
    def paused(self) -> bool:
        """Whether the client is behind: nothing should be written until `on_writable` is called."""

    def open(self, on_writable: Callable[[], None], on_lost: Callable[[], None]) -> None:
        """Begin: from now on a client that stays behind for too long is cut. `on_lost` is called if the connection ends
        before `close`.
        """

    def write(self, data: bytes) -> None:
        """Send one chunk, not empty."""

    def close(self) -> None:
        """No chunk follows from here; the response itself is ended by its application."""


def chunk_writer(scope: Any) -> ChunkWriter | None:
    """The connection of this request, if it writes chunks past the application's layers."""
    writer: ChunkWriter | None = scope.get("state", {}).get("chunk_writer")
    return writer


class _HeldHead:
    """Stands in for the transport of `cycle`, uvicorn's name for a request, while its head is written."""

    def __init__(self, cycle: Any, transport: Any) -> None:
        self._cycle = cycle
        self._transport = transport
        self.data = b""
        cycle.transport = self

    def release(self) -> bytes:
        """The head; what is written from now on goes out."""
        self._cycle.transport = self._transport
        return self.data

    def write(self, data: bytes) -> None:
        self.data += data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _send_unchunked(cycle: Any) -> None:
    """Have a body of unknown length end with the connection: HTTP/1.0 knows no chunks (RFC 9112, 6.1), which uvicorn
    would send.
    """
    inner, unknown = cycle.send, False

    async def send(message: Any) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if unknown:
                cycle.chunked_encoding = False
        elif unknown:
            cycle.expected_content_length = len(message.get("body", b""))
        await inner(message)

    cycle.send = send


def raw_answer(status: int, phrase: str, message: str, type: str, retry_after: int | None = None) -> bytes:
    """A whole HTTP answer with the usual error body, after which the connection is closed."""
    body = json.dumps(error_body(message, type, status)).encode()
    retry = "" if retry_after is None else f"retry-after: {retry_after}\r\n"
    head = (
        f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


async def _busy(scope: Any, receive: Any, send: Any) -> None:
    body = json.dumps(error_body("The server has too many connections.", "ServiceUnavailableError", 503)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Outbox:
    """Chunks for any number of connections, written one right after the other at the next turn of the event loop.

    A write to a client that reads at the moment costs a third of one that has to wake it. When a step has brought
    something for many streams of one client (or proxy), it is awake for all writes but the first, unless there is
    other work in between.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[asyncio.Transport, bytes]] = []

    def put(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, data: bytes) -> None:
        if not self._chunks:
            loop.call_soon(self.flush)
        self._chunks.append((transport, data))

    def flush(self) -> None:
        """Write what is there, in order. A connection that fails is cut; the others go on."""
        chunks, self._chunks = self._chunks, []
        for transport, data in chunks:
            if transport.is_closing():
                continue
            try:
                transport.write(data)
            except Exception:
                logger.exception("A connection does not take what is written to it")
                transport.abort()


class _PatientFlow(FlowControl):
    """Reads on only when all that was read has been looked at."""

    def __init__(self, connection: BoundedConnection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.resume_feeding():
            super().resume_reading()


class BoundedConnection(NoUpgrades):
    """uvicorn's protocol for HTTP/1.1 within bounds: cuts clients that send heads slowly or without end, and those that
    do not read what was sent. Of many requests or chunks in one piece it takes few per turn of the event loop. Where
    there are too many connections, those on which nothing happens make room for others.

    Times in seconds. direct: streams may write chunks past the application's layers, none of which may then care for
    bodies.
    """

    head_timeout: float
    max_connections: int
    write_timeout: float
    direct: bool
    outbox: Outbox

    app_state: dict[str, Any]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _PatientFlow(self)
        self._unfed = b""
        self._feeding = False
        self.idle_since = self.loop.time()
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        # Layers above get no other way to drop a client that reads nothing.
        self.app_state = {**self.app_state, "drop_connection": transport.abort}
        if self.direct:
            self.app_state["chunk_writer"] = self
        self._on_writable: Callable[[], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._held_head: _HeldHead | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._half_closed = False  # the client sends nothing more
        self._read_all = False  # and what it has sent was read
        self._idle_bytes = 0
        self._looking = False
        self._last_answer: bytes | None = None  # goes out behind those to `_requests`; nothing is read any more
        self._requests: deque[Any] = deque()  # not answered yet: the one at work, and those that were sent behind it
        if len(self.connections) > self.max_connections and not self._make_room():
            self.app = _busy
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(self.head_timeout, self._on_slow_head)

    def _make_room(self) -> bool:
        """Close those connections that have waited for their clients for longest. Whether there were any."""
        waiting: list[Any] = [other for other in self.connections if other is not self]
        waiting = [other for other in waiting if other.waits_for_client]
        for other in heapq.nsmallest(CLOSED_AT_ONCE, waiting, key=lambda other: other.idle_since):
            other.transport.abort()
            self.connections.discard(other)
        return bool(waiting)

    @property
    def waits_for_client(self) -> bool:
        """Whether there is no whole request to work at."""
        return not self._requests or self._requests[0].more_body

    def data_received(self, data: bytes) -> None:
        if self._last_answer is not None:
            return
        if self._unfed:
            self._unfed += data
        elif len(data) > BYTES_PER_TURN:
            self._unfed = data
            self._feed_part()
        else:
            self._feed(data)

    def _feed_part(self) -> None:
        """Look at the next part of what was read. The rest waits for another turn, for pipelined requests to be
        answered, and for the application to take what there is of a body.
        """
        self._feeding = False
        if self.transport.is_closing():
            return
        part, self._unfed = self._unfed[:BYTES_PER_TURN], self._unfed[BYTES_PER_TURN:]
        self._feed(part)
        self.flow.pause_reading()
        _, length, at_rest, _ = self._progress()
        if at_rest or length <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def resume_feeding(self) -> bool:
        """Go on with what was read before, if anything is left of it. Whether there is."""
        if self._unfed and not self._feeding and not self.pipeline:
            self._feeding = True
            self.loop.call_soon(self._feed_part)
        return bool(self._unfed or self.pipeline or self._last_answer is not None)

    def _feed(self, data: bytes) -> None:
        before = self._progress()
        super().data_received(data)
        after = self._progress()
        self._idle_bytes = 0 if after != before else self._idle_bytes + len(data)
        if not after[2]:
            self._stop_head_timer()
        elif before[2] and self._head_timer is None:  # the head of the next request has begun, and is not whole
            self._head_timer = self.loop.call_later(self.head_timeout, self._on_slow_head)
        limit = MAX_IGNORED_BYTES if after[2] and after[3] and after[0] is not None else MAX_IDLE_BYTES
        if self._idle_bytes > limit and not self.transport.is_closing():
            text = "The request headers are too large."
            phrase = "Request Header Fields Too Large"
            self._answer_and_close(raw_answer(431, phrase, text, "RequestHeaderFieldsTooLarge"))

    def _progress(self) -> tuple[Any, int, bool, bool]:
        """The request at work, how much of its body waits, whether none is at work, whether more body may come."""
        cycle = self.cycle
        if cycle is None:
            return None, 0, True, True
        return cycle, len(cycle.body), cycle.response_complete, cycle.more_body

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) <= MAX_HEADER_FIELDS:  # one more than may be there is enough to refuse the request
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            if self.scope["http_version"] != "1.1":
                _send_unchunked(self.cycle)
            self._requests.append(self.cycle)
            if self.pipeline:
                self._start_looking()

    def _start_looking(self) -> None:
        """While requests wait behind another nothing is read, so that nobody sees the client leave."""
        if not self._looking and self.scheme != "https":
            self._looking = True
            self.loop.call_later(LOOK_EVERY, self._look)

    def _look(self) -> None:
        waiting = bool(self.pipeline) or (self._last_answer is not None and bool(self._requests))
        self._looking = waiting and not self.transport.is_closing()
        if not self._looking:
            return
        self._end_if_gone()
        if self._tcp_state() == _TCP_CLOSE_WAIT:
            self._on_half_close()
        self.loop.call_later(LOOK_EVERY, self._look)

    def _tcp_state(self) -> int:
        """0 for a connection that is not of TCP."""
        try:
            connection = self.transport.get_extra_info("socket")
            return int(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
        except OSError:
            return 0

    def _tell_requests(self) -> None:
        """No answer can be sent any more. uvicorn tells only the last request."""
        for request in self._requests:
            if not request.response_complete:
                request.disconnected = True
                request.message_event.set()

    def on_response_complete(self) -> None:
        while self._requests and self._requests[0].response_complete:
            self._requests.popleft()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self.idle_since = self.loop.time()
        self.flow.resume_reading()  # which waited while there was another request
        if self._requests:
            return
        if self._last_answer is not None:
            self._close_with(self._last_answer)
        elif self._read_all:
            self.transport.close()
        elif self.cycle.more_body:  # and perhaps never comes: nobody may hold a connection like that
            self._stop_linger_timer()
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def on_message_complete(self) -> None:
        self._stop_linger_timer()
        super().on_message_complete()

    def _stop_linger_timer(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends nothing more. If it has sent a whole request it may still read: it gets its answer.

        Most that end their side have left, though, and nothing tells them apart but what happens to something that is
        sent: so those who wait for an answer are sent an interim one.
        """
        if self.waits_for_client or self.scheme == "https":  # TLS has no half of a connection
            return None
        self._read_all = True
        self._on_half_close()
        return True

    def _on_half_close(self) -> None:
        """A request is at work, and the client sends nothing more; some of what it has sent may wait to be read."""
        if self._half_closed:
            return
        self._half_closed = True
        request = self._requests[0]
        if not request.response_started and request.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        for seconds in LOOK_SECONDS:
            self.loop.call_later(seconds, self._end_if_gone)

    def _end_if_gone(self) -> None:
        if not self.transport.is_closing() and self._tcp_state() == _TCP_CLOSED:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_linger_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        self._tell_requests()
        if self._on_lost is not None:
            self._on_lost()

    # -- chunks of a streamed body, see ChunkWriter ----------------------------------------------------------------

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        self._on_lost = on_lost
        if on_lost is not None and self.transport.is_closing():
            on_lost()

    def hold_head(self, scope: Any) -> None:
        cycle = self.cycle
        if cycle.scope is scope and not cycle.response_started:
            self._held_head = _HeldHead(cycle, self.transport)

    def _take_head(self) -> bytes:
        held, self._held_head = self._held_head, None
        return b"" if held is None else held.release()

    def takes_chunks(self, scope: Any) -> bool:
        """HTTP/1.1, through httptools, head sent."""
        cycle = self.cycle
        return (
            cycle.scope is scope
            and getattr(cycle, "chunked_encoding", None) is True
            and cycle.response_started
            and not cycle.response_complete
            and scope["method"] != "HEAD"
        )

    @property
    def paused(self) -> bool:
        return bool(self.flow.write_paused)

    def open(self, on_writable: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self._on_writable, self._on_lost = on_writable, on_lost
        if self.flow.write_paused:
            self._start_write_timer()

    def write(self, data: bytes) -> None:
        head = b"" if self._held_head is None else self._take_head()
        self.outbox.put(self.loop, self.transport, b"%b%x\r\n%b\r\n" % (head, len(data), data))

    def close(self) -> None:
        self.outbox.flush()  # what the application writes comes after it
        head = self._take_head()
        if head and not self.transport.is_closing():
            self.transport.write(head)
        self._on_writable = self._on_lost = None
        self._stop_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._on_writable is not None:
            self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()
        if self._on_writable is not None:
            self._on_writable()

    def _start_write_timer(self) -> None:
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # -- bounds ----------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._answer_and_close(raw_answer(400, "Bad Request", msg, "BadRequestError"))

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait for a reader that never comes
        else:
            super().timeout_keep_alive_handler()

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        text = "The request headers did not arrive in time."
        self._answer_and_close(raw_answer(408, "Request Timeout", text, "TimeoutError"))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _answer_and_close(self, answer: bytes) -> None:
        """Answer what was read last, once the requests before it have been, and read no more."""
        if self._last_answer is not None:
            return
        self._unfed = b""
        cycle = self.cycle
        if cycle is not None and cycle.more_body:  # it is a part of this request
            if cycle.response_started:  # another answer would be taken for a part of this request's
                self.transport.abort()
                return
            self._requests.pop()
            if self.pipeline:
                self.pipeline.popleft()
            else:
                cycle.disconnected = True
                cycle.message_event.set()
        if not self._requests:
            self._close_with(answer)
            return
        self._last_answer = answer
        self.flow.pause_reading()
        self._start_looking()

    def _close_with(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()
        self.loop.call_later(1.0, self.transport.abort)  # closing would wait for a reader that never comes


def connection_class(
    head_timeout: float, max_connections: int, write_timeout: float = 30.0, direct: bool = False
) -> type[asyncio.Protocol]:
    """A `BoundedConnection` with these bounds, and an outbox for all connections of a server."""
    attributes: dict[str, Any] = {
        "head_timeout": head_timeout,
        "max_connections": max_connections,
        "write_timeout": write_timeout,
        "direct": direct,
        "outbox": Outbox(),
    }
    made: type[asyncio.Protocol] = type("Connection", (BoundedConnection,), attributes)
    return made
