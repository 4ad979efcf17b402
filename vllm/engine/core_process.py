"""The engine core as a process of its own: `python -m vllm.engine.core_process FD PARENT [FD ...]`, started by
`core_client.CoreProcess`.

The first frame it reads is the resolved configuration as JSON; then it answers `Ready` and serves until told to stop
or until the front end that started it is gone. Others may be served beside that, each over a socket of its own, and
leave when they like. It leads a session of its own, so that one signal reaches it and all its ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import termios
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from vllm.engine import wire
from vllm.engine.unread import Common, Unread, look_at, read
from vllm.exceptions import told
from vllm.faults import Faults
from vllm.ipc import functions
from vllm.ipc.child import end_with_parent
from vllm.ipc.frames import FrameReader, read_frames, receive_frames
from vllm.logger import init_logger, mark_lines
from vllm.platforms import cuda_early
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats, prompt_pieces
from vllm.utils.collector import IdleMemory

if TYPE_CHECKING:
    from vllm.engine.core import EngineCore

logger = init_logger(__name__)

PULSE_SECONDS = 0.2
IDLE_CHECK_SECONDS = 1.0
PREPARE_SECONDS = 0.005  # without a request, before the next piece of what later steps would wait for
# A front end beside the first that takes nothing out of its socket for so long, while it is full, is given up.
SEND_SECONDS = 1.0
MOST_UNREAD = 1 << 20  # bytes in its socket, with which it is told nothing more
WHOLE_SECONDS = 0.05  # so often are tokens told of which nobody looks before the last one
# Of each turn between two steps, for what front ends have sent, while nobody runs and while somebody does: he must not
# be held up by many requests, nor by long prompts.
TAKE_SECONDS, BESIDE_SECONDS = 0.02, 0.003
LEAST_SECONDS = 0.0005  # for reading requests, however long it takes to receive them
# What a front end may call by name; nothing else is reachable from the socket.
CALLABLE = frozenset(
    {
        "reset_prefix_cache", "start_profile", "stop_profile", "collective_rpc", "check_health", "idle_report",
        "begin_adapter", "adapter_state", "remove_lora", "pin_lora", "list_loras",
    }
)  # fmt: skip


class Heart:
    """Says for how long the core has made no progress. Written by the loop, read by the pulse thread."""

    def __init__(self) -> None:
        self._busy_since: float | None = None

    def beat(self, busy: bool) -> None:
        """A step was finished, or the loop looked around; `busy` says whether there is more to do."""
        self._busy_since = time.monotonic() if busy else None

    @property
    def is_busy(self) -> bool:
        return self._busy_since is not None

    def busy_seconds(self, allowance: float) -> float:
        """Seconds without a finished step beyond those that are allowed for it; 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since - allowance)


class Peer:
    """One front end: its socket, and what it was not told yet.

    prefix: what the core's names for its requests begin with; "" if there are no other front ends.
    held: outputs that were not sent yet, by request.   singly: requests that want each token by itself
    (`stream_interval`).   whole: requests of which nobody looks at a part.   told: when it was last told of outputs.
    missed: prompt tokens, generated tokens and steps since its last statistics, of which others were told.   stale:
    others were told something since then.   gone: nothing more can be sent.   common: what its next requests may name
    by number.
    """

    def __init__(self, connection: socket.socket, prefix: str = "", patience: float | None = None) -> None:
        """patience: seconds after which one that takes nothing out of its socket is given up; None: never."""
        self.connection, self.prefix = connection, prefix
        self.frames = FrameReader()
        self.held: dict[str, CoreOutput] = {}
        self.common: dict[int, Common] = {}
        self.singly: set[str] = set()
        self.whole: set[str] = set()
        self.told = 0.0
        self.missed = 0, 0, 0
        self.stale = self.gone = False
        self._patience = patience
        self._unread = array("i", [0])
        self._lock = threading.Lock()
        connection.settimeout(patience)

    def send(self, message: wire.FromCore) -> None:
        """Write one frame; the pulse thread and the loop take turns."""
        data = wire.frame(message)
        with self._lock:
            if self.gone:
                return
            try:
                self.connection.sendall(data)
            except OSError:
                if self._patience is None:
                    raise
                self.gone = True  # what it has got may be half a frame

    def unread(self) -> int:
        """Bytes that it has not taken out of the socket."""
        fcntl.ioctl(self.connection, termios.TIOCOUTQ, self._unread)
        return self._unread[0]

    def has_room(self) -> bool:
        """Whether sending more will not hold up everybody else."""
        if self._patience is None:
            return True
        with self._lock:
            return not self.gone and self.unread() < MOST_UNREAD

    @property
    def is_patient(self) -> bool:
        """Whether what is held may be told later, since nobody looks at it before."""
        return self.whole.issuperset(self.held) and time.monotonic() - self.told < WHOLE_SECONDS

    def take(self, request: CoreRequest) -> None:
        """Note what a request, named as by the front end, wants to be told when."""
        if _wants_tokens_singly(request):
            self.singly.add(request.request_id)
        if _is_wanted_whole(request):
            self.whole.add(request.request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests have ended."""
        request_ids = list(request_ids)
        self.singly.difference_update(request_ids)
        self.whole.difference_update(request_ids)

    def close(self) -> None:
        """Nothing more is sent, by anybody."""
        with self._lock:
            self.gone = True
            self.connection.close()

    def stats(self, stats: CoreStats) -> CoreStats:
        """These, with what it has missed."""
        prompt, generated, steps = self.missed
        self.missed, self.stale = (0, 0, 0), False
        stats.prompt_tokens += prompt
        stats.generation_tokens += generated
        stats.steps = max(1, stats.steps + steps)
        return stats

    def miss(self, stats: CoreStats) -> None:
        """Somebody else is told of this."""
        prompt, generated, steps = self.missed
        self.stale = True
        self.missed = (prompt + stats.prompt_tokens, generated + stats.generation_tokens, steps + stats.steps)

    def name_in_core(self, request: CoreRequest) -> None:
        """Give a request of this front end a name that no other's has."""
        prefix = self.prefix
        request.request_id = prefix + request.request_id
        if request.fork_of is not None:
            request.fork_of = prefix + request.fork_of
        if request.account is not None:
            request.account = prefix + request.account


class CoreServer:
    """Reads requests from its front ends, drives the core, writes what each step brought."""

    def __init__(self, connection: socket.socket, core: EngineCore, further: Sequence[socket.socket] = ()) -> None:
        """connection: to the front end that started this process, which ends with it.   further: to others, whose
        requests end with them.
        """
        self._core = core
        self._first = Peer(connection, "0/" if further else "")
        peers = [self._first, *(Peer(c, f"{i}/", SEND_SECONDS) for i, c in enumerate(further, start=1))]
        self._peers = {peer.connection.fileno(): peer for peer in peers}
        self._by_prefix = {peer.prefix: peer for peer in peers}
        self._readable = select.poll()
        for number in self._peers:
            self._readable.register(number, select.POLLIN)
        self._unread = Unread()
        self._steps = 0  # since the last statistics
        self._heart = Heart()
        self._stopping = False

    def send(self, message: wire.FromCore) -> None:
        """Tell all front ends."""
        for peer in list(self._peers.values()):
            if peer.has_room():
                peer.send(message)

    def start_pulse(self) -> None:
        threading.Thread(target=self._pulse_forever, name="core-pulse", daemon=True).start()

    def serve(self) -> None:
        """Work while there is something to do, sleep until there is otherwise."""
        core, prepares = self._core, True
        while not self._stopping:
            busy = core.has_work() or bool(self._unread)
            self._heart.beat(busy)
            if not busy:
                self._send_held()
                self._tell_bystanders()
            self._take_in(0.0 if busy else PREPARE_SECONDS if prepares else IDLE_CHECK_SECONDS)
            if self._stopping:
                return
            if core.has_waiting():  # the next step may be a long one
                self._send_held(patiently=True)
            if core.has_work():
                self._heart.beat(True)
                core.more_to_come = bool(self._unread)
                outputs = core.step()
                core.check_alive()  # who learns that it has ended knows which requests can go on elsewhere
                self._report(outputs)
                prepares = True
                if not core.has_unfinished():
                    core.check_idle()
            elif prepares:
                prepares = core.prepare()

    def _report(self, outputs: list[CoreOutput]) -> None:
        """Tell each front end what a step brought for its requests."""
        self._steps += 1
        if len(self._peers) == 1:
            self._report_to(self._first, outputs)
            return
        for peer, theirs in self._divided(outputs):
            if theirs or not outputs:
                self._report_to(peer, theirs)

    def _divided(self, outputs: list[CoreOutput]) -> list[tuple[Peer, list[CoreOutput]]]:
        """The outputs of each front end that is there, under its own names."""
        found: dict[str, list[CoreOutput]] = {peer.prefix: [] for peer in self._peers.values()}
        for output in outputs:
            number, slash, output.request_id = output.request_id.partition("/")
            found.get(number + slash, []).append(output)
        return [(self._by_prefix[prefix], theirs) for prefix, theirs in found.items()]

    def _report_to(self, peer: Peer, outputs: list[CoreOutput]) -> None:
        """Send what a step brought: now, if the front end has taken everything that was sent before, or a request has
        begun or ended; else together with what the next steps bring.

        To wake the front end and its clients costs the core about 0.1 ms, a third of it in the call and the rest in the
        step after it, whose caches they have used. Who is behind is woken once for all, and for answers that are wanted
        as a whole few times.
        """
        held, urgent = peer.held, not outputs
        if peer.singly:
            urgent = urgent or not peer.singly.isdisjoint(output.request_id for output in outputs)
        for output in outputs:
            urgent = urgent or output.num_cached_tokens is not None or output.finish_reason is not None
            before = held.setdefault(output.request_id, output)
            if before is not output:
                before.extend(output)
        if (urgent or (not peer.is_patient and peer.unread() == 0)) and peer.has_room():
            self._send_held_to(peer, self._stats(peer))
        if urgent and (peer.singly or peer.whole):
            peer.forget(output.request_id for output in outputs if output.finish_reason is not None)

    def _send_held(self, patiently: bool = False) -> None:
        for peer in list(self._peers.values()):
            if not (patiently and peer.is_patient):
                self._send_held_to(peer)

    def _tell_bystanders(self) -> None:
        """Tell front ends without requests of what has been done for others, before all is quiet."""
        reachable = [peer for peer in self._peers.values() if not peer.stale or peer.has_room()]
        for peer in reachable:
            if peer.stale:
                peer.send(wire.StepOutputs([], self._stats(peer)))
        for peer in reachable:  # nothing has changed meanwhile
            peer.stale = any(peer.missed)

    def _send_held_to(self, peer: Peer, stats: CoreStats | None = None) -> None:
        """Send the outputs that were held back; without any, the news that a part of a prompt was computed."""
        if (peer.held or (stats is not None and stats.prompt_tokens)) and peer.has_room():
            self._send_outputs(peer, list(peer.held.values()), stats or self._stats(peer))
            peer.held.clear()
            peer.told = time.monotonic()

    def _send_outputs(self, peer: Peer, outputs: list[CoreOutput], stats: CoreStats) -> None:
        """Send a step, usually as one message; with many prompt logprobs, first what concerns all the others."""
        pieces = list(prompt_pieces(outputs))
        if not pieces:
            peer.send(wire.StepOutputs(outputs, stats))
            return
        large = {piece.request_id for piece in pieces}
        peer.send(wire.StepOutputs([output for output in outputs if output.request_id not in large], stats))
        counted = msgspec.structs.replace(stats, prompt_tokens=0, generation_tokens=0)
        for piece in pieces:
            peer.send(wire.StepOutputs([piece], counted))
        peer.send(wire.StepOutputs([output for output in outputs if output.request_id in large], counted))

    def _stats(self, peer: Peer) -> CoreStats:
        """What this front end is told of the core. Each hears of all work once."""
        stats = self._core.stats()
        stats.steps, self._steps = self._steps, 0
        stats.num_waiting += len(self._unread)
        for other in self._peers.values():
            if other is not peer:
                other.miss(stats)
        return peer.stats(stats)

    def _take_in(self, patience: float) -> None:
        """Handle what the front ends have sent, or much of it; wait for it for at most `patience` seconds.

        It waits in `poll`, which asks for what can be read: a thread that waits in `recv` is also woken, for nothing,
        each time the front end takes something out of the socket.
        """
        for peer in [peer for peer in self._peers.values() if peer.gone]:
            self._leave(peer)
        ready = self._readable.poll(1000 * patience)
        if not ready and patience:
            self._core.check_health()  # a rank may die while nobody asks for anything
        deadline = time.monotonic() + (BESIDE_SECONDS if self._core.has_unfinished() else TAKE_SECONDS)
        while (ready or self._unread) and not self._stopping:
            for number, _ in ready:
                self._receive(self._peers[number])
            self._read_until(max(deadline, time.monotonic() + LEAST_SECONDS))
            if time.monotonic() > deadline:
                return
            ready = self._readable.poll(0)

    def _receive(self, peer: Peer) -> None:
        """Take in what a front end has sent, or handle its end. Requests wait for their turn; nothing else waits for
        them, but for calls, which may be about requests that were sent before.
        """
        try:
            bodies = read_frames(peer.connection, peer.frames)
            messages = None if bodies is None else [wire.decode_to_core(body) for body in bodies]
        except (ValueError, msgspec.DecodeError, OSError) as error:
            self._give_up(peer, error)
            return
        if messages is None:  # it is gone, however it went
            if peer is self._first:
                _end_all_processes()
            self._leave(peer)
            return
        for message in messages:
            if peer.gone or self._stopping:
                return
            if isinstance(message, wire.Added):
                self._core.add_requests([])
                peer.common.update((number, Common(raw)) for number, raw in message.common)
                for request in message.requests:
                    self._look_at(peer, request)
            elif isinstance(message, wire.Call):
                self._unread.put_behind(peer.prefix, message)
            else:
                self._handle(peer, message)

    def _look_at(self, peer: Peer, raw: msgspec.Raw) -> None:
        """A request has come."""
        try:
            request = look_at(raw, peer.common)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            name = wire.name_of(raw)
            if name:
                self._refuse(peer, name, error)
            elif not peer.gone:
                self._give_up(peer, error)
            return
        if not self._unread.add(peer.prefix, request.request_id, request.account, request):
            self._end(peer, request.request_id, f"Request {request.request_id} already exists.")

    def _read_until(self, deadline: float) -> None:
        """Handle what was taken in, at least one request or call."""
        while not self._stopping and (taken := self._unread.take()) is not None:
            peer, content = self._by_prefix[taken[0]], taken[1]
            if isinstance(content, wire.Call):
                self._handle(peer, content)
            else:
                self._add(peer, content)
            if time.monotonic() > deadline:
                return

    def _add(self, peer: Peer, unread: wire.UnreadRequest) -> None:
        """Queue a request of a front end, which is told at once if it cannot be served."""
        name = unread.request_id
        try:
            request = read(unread)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._refuse(peer, name, error)
            return
        peer.take(request)
        if peer.prefix:
            peer.name_in_core(request)
        for output in self._core.add_requests([request], calls=0):
            output.request_id = name
            peer.forget([name])
            peer.send(wire.StepOutputs([output], self._stats(peer)))

    def _refuse(self, peer: Peer, name: str, error: Exception) -> None:
        self._end(peer, name, f"The request cannot be read: {error}")

    def _end(self, peer: Peer, name: str, error: str) -> None:
        """A request has ended before it was queued."""
        output = CoreOutput(name, [], finish_reason="error", error=error)
        peer.send(wire.StepOutputs([output], self._stats(peer)))

    def _give_up(self, peer: Peer, error: Exception) -> None:
        """What a front end has sent makes no sense; the core does not go on without the first one."""
        if peer is self._first:
            raise error
        logger.error("What a front end has sent makes no sense", exc_info=error)
        self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        """A front end is gone, and nobody wants what its requests would bring."""
        number = peer.connection.fileno()
        self._readable.unregister(number)
        del self._peers[number]
        peer.close()
        self._unread.forget(peer.prefix)
        self._core.abort([name for name in self._core.request_ids() if name.startswith(peer.prefix)])

    def _handle(self, peer: Peer, message: wire.Abort | wire.Call | wire.Stop) -> None:
        if isinstance(message, wire.Abort):
            peer.forget(message.request_ids)
            for request_id in message.request_ids:
                peer.held.pop(request_id, None)
            self._unread.discard(peer.prefix, message.request_ids)
            self._core.abort([peer.prefix + request_id for request_id in message.request_ids])
            peer.send(wire.StepOutputs([], self._stats(peer), message.number))
        elif isinstance(message, wire.Call):
            peer.send(self._call(message))
        elif peer is self._first:
            self._stopping = True
        else:
            self._leave(peer)

    def _call(self, call: wire.Call) -> wire.CallResult:
        if call.method not in CALLABLE:
            return wire.CallResult(call.call_id, error=f"The core has no method {call.method!r} to call.")
        try:
            value = getattr(self._core, call.method)(*call.args, **call.kwargs)
            if call.method == "collective_rpc":
                value = functions.portable(value)
            result = wire.CallResult(call.call_id, value=value)
            wire.frame(result)  # what cannot be sent is this call's error, not the core's
            return result
        except Exception as error:
            logger.exception("Core method %s failed", call.method)
            return wire.CallResult(call.call_id, error=f"{type(error).__name__}: {error}")

    def _pulse_forever(self) -> None:
        memory = IdleMemory()
        while True:
            time.sleep(PULSE_SECONDS)
            try:
                self.send(wire.Pulse(self._heart.busy_seconds(self._core.step_allowance)))
            except OSError:
                return
            memory.look(not self._heart.is_busy)


def _wants_tokens_singly(request: CoreRequest) -> bool:
    params = request.params
    return isinstance(params, SamplingParams) and params.stream_interval == 1


def _is_wanted_whole(request: CoreRequest) -> bool:
    """Whether nobody looks at its tokens before the last one, neither for stop strings nor to count what is kept."""
    params = request.params
    if not isinstance(params, SamplingParams) or params.output_kind is not RequestOutputKind.FINAL_ONLY:
        return False
    return not params.stop and params.logprobs is None and params.prompt_logprobs is None


def _end_all_processes() -> NoReturn:
    """End this process and every rank it has started, now."""
    if os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _first_frame(connection: socket.socket) -> dict[str, Any]:
    """The configuration; the front end sends nothing more before it has heard `Ready`."""
    bodies = receive_frames(connection, FrameReader())
    if not bodies:
        sys.exit(1)
    document: dict[str, Any] = json.loads(bodies[0])
    return document


def make_core(document: dict[str, Any]) -> EngineCore:
    """The core that the front end's document describes; loads the model."""
    if not document["parallel_config"]["replica"]:  # the first device is another's
        cuda_early.begin(document["device_config"]["device"])
    from vllm.config import VllmConfig
    from vllm.engine.core import EngineCore
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.restore(document.pop("registered_models"))
    config = VllmConfig.from_dict(document)
    if config.parallel_config.local_replicas > 1:
        mark_lines(f"replica {config.parallel_config.replica}")
    return EngineCore(config)


def main(argv: list[str], make: Callable[[dict[str, Any]], EngineCore] = make_core) -> int:
    """Entry of the core process; returns its exit status. `argv`: the socket's descriptor, the front end's pid, and
    descriptors of sockets to further front ends.
    """
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front end, which then tells us
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection, *further = (socket.socket(fileno=int(number)) for number in (argv[0], *argv[2:]))
    document = _first_frame(connection)
    end_with_parent(connection, int(argv[1]), _end_all_processes)
    core = None
    try:
        core = make(document)
        server = CoreServer(Faults.from_env().around_connection(connection), core, further)
        server.start_pulse()
        gc.collect()
        gc.freeze()  # what loading has made stays: collections need not look at it again and again
        server.send(wire.Ready(core.describe()))
        server.serve()
    except Exception as error:
        if core is None and isinstance(error, ValueError):  # of the settings or files, which the message is about
            logger.debug("The engine core failed", exc_info=True)
        else:
            logger.exception("The engine core failed")
        for end in (connection, *further):
            with contextlib.suppress(OSError):
                end.sendall(wire.frame(wire.Fatal(told(error))))
        return 1
    finally:
        if core is not None:
            core.shutdown()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
