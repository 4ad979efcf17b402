"""The header of a safetensors file, entry by entry and without torch.

The format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data,
whose pieces lie back to back. Files come from strangers: an entry is parsed only once its end is found nearby, so that
no step of the parser holds the interpreter for long, and a reader that has seen enough stops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 16
_MAX_ENTRY = 2048  # characters of one tensor's dtype, shape and data_offsets
_MAX_NAME = 4096  # characters of a name, as it is written
_MAX_METADATA = 4 << 20  # characters
_SPACE = re.compile(r"[ \t\n\r]*")


class HeaderEntry(NamedTuple):
    """What a header says of a tensor. start, end: where its bytes lie, counted from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def iterate_header(file: Path, max_bytes: int = MAX_HEADER_BYTES) -> Iterator[HeaderEntry]:
    """The tensors of `file` in the order of its header, not compared with each other or with the file's size.

    max_bytes: of the header; a longer one is not parsed.   Raises ValueError that names the file if it is damaged.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise damaged(file, "it is a pointer of Git LFS, whose content `git lfs pull` fetches")
            length = int.from_bytes(start, "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise damaged(file, f"its header claims {length} bytes, but the file has {size} in all")
            if length > max_bytes:
                raise ValueError(f"{file} has a header of {length} bytes, expected at most {max_bytes}.")
            text = str(stream.read(length), "utf-8")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise damaged(file, "its header is not valid JSON") from None
    cursor = _Cursor(text)
    if cursor.next != "{":
        raise damaged(file, "its header is not a JSON object")
    try:
        yield from _entries(file, cursor, 8 + length)
    except (json.JSONDecodeError, RecursionError):
        raise damaged(file, f"its header is not valid JSON, with names of at most {_MAX_NAME} characters") from None


class _Cursor:
    """A place in a JSON text. Methods raise JSONDecodeError where the text is another than they expect."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    @property
    def next(self) -> str:
        """The next character that is no white space, "" at the end."""
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def take(self, expected: str) -> None:
        if self.next != expected:
            raise json.JSONDecodeError(f"Expected {expected!r}", "", 0)
        self._at += len(expected)

    def string(self, most: int) -> str:
        """A string that ends within so many characters."""
        self.take('"')
        found, length = scanstring(self._text[self._at : self._at + most], 0)
        self._at += length
        return found

    def names(self) -> Iterator[str]:
        """The names in an object; the caller takes the value of each."""
        self.take("{")
        if self.next != "}":
            while True:
                name = self.string(_MAX_NAME)
                self.take(":")
                yield name
                if self.next == "}":
                    break
                self.take(",")
        self.take("}")

    def skip_strings(self) -> None:
        """Go on behind an object of strings."""
        part = _Cursor(self._text[self._at : self._at + _MAX_METADATA])
        for _ in part.names():
            part.take('"')
            _, part._at = scanstring(part._text, part._at)
        self._at += part._at

    def flat_object(self) -> Any:
        """An object without others in it; None for one that does not end soon, or for anything else."""
        end = self._text.find("}", self._at, self._at + _MAX_ENTRY) + 1
        if self.next != "{" or not end:
            return None
        found = json.loads(self._text[self._at : end])
        self._at = end
        return found


def _entries(file: Path, cursor: _Cursor, data_start: int) -> Iterator[HeaderEntry]:
    for name in cursor.names():
        if name == "__metadata__":
            cursor.skip_strings()
            continue
        fields = cursor.flat_object()
        if fields is None:
            raise damaged(file, f"the entry of tensor {name!r:.200} is not an object of dtype, shape and data_offsets")
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not isinstance(dtype, str):
            raise damaged(file, f"tensor {name!r:.200} has the unknown dtype {dtype!r:.100}")
        if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
            raise damaged(file, f"tensor {name!r:.200} has the shape {shape!r:.100}")
        if not _is_sizes(offsets) or len(offsets) != 2:
            raise damaged(file, f"tensor {name!r:.200} has the data_offsets {offsets!r:.100}")
        yield HeaderEntry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])
    cursor.take("")


def _is_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


class DamagedFile(ValueError):
    """A file that is not what it claims to be."""


def damaged(file: Path, what: str) -> DamagedFile:
    """The error that says what is wrong with a file."""
    return DamagedFile(f"{file} is not a complete safetensors file: {what}. Download it again.")
