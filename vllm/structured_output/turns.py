"""Constraints that are compiled by copies of this process (forks), which take turns: what is short waits for nothing
that is long.

Each constraint first has a short turn. What is not done by then goes on in a second class, of which one copy runs at a
time beside the short turns, in the order in which they came there; the others are stopped meanwhile.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections import deque
from collections.abc import Callable

import msgspec

from vllm.ipc.child import die_with
from vllm.structured_output.grammar import Backend, GrammarError
from vllm.structured_output.spec import GrammarSpec

TURN_SECONDS = 0.1
MAX_STOPPED = 16  # copies; what comes beyond them keeps its place without one, and begins again when that comes
STOPPED_BYTES = 4 << 30  # of memory that all of them together may hold
MEMORY_BYTES = 4 << 30  # of address space that each copy may add: more than importing torch reserves
_CHUNK = 1 << 20
_ALIVE = b"+"  # a copy's first word: it will end with this process, even if it is stopped


class Answer(msgspec.Struct, array_like=True):
    """What has become of a question: a compiled grammar, or why there is none."""

    number: int = 0
    data: bytes = b""
    error: str | None = None


def too_long(seconds: float) -> str:
    """Why there is no grammar."""
    return f"compiling took longer than the {seconds:g} s that VLLM_GRAMMAR_COMPILE_TIMEOUT_S allows"


class _Work:
    """A constraint, and the copy that compiles it. pid: of the copy, 0 if there is none; its words come from `source`.
    since: when it began to run, None if it does not; before that it `ran` so many seconds. nbytes: what it holds while
    it is stopped.
    """

    def __init__(self, number: int, spec: GrammarSpec, seconds: float) -> None:
        self.number, self.spec, self.seconds = number, spec, seconds
        self.pid, self.source = 0, -1
        self.parts: list[bytes] = []
        self.ran = 0.0
        self.since: float | None = None
        self.nbytes = 0

    def ran_until(self, now: float) -> float:
        return self.ran if self.since is None else self.ran + now - self.since


class Turns:
    """Not for several threads, since copies end with the thread that made them.

    news: is told where to look for what copies say.   tell: gets each encoded Answer; every question has one.
    """

    def __init__(
        self, backend: Backend, news: select.poll, tell: Callable[[bytes], object], turn_seconds: float = TURN_SECONDS
    ) -> None:
        self._backend, self._news, self._tell, self._turn = backend, news, tell, turn_seconds
        self._new: deque[_Work] = deque()
        self._short: _Work | None = None
        self._slow: deque[_Work] = deque()  # the first one runs
        self._by_source: dict[int, _Work] = {}

    def add(self, number: int, spec: GrammarSpec, seconds: float) -> None:
        """Compile this too; its copy may run so many seconds."""
        self._new.append(_Work(number, spec, seconds))

    def give_up(self, number: int) -> None:
        """Nobody waits for this any more, if it is not done yet."""
        for work in [*self._running(), *self._new, *self._slow]:
            if work.number == number:
                self._refuse(work, "nobody waits for it")
                return

    def pass_on(self) -> float | None:
        """Let those run whose turn it is. Returns the seconds until that changes by itself, None if it does not."""
        now = time.monotonic()
        for work in self._running():
            if work.ran_until(now) >= work.seconds:
                self._refuse(work, too_long(work.seconds))
        short = self._short
        if short is not None and short.ran_until(now) >= self._turn:
            self._short = None
            self._slow.append(short)
            if short is not self._slow[0]:
                self._stop(short, now)
        if self._slow and self._slow[0].since is None:
            self._run(self._slow[0])
        if self._short is None and self._new:
            self._short = self._new.popleft()
            self._run(self._short)
        left = [work.seconds - work.ran_until(now) for work in self._running()]
        if self._short is not None:
            left.append(self._turn - self._short.ran_until(now))
        return max(0.0, min(left)) if left else None

    def read(self, source: int) -> None:
        """Take in what a copy has said; at its end, that is its answer."""
        work = self._by_source.get(source)
        if work is None:
            return
        part = os.read(source, _CHUNK)
        if part:
            work.parts.append(part)
            return
        body = b"".join(work.parts)[len(_ALIVE) :]
        if self._end_copy(work) == 0:
            self._leave(work)
            self._tell(body)
        else:
            limit = f"{MEMORY_BYTES >> 30} GiB of memory"
            self._refuse(work, f"the library could not compile it: it crashed, or needed more than {limit}")

    def _running(self) -> list[_Work]:
        return [work for work in (self._short, *self._slow) if work is not None and work.since is not None]

    def _run(self, work: _Work) -> None:
        if work.pid:
            os.kill(work.pid, signal.SIGCONT)
        else:
            work.pid, work.source = _copy(self._backend, work.number, work.spec)
            self._by_source[work.source] = work
            self._news.register(work.source, select.POLLIN)
        work.since = time.monotonic()

    def _stop(self, work: _Work, now: float) -> None:
        os.kill(work.pid, signal.SIGSTOP)
        work.ran, work.since = work.ran_until(now), None
        work.nbytes = max(0, _memory(work.pid)[1] - _memory(os.getpid())[1])
        stopped = [other for other in self._slow if other.pid and other.since is None]
        too_much = sum(other.nbytes for other in stopped) > STOPPED_BYTES
        if too_much or len(stopped) > MAX_STOPPED or not work.parts:
            self._end_copy(work)

    def _refuse(self, work: _Work, error: str) -> None:
        self._end_copy(work)
        self._leave(work)
        self._tell(msgspec.msgpack.encode(Answer(work.number, error=error)))

    def _leave(self, work: _Work) -> None:
        if work is self._short:
            self._short = None
        else:
            (self._new if work in self._new else self._slow).remove(work)

    def _end_copy(self, work: _Work) -> int:
        """End a constraint's copy, if it has one; with what status it has ended. Another one would begin anew."""
        if not work.pid:
            return 0
        self._news.unregister(work.source)
        del self._by_source[work.source]
        os.close(work.source)
        os.kill(work.pid, signal.SIGKILL)  # which ends what is stopped, too
        _, status = os.waitpid(work.pid, 0)
        work.pid, work.source, work.ran, work.since = 0, -1, 0.0, None
        work.parts.clear()
        return status


def _copy(backend: Backend, number: int, spec: GrammarSpec) -> tuple[int, int]:
    """A copy of this process that compiles: its id, and where it writes _ALIVE and then an encoded Answer."""
    parent = os.getpid()
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    status = 1
    try:
        os.setpgid(0, 0)  # a group that loses its shell while one of it is stopped is hung up: the server's must not be
        if die_with(parent):
            os.write(theirs, _ALIVE)
            _limit_memory()
            _write(theirs, msgspec.msgpack.encode(_answer(backend, number, spec)))
            status = 0
    finally:
        os._exit(status)


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def _answer(backend: Backend, number: int, spec: GrammarSpec) -> Answer:
    try:
        return Answer(number, backend.build(spec))
    except GrammarError as error:
        problem = str(error)
    except MemoryError:
        problem = f"compiling needs more than {MEMORY_BYTES >> 30} GiB of memory"
    except RecursionError:
        problem = "it is nested too deeply"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return Answer(number, error=problem)


def _limit_memory() -> None:
    """Bound what compiling may add to the address space that imports have taken."""
    used, _ = _memory(os.getpid())
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _memory(pid: int) -> tuple[int, int]:
    """Bytes of a process: of its address space, and those that it holds, without files."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        size, resident, shared = (int(pages) * resource.getpagesize() for pages in file.read().split()[:3])
    return size, resident - shared
