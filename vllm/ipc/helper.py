"""A process that answers questions, and is ended when an answer takes too long: both of its ends.

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
from vllm.ipc.frames import FrameReader, frame, read_frames


class Helper:
    """The asking end. Not for several threads at once, but for `kill`, and one that sends while another receives.

    environment: variables of the process in place of ours.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._module, self._environment = module, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._reader = FrameReader()

    @property
    def is_running(self) -> bool:
        """Whether it can be asked."""
        if self._connection is None:
            return False
        ends = select.poll()  # `Popen.poll` may hear of its end later
        ends.register(self._connection, select.POLLRDHUP)
        return not ends.poll(0)

    def start(self, hello: bytes, seconds: float) -> bytes:
        """End the process if there is one, and start another; what it says to the first frame, as `ask`."""
        self.end()
        self._process, self._connection = start_child(self._module, environment=self._environment)
        self._reader = FrameReader()
        return self.ask(hello, seconds)

    def ask(self, question: bytes, seconds: float) -> bytes:
        """The answer. Raises TimeoutError, and EOFError if the process has ended; it should then be ended."""
        deadline = time.monotonic() + seconds
        self.send(question, seconds)
        while (left := deadline - time.monotonic()) > 0:
            for answer in self.receive(left):
                return answer
        raise TimeoutError

    def send(self, question: bytes, seconds: float) -> None:
        """Ask without waiting for the answer. Raises as `ask`, TimeoutError if the process does not listen."""
        if self._connection is None:
            raise EOFError
        self._connection.settimeout(seconds)
        try:
            self._connection.sendall(frame(question))
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None

    def receive(self, seconds: float) -> list[bytes]:
        """Answers that come next, none if they take longer than that. Raises EOFError if the process has ended."""
        if self._connection is None:
            raise EOFError
        news = select.poll()
        news.register(self._connection, select.POLLIN)
        if not news.poll(1e3 * seconds):
            return []
        answers = read_frames(self._connection, self._reader)
        if answers is None:
            raise EOFError
        return answers

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
        while (questions := self.read()) is not None:
            yield from questions

    def read(self) -> list[bytes] | None:
        """Questions that the next bytes complete, which may be none; None at the end. Waits for these bytes."""
        return read_frames(self._connection, self._reader)

    def fileno(self) -> int:
        """Where questions come from."""
        return self._connection.fileno()

    def answer(self, body: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._connection.sendall(frame(body))
