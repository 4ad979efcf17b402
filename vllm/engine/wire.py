"""The wire between front end and core process: msgpack frames with a schema over an inherited socket pair.

A socket pair has no name, no file and no listener: nobody else can connect, nothing is left behind, and each side
sees the other's death as end of file.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from vllm.engine.messages import CoreOutput, CoreRequest, CoreStats

_HEADER = struct.Struct("<I")
MAX_FRAME = 1 << 30


class AddRequests(msgspec.Struct, tag="add", gc=False):
    """Queue these requests."""

    requests: list[CoreRequest]


class Abort(msgspec.Struct, tag="abort", gc=False):
    """End these requests; unknown ids are ignored."""

    request_ids: list[str]


class Call(msgspec.Struct, tag="call", gc=False):
    """Run one of the core's named utility methods and answer with a `CallResult` of the same id."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Stop(msgspec.Struct, tag="stop", gc=False):
    """End the core process now; running requests are the front end's business."""


ToCore = AddRequests | Abort | Call | Stop


class Ready(msgspec.Struct, tag="ready", gc=False):
    """The core is up. `info` describes the cache and what a front end needs to know of the resolved configuration."""

    info: dict[str, Any]


class StepOutputs(msgspec.Struct, tag="step", gc=False):
    """Everything one step brought, or a few short ones."""

    outputs: list[CoreOutput]
    stats: CoreStats


class CallResult(msgspec.Struct, tag="result", gc=False):
    """Answer to a `Call`: `value`, or `error` (a text) if it failed."""

    call_id: int
    value: Any = None
    error: str | None = None


class Pulse(msgspec.Struct, tag="pulse", gc=False):
    """Sent a few times a second by a thread of its own, so that a stuck step shows.

    `busy_seconds` is how long the core has been busy without finishing a step (0 when idle), less what the step's size
    explains.
    """

    busy_seconds: float = 0.0


class Fatal(msgspec.Struct, tag="fatal", gc=False):
    """The core is about to end because of this error."""

    error: str


FromCore = Ready | StepOutputs | CallResult | Pulse | Fatal

_encoder = msgspec.msgpack.Encoder()
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode


def frame(message: ToCore | FromCore) -> bytes:
    """A message as bytes: 4 bytes of length, then msgpack."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames. Feed it what was received; it yields the complete bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies completed by `data`. Raises ValueError for a frame beyond the limit."""
        buffer = self._buffer
        if not buffer and len(data) >= _HEADER.size and _HEADER.unpack_from(data)[0] == len(data) - _HEADER.size:
            return [data[_HEADER.size :]]  # exactly one, as nearly always
        buffer += data
        bodies = []
        offset = 0
        while len(buffer) - offset >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer, offset)
            if length > MAX_FRAME:
                raise ValueError(f"A frame of {length} bytes exceeds the limit of {MAX_FRAME}.")
            end = offset + _HEADER.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[offset + _HEADER.size : end]))
            offset = end
        if offset:
            del buffer[:offset]
        return bodies


def read_frames(connection: socket.socket, reader: FrameReader) -> list[bytes] | None:
    """What one read completes, which may be nothing; None at end of file."""
    try:
        data = connection.recv(1 << 18)
    except ConnectionResetError:
        return None
    return reader.feed(data) if data else None


def receive_frames(connection: socket.socket, reader: FrameReader) -> list[bytes] | None:
    """Block until at least one frame is complete; None at end of file."""
    while (bodies := read_frames(connection, reader)) is not None:
        if bodies:
            return bodies
    return None
