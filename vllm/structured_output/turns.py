"""Constraints that are compiled by copies of this process (forks), which take turns: what is short waits for nothing
that is long.

Each constraint first has a short turn, then a longer one, of which one copy runs at a time. What is not done by then
goes on to its end, one copy at a time beside those turns; the others are stopped meanwhile. Of those that wait for the
same, the one that came last and the one that came first go on in turn: nobody waits for all that was piled up before,
and nobody for ever.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from vllm.ipc.child import die_with
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.spec import GrammarSpec

TURN_SECONDS = (0.02, 0.1)  # of the first turn, and of the second
STARVED = 4  # a copy that waits for a processor is charged a part of that time only
MAX_STOPPED = 16  # copies; what comes beyond them keeps its place without one, and begins again when that comes
STOPPED_BYTES = 4 << 30  # of memory that all of them together may hold
MEMORY_BYTES = 4 << 30  # of address space that each copy may add: more than importing torch reserves
_CHUNK = 1 << 20
_SOON = 1e-3  # seconds: no turn is looked at more often
_ALIVE = b"+"  # a copy's first word: it will end with this process, even if it is stopped


class Compiler(Protocol):
    """What of `grammar.Backend` compiles."""

    def prepare(self) -> None: ...

    def build(self, spec: GrammarSpec) -> bytes: ...


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
    turns: how many it has had; its turn ends when it ran `turn_ends` seconds.   since: when it began to run, and its
    processor time then; None if it does not; before that it `ran` so many seconds.   nbytes: what it holds while it is
    stopped.
    """

    def __init__(self, number: int, spec: GrammarSpec, seconds: float) -> None:
        self.number, self.spec, self.seconds = number, spec, seconds
        self.pid, self.source = 0, -1
        self.parts: list[bytes] = []
        self.turns = 0
        self.ran = self.turn_ends = 0.0
        self.since: tuple[float, float] | None = None
        self.nbytes = 0

    def ran_until(self, now: float) -> float:
        """Seconds that it ran, without most of those in which no processor was free for it."""
        if self.since is None:
            return self.ran
        begun, used = self.since
        passed = now - begun
        return self.ran + max(min(passed, _processor_seconds(self.pid) - used), passed / STARVED)


class _Line(deque[_Work]):
    """Those that wait for the same."""

    _is_newest = False

    def next(self) -> _Work | None:
        """Take one out: in turn that which came last, and that which came first."""
        if not self:
            return None
        self._is_newest = not self._is_newest
        return self.pop() if self._is_newest else self.popleft()


class Turns:
    """Not for several threads, since copies end with the thread that made them.

    news: is told where to look for what copies say.   tell: gets each encoded Answer; every question has one.
    """

    def __init__(
        self,
        backend: Compiler,
        news: select.poll,
        tell: Callable[[bytes], object],
        turn_seconds: Sequence[float] = TURN_SECONDS,
    ) -> None:
        self._backend, self._news, self._tell, self._turns = backend, news, tell, turn_seconds
        self._lines = [_Line() for _ in (*turn_seconds, None)]  # by turns that they have had
        self._short: _Work | None = None  # has a turn
        self._long: _Work | None = None  # has had all
        self._by_source: dict[int, _Work] = {}

    def add(self, number: int, spec: GrammarSpec, seconds: float) -> None:
        """Compile this too; its copy may run so many seconds."""
        self._lines[0].append(_Work(number, spec, seconds))

    def give_up(self, number: int) -> None:
        """Nobody waits for this any more, if it is not done yet."""
        for work in [*self._running(), *self._waiting()]:
            if work.number == number:
                self._refuse(work, "nobody waits for it")
                return

    def pass_on(self) -> float | None:
        """Let those run whose turn it is. Returns the seconds until that changes by itself, None if it does not."""
        now = time.monotonic()
        for work in self._running():
            if work.ran_until(now) >= work.seconds:
                self._refuse(work, too_long(work.seconds))
        over = self._short
        if over is not None and over.ran_until(now) >= over.turn_ends:
            self._short = None
            over.turns += 1
            self._lines[over.turns].append(over)
        if self._long is None:
            self._long = self._lines[-1].next()
        if self._short is None:
            self._short = next((new for line in self._lines[:-1] if (new := line.next()) is not None), None)
            if self._short is not None:
                self._short.turn_ends = self._short.ran_until(now) + self._turns[self._short.turns]
        running = self._running()
        if over is not None and over not in running:
            self._stop(over, now)
        for work in running:
            if work.since is None:
                self._run(work)
        left = [work.seconds - work.ran_until(now) for work in running]
        if self._short is not None:
            left.append(self._short.turn_ends - self._short.ran_until(now))
        return max(_SOON, min(left)) if left else None

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
        return [work for work in (self._short, self._long) if work is not None]

    def _waiting(self) -> list[_Work]:
        return [work for line in self._lines for work in line]

    def _run(self, work: _Work) -> None:
        if work.pid:
            os.kill(work.pid, signal.SIGCONT)
        else:
            work.pid, work.source = _copy(self._backend, work.number, work.spec)
            self._by_source[work.source] = work
            self._news.register(work.source, select.POLLIN)
        work.since = time.monotonic(), _processor_seconds(work.pid)

    def _stop(self, work: _Work, now: float) -> None:
        os.kill(work.pid, signal.SIGSTOP)
        work.ran, work.since = work.ran_until(now), None
        work.nbytes = max(0, _memory(work.pid)[1] - _memory(os.getpid())[1])
        stopped = [other for other in self._waiting() if other.pid]
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
        elif work is self._long:
            self._long = None
        else:
            self._lines[work.turns].remove(work)

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


def _copy(backend: Compiler, number: int, spec: GrammarSpec) -> tuple[int, int]:
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


def _answer(backend: Compiler, number: int, spec: GrammarSpec) -> Answer:
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


def _processor_seconds(pid: int) -> float:
    """Of all threads of a process that was not waited for."""
    return time.clock_gettime((~pid << 3) | 2)  # its clock, as clock_getcpuclockid(3) says it


def _memory(pid: int) -> tuple[int, int]:
    """Bytes of a process: of its address space, and those that it holds, without files."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        size, resident, shared = (int(pages) * resource.getpagesize() for pages in file.read().split()[:3])
    return size, resident - shared
