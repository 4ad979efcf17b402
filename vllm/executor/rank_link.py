"""The first rank's end of its connection to another rank, wherever that is."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import deque

from vllm.exceptions import EngineDeadError
from vllm.executor import codec
from vllm.ipc.frames import FrameReader, receive_frames

DEATH_NOTICE_S = 1.0  # how long a dead rank may take to be seen as dead


class RankLink(ABC):
    """A rank and the socket to it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._connection = connection
        self._reader = FrameReader()
        self._frames: deque[bytes] = deque()

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"Rank {self.rank}"

    @property
    @abstractmethod
    def pid(self) -> int:
        """Of its process, on its own host."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it has not ended, as far as can be said without waiting."""

    @property
    def was_killed(self) -> bool:
        """Whether it is known that a signal has ended it."""
        return False

    @abstractmethod
    def _end_of_process(self) -> str:
        """How its process ended, as the end of a sentence that begins with its name."""

    @abstractmethod
    def join(self) -> None:
        """Wait until it has ended; by force if it takes too long."""

    def send(self, data: bytes, seconds: float | None = None) -> None:
        """Write one frame. Raises EngineDeadError if the rank is gone, or has taken in nothing for so many seconds."""
        rest = memoryview(data)
        try:
            while rest:
                if not select.select([], [self._connection], [], seconds)[1]:
                    raise EngineDeadError(f"{self.name} (pid {self.pid}) has read nothing for {seconds:g} s: it hangs.")
                with contextlib.suppress(BlockingIOError):
                    rest = rest[self._connection.send(rest, socket.MSG_DONTWAIT) :]
        except OSError as error:
            raise self.death() from error

    def receive(self, deadline: float | None = None) -> codec.FromRank:
        """The next message, until `deadline` on the monotonic clock.

        Raises TimeoutError; EngineDeadError if the rank is gone; ValueError or EngineDeadError with what it says if it
        failed.
        """
        while not self._frames:
            if deadline is not None:
                left = max(0.0, deadline - time.monotonic())
                if not select.select([self._connection], [], [], left)[0]:
                    raise TimeoutError(f"{self.name} has not answered in time.")
            try:
                frames = receive_frames(self._connection, self._reader)
            except OSError as error:
                raise self.death() from error
            if frames is None:
                raise self.death()
            self._frames.extend(frames)
        message = codec.decode_from_rank(self._frames.popleft())
        if isinstance(message, codec.Failed):
            if message.is_value_error:
                raise ValueError(f"{self.name}: {message.error}")
            raise EngineDeadError(f"{self.name} failed:\n{message.error}")
        return message

    def death(self) -> EngineDeadError:
        """The error for a rank that is gone: its own words if it left any, else how its process ended."""
        try:
            self._connection.settimeout(DEATH_NOTICE_S)
            while (frames := receive_frames(self._connection, self._reader)) is not None:
                self._frames.extend(frames)
        except OSError:
            pass  # nothing more to learn
        for body in self._frames:
            message = codec.decode_from_rank(body)
            if isinstance(message, codec.Failed):
                return EngineDeadError(f"{self.name} failed:\n{message.error}")
        return EngineDeadError(f"{self.name} (pid {self.pid}) {self._end_of_process()}")

    def hang_up(self) -> None:
        """Close the socket, which a rank takes as the order to end."""
        self._connection.close()
