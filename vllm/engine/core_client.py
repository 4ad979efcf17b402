"""The front end's end of the core, which is a process of its own or a thread of this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from vllm import envs
from vllm.engine import wire
from vllm.exceptions import EngineDeadError
from vllm.executor.ray_utils import handed_on
from vllm.ipc.child import start_child, wide_pair
from vllm.ipc.frames import FrameReader, frame, receive_frames
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.core import EngineCore

logger = init_logger(__name__)

_BUFFER_BYTES = 1 << 22  # of a socket
_TURN_SECONDS = 0.005  # of the event loop, for what the core sends
_ENDS_AT_ONCE = 32  # whose texts may have to be made; after them it may be others' turn

OutputHandler = Callable[[list[CoreOutput], CoreStats], None]
DeathHandler = Callable[[str], None]


class EngineSilentError(EngineDeadError):
    """The core gives no sign of life. It may be stopped, and wake up."""


class Leaving:
    """Names of requests that the core was told to end and may not have heard of: what it says of them is of those, also
    where a name is used again meanwhile.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()  # by name; the newest last
        self._newest = 0

    def begin(self, request_ids: Iterable[str]) -> int:
        """They are told to end. Returns the number of this call, which the core is to answer with."""
        self._newest += 1
        for request_id in request_ids:
            self._numbers[request_id] = self._newest
            self._numbers.move_to_end(request_id)
        return self._newest

    def end(self, number: int) -> None:
        """The core has heard of this call, and so of those before it."""
        while self._numbers and next(iter(self._numbers.values())) <= number:
            self._numbers.popitem(last=False)

    def without(self, outputs: list[CoreOutput]) -> list[CoreOutput]:
        """The outputs of others."""
        if not self._numbers:
            return outputs
        return [output for output in outputs if output.request_id not in self._numbers]


class AsyncCoreClient(Protocol):
    """What `AsyncLLMEngine` needs of a core. Handlers run on the event loop that called `attach`."""

    info: dict[str, Any]

    def launch(self) -> None: ...

    async def attach(self, on_outputs: OutputHandler, on_death: DeathHandler) -> None: ...

    def add(self, requests: list[CoreRequest]) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...

    def check_health(self) -> None: ...

    def stall(self) -> str | None: ...

    def excuse(self) -> None: ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...


class CorePeer:
    """One end of a connection to a core, over which it is used: that of the process which started it, or of another
    front end, which got a socket of `CoreProcess.further` and may leave while the core goes on.

    `check_health` reports a core unhealthy that sends no pulse, or has been busy for `health_seconds` without finishing
    a step; `stall` says when to give it up: either has lasted for `stall_seconds`.
    """

    PULSE_GRACE_SECONDS = 1.5

    def __init__(
        self, connection: socket.socket | None, stall_seconds: float, health_seconds: float | None = None
    ) -> None:
        self._connection = connection
        self._stall_seconds = stall_seconds
        self._health_seconds = stall_seconds if health_seconds is None else min(health_seconds, stall_seconds)
        self._frames = FrameReader()
        self._sharing = wire.Sharing()
        self._leaving = Leaving()
        self._waiting: deque[bytes | wire.StepOutputs] = deque()
        self._catching_up = False
        self._transport: asyncio.Transport | None = None
        self._on_outputs: OutputHandler | None = None
        self._on_death: DeathHandler | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._last_pulse = 0.0
        self._busy_seconds = 0.0
        self._death: str | None = None
        self._last_words = ""
        self._stopping = False
        self.info: dict[str, Any] = {}

    def launch(self) -> None:
        """Wait until the core is ready. Raises RuntimeError with the core's own words if it fails."""
        assert self._connection is not None
        self._await_ready(self._connection)

    def _await_ready(self, connection: socket.socket) -> None:
        reason = "The engine core process ended unexpectedly."
        while True:
            bodies = receive_frames(connection, self._frames)
            if bodies is None:
                raise RuntimeError(f"The engine core failed to start: {reason}")
            for i, body in enumerate(bodies):
                message = wire.decode_from_core(body)
                if isinstance(message, wire.Fatal):
                    reason = message.error
                elif isinstance(message, wire.Ready):
                    self.info = message.info
                    self._waiting.extend(bodies[i + 1 :])
                    return

    async def attach(self, on_outputs: OutputHandler, on_death: DeathHandler) -> None:
        """Listen to the launched core on the running event loop."""
        self._on_outputs, self._on_death = on_outputs, on_death
        self._last_pulse = time.monotonic()
        loop, connection = asyncio.get_running_loop(), self._connection
        assert connection is not None
        connect = loop.create_unix_connection if connection.family == socket.AF_UNIX else loop.create_connection
        await connect(lambda: _Connection(self), sock=connection)

    def add(self, requests: list[CoreRequest]) -> None:
        self._send(self._sharing.message(requests))

    def abort(self, request_ids: list[str]) -> None:
        if self._death is None:
            self._send(wire.Abort(request_ids, self._leaving.begin(request_ids)))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a utility method of the core. Raises RuntimeError with its error text if it fails."""
        call_id = self._next_call
        self._next_call += 1
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(wire.Call(call_id, method, list(args), kwargs))
        return await future

    def check_health(self) -> None:
        """Raise EngineDeadError unless the core lives and makes progress."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        problem = self._problem(self.PULSE_GRACE_SECONDS, self._health_seconds)
        if problem is not None:
            raise problem

    def stall(self) -> str | None:
        """Why the core should be given up, or None."""
        if self._death is not None:
            return None
        problem = self._problem(max(self.PULSE_GRACE_SECONDS, self._stall_seconds), self._stall_seconds)
        return None if problem is None else problem.reason

    def _problem(self, silent_seconds: float, busy_seconds: float) -> EngineDeadError | None:
        """What is wrong if the core may be silent, and busy with one step, for this long."""
        silence = time.monotonic() - self._last_pulse
        if silence > silent_seconds:
            return EngineSilentError(f"The engine core has given no sign of life for {silence:.1f} s.")
        if self._busy_seconds > busy_seconds:
            return EngineDeadError(f"The engine core has not finished a step for {self._busy_seconds:.1f} s.")
        return None

    def excuse(self) -> None:
        """This process itself was held up and read no pulses: the core's silence starts anew."""
        self._last_pulse = time.monotonic()

    async def stop(self) -> None:
        """Leave the core."""
        self.kill()

    def kill(self) -> None:
        """Leave the core at once, from any thread. May be called twice."""
        self._stopping = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # the event loop closes what it listens to

    def _send(self, message: wire.ToCore) -> None:
        if self._death is not None or self._transport is None:
            raise EngineDeadError(self._death or "The engine core is not running.")
        self._transport.write(wire.frame(message))

    def on_connection(self, transport: asyncio.Transport) -> None:
        """The event loop listens from now on."""
        self._transport = transport
        self._take_waiting()

    def on_data(self, data: bytes) -> None:
        """Take in what the core has sent."""
        self._last_pulse = time.monotonic()
        try:
            bodies = self._frames.feed(data)
        except ValueError as error:
            self._give_up(error)
            return
        self._waiting.extend(bodies)
        if not self._catching_up:
            self._take_waiting()

    def _take_waiting(self, patience: float = _TURN_SECONDS) -> None:
        """Take in what waits, but no longer than `patience` seconds: then it is everybody else's turn first.

        What more the core has to say stays in the socket for as long, so that a core which is faster than the front end
        waits for it in the end.
        """
        deadline = time.perf_counter() + patience
        late = False
        try:
            while self._waiting and not late:
                self._take(self._next())
                late = time.perf_counter() > deadline
        except Exception as error:
            self._waiting.clear()
            self._give_up(error)
            return
        if late:
            asyncio.get_running_loop().call_soon(self._take_waiting)
        transport = self._transport
        if late == self._catching_up or transport is None or transport.is_closing():
            return
        self._catching_up = late
        if late:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _next(self) -> wire.FromCore:
        """The next message. Of a step that ends many requests, what it brought for the others is one by itself."""
        waiting = self._waiting.popleft()
        message: wire.FromCore = waiting if isinstance(waiting, wire.StepOutputs) else wire.decode_from_core(waiting)
        if not isinstance(message, wire.StepOutputs) or len(message.outputs) <= _ENDS_AT_ONCE or message is waiting:
            return message
        ends = [output for output in message.outputs if output.finish_reason is not None]
        if len(ends) > _ENDS_AT_ONCE:
            told = msgspec.structs.replace(message.stats, prompt_tokens=0, generation_tokens=0)
            parts = [ends[i : i + _ENDS_AT_ONCE] for i in range(0, len(ends), _ENDS_AT_ONCE)]
            self._waiting.extendleft(wire.StepOutputs(part, told) for part in reversed(parts))
            message.outputs = [output for output in message.outputs if output.finish_reason is None]
        return message

    def _take(self, message: wire.FromCore) -> None:
        if isinstance(message, wire.StepOutputs):
            self._busy_seconds = 0.0
            assert self._on_outputs is not None
            self._leaving.end(message.aborted)
            self._on_outputs(self._leaving.without(message.outputs), message.stats)
        elif isinstance(message, wire.Pulse):
            self._busy_seconds = message.busy_seconds
        elif isinstance(message, wire.CallResult):
            self._resolve(message)
        elif isinstance(message, wire.Fatal):
            self._last_words = message.error

    def _give_up(self, error: Exception) -> None:
        """What was sent cannot be taken in: nothing after it can be relied on, so the connection ends."""
        logger.error("Taking in what the engine core sent has failed", exc_info=error)
        self._last_words = f"{type(error).__name__}: {error}"
        if self._transport is not None:
            self._transport.abort()

    def _resolve(self, result: wire.CallResult) -> None:
        future = self._calls.pop(result.call_id, None)
        if future is None or future.done():
            return
        if result.error is not None:
            future.set_exception(RuntimeError(result.error))
        else:
            future.set_result(result.value)

    def on_end(self) -> None:
        """The connection is gone, and so is the core, however that came about."""
        self._take_waiting(float("inf"))
        self._death = self._last_words or "The engine core process ended unexpectedly."
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(self._death))
        self._calls.clear()
        if not self._stopping and self._on_death is not None:
            self._on_death(self._death)


class CoreProcess(CorePeer):
    """Starts and watches the core process. Death of either side is end of file for the other.

    `module` is what the process runs. further: sockets for `CorePeer`s, each for one other front end.
    """

    def __init__(
        self,
        config: dict[str, Any],
        stall_seconds: float,
        module: str = "vllm.engine.core_process",
        health_seconds: float | None = None,
        further: int = 0,
    ) -> None:
        """further: how many other front ends there will be; `further` has their sockets from the start."""
        super().__init__(None, stall_seconds, health_seconds)
        self._config = config
        self._module = module
        pairs = [wide_pair(_BUFFER_BYTES) for _ in range(further)]
        self.further = [ours for ours, _ in pairs]
        self._further_ends = [theirs for _, theirs in pairs]
        self._process: subprocess.Popen[bytes] | None = None
        self._group_ended = False

    def launch(self) -> None:
        """Spawn the core and wait until it is ready. Raises RuntimeError with the core's own words if it fails."""
        self._process, ours = self._start()
        self._connection = ours
        document = json.dumps({**self._config, "registered_models": ModelRegistry.registered()}).encode()
        try:
            with contextlib.suppress(BrokenPipeError):  # then it has ended already, and says why
                ours.sendall(frame(document))
            self._await_ready(ours)
        except BaseException:
            ours.close()
            self._reap(self._process, 1.0)
            raise

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        theirs, self._further_ends = self._further_ends, []
        environment = {**os.environ, **handed_on()}
        return start_child(
            self._module, leads_session=True, buffer_bytes=_BUFFER_BYTES, environment=environment, further=theirs
        )

    def check_health(self) -> None:
        """Raise EngineDeadError unless the core process lives and makes progress."""
        if self._death is None and (self._process is None or self._process.poll() is not None):
            raise EngineDeadError(
                f"The engine core process ended with status {self._process and self._process.returncode}."
            )
        super().check_health()

    def on_end(self) -> None:
        """The connection is gone, and so is the core, however that came about."""
        self._kill_group()  # its ranks, if it left any
        super().on_end()

    async def stop(self) -> None:
        """End the core process: ask, then insist. Returns when it is gone."""
        self._stopping = True
        with contextlib.suppress(OSError, EngineDeadError):
            if self._transport is not None:
                self._send(wire.Stop())
            elif self._connection is not None:  # nobody has listened yet
                self._connection.sendall(wire.frame(wire.Stop()))
        process = self._process
        if process is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._reap, process, 5.0)
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def kill(self) -> None:
        """End the core process and its workers at once, from any thread. May be called twice."""
        self._stopping = True
        self._kill_group()
        if self._process is not None and not sys.is_finalizing():  # its keeper may be gone then with the lock of `wait`
            self._process.wait()

    def _kill_group(self) -> None:
        if self._process is not None and not self._group_ended:
            self._group_ended = True  # later its number may be somebody else's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _reap(self, process: subprocess.Popen[bytes], patience: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
        self._kill_group()  # its ranks share its session, so that one signal reaches all of them
        process.wait()


class _Connection(asyncio.Protocol):
    """Hands what comes from the core to its client in the callback that brings it, with no task in between."""

    def __init__(self, client: CorePeer) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.on_connection(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._client.on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.on_end()


class CoreThread:
    """The core in a thread of this process (`--disable-frontend-multiprocessing`)."""

    def __init__(self, make_core: Callable[[], EngineCore], stall_seconds: float, health_seconds: float) -> None:
        self._make_core = make_core
        self._stall_seconds = stall_seconds
        self._health_seconds = min(health_seconds, stall_seconds)
        self._core: EngineCore | None = None
        self._inbox: list[Callable[[EngineCore], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._busy_since: float | None = None
        self._death: str | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._leaving = Leaving()
        self.info: dict[str, Any] = {}

    def launch(self) -> None:
        """Build the core in its thread and wait until it is ready. Raises what building it raised."""
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    async def attach(self, on_outputs: OutputHandler, on_death: DeathHandler) -> None:
        """Hand outputs to the running event loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._on_outputs, self._on_death = on_outputs, on_death

    def add(self, requests: list[CoreRequest]) -> None:
        def work(core: EngineCore) -> None:
            rejected = core.add_requests(requests)
            if rejected:
                self._post(self._take, rejected, core.stats())

        self._submit(work)

    def abort(self, request_ids: list[str]) -> None:
        number = self._leaving.begin(request_ids)

        def work(core: EngineCore) -> None:
            core.abort(request_ids)
            self._post(self._take, [], core.stats(), number)

        self._submit(work)

    def _take(self, outputs: list[CoreOutput], stats: CoreStats, aborted: int = 0) -> None:
        """Hand on what the core has said, on the event loop."""
        self._leaving.end(aborted)
        self._on_outputs(self._leaving.without(outputs), stats)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the core between two steps."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)

        def work(core: EngineCore) -> None:
            try:
                self._post(settle, getattr(core, method)(*args, **kwargs), None)
            except Exception as error:
                self._post(settle, None, error)

        self._submit(work)
        return await future

    def check_health(self) -> None:
        """Raise EngineDeadError unless the thread lives and makes progress."""
        if self._death is not None or self._thread is None or not self._thread.is_alive():
            raise EngineDeadError(self._death or "The engine core is not running.")
        problem = self._problem(self._health_seconds)
        if problem is not None:
            raise EngineDeadError(problem)

    def stall(self) -> str | None:
        """Why the core should be given up, or None."""
        return self._problem(self._stall_seconds)

    def _problem(self, patience: float) -> str | None:
        since, core = self._busy_since, self._core
        if since is None or core is None or time.monotonic() - since - core.step_allowance <= patience:
            return None
        return f"The engine core has not finished a step for {time.monotonic() - since:.1f} s."

    def excuse(self) -> None:
        """Nothing to excuse: the thread and its watcher share a clock."""

    async def stop(self) -> None:
        """End the thread after the step it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def kill(self) -> None:
        """Ask the thread to end after the step it is in; it is a daemon and holds nothing up."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _submit(self, work: Callable[[EngineCore], None]) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _post(self, function: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            core = self._core = self._make_core()
            self.info = core.describe()
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        try:
            self._serve(core)
        except Exception as error:
            logger.exception("The engine core failed")
            self._death = f"{type(error).__name__}: {error}"
            self._post(self._on_death, self._death)
        finally:
            self._core = None
            core.shutdown()

    def _serve(self, core: EngineCore) -> None:
        while True:
            busy = core.has_work()
            self._busy_since = time.monotonic() if busy else None
            with self._wake:
                while not (self._inbox or busy or self._stopping):
                    self._wake.wait()
                work, self._inbox = self._inbox, []
                if self._stopping:
                    return
            for item in work:
                item(core)
            if core.has_work():
                self._busy_since = time.monotonic()
                outputs, stats = core.step(), core.stats()
                core.check_alive()
                if outputs or stats.prompt_tokens:
                    self._post(self._take, outputs, stats)
                core.check_idle()


def patience() -> tuple[float, float]:
    """Seconds after which a core that is stuck is given up, and after which it is not healthy."""
    return float(envs.VLLM_ENGINE_ITERATION_TIMEOUT_S), float(envs.VLLM_HEALTH_TIMEOUT_S)


def check_copies(config: VllmConfig, multiprocessing: bool) -> None:
    """Raise ValueError if copies of the engine are asked for, which need processes, and there are to be none."""
    copies = config.parallel_config.local_replicas
    if copies > 1 and not multiprocessing:
        raise ValueError(
            f"data_parallel_size={copies} needs a process for each copy of the engine, which "
            "--disable-frontend-multiprocessing forbids. Leave out one of the two."
        )


def make_core_client(config: VllmConfig, multiprocessing: bool) -> AsyncCoreClient:
    """A core that is not started yet, as a process or as a thread."""
    check_copies(config, multiprocessing)
    stall, health = patience()
    copies = config.parallel_config.local_replicas
    if multiprocessing:
        if copies == 1:
            return CoreProcess(config.to_dict(), stall, health_seconds=health)
        from vllm.engine.fleet import Fleet
        from vllm.engine.joined_fleet import JoinedFleet

        started: set[int] = set()

        def start(index: int, meeting: str = "") -> AsyncCoreClient:
            if config.parallel_config.data_parallel_backend == "ray":
                from vllm.engine.ray_core import RayCore

                again = index in started
                started.add(index)
                return RayCore(index, config, stall, health, again=again)
            parallel = replace(config.parallel_config, replica=index, meeting=meeting)
            return CoreProcess(replace(config, parallel_config=parallel).to_dict(), stall, health_seconds=health)

        kind = JoinedFleet if config.parallel_config.shares_experts else Fleet
        return kind(start, copies, config.cache_config.enable_prefix_caching)

    def make() -> Any:
        from vllm.engine.core import EngineCore

        return EngineCore(config)

    return CoreThread(make, stall, health)
