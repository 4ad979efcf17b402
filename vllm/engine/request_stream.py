"""What one consumer of the asynchronous engine has not read yet."""

from __future__ import annotations

import asyncio

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind


class RequestStream:
    """Outputs on their way to one consumer; a slow one finds them merged, so that its delay costs no memory."""

    __slots__ = ("_error", "_output", "_waiter", "kind")

    def __init__(self, kind: RequestOutputKind) -> None:
        self.kind = kind
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Hand over an output; differences are added up, cumulative outputs replace the one before."""
        if self._output is not None and self.kind is RequestOutputKind.DELTA:
            self._output.add(output, aggregate=True)
        else:
            self._output = output
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, after what is already there."""
        self._error = self._error or error
        self._wake()

    async def next(self) -> RequestOutput:
        """The next output, waiting for it if need be. Raises the stream's error."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._output = self._output, None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
