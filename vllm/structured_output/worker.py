"""A process in which grammars are compiled by libraries that may take very long, need much memory, or crash: both ends.

The first question brings the back end's name and vocabulary, each further one a constraint. The process imports the
library once, and has each constraint compiled by a copy of itself (`turns.py`). Answers come as they are ready.
"""

from __future__ import annotations

import itertools
import os
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from vllm.ipc.helper import Helper, Questions
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.turns import STARVED, TURN_SECONDS, Answer, Compiler, Turns
from vllm.structured_output.vocabulary import Vocabulary

START_SECONDS = 120.0  # to import a library and read a vocabulary
# One of the questions under way is answered in time, whatever a library does; if none is within so many seconds more,
# the process is ended itself.
MARGIN_SECONDS = 5.0


class Start(msgspec.Struct, array_like=True):
    """What the process works with."""

    backend: str
    tokens: list[bytes | None]
    end_ids: list[int]


class Question(msgspec.Struct, array_like=True):
    """What is compiled, and within how many seconds that it runs; None if nobody waits for that number any more."""

    number: int
    spec: GrammarSpec | None = None
    seconds: float = 0.0


class _Life:
    """The process from a start to its end: what it was asked, and by when (`due`) it has to answer one of them."""

    def __init__(self, helper: Helper) -> None:
        self.helper = helper
        self.asked: dict[int, Future[bytes]] = {}
        self.patience = MARGIN_SECONDS
        self.due = 0.0


class CompileProcess:
    """The asking end: starts the process when it is first needed. Any thread may call.

    module: what the process runs, for tests.
    """

    def __init__(self, backend: str, vocabulary: Vocabulary, module: str = __name__) -> None:
        self._start = msgspec.msgpack.encode(Start(backend, list(vocabulary.tokens), list(vocabulary.end_ids)))
        self._backend, self._module = backend, module
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._lock = threading.Lock()  # of who starts the process, sends to it or ends it
        self._helper: Helper | None = None
        self._life: _Life | None = None
        self._reader: threading.Thread | None = None
        self._numbers = itertools.count()
        self._closed = False

    def build(self, spec: GrammarSpec, seconds: float) -> Future[bytes]:
        """What the back end's `build` returns. The future fails with GrammarError, also if that runs longer than
        `seconds`; if it is cancelled, compiling ends. Raises GrammarError if there is no process; waits for its start.
        """
        built: Future[bytes] = Future()
        with self._lock:
            life, number = self._make_run(), next(self._numbers)
            life.patience = STARVED * seconds + MARGIN_SECONDS
            if not life.asked:
                life.due = time.monotonic() + life.patience
            life.asked[number] = built
            self._send(life, Question(number, spec, seconds))

        def give_up(built: Future[bytes]) -> None:
            if built.cancelled():
                with self._lock:
                    self._send(life, Question(number))

        built.add_done_callback(give_up)
        return built

    def close(self) -> None:
        """End the process, from any thread; what is under way fails."""
        self._closed = True
        if self._helper is not None:
            self._helper.kill()  # it may be starting, for which the lock is held
        with self._lock:
            if self._helper is not None:
                self._helper.kill()
        if self._reader is not None:
            self._reader.join()

    def make_run(self) -> None:
        """Start the process, unless it runs. Raises GrammarError."""
        with self._lock:
            self._make_run()

    def _make_run(self) -> _Life:
        if self._life is not None and self._life.helper.is_running:  # it may have died since
            return self._life
        if self._closed:
            raise GrammarError("the engine is shutting down")
        helper = self._helper = Helper(self._module, self._environment)
        try:
            answer = msgspec.msgpack.decode(helper.start(self._start, START_SECONDS), type=Answer)
        except (OSError, EOFError) as error:
            helper.end()
            raise GrammarError(f"the process that compiles for {self._backend} did not start") from error
        if answer.error is not None:
            helper.end()
            raise GrammarError(answer.error)
        life = self._life = _Life(helper)
        name = f"grammar-{self._backend}-answers"
        self._reader = threading.Thread(target=self._read, args=(life,), name=name, daemon=True)
        self._reader.start()
        return life

    def _send(self, life: _Life, question: Question) -> None:
        try:
            life.helper.send(msgspec.msgpack.encode(question), MARGIN_SECONDS)
        except (OSError, EOFError):
            life.helper.kill()  # whoever reads its answers says that it was lost

    def _read(self, life: _Life) -> None:
        """Take in answers until the process ends, or answers none in time."""
        try:
            while not life.asked or time.monotonic() < life.due:
                for body in life.helper.receive(MARGIN_SECONDS):
                    answer = msgspec.msgpack.decode(body, type=Answer)
                    life.due = time.monotonic() + life.patience
                    built = life.asked.pop(answer.number)
                    if not built.set_running_or_notify_cancel():
                        continue
                    if answer.error is None:
                        built.set_result(answer.data)
                    else:
                        built.set_exception(GrammarError(answer.error))
        except (OSError, EOFError):
            pass
        finally:
            with self._lock:
                life.helper.end()
                asked = list(life.asked.values())
                life.asked.clear()
            for built in asked:
                if built.set_running_or_notify_cancel():
                    lost = f"the process that compiles for {self._backend} was lost"
                    built.set_exception(GrammarError(lost))


def main() -> int:
    """Answer until the other end is closed."""
    questions = Questions()
    from vllm.structured_output.backends import make_backend
    from vllm.structured_output.trial import Tried

    return serve(questions, lambda name, vocabulary: Tried(make_backend(name, vocabulary), vocabulary))


def serve(
    questions: Questions,
    make_backend: Callable[[str, Vocabulary], Compiler],
    turn_seconds: Sequence[float] = TURN_SECONDS,
) -> int:
    """Answer until the other end is closed; the status of the process."""
    # The thread that watches for the parent's end holds nothing that a copy would wait for.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    start = msgspec.msgpack.decode(next(iter(questions)), type=Start)
    try:
        backend = make_backend(start.backend, Vocabulary(tuple(start.tokens), tuple(start.end_ids), lambda text: []))
        backend.prepare()
    except Exception as error:
        questions.answer(msgspec.msgpack.encode(Answer(error=f"{type(error).__name__}: {error}")))
        return 1
    questions.answer(msgspec.msgpack.encode(Answer()))
    news = select.poll()
    news.register(questions, select.POLLIN)
    turns = Turns(backend, news, questions.answer, turn_seconds)
    while True:
        left = turns.pass_on()
        for source, _ in news.poll(None if left is None else 1e3 * left):
            if source != questions.fileno():
                turns.read(source)
                continue
            bodies = questions.read()
            if bodies is None:
                return 0
            for body in bodies:
                asks = msgspec.msgpack.decode(body, type=Question)
                if asks.spec is None:
                    turns.give_up(asks.number)
                else:
                    turns.add(asks.number, asks.spec, asks.seconds)


if __name__ == "__main__":
    sys.exit(main())
