"""Python's garbage collector, out of the way where much is allocated at once and nothing becomes garbage."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.utils.allocator import give_back_freed_memory

_NEVER = 2**30
_LOOK_SECONDS = 2.0
_BUSY_SECONDS = 10.0
_MUCH_IDLE = 8 << 20
_MUCH_BUSY = 32 << 20
_LITTLE = 1 << 20
_AGAIN_SECONDS = 8.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHARE = 0.002  # of the time, at most, for full collections while there is work


async def collect_when_idle(is_idle: Callable[[], bool]) -> None:
    """Make all full collections of this process, until cancelled: when it is idle, else seldom.

    The interpreter begins one whenever a quarter more objects exist, which is in the middle of making large answers;
    with half a million log probabilities it takes 0.1 s, in which no stream moves. While there is work there is one
    every 10 s, or more seldom if they take longer than 20 ms. Collections of young objects go on as ever.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    due = time.monotonic() + _BUSY_SECONDS
    try:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            begun = time.monotonic()
            if not gc.get_count()[2] or (begun < due and not is_idle()):
                continue
            gc.collect()
            took = time.monotonic() - begun
            due = begun + max(_BUSY_SECONDS, took / _SHARE)
    finally:
        gc.set_threshold(young, middle, old)


async def give_back_memory(is_idle: Callable[[], bool], drop_caches: Callable[[], None]) -> None:
    """Return what this process has once needed to the operating system, until cancelled: as soon as it is idle, or
    every few seconds if much has come together.

    Freed memory stays with the C library's allocator, which keeps it for later: 16 MB of text in a request are a few
    hundred in the end.
    """
    loop = asyncio.get_running_loop()
    usual = in_use = resident_bytes()
    again = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        before, idle = resident_bytes(), is_idle()
        if time.monotonic() >= again:
            in_use = usual
        if before - in_use < (_MUCH_IDLE if idle else _MUCH_BUSY):
            continue
        if idle:
            drop_caches()
            gc.collect()
        await loop.run_in_executor(None, give_back_freed_memory)  # without the interpreter's lock
        after = resident_bytes()
        if after < before - _LITTLE:
            usual = min(usual, after)
            continue
        in_use, again = after, time.monotonic() + _AGAIN_SECONDS  # requests hold it, and may let go of it
        if idle:
            usual = after  # likely to stay


class IdleMemory:
    """For a thread that looks now and then: what was freed goes back to the operating system, once for each time that
    the process has been idle for some seconds and has more memory than then.
    """

    def __init__(self) -> None:
        self._usual = resident_bytes()
        self._idle_since: float | None = None

    def look(self, idle: bool) -> None:
        now = time.monotonic()
        if not idle:
            self._idle_since = now
        elif self._idle_since is not None and now - self._idle_since > _LOOK_SECONDS:
            self._idle_since = None
            if resident_bytes() - self._usual > _MUCH_BUSY:
                give_back_freed_memory()
                self._usual = resident_bytes()


def resident_bytes() -> int:
    """How much of this process is in memory; 0 where the system does not say so."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


@contextmanager
def what_exists_frozen() -> Iterator[None]:
    """In this block, collections look only at objects made in it: those that exist are neither visited nor collected.

    They are freed as ever when nobody refers to them; cycles among them wait until the block ends. A process that has
    frozen objects for itself is left alone.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection in this block. For bounded work: a full collection in a large process takes 0.1 s and more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
