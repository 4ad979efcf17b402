"""What one consumer of the asynchronous engine has not read yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from vllm.logger import init_logger
from vllm.outputs import PoolingRequestOutput, RequestOutput, failure_of
from vllm.sampling_params import RequestOutputKind

logger = init_logger(__name__)

MAX_APART = 256  # outputs, of all prompts and choices of one call


class Apart:
    """How many outputs the streams of one call keep apart, an output of several choices counted for each."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 0


class Wakeups:
    """Calls listeners once per turn of the event loop, however many outputs each got: one callback for all of them."""

    def __init__(self) -> None:
        self._due: list[RequestStream] = []

    def add(self, loop: asyncio.AbstractEventLoop, stream: RequestStream) -> None:
        if not self._due:
            loop.call_soon(self._run)
        self._due.append(stream)

    def _run(self) -> None:
        due, self._due = self._due, []
        for stream in due:
            stream.due = False
            try:
                if stream.listener is not None:
                    stream.listener()
            except Exception:
                logger.exception("A consumer has failed; the others go on")


class RequestStream:
    """Outputs on their way to one consumer; a slow one finds them merged, so that its delay costs no memory.

    The consumer awaits `next`, or has a function called when there is something to `take`. It must `close` the stream,
    which calls `on_close` once; that ends a request still running.

    apart: each output is handed over by itself, unless the streams that share this are behind by MAX_APART.
    """

    __slots__ = (
        "_apart", "_error", "_held", "_loop", "_on_close", "_output", "_timer", "_waiter", "_wakeups", "due", "kind",
        "listener", "request_id",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        kind: RequestOutputKind,
        wakeups: Wakeups,
        on_close: Callable[[RequestStream], None],
        apart: Apart | None = None,
    ) -> None:
        self.request_id = request_id
        self.kind = kind
        self._wakeups = wakeups
        self._on_close: Callable[[RequestStream], None] | None = on_close
        self._held = apart
        self._apart: deque[RequestOutput] = deque()  # outputs before `_output` that were not taken
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.listener: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.due = False  # the listener is about to be called
        self._timer: asyncio.TimerHandle | None = None

    # -- the engine's side ---------------------------------------------------------------------------------------------

    def put(self, output: RequestOutput | PoolingRequestOutput[Any]) -> None:
        """Hand over an output; differences are added up, cumulative outputs replace the one before.

        Of a request that is pooled it is a `PoolingRequestOutput`, as whoever asked for it knows.
        """
        output = cast(RequestOutput, output)
        if self._output is not None and self.kind is RequestOutputKind.DELTA:
            if self._held is not None and self._held.held < MAX_APART:
                self._held.held += len(self._output.outputs)
                self._apart.append(self._output)
                self._output = output
            else:
                self._output.add(output, aggregate=True)
        else:
            self._output = output
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, after what is already there."""
        self._error = self._error or error
        self._wake()

    def expire_with(self, timer: asyncio.TimerHandle) -> None:
        """`timer` will fail this stream; closing it ends the timer."""
        self._timer = timer

    def _wake(self) -> None:
        if self._loop is not None:
            if not self.due:
                self.due = True
                self._wakeups.add(self._loop, self)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the consumer's side -------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` on this event loop, soon, whenever there is something new to `take`, and once for what is."""
        self._loop = asyncio.get_running_loop()
        self.listener = listener
        if self._output is not None or self._error is not None:
            self._wake()

    def take(self) -> RequestOutput | None:
        """What has come since the last time, None if nothing has. After the last output: raises the stream's error."""
        if self._apart:
            first = self._apart.popleft()
            self._held.held -= len(first.outputs)  # type: ignore[union-attr]
            return first
        output, self._output = self._output, None
        if output is None and self._error is not None:
            raise self._error
        return output

    async def next(self) -> RequestOutput:
        """The next output, waiting for it if need be. Raises the stream's error."""
        while (output := self.take()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return output

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """All outputs as they come; the stream is closed at the end or when the consumer leaves."""
        try:
            while True:
                output = await self.next()
                yield output
                if output.finished:
                    if is_failed(output):
                        await self.next()  # raises
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Nobody reads any more. May be called twice."""
        self.listener = None
        if self._timer is not None:
            self._timer.cancel()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)
        while self._apart:
            self.take()


def is_failed(output: RequestOutput | PoolingRequestOutput[Any]) -> bool:
    """Whether the engine could not finish this request; its stream then raises why."""
    return failure_of(output) is not None
