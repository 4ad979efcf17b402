"""Connections of TLS before they are any: those that say nothing make room, and few handshakes share a turn."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sized
from typing import Any

from vllm.entrypoints.openai.gate import Gate


class Greetings:
    """Makes the protocols of accepted connections, of which `make` makes another one once TLS is spoken.

    most: of `connections` and greetings together; the greeting that has taken longest makes room.   seconds: for one.
    """

    def __init__(
        self, make: Callable[[], Any], context: ssl.SSLContext, connections: Sized, most: int, seconds: float
    ) -> None:
        self.make, self.context, self.seconds = make, context, seconds
        self.gate = Gate()
        self._connections, self._most = connections, most
        self._all: dict[_Greeting, None] = {}  # in order

    def __call__(self) -> asyncio.Protocol:
        return _Greeting(self)

    def add(self, greeting: _Greeting) -> None:
        if self._all and len(self._all) + len(self._connections) >= self._most:
            next(iter(self._all)).end()
        self._all[greeting] = None

    def remove(self, greeting: _Greeting) -> None:
        self._all.pop(greeting, None)


class _Greeting(asyncio.Protocol):
    def __init__(self, greetings: Greetings) -> None:
        self._greetings = greetings
        self._transport: Any = None
        self._early = b""  # what came right behind the handshake
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._greetings.add(self)
        self._timer = asyncio.get_running_loop().call_later(self._greetings.seconds, self.end)

    def data_received(self, data: bytes) -> None:
        if self._task is not None:
            self._early += data
            return
        self._transport.pause_reading()
        self._task = asyncio.get_running_loop().create_task(self._greet(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()

    def end(self) -> None:
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self._timer.cancel()
        self._greetings.remove(self)

    async def _greet(self, hello: bytes) -> None:
        greetings = self._greetings
        await greetings.gate.enter()  # what comes now takes a millisecond of signing
        if self._transport.is_closing():
            return
        upgrade = asyncio.ensure_future(
            asyncio.get_running_loop().start_tls(
                self._transport, self, greetings.context, server_side=True, ssl_handshake_timeout=greetings.seconds
            )
        )
        for _ in range(2):  # until TLS reads what comes, and has not read anything yet
            await asyncio.sleep(0)
        tls = self._transport.get_protocol()
        for start in range(0, len(hello), 1024):
            part = hello[start : start + 1024]
            tls.get_buffer(len(part))[: len(part)] = part
            tls.buffer_updated(len(part))
        try:
            transport: Any = await upgrade
        except (OSError, EOFError, RuntimeError):
            self.end()
            return
        self._forget()
        if transport is None or transport.is_closing():
            return
        protocol = greetings.make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._early:
            protocol.data_received(self._early)
