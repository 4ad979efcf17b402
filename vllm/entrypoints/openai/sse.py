"""A streamed response: the first event decides the status, then events flow until the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response

from vllm.engine.request_stream import RequestStream, is_failed
from vllm.entrypoints.openai.answers import INLINE_ENTRIES, count_entries, has_logprobs
from vllm.entrypoints.openai.connection import ChunkWriter, chunk_writer
from vllm.entrypoints.openai.context import Prompt, as_api_error, open_all
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.limits import SlowReaderError, take_back_cancel

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# Of one answer's events, written in a turn of the event loop: this takes a few milliseconds, then others have theirs.
BYTES_PER_TURN = 64 * 1024
BYTES_OF_AN_OUTPUT = 128  # which it counts for besides its events


class Events(Protocol):
    """Writes what a request's prompts bring as events; nothing is sent for empty ones."""

    def entries(self, index: int, output: RequestOutput) -> int:
        """How many log probabilities the events of an output of prompt number `index` will show."""
        return count_entries([output])

    def feed(self, index: int, output: RequestOutput) -> bytes:
        """The events of one output of prompt number `index`."""

    def end(self) -> bytes:
        """The events after the last output."""

    def failure(self, error: APIError) -> bytes:
        """The events of an error, which are the last ones."""


class EventStream(Response):
    """Sends events as they come. An error before the first event is an HTTP error; a later one is an event, the last.

    Where the connection takes chunks directly, an output becomes bytes on it in the very callback that brings it: no
    task is woken per token; what several prompts bring in a turn of the event loop is one chunk. Otherwise events pass
    through the layers of the application, as any ASGI body does. A slow reader finds outputs merged either way. What
    still runs when the client is gone is aborted in the engine.
    """

    def __init__(self, prompts: Sequence[Prompt], events: Events, headers: dict[str, str] | None = None) -> None:
        self._prompts = prompts
        self._events = events
        self._extra = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        self.background = None
        self._streams: list[RequestStream] = []
        self._unfinished = len(prompts)
        self._due: dict[int, None] = {}  # prompts whose streams have something, in order
        self._changed = asyncio.Event()
        self._is_scheduled = False  # `_go_on`, for a later turn of the event loop
        self._writer: ChunkWriter | None = None
        self._work: tuple[int, RequestOutput, asyncio.Future[bytes]] | None = None  # a large output, being written
        self._ready = b""  # events that were not sent yet
        self._complete = False  # and none will come after them
        self._begun = False  # the status was decided
        self._gone = False  # the connection has ended
        self.on_close: Callable[[], None] | None = None  # called once, when nothing more will be sent

    async def start(self, scope: Any, receive: Any) -> None:
        """Begin the requests and wait for the first event; what is raised until then is raised here, in time for the
        status to say so, also that the client has left (`while_there`).
        """
        try:
            async with while_there(scope, receive):
                await self._await_first()
            self._begun = True
        except BaseException:
            self._close()
            raise

    async def _await_first(self) -> None:
        await open_all(self._prompts, self._streams, self._on_output)
        while not self._ready and not self._complete:
            await self._changed.wait()
            self._changed.clear()
            self._ready = self._collect()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": HEADERS + self._extra}
        writer = chunk_writer(scope)
        try:
            with suppress(SlowReaderError, ConnectionError):
                if writer is None:
                    await send(head)
                    await self._pass_on(receive, send)
                else:
                    await self._write_to(writer, scope, receive, send, head)
        finally:
            self._close()

    def _close(self) -> None:
        self._complete = True
        for stream in self._streams:
            stream.close()
        if self.on_close is not None:
            self.on_close()

    async def _pass_on(self, receive: Any, send: Any) -> None:
        """Send all events through the layers of the application, and look out for the end of the connection."""
        sender = asyncio.current_task()
        gone = False

        def leave(_: object) -> None:
            nonlocal gone
            gone = True
            if sender is not None:
                sender.cancel()

        watcher = asyncio.ensure_future(_until_disconnect(receive))
        watcher.add_done_callback(leave)
        try:
            while not self._complete:
                if self._ready:
                    await send({"type": "http.response.body", "body": self._ready, "more_body": True})
                await self._changed.wait()
                self._changed.clear()
                self._ready = self._collect()
            await self._end(send)
        except asyncio.CancelledError:
            if not gone:
                raise
            take_back_cancel(sender)
        finally:
            watcher.remove_done_callback(leave)
            watcher.cancel()

    async def _end(self, send: Any) -> None:
        """Send the last events."""
        await send({"type": "http.response.body", "body": self._ready, "more_body": False})

    async def _write_to(self, writer: ChunkWriter, scope: Any, receive: Any, send: Any, head: dict[str, Any]) -> None:
        """Have head and events written as they come; the connection says when it has ended."""
        writer.hold_head(scope)
        try:
            await send(head)
            if writer.takes_chunks(scope):
                self._writer = writer
                writer.open(self._write, self._on_lost)
                if not writer.paused:
                    self._write()
                while not self._complete:
                    await self._changed.wait()
                    self._changed.clear()
        finally:
            writer.close()
            taken, self._writer = self._writer is not None, None
        if not taken:
            await self._pass_on(receive, send)
        elif not self._gone:
            await self._end(send)

    def _on_lost(self) -> None:
        """The client is gone."""
        self._gone = self._complete = True
        self._changed.set()

    def _on_output(self, index: int) -> None:
        """A stream has something."""
        self._due[index] = None
        if len(self._prompts) == 1:
            self._go_on()
        else:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Send what is due, unless the client is behind."""
        self._is_scheduled = False
        writer = self._writer
        if writer is None:
            self._changed.set()
        elif not writer.paused:
            self._write()

    def _write(self) -> None:
        """Put what there is on the connection, which is not behind; the last events are left to `_end`, which ends the
        response.
        """
        ready, self._ready = self._ready + self._collect(), b""
        if self._complete:
            self._ready = ready
            self._changed.set()
        elif ready and self._writer is not None:
            self._writer.write(ready)

    def _collect(self) -> bytes:
        """The events of what has come, within the bounds of one turn of the event loop; for what is left, `_go_on` is
        called in a later one. Raises an error that is the first thing to come.
        """
        if self._complete or (self._work is not None and not self._work[2].done()):
            return b""
        events: list[bytes] = []
        room = BYTES_PER_TURN
        due, self._due = self._due, {}
        try:
            if self._work is not None:
                (index, output, work), self._work = self._work, None
                events.append(work.result())
                room -= len(events[0])
                self._count_end(output)
            for index in list(due):
                take = self._streams[index].take
                # or an error that follows the outputs
                while self._work is None and room > 0 and (taken := take()) is not None:
                    shows = has_logprobs(taken)
                    if not (shows or taken.finished):  # most
                        written = self._events.feed(index, taken)
                    elif shows and (taken.finished or self._events.entries(index, taken) > INLINE_ENTRIES):
                        self._begin(index, taken)  # ends may tell of all log probabilities again
                        break
                    else:
                        written = self._write_output(index, taken)
                        self._count_end(taken)
                    events.append(written)
                    room -= len(written) + BYTES_OF_AN_OUTPUT
                if self._work is not None or room <= 0:
                    break
                del due[index]
            self._due = {**due, **self._due}
            if room <= 0:
                self._schedule()
        except Exception as error:
            self._complete = True
            if not self._begun and not any(events):
                raise
            events.append(self._events.failure(as_api_error(error)))
        return b"".join(events)

    def _begin(self, index: int, output: RequestOutput) -> None:
        """Write the events of a large output beside the event loop. What comes meanwhile waits."""
        lanes = self._prompts[index].engine.lanes
        size = self._events.entries(index, output)
        work = asyncio.ensure_future(lanes.write(self._write_output, index, output, size=size))
        work.add_done_callback(lambda _: self._on_output(index))
        self._work = index, output, work

    def _write_output(self, index: int, output: RequestOutput) -> bytes:
        """The events of an output, and those after all if it is the last one."""
        events = self._events.feed(index, output)
        return events + self._events.end() if _is_end(output) and self._unfinished == 1 else events

    def _count_end(self, output: RequestOutput) -> None:
        if _is_end(output):
            self._unfinished -= 1
            self._complete = self._unfinished == 0


def _is_end(output: RequestOutput) -> bool:
    return output.finished and not is_failed(output)


@asynccontextmanager
async def while_there(scope: Any, receive: Any) -> AsyncIterator[None]:
    """What is done inside is cancelled as soon as the client of a request is gone that was read as a whole. Raises
    APIError 499 then, which nobody gets to see but the log.
    """
    task, writer, gone = asyncio.current_task(), chunk_writer(scope), False
    watcher = None if writer is not None else asyncio.ensure_future(_until_disconnect(receive))

    def leave(*_: object) -> None:
        nonlocal gone
        gone = True
        if task is not None:
            task.cancel()

    try:
        if writer is not None:
            writer.watch(leave)
        elif watcher is not None:
            watcher.add_done_callback(leave)
        yield
        if gone:
            await asyncio.sleep(0)  # is cancelled
    except asyncio.CancelledError:
        if not gone:
            raise
        take_back_cancel(task)
        raise APIError(499, "The client has left.", "ClientClosedRequest") from None
    finally:
        if writer is not None:
            writer.watch(None)
        elif watcher is not None:
            watcher.remove_done_callback(leave)
            watcher.cancel()


async def _until_disconnect(receive: Any) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
