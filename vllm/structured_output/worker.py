"""A process in which grammars are compiled by libraries that may take very long, need much memory, or crash.

The first question brings the back end's name and vocabulary, each further one a constraint. Whoever started the process
ends it when an answer takes too long, and starts another one.
"""

from __future__ import annotations

import os
import resource
import sys
import threading

import msgspec

from vllm.ipc.helper import Helper, Questions
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.vocabulary import Vocabulary

START_SECONDS = 120.0  # to import a library and read a vocabulary
MEMORY_BYTES = 4 << 30  # more than importing torch reserves


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
        self._helper = Helper(__name__, {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        self._closed = False

    def build(self, spec: GrammarSpec, seconds: float) -> bytes:
        """What the back end's `build` returns. Raises GrammarError, also if it takes longer than `seconds`."""
        with self._lock:
            self._make_run()
            try:
                body = self._helper.ask(msgspec.msgpack.encode(spec), seconds)
            except TimeoutError:
                self._helper.end()
                raise GrammarError(f"compiling took longer than the {seconds:g} s that are allowed") from None
            except (OSError, EOFError):
                self._helper.end()
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
        self._helper.kill()
        with self._lock:
            self._helper.end()

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
    questions = Questions()
    from vllm.structured_output.backends import make_backend

    asked = iter(questions)
    start = msgspec.msgpack.decode(next(asked), type=Start)
    try:
        backend = make_backend(start.backend, Vocabulary(tuple(start.tokens), tuple(start.end_ids), lambda text: []))
    except Exception as error:
        questions.answer(msgspec.msgpack.encode(Answer(error=f"{type(error).__name__}: {error}")))
        return 1
    _limit_memory()
    questions.answer(msgspec.msgpack.encode(Answer()))
    for question in asked:
        spec = msgspec.msgpack.decode(question, type=GrammarSpec)
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
        questions.answer(msgspec.msgpack.encode(answer))
    return 0


def _limit_memory() -> None:
    """Bound what compiling may add to the address space that imports have taken."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
