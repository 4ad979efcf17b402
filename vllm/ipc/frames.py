"""Frames on an inherited socket pair: 4 bytes of length, then a body.

A socket pair has no name, no file and no listener: nobody else can connect, nothing is left behind, and each side
sees the other's death as end of file.
"""

from __future__ import annotations

import socket
import struct

_HEADER = struct.Struct("<I")
MAX_FRAME = 1 << 30


def frame(body: bytes) -> bytes:
    """A body with its length in front. Raises ValueError for one that is longer than a reader takes."""
    if len(body) > MAX_FRAME:
        raise ValueError(f"A message of {len(body)} bytes cannot be sent: at most {MAX_FRAME} at a time.")
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
