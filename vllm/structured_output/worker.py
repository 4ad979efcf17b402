"""A process in which grammars are compiled by libraries that may take very long, need much memory, or crash.

The first question brings the back end's name and vocabulary, each further one a constraint. The process imports the
library once, and has each constraint compiled by a copy of itself (a fork), which it ends when that takes too long: the
next one begins at once.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import threading
import time
import warnings

import msgspec

from vllm.ipc.child import die_with
from vllm.ipc.helper import Helper, Questions
from vllm.structured_output.grammar import Backend, GrammarError
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.vocabulary import Vocabulary

START_SECONDS = 120.0  # to import a library and read a vocabulary
MEMORY_BYTES = 4 << 30  # more than importing torch reserves
# The process answers in time, whatever a library does; if it does not within so many seconds more, it is ended itself.
MARGIN_SECONDS = 5.0
_CHUNK = 1 << 20


def too_long(seconds: float) -> str:
    """Why there is no grammar."""
    return f"compiling took longer than the {seconds:g} s that VLLM_GRAMMAR_COMPILE_TIMEOUT_S allows"


class Start(msgspec.Struct, array_like=True):
    """What the process works with."""

    backend: str
    tokens: list[bytes | None]
    end_ids: list[int]


class Question(msgspec.Struct, array_like=True):
    """What is compiled, and within how many seconds."""

    spec: GrammarSpec
    seconds: float


class Answer(msgspec.Struct, array_like=True):
    """A compiled grammar, or why there is none."""

    data: bytes = b""
    error: str | None = None


class CompileProcess:
    """The other end: starts the process when it is first needed, one compilation at a time."""

    def __init__(self, backend: str, vocabulary: Vocabulary) -> None:
        self._start = msgspec.msgpack.encode(Start(backend, list(vocabulary.tokens), list(vocabulary.end_ids)))
        self._backend = backend
        self._lock = threading.Lock()
        self._helper = Helper(__name__, {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        self._closed = False

    def build(self, spec: GrammarSpec, seconds: float) -> bytes:
        """What the back end's `build` returns. Raises GrammarError, also if it takes longer than `seconds`."""
        with self._lock:
            self._make_run()
            try:
                body = self._helper.ask(msgspec.msgpack.encode(Question(spec, seconds)), seconds + MARGIN_SECONDS)
            except (TimeoutError, OSError, EOFError):
                self._helper.end()
                raise GrammarError(f"the process that compiles for {self._backend} was lost") from None
            answer = msgspec.msgpack.decode(body, type=Answer)
            if answer.error is not None:
                raise GrammarError(answer.error)
            return answer.data

    def close(self) -> None:
        """End the process, from any thread; a compilation that is under way fails."""
        self._closed = True
        self._helper.kill()
        with self._lock:
            self._helper.end()

    def make_run(self) -> None:
        """Start the process, unless it runs. Raises GrammarError."""
        with self._lock:
            self._make_run()

    def _make_run(self) -> None:
        if self._helper.is_running:  # it may have died between two compilations
            return
        if self._closed:
            raise GrammarError("the engine is shutting down")
        try:
            answer = msgspec.msgpack.decode(self._helper.start(self._start, START_SECONDS), type=Answer)
        except (OSError, EOFError) as error:
            self._helper.end()
            raise GrammarError(f"the process that compiles for {self._backend} did not start") from error
        if answer.error is not None:
            self._helper.end()
            raise GrammarError(answer.error)


def main() -> int:
    """Answer until the other end is closed."""
    # The thread that watches for the parent's end holds nothing that a copy would wait for.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    questions = Questions()
    from vllm.structured_output.backends import make_backend

    asked = iter(questions)
    start = msgspec.msgpack.decode(next(asked), type=Start)
    try:
        backend = make_backend(start.backend, Vocabulary(tuple(start.tokens), tuple(start.end_ids), lambda text: []))
        backend.prepare()
    except Exception as error:
        questions.answer(msgspec.msgpack.encode(Answer(error=f"{type(error).__name__}: {error}")))
        return 1
    questions.answer(msgspec.msgpack.encode(Answer()))
    for question in asked:
        asks = msgspec.msgpack.decode(question, type=Question)
        questions.answer(_by_a_copy(backend, asks.spec, asks.seconds))
    return 0


def _by_a_copy(backend: Backend, spec: GrammarSpec, seconds: float) -> bytes:
    """The encoded Answer of a copy of this process, which is ended when it takes too long."""
    deadline, parent = time.monotonic() + seconds, os.getpid()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            if die_with(parent):
                _limit_memory()
                _write(theirs, msgspec.msgpack.encode(_answer(backend, spec)))
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        body = _read(ours, deadline)
    finally:
        os.close(ours)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if body:
        return body
    crashed = f"the library could not compile it: it crashed, or needed more than {MEMORY_BYTES >> 30} GiB of memory"
    return msgspec.msgpack.encode(Answer(error=too_long(seconds) if body is None else crashed))


def _read(source: int, deadline: float) -> bytes | None:
    """All that a copy says until it ends; None if it is not done in time."""
    news = select.poll()
    parts: list[bytes] = []
    news.register(source, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and news.poll(1e3 * left):
        part = os.read(source, _CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def _answer(backend: Backend, spec: GrammarSpec) -> Answer:
    try:
        return Answer(backend.build(spec))
    except GrammarError as error:
        return Answer(error=str(error))
    except MemoryError:
        return Answer(error=f"compiling needs more than {MEMORY_BYTES >> 30} GiB of memory")
    except RecursionError:
        return Answer(error="it is nested too deeply")
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {error}")


def _limit_memory() -> None:
    """Bound what compiling may add to the address space that imports have taken."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
