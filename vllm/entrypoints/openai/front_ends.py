"""The processes that speak HTTP in front of one core (`--api-server-count`): how the first starts the others, how they
ask each other, and how they end together.

All of them accept connections at one port, among which the kernel divides new ones. The core knows them apart
(`CoreProcess(further=n)`); what clients see of all is asked for with `gather`: a question to one of the others goes to
the first, which asks everybody. The queue's bounds are counted in common memory (`engine/tally.py`). Whichever ends,
all end.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from vllm import envs
from vllm.engine import admission
from vllm.engine.core_client import CoreProcess, patience
from vllm.engine.tally import Tally, shared_file
from vllm.ipc.child import start_child
from vllm.ipc.codec import decoder, encode
from vllm.ipc.frames import FrameReader, frame
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

MODULE = "vllm.entrypoints.openai.front_end"
ANSWER_SECONDS = 10.0  # for a front end to answer another
LEAVE_SECONDS = 10.0  # for one to end, beyond what its requests get
Handler = Callable[..., Awaitable[Any]]


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """A question to another front end; the answer has the same number."""

    number: int
    what: str
    args: list[Any]


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """What came of a question; error: why nothing did."""

    number: int
    value: Any = None
    error: str | None = None


Message: TypeAlias = Ask | Answer
_decode = decoder(Message).decode


class Link(asyncio.Protocol):
    """One end of the socket between the first front end and another: questions both ways. `lost` is done when the other
    end is gone.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        """handlers: what the other end may ask for, by name."""
        self._handlers = handlers
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._answering: set[asyncio.Task[None]] = set()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def over(cls, connection: socket.socket, handlers: Mapping[str, Handler]) -> Link:
        """A link over a connected socket, which is its own from here on."""
        link = cls(handlers)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connection)
        return link

    async def ask(self, what: str, *args: Any) -> Any:
        """The other end's answer. Raises RuntimeError with its error, ConnectionError if it is gone, TimeoutError if it
        takes too long.
        """
        if self._transport is None or self.lost.done():
            raise ConnectionError("The other front end is gone.")
        self._number += 1
        number = self._number
        found = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, what, list(args)))
        try:
            return await asyncio.wait_for(found, ANSWER_SECONDS)
        except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
            raise TimeoutError("Another front end has not answered.") from None
        finally:
            self._asked.pop(number, None)

    def tell(self, what: str) -> None:
        """Ask for something whose answer nobody waits for."""
        self._send(Ask(0, what, []))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            message = _decode(body)
            if isinstance(message, Ask):
                task = asyncio.ensure_future(self._answer(message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            elif (found := self._asked.pop(message.number, None)) is not None and not found.done():
                if message.error is None:
                    found.set_result(message.value)
                else:
                    found.set_exception(RuntimeError(message.error))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        for found in self._asked.values():
            if not found.done():
                found.set_exception(ConnectionError("The other front end is gone."))
        self._asked.clear()

    def _send(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(encode(message)))

    async def _answer(self, ask: Ask) -> None:
        try:
            handler = self._handlers.get(ask.what)
            if handler is None:
                raise ValueError(f"There is nothing called {ask.what!r} to ask for.")
            self._send(Answer(ask.number, await handler(*ask.args)))
        except Exception as error:
            logger.exception("The question %r of another front end failed", ask.what)
            self._send(Answer(ask.number, error=f"{type(error).__name__}: {error}"))


class FrontEnds:
    """All front ends, as one of them sees them. This class is the view of one that is alone."""

    count = 1
    takes_signals = True

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}  # what is asked of each, by name

    async def attach(self) -> None:
        """Begin to answer, on the running event loop."""

    async def gather(self, what: str, *args: Any) -> list[Any]:
        """Everybody's answer, the first one's first. Raises what `Link.ask` raises."""
        return [await self.handlers[what](*args)]

    async def serving(self) -> None:
        """This one serves; returns when all do. Raises RuntimeError if one has ended instead."""

    async def lost(self) -> str:
        """Returns, with the reason, when this one has to end because another has."""
        await asyncio.Event().wait()
        raise AssertionError

    def end(self) -> None:
        """Have all others finish their requests and end."""

    async def ended(self, seconds: float) -> None:
        """Returns when all others have ended, those by force that do not within so many seconds."""


class _Other:
    """A further front end, as the first sees it."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.process, self.connection = process, connection
        self.link: Link | None = None
        self.serves = asyncio.Event()


class FirstOfSeveral(FrontEnds):
    """The first front end's view: it has started the core and the others, and is told when to end."""

    def __init__(self, others: list[_Other], core: CoreProcess, tally: Tally) -> None:
        super().__init__()
        self.core, self.tally = core, tally
        self._others = others
        self.count = 1 + len(others)

    @classmethod
    def start(cls, config: VllmConfig, args: argparse.Namespace, listeners: list[socket.socket]) -> FirstOfSeveral:
        """Start a front end for each listener, to be there when the model is; the core is not started yet."""
        stall, health = patience()
        core = CoreProcess(config.to_dict(), stall, health_seconds=health, further=len(listeners))
        numbers = shared_file(1 + len(listeners), admission.COLUMNS)
        document = {
            "args": plain_flags(args),
            "config": config.to_dict(),
            "registered_models": ModelRegistry.registered(),
        }
        others = []
        for index, (listener, end) in enumerate(zip(listeners, core.further, strict=True), start=1):
            copy = os.fdopen(os.dup(numbers.fileno()), "r+b", buffering=0)
            process, connection = start_child(MODULE, leads_session=True, further=(end, listener, copy))
            connection.sendall(frame(json.dumps({**document, "index": index}).encode()))
            others.append(_Other(process, connection))
        tally = Tally(numbers, 0, admission.COLUMNS)
        numbers.close()
        return cls(others, core, tally)

    async def attach(self) -> None:
        for other in self._others:

            async def serves(other: _Other = other) -> None:
                other.serves.set()

            handlers: dict[str, Handler] = {"gather": self.gather, "serves": serves}
            other.link = await Link.over(other.connection, handlers)

    async def gather(self, what: str, *args: Any) -> list[Any]:
        links = [other.link for other in self._others if other.link is not None]
        return list(await asyncio.gather(self.handlers[what](*args), *(link.ask(what, *args) for link in links)))

    async def serving(self) -> None:
        ready = asyncio.ensure_future(asyncio.wait([asyncio.ensure_future(o.serves.wait()) for o in self._others]))
        lost = asyncio.ensure_future(self.lost())
        await asyncio.wait({ready, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            raise RuntimeError(lost.result())
        lost.cancel()

    async def lost(self) -> str:
        links = {other.link.lost: i for i, other in enumerate(self._others, start=1) if other.link is not None}
        done, _ = await asyncio.wait(links, return_when=asyncio.FIRST_COMPLETED)
        index = links[next(iter(done))]
        process = self._others[index - 1].process
        loop = asyncio.get_running_loop()
        status = await loop.run_in_executor(None, _status, process)
        return f"Front end {index} of {self.count} has ended with status {status}."

    def end(self) -> None:
        for other in self._others:
            if other.link is not None:
                other.link.tell("end")

    async def ended(self, seconds: float) -> None:
        links = [other.link.lost for other in self._others if other.link is not None]
        if links:
            await asyncio.wait(links, timeout=seconds + LEAVE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End those that have not ended, now."""
        for other in self._others:
            if other.process.poll() is None and not (other.link is not None and other.link.lost.done()):
                other.process.kill()


def _status(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(5.0)
    except subprocess.TimeoutExpired:
        return None


class Further(FrontEnds):
    """The view of a further front end, which ends when the first says so."""

    takes_signals = False

    def __init__(self, connection: socket.socket, count: int) -> None:
        super().__init__()
        self.count = count
        self._connection = connection
        self._link: Link | None = None

    async def attach(self) -> None:
        self._link = await Link.over(self._connection, self.handlers)

    async def gather(self, what: str, *args: Any) -> list[Any]:
        assert self._link is not None
        found: list[Any] = await self._link.ask("gather", what, *args)
        return found

    async def serving(self) -> None:
        assert self._link is not None
        await self._link.ask("serves")

    async def lost(self) -> str:
        assert self._link is not None
        await self._link.lost
        return "The first front end is gone."


def plain_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as plain data, but for parts of the engine's configuration, which travels as a whole."""
    return {name: value for name, value in vars(args).items() if not dataclasses.is_dataclass(value)}


def check_front_ends(args: argparse.Namespace) -> None:
    """Raise ValueError for what one front end alone can do, if there are to be several."""
    count = args.api_server_count
    if count < 1:
        raise ValueError(f"--api-server-count must be 1 or more, got {count}.")
    if count == 1:
        return
    asked = f"--api-server-count {count}"
    if sys.platform != "linux":
        raise ValueError(f"{asked} needs Linux, whose kernel divides the connections of one port among processes.")
    for wanted, what in (
        (args.disable_frontend_multiprocessing, "--disable-frontend-multiprocessing: the core must be a process"),
        ((args.data_parallel_size or 1) > 1, "--data-parallel-size: copies of the engine have one front end"),
        (envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING, "VLLM_ALLOW_RUNTIME_LORA_UPDATING: adapters would be one process's"),
        (envs.VLLM_ENABLE_RESPONSES_API_STORE, "VLLM_ENABLE_RESPONSES_API_STORE: responses would be one process's"),
    ):
        if wanted:
            raise ValueError(f"{asked} does not go with {what}. Leave out one of the two.")
