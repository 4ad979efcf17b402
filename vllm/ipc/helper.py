"""A process that answers one question at a time, and is ended when an answer takes too long: both of its ends.

It does what may take very long, need much memory or crash. Questions and answers are frames on an inherited socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from vllm.ipc.child import end_with_parent, start_child
from vllm.ipc.frames import FrameReader, frame

_CHUNK = 1 << 18


class Helper:
    """The asking end. Not for several threads at once, but for `kill`.

    environment: variables of the process in place of ours.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._module, self._environment = module, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._reader = FrameReader()

    @property
    def is_running(self) -> bool:
        """Whether it waits for a question."""
        # Between two questions there is nothing to read but the end. `Popen.poll` may hear of it later.
        if self._connection is None:
            return False
        news = select.poll()
        news.register(self._connection, select.POLLIN)
        return not news.poll(0)

    def start(self, hello: bytes, seconds: float) -> bytes:
        """End the process if there is one, and start another; what it says to the first frame, as `ask`."""
        self.end()
        self._process, self._connection = start_child(self._module, environment=self._environment)
        self._reader = FrameReader()
        return self.ask(hello, seconds)

    def ask(self, question: bytes, seconds: float) -> bytes:
        """The answer. Raises TimeoutError, and EOFError if the process has ended; it should then be ended."""
        connection, deadline = self._connection, time.monotonic() + seconds
        if connection is None:
            raise EOFError
        try:
            connection.settimeout(seconds)
            connection.sendall(frame(question))
            while True:
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
                data = connection.recv(_CHUNK)
                if not data:
                    raise EOFError
                for answer in self._reader.feed(data):
                    return answer
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None

    def kill(self) -> None:
        """Make what is being asked fail; any thread may call this."""
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """End the process, if it runs, and wait until it has gone."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()


class Questions:
    """The answering end: made from the process's arguments, it ends the process with its parent."""

    def __init__(self) -> None:
        descriptor, parent = map(int, sys.argv[1:3])
        self._connection = socket.socket(fileno=descriptor)
        end_with_parent(self._connection, parent, lambda: os._exit(1))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the parent
        os.dup2(2, 1)  # what a library prints is not the parent's output
        self._reader = FrameReader()

    def __iter__(self) -> Iterator[bytes]:
        while data := self._connection.recv(_CHUNK):
            yield from self._reader.feed(data)

    def answer(self, body: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._connection.sendall(frame(body))
