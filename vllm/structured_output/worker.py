"""A process in which grammars are compiled by libraries that may take very long, need much memory, or crash.

`python -m vllm.structured_output.worker` reads length-prefixed msgpack frames from standard input: the back end's name
and vocabulary, then one constraint after the other, each answered by a frame on standard output. Whoever started it
ends it when an answer takes too long, and starts another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import msgspec

from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.vocabulary import Vocabulary

START_SECONDS = 120.0  # to import a library and read a vocabulary
MEMORY_BYTES = 4 << 30  # more than importing torch reserves
_PR_SET_PDEATHSIG = 1
_HEADER = struct.Struct("<Q")


class Start(msgspec.Struct, array_like=True):
    """What the process works with."""

    backend: str
    tokens: list[bytes | None]
    end_ids: list[int]


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
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def build(self, spec: GrammarSpec, seconds: float) -> bytes:
        """What the back end's `build` returns. Raises GrammarError, also if it takes longer than `seconds`."""
        with self._lock:
            process = self._running()
            try:
                _write(process.stdin, msgspec.msgpack.encode(spec))
                body = _read(process.stdout, time.monotonic() + seconds)
            except TimeoutError:
                self._end()
                raise GrammarError(f"compiling took longer than the {seconds:g} s that are allowed") from None
            except (OSError, EOFError):
                self._end()
                raise GrammarError(
                    f"the {self._backend} library could not compile it: it crashed, or needed more than "
                    f"{MEMORY_BYTES >> 30} GiB of memory"
                ) from None
            answer = msgspec.msgpack.decode(body, type=Answer)
            if answer.error is not None:
                raise GrammarError(answer.error)
            return answer.data

    def close(self) -> None:
        """End the process, from any thread; a compilation that is under way fails."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()  # it may have died between two compilations
        if self._closed:
            raise GrammarError("the engine is shutting down")
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.structured_output.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._process = process
        try:
            _write(process.stdin, self._start)
            answer = msgspec.msgpack.decode(_read(process.stdout, time.monotonic() + START_SECONDS), type=Answer)
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            raise GrammarError(f"the process that compiles for {self._backend} did not start") from error
        if answer.error is not None:
            self._end()
            raise GrammarError(answer.error)
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # there may be something that was not written yet
                        stream.close()


def _write(stream: IO[bytes] | None, body: bytes) -> None:
    assert stream is not None
    stream.write(_HEADER.pack(len(body)) + body)
    stream.flush()


def _read(stream: IO[bytes] | None, deadline: float | None = None) -> bytes:
    """One frame. Raises EOFError at the end, TimeoutError at the deadline."""
    assert stream is not None
    (length,) = _HEADER.unpack(_read_exactly(stream, _HEADER.size, deadline))
    return _read_exactly(stream, length, deadline)


def _read_exactly(stream: IO[bytes], count: int, deadline: float | None) -> bytes:
    parts = []
    while count:
        if deadline is not None and not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(stream.fileno(), min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main() -> int:
    """Serve until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also in the middle of a compilation
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    source = sys.stdin.buffer
    from vllm.structured_output.backends import make_backend

    start = msgspec.msgpack.decode(_read(source), type=Start)
    try:
        backend = make_backend(start.backend, Vocabulary(tuple(start.tokens), tuple(start.end_ids), lambda text: []))
    except Exception as error:
        _write(answers, msgspec.msgpack.encode(Answer(error=f"{type(error).__name__}: {error}")))
        return 1
    _limit_memory()
    _write(answers, msgspec.msgpack.encode(Answer()))
    while True:
        try:
            spec = msgspec.msgpack.decode(_read(source), type=GrammarSpec)
        except EOFError:
            return 0
        try:
            answer = Answer(backend.build(spec))
        except GrammarError as error:
            answer = Answer(error=str(error))
        except MemoryError:
            answer = Answer(error=f"compiling needs more than {MEMORY_BYTES >> 30} GiB of memory")
        except RecursionError:
            answer = Answer(error="it is nested too deeply")
        except Exception as error:
            answer = Answer(error=f"{type(error).__name__}: {error}")
        _write(answers, msgspec.msgpack.encode(answer))


def _limit_memory() -> None:
    """Bound what compiling may add to the address space that imports have taken."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
