"""Several ranks on one host: the first one in this process, the others in processes of their own.

Plans are sent to every rank and executed by all in the same order. Only the first rank samples and knows results; of a
pipeline it is on the last stage, and the first one is told what that has sampled. A rank that fails takes the
executor down: the others may wait for it inside a collective operation, and cannot be trusted to agree again.
"""

from __future__ import annotations

import math
import socket
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.exceptions import EngineDeadError
from vllm.executor import codec, rendezvous
from vllm.executor.base import CPU_SECONDS_PER_TOKEN
from vllm.executor.calls import Caller, callable_of, worker_class
from vllm.executor.rank_link import DEATH_NOTICE_S, RankLink
from vllm.ipc import functions
from vllm.ipc.child import start_child
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry
from vllm.step.known import KnownTokens, is_told
from vllm.step.plan import RowMasks, StepPlan
from vllm.step.result import StepResult
from vllm.worker.step_handle import Handle
from vllm.worker.worker import Worker, compile_ahead

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_DEVICE_TIMEOUT_S = 600  # there `collect` notices earlier that a step does not end
_LEAST_TIMEOUT_S = 60  # for ranks that meet on a busy host
_POLITE_S = 5.0  # how long a rank may take to end when told to


class RankProcess(RankLink):
    """A rank in a process that this one has started."""

    def __init__(self, rank: int) -> None:
        self.process, connection = start_child("vllm.executor.worker_process")
        super().__init__(rank, connection)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def was_killed(self) -> bool:
        return (self.process.poll() or 0) < 0

    def _end_of_process(self) -> str:
        try:
            status = self.process.wait(DEATH_NOTICE_S)
        except subprocess.TimeoutExpired:
            return "does not answer any more."
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{how}. Its log lines are above."

    def join(self) -> None:
        try:
            self.process.wait(_POLITE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is. device, local: see `Ranks`."""

    device: int
    local: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cast:
    """Where the ranks meet, and the place of each. listener: at `host`; whoever has the cast closes it."""

    host: str
    listener: socket.socket
    places: Sequence[Place]


class _Others:
    """The other ranks, and whether this process has joined them; what must not be left behind."""

    def __init__(self) -> None:
        self.ranks: list[RankLink] = []
        self.finally_do: list[Callable[[], None]] = []  # when all have ended
        self.joined = False
        self.worker: Worker | None = None  # of this process

    def end(self) -> None:
        """End the processes and leave the process group. May be called again."""
        for rank in self.ranks:
            rank.hang_up()
        for rank in self.ranks:
            rank.join()
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        if self.joined:
            self.joined = False
            rendezvous.leave()
        while self.finally_do:
            self.finally_do.pop()()


@dataclass(slots=True)
class _Step:
    """A step in flight. message: what ranks are told.   handle: None as long as the last stage has not begun."""

    plan: StepPlan
    message: bytes
    handle: Handle | None = None


def longest_step(config: VllmConfig) -> float:
    """Seconds that a step may take."""
    seconds = float(envs.VLLM_ENGINE_ITERATION_TIMEOUT_S)
    if config.device_config.device == "cpu":
        seconds += CPU_SECONDS_PER_TOKEN * config.scheduler_config.max_num_batched_tokens
    return seconds


def collective_timeout(config: VllmConfig) -> int:
    """Seconds after which a collective operation fails. On a CPU a step waits inside of it for a rank that hangs, so
    that it may last as long as the largest step may, and no longer.
    """
    if config.parallel_config.distributed_timeout_seconds is not None:
        return config.parallel_config.distributed_timeout_seconds
    if config.device_config.device != "cpu":
        return _DEVICE_TIMEOUT_S
    return max(_LEAST_TIMEOUT_S, math.ceil(longest_step(config)))


class MultiprocExecutor:
    """Executes plans on `tensor_parallel_size * pipeline_parallel_size` ranks."""

    def __init__(self, config: VllmConfig) -> None:
        self._in_flight: deque[_Step] = deque()
        self._known = KnownTokens() if config.parallel_config.pipeline_parallel_size > 1 else None
        self._broken: EngineDeadError | None = None
        self._worker: Worker | None = None
        self._calls = 0
        self._caller = Caller()
        self._patience = envs.VLLM_ENGINE_ITERATION_TIMEOUT_S
        self._unread_s: float | None = None
        self._others = _Others()
        # Also when this object is dropped without shutdown(), and at the end of the program.
        self._finalizer = weakref.finalize(self, self._others.end)
        try:
            self._worker, self.num_blocks = self._start(config)
        except BaseException:
            self.shutdown()
            raise
        self.kv_layout = self._worker.layout
        ahead = 2 if self._worker.context.is_async else 1
        self.max_in_flight = max(ahead, config.parallel_config.pipeline_parallel_size) if config.overlap_steps else 1
        # Ranks that share layers or experts record what they exchange, together, in the steps that they run.
        alone = config.parallel_config.tensor_parallel_size == 1 and not config.parallel_config.shares_experts
        self._prepares = alone and self._worker.context.is_async
        # Where a step keeps the host busy until it is done, the last stage begins when its result is asked for, with
        # all its ranks: one that began alone would wait for this one, and read nothing more until then.
        self._defers = self._known is not None and not self._worker.context.is_async
        self._sharers = config.parallel_config.tensor_parallel_size - 1  # the other ranks of the last stage, the first
        # A rank that works reads nothing: not before it has done what it was given.
        self._unread_s = longest_step(config) * (2 + self.max_in_flight)

    def _start(self, config: VllmConfig) -> tuple[Worker, int]:
        parallel = config.parallel_config
        document = {**config.to_dict(), "registered_models": ModelRegistry.registered()}
        timeout = collective_timeout(config)
        cast = self._cast(config)
        with cast.listener as listener:
            states = rendezvous.one_shot_states(config)
            compiling = compile_ahead(config, rendezvous.dry_run(parallel.tensor_parallel_size, states))
            for rank_process in self._ranks:
                rank_process.receive()  # it runs: from here on, meeting it takes no longer than the others
            meeting = rendezvous.Meeting(cast.host, listener.getsockname()[1], timeout, parallel.meeting)
            for r in self._ranks:
                place = cast.places[r.rank]
                begin = codec.Begin(
                    document, r.rank, meeting.host, meeting.port, timeout, place.device, place.local
                )  # fmt: skip
                r.send(codec.frame(begin))
            seat = rendezvous.seat_of(parallel, 0)
            device, place = config.device_config.device, cast.places[0]
            ranks = rendezvous.join(device, seat, meeting, place.device, place.local, listener, states)
            self._others.joined = True
        worker = self._others.worker = worker_class(config)(config, ranks, compiling)
        own = worker.count_blocks()
        num_blocks = min([own, *(self._ready(r) for r in self._ranks)])
        self._broadcast(codec.Start(num_blocks))
        worker.start(num_blocks)
        for r in self._ranks:
            self._ready(r)
        others = [f"{r.name} (pid {r.pid})" for r in self._ranks]
        logger.info("%d ranks are ready: this process, %s.", parallel.world_size, ", ".join(others))
        return worker, num_blocks

    def _cast(self, config: VllmConfig) -> Cast:
        """Start the other ranks and say where each is, this one included."""
        parallel = config.parallel_config
        world, first = parallel.world_size, parallel.replica * parallel.world_size
        for rank in range(1, world):
            self._ranks.append(RankProcess(rank))
        places = [Place(parallel.first_device + r, (first + r, world * parallel.local_replicas)) for r in range(world)]
        return Cast(rendezvous.LOOPBACK, rendezvous.open_listener(), places)

    @property
    def _ranks(self) -> list[RankLink]:
        return self._others.ranks

    def _ready(self, rank: RankLink) -> int:
        message = rank.receive()
        if not isinstance(message, codec.Ready):
            raise EngineDeadError(f"Rank {rank.rank} sent {type(message).__name__} where Ready was due.")
        return message.value

    def _broadcast(self, message: codec.ToRank) -> None:
        self._send(self._ranks, codec.frame(message))

    def _send(self, ranks: Iterable[RankLink], data: bytes) -> None:
        for rank in ranks:
            rank.send(data, self._unread_s)

    @property
    def driver_worker(self) -> Worker:
        raise RuntimeError(
            "driver_worker is one of several ranks here, and what is done to one must be done to all: call "
            "collective_rpc with a function that takes the worker, or with a method of worker_extension_cls."
        )

    @property
    def worker(self) -> Worker:
        """The first rank's worker, when it is free; raises EngineDeadError when the ranks work together no more."""
        self._caller.wait()
        if self._broken is not None:
            raise self._broken
        if self._worker is None:
            raise EngineDeadError("The executor has been shut down.")
        return self._worker

    def submit(self, plan: StepPlan) -> None:
        """Start a step on every rank."""
        self.worker  # noqa: B018 - raises if the executor is broken or shut down
        known, told = None, 0
        if self._known is not None:
            known, told = self._known.take(), self._known.planned(plan)
        step = _Step(plan, codec.frame(codec.step_message(plan, known, told)))
        try:
            self._send(self._ranks[self._sharers :], step.message)
            if not self._defers:
                self._begun(step)
            self._in_flight.append(step)
        except Exception as error:
            raise self._break(error) from error

    def runs_ahead(self) -> bool:
        """Whether no token of a step in flight must be known here before a plan that goes on from it is submitted."""
        return self.max_in_flight > 1 and (self._known is None or all(is_told(s.plan) for s in self._in_flight))

    def complete(self, step_id: int, masks: RowMasks | None) -> None:
        """Give the step submitted last the masks that it waits for; only the first rank samples and needs them."""
        try:
            self.worker.complete(step_id, masks)
        except Exception as error:
            raise self._break(error) from error

    def collect(self) -> StepResult:
        """The result of the oldest step in flight. Looks after the ranks while it waits: one that is gone or, on a
        device, that does not come to an end within VLLM_ENGINE_ITERATION_TIMEOUT_S, ends the executor.
        """
        step, begun = self._in_flight.popleft(), time.monotonic()
        try:
            handle = self._begun(step)
            while not handle.wait(DEATH_NOTICE_S):
                self.check_health()
                if time.monotonic() - begun > self._patience:
                    raise EngineDeadError(
                        f"Step {step.plan.step_id} has not come to an end within {self._patience} s: a rank or its "
                        "device hangs. VLLM_ENGINE_ITERATION_TIMEOUT_S allows for longer steps."
                    )
            result = handle.result()
        except Exception as error:
            raise self._break(error) from error
        if self._known is not None:
            self._known.sampled(step.plan, result)
        return result

    def _begun(self, step: _Step) -> Handle:
        """The driver's part of a step, begun with all ranks of its stage."""
        if step.handle is None:
            self._send(self._ranks[: self._sharers], step.message)
            step.handle = self.worker.execute(step.plan)
        return step.handle

    def _break(self, error: Exception) -> EngineDeadError:
        """Give up: after half a step the ranks cannot be brought together again."""
        if self._broken is None:
            self._broken = self._cause(error)
            logger.error("The ranks are stopped: %s", self._broken)
            self._others.end()
        return self._broken

    def _cause(self, error: Exception) -> EngineDeadError:
        """If a rank is gone, that is the reason; a failed collective operation, here or in another rank, is only how it
        shows.
        """
        said = isinstance(error, EngineDeadError)
        deadline = time.monotonic() + (0.0 if said else DEATH_NOTICE_S)
        while True:
            dead = sorted((rank for rank in self._ranks if not rank.is_alive), key=lambda rank: not rank.was_killed)
            if dead and (dead[0].was_killed or not said):
                return dead[0].death()
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        if isinstance(error, EngineDeadError):
            return error
        return EngineDeadError(f"A step failed: {type(error).__name__}: {error}")

    def agree(self, tokens: int, busy: bool, calls: int) -> tuple[int, bool]:
        """What all copies of the engine do next, as `distributed.exchange.Peers` says."""
        peers = self.worker.ranks.peers
        if peers is None:
            raise RuntimeError("This copy of the engine shares nothing with others.")
        try:
            return peers.agree(tokens, busy, calls)
        except Exception as error:
            lost = EngineDeadError(f"A copy of the engine that has a part of the experts is gone: {error}")
            raise self._break(lost) from error

    def prepare(self) -> bool:
        """Let each rank do a piece of what later steps would wait for; whether one of them has more to do."""
        return self._prepares and any(self.collective_rpc("prepare"))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every rank's worker by name, or a function that is given the worker. Arguments and results
        travel as `ipc.functions` says, also those of the first rank: they are alike on all.

        timeout: seconds for all ranks together. Raises TimeoutError; RuntimeError with the first rank's error if
            one failed.
        """
        worker = self.worker
        bound = callable_of(worker, method)
        sent, arguments = functions.portable(method), functions.portable(list(args))
        named = functions.portable(dict(kwargs or {}))
        deadline = None if timeout is None else time.monotonic() + timeout
        self._calls += 1
        call = codec.frame(codec.Call(self._calls, sent, arguments, named))
        own_call = partial(bound, *functions.copied(arguments), **functions.copied(named))
        try:
            for step in self._in_flight:  # for which the others wait before they answer
                self._begun(step)
            self._send(self._ranks, call)
        except Exception as broken:
            raise self._break(broken) from broken
        results: list[Any] = []
        error: Exception | None = None
        try:
            results.append(functions.copied(self._caller.call(worker, own_call, timeout)))
        except Exception as own:
            error = own  # the others' answers must be read all the same
        for rank in self._ranks:
            answer = self._answer(rank, self._calls, deadline)
            if answer.error is not None and error is None:
                error = RuntimeError(f"Rank {rank.rank}: {answer.error}")
            results.append(functions.received(answer.value))
        if error is not None:
            raise error
        return results

    def _answer(self, rank: RankLink, call_id: int, deadline: float | None) -> codec.Result:
        """A rank's answer to a call; answers to calls that were given up are dropped."""
        while True:
            try:
                message = rank.receive(deadline)
            except EngineDeadError as error:
                raise self._break(error) from error
            if not isinstance(message, codec.Result):
                raise self._break(EngineDeadError(f"Rank {rank.rank} sent {type(message).__name__} as an answer."))
            if message.call_id == call_id:
                return message

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write every rank's weights for load_format="sharded_state"."""
        self.collective_rpc("save_sharded_state", args=(path, pattern, max_size))

    def check_health(self) -> None:
        """Raises EngineDeadError if a rank is gone."""
        self.worker.context  # noqa: B018 - raises if the executor is broken or shut down
        for rank in self._ranks:
            if not rank.is_alive:
                raise self._break(rank.death())

    def shutdown(self) -> None:
        """End all ranks."""
        self._in_flight.clear()
        self._worker = None
        self._finalizer()
