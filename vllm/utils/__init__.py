"""Small helpers with a public path; what is large lives in a module of its own and is imported when used."""

from __future__ import annotations

import asyncio
import functools
import socket
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import closing, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeGuard, TypeVar

from vllm import envs

if TYPE_CHECKING:
    from vllm.utils.argparse import FlexibleArgumentParser

T = TypeVar("T")
P = ParamSpec("P")

__all__ = [
    "Counter",
    "FlexibleArgumentParser",
    "cdiv",
    "get_ip",
    "get_open_port",
    "is_list_of",
    "is_pin_memory_available",
    "make_async",
    "merge_async_iterators",
    "random_uuid",
]

_HOME_OF = {"FlexibleArgumentParser": "vllm.utils.argparse"}
_LARGEST_PORT = 65535


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'vllm.utils' has no attribute {name!r}")
    return getattr(import_module(home), name)


class Counter:
    """Counts up from `start`, one at each `next()`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        value = self.counter
        self.counter += 1
        return value

    def __iter__(self) -> Counter:
        return self

    def reset(self) -> None:
        self.counter = 0


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


def is_list_of(value: object, typ: type[T], *, check: Literal["first", "all"] = "first") -> TypeGuard[list[T]]:
    """Whether `value` is a list of `typ`, judged by its first or by all of its items. An empty list is."""
    if not isinstance(value, list):
        return False
    items = value[:1] if check == "first" else value
    return all(isinstance(item, typ) for item in items)


def get_ip() -> str:
    """The address under which other machines find this one: VLLM_HOST_IP, else that of the default route, else
    127.0.0.1.
    """
    if envs.VLLM_HOST_IP:
        return envs.VLLM_HOST_IP
    for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # nothing is sent there
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe, suppress(OSError):
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_pin_memory_available() -> bool:
    """Whether host memory can be pinned for copies to a device."""
    import torch

    return torch.cuda.is_available()


def get_open_port() -> int:
    """A free TCP port of this machine: the first one from VLLM_PORT on if that is set, else any."""
    first = envs.VLLM_PORT
    if not first:
        return _bind(0)
    for port in range(first, _LARGEST_PORT + 1):
        try:
            return _bind(port)
        except OSError:
            continue
    raise OSError(
        f"no free port from VLLM_PORT={first} to {_LARGEST_PORT}; set VLLM_PORT to a lower number or unset it"
    )


def _bind(port: int) -> int:
    """The port that binding to `port` on the loopback interface gave (any free one for 0); free again on return."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as server:
        server.bind(("127.0.0.1", port))
        return int(server.getsockname()[1])


def make_async(func: Callable[P, T], executor: Executor | None = None) -> Callable[P, Awaitable[T]]:
    """A function that runs the blocking `func` in a thread (of `executor`, or the event loop's own) and awaits it."""

    def run(*args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(executor, functools.partial(func, *args, **kwargs))

    return run


async def merge_async_iterators(*iterators: AsyncIterator[T]) -> AsyncGenerator[tuple[int, T], None]:
    """(which iterator, item) of all of them, each as soon as it is there. If one raises, or nobody wants more, what the
    others are waiting for is cancelled.
    """
    waiting = {asyncio.ensure_future(anext(iterator)): i for i, iterator in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(iterators[i]))] = i
                yield i, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
