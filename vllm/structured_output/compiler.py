"""Compiles grammars in the background: one compilation per constraint, a deadline for each, and a bounded memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from vllm import envs
from vllm.logger import init_logger
from vllm.structured_output.backends import make_backend
from vllm.structured_output.grammar import Backend, Grammar, GrammarError
from vllm.structured_output.positions import MaskTable, Places
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.turns import too_long
from vllm.structured_output.vocabulary import Vocabulary
from vllm.structured_output.worker import CompileProcess

logger = init_logger(__name__)

CACHE_BYTES = 256 << 20
THREADS = 2


class Compiled(NamedTuple):
    """A grammar, the back end that fills its masks, and its places, if those decide what the masks are."""

    grammar: Grammar
    backend: Backend
    places: Places | None = None


class GrammarCache:
    """Compiled grammars, of which those used last stay while all of them together have at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._found: OrderedDict[GrammarSpec, tuple[Compiled, int]] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._found)

    def get(self, spec: GrammarSpec) -> Compiled | None:
        found = self._found.get(spec)
        if found is None:
            return None
        self._found.move_to_end(spec)
        return found[0]

    def put(self, spec: GrammarSpec, compiled: Compiled) -> None:
        size = compiled.grammar.nbytes + spec.nbytes
        self._drop(spec)
        if size > self._limit:
            return
        self._found[spec] = (compiled, size)
        self.nbytes += size
        while self.nbytes > self._limit:
            self._drop(next(iter(self._found)))

    def _drop(self, spec: GrammarSpec) -> None:
        found = self._found.pop(spec, None)
        if found is not None:
            self.nbytes -= found[1]


class GrammarCompiler:
    """Owns the back ends of one vocabulary, which is made (in the background too) when the first grammar is asked for.

    `seconds`: how long a compilation may run, None for what the environment says; `cache_bytes`: what compiled
    grammars may hold; `threads`: for each back end, which ask its process, and load what that has compiled. Requests
    keep theirs as long as they run.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        seconds: float | None = None,
        cache_bytes: int = CACHE_BYTES,
        threads: int = THREADS,
    ) -> None:
        self._make_vocabulary = make_vocabulary
        self._seconds: float = envs.VLLM_GRAMMAR_COMPILE_TIMEOUT_S if seconds is None else seconds
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, Backend] = {}
        self._processes: dict[str, CompileProcess] = {}
        self._under_way: dict[GrammarSpec, Future[Compiled]] = {}
        self._threads = threads
        self._pools: dict[str, ThreadPoolExecutor] = {}  # by back end: a slow one holds up no other
        self._closed = False
        self.cache = GrammarCache(cache_bytes)

    def compile(self, spec: GrammarSpec) -> Future[Compiled]:
        """The grammar, at once if it is known. The future fails with GrammarError."""
        with self._lock:
            known = self.cache.get(spec)
            if known is not None:
                done: Future[Compiled] = Future()
                done.set_result(known)
                return done
            found = self._under_way.get(spec)
            if found is None:
                found = self._under_way[spec] = Future()
                self._pool(spec.backend).submit(self._ask, spec, found)
            return found

    def warm(self, name: str) -> Future[None]:
        """Load a back end's library in the background, and start its process if it has one: seconds that the first
        request would wait. If that fails, the first request is told why.
        """
        with self._lock:
            return self._pool(name).submit(self._warm, name)

    def give_up(self, spec: GrammarSpec) -> None:
        """Nobody waits for this any more: compiling it ends."""
        with self._lock:
            found = self._under_way.pop(spec, None)
        if found is not None:
            found.cancel()

    def close(self) -> None:
        """End the threads and processes; what is under way is given up."""
        with self._lock:
            self._closed = True
            left = list(self._under_way.values())
            for pool in self._pools.values():
                pool.shutdown(wait=False, cancel_futures=True)
        for future in left:
            future.cancel()
        for process in list(self._processes.values()):
            process.close()

    def _pool(self, name: str) -> ThreadPoolExecutor:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = ThreadPoolExecutor(self._threads, thread_name_prefix=f"grammar-{name}")
        return pool

    def _warm(self, name: str) -> None:
        self._backend(name)
        self._process(name).make_run()

    def _later(self, name: str, do: Callable[..., object], *arguments: Any) -> None:
        """Have a back end's threads do it, unless they have ended."""
        with self._lock:
            if not self._closed:
                self._pool(name).submit(do, *arguments)

    def _ask(self, spec: GrammarSpec, future: Future[Compiled]) -> None:
        """Have the process compile it. What may take long happens there: its own start is not counted."""
        if future.cancelled():
            return
        try:
            self._backend(spec.backend)
            built = self._process(spec.backend).build(spec, self._seconds)
        except BaseException as error:
            self._settle(spec, future, None, error)
            return
        built.add_done_callback(lambda built: self._later(spec.backend, self._load, spec, future, built))
        future.add_done_callback(lambda _: self._later(spec.backend, built.cancel) if future.cancelled() else None)

    def _load(self, spec: GrammarSpec, future: Future[Compiled], built: Future[bytes]) -> None:
        """Make a grammar of what the process has compiled."""
        if future.cancelled():
            return
        try:
            compiled = self._compiled(spec, built.result())
        except BaseException as error:
            self._settle(spec, future, None, error)
        else:
            self._settle(spec, future, compiled)

    def _settle(
        self, spec: GrammarSpec, future: Future[Compiled], compiled: Compiled | None, error: BaseException | None = None
    ) -> None:
        """Say what has come of it to those who wait."""
        with self._lock:
            if self._under_way.get(spec) is future:
                del self._under_way[spec]
            if compiled is not None:
                self.cache.put(spec, compiled)
        if not future.set_running_or_notify_cancel():
            return
        if compiled is not None:
            future.set_result(compiled)
        elif isinstance(error, GrammarError):
            future.set_exception(error)
        elif isinstance(error, Exception):
            logger.error("A grammar could not be compiled", exc_info=error)
            future.set_exception(GrammarError(f"{type(error).__name__}: {error}"))
        else:  # what a library in another language panics with
            logger.error("A library failed while it compiled a grammar", exc_info=error)
            future.set_exception(GrammarError(f"the {spec.backend} library failed: {type(error).__name__}"))

    def _compiled(self, spec: GrammarSpec, data: bytes) -> Compiled:
        backend = self._backend(spec.backend)
        started = time.thread_time()
        grammar = backend.load(spec, data)
        _check_beginning(grammar, self.vocabulary.words)
        if time.thread_time() - started > self._seconds:
            raise GrammarError(too_long(self._seconds))
        tokens = self.vocabulary.tokens
        return Compiled(grammar, backend, Places.of(spec, tokens, self._table) if backend.places_decide else None)

    @cached_property
    def _table(self) -> MaskTable:
        return MaskTable(self.vocabulary.words)

    @property
    def vocabulary(self) -> Vocabulary:
        """Made when it is first asked for."""
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _backend(self, name: str) -> Backend:
        vocabulary = self.vocabulary
        with self._making:
            if name not in self._backends:
                self._backends[name] = make_backend(name, vocabulary)
            return self._backends[name]

    def _process(self, name: str) -> CompileProcess:
        vocabulary = self.vocabulary
        with self._making:
            if name not in self._processes:
                self._processes[name] = CompileProcess(name, vocabulary)
            return self._processes[name]


def _check_beginning(grammar: Grammar, words: int) -> None:
    """Raise GrammarError if no text of the model's tokens begins as the grammar wants it."""
    row: np.ndarray = np.zeros(words, np.uint32)
    if not grammar.start().fill(row) and not row.any():
        raise GrammarError("no text that the model can write satisfies it")
