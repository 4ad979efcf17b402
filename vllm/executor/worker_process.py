"""A rank other than the first: `python -m vllm.executor.worker_process FD PARENT`, started by `multiproc`.

It does what the socket says, one message after the other, and ends when the socket does: by itself when it waits,
through a thread of its own when it computes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections import deque
from typing import TYPE_CHECKING

from vllm.executor import codec
from vllm.executor.calls import callable_of, worker_class
from vllm.ipc import functions
from vllm.ipc.child import end_with_parent
from vllm.ipc.frames import FrameReader, receive_frames
from vllm.logger import mark_lines

if TYPE_CHECKING:
    from vllm.worker.worker import Worker


class Rank:
    """Reads messages and does what they say."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()
        self._frames: deque[bytes] = deque()
        self._worker: Worker | None = None

    def _receive(self) -> codec.ToRank:
        while not self._frames:
            frames = receive_frames(self._connection, self._reader)
            if frames is None:
                os._exit(1)
            self._frames.extend(frames)
        return codec.decode_to_rank(self._frames.popleft())

    def _send(self, message: codec.FromRank) -> None:
        self._connection.sendall(codec.frame(message))

    def run(self) -> None:
        """Work until the socket is closed."""
        import vllm.worker.worker  # noqa: F401 - slow; once this is done, the ranks meet without waiting for each other

        self._send(codec.Ready(os.getpid()))
        while True:
            message = self._receive()
            match message:
                case codec.Step():
                    self._ready_worker().follow(message.plan, message.known, message.told)
                case codec.Call():
                    self._send(answer(self._ready_worker(), message))
                case codec.Begin():
                    self._begin(message)
                case codec.Start():
                    self._ready_worker().start(message.num_blocks)
                    self._send(codec.Ready())

    def _ready_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("The first message must be Begin.")
        return self._worker

    def _begin(self, message: codec.Begin) -> None:
        from vllm.config import VllmConfig
        from vllm.executor.rendezvous import Meeting, dry_run, join, one_shot_states, seat_of
        from vllm.model_executor.models.registry import ModelRegistry
        from vllm.worker.worker import compile_ahead

        ModelRegistry.restore(message.config.pop("registered_models"))
        config = VllmConfig.from_dict(message.config)
        if config.parallel_config.local_replicas > 1:
            mark_lines(f"replica {config.parallel_config.replica} rank {message.index}")
        parallel, device, states = config.parallel_config, config.device_config.device, one_shot_states(config)
        seat = seat_of(parallel, message.index)
        meeting = Meeting(message.host, message.port, message.timeout, parallel.meeting)
        compiling = None
        if seat.tp_rank == 0 and not seat.is_sampling:  # one rank of each stage; the first one knows of its own
            compiling = compile_ahead(config, dry_run(seat.tp, states))
        ranks = join(device, seat, meeting, message.device, message.local, one_shot=states)
        self._worker = worker_class(config)(config, ranks, compiling)
        self._send(codec.Ready(self._worker.count_blocks()))


def answer(worker: Worker, message: codec.Call) -> codec.Result:
    """What a worker answers to a call. An error of the method is its answer, not the end of this rank."""
    try:
        method = callable_of(worker, message.method)
        value = functions.portable(method(*functions.received(message.args), **functions.received(message.kwargs)))
        result = codec.Result(message.call_id, value)
        codec.frame(result)  # fails here if the value cannot travel
    except Exception as error:
        return codec.Result(message.call_id, error=f"{type(error).__name__}: {error}")
    return result


def main() -> None:
    """Serve the socket whose number is the first argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first rank says when to end
    end_with_parent(connection, int(sys.argv[2]), lambda: os._exit(1))
    rank = Rank(connection)
    try:
        rank.run()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        message = str(error) if isinstance(error, ValueError) else text
        connection.sendall(codec.frame(codec.Failed(message, isinstance(error, ValueError))))
        connection.close()
        os._exit(1)  # not through destructors that wait for other ranks


if __name__ == "__main__":
    main()
