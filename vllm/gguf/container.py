"""Reading a GGUF file's header: key-value pairs and the list of tensors, checked before anything is used.

The format (little endian): "GGUF", u32 version, u64 tensor count, u64 pair count; pairs of key, u32 type, value; of
each tensor name, u32 number of dimensions, u64 sizes (fastest first), u32 type, u64 offset; then the data, aligned.
Files come from strangers: every count is held against what the file can contain before memory is taken for it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_TEXTS = 1 << 22  # in one array
MAX_TEXT_BYTES = 16 << 20
MAX_HEADER_BYTES = 512 << 20
MAX_NAME_BYTES = 1 << 10
MAX_DEPTH = 2  # of arrays

_TEXT, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

# type id -> (name, values of a block, bytes of a block)
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50), 20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136), 28: ("f64", 1, 8), 29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66), 39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36),
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """shape: slowest dimension first, [out, in] for a weight.   start, num_bytes: where it lies in `file`."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    file: Path


@dataclass(frozen=True)
class GgufFile:
    """What a file's header says. Arrays of numbers are numpy arrays, of texts lists."""

    file: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


class _Header:
    """A cursor over the bytes of a file that never goes past their end."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at, self.size = file, data, 0, len(data)

    def fail(self, what: str) -> ValueError:
        return ValueError(f"{self.file} is not a GGUF file that can be read: {what}. Download it again.")

    def take(self, count: int, what: str) -> bytes:
        if count < 0 or count > self.size - self.at:
            raise self.fail(f"{what} at byte {self.at} goes past the end of the file ({self.size} bytes)")
        if self.at + count > MAX_HEADER_BYTES:
            raise self.fail(f"its header is larger than {MAX_HEADER_BYTES} bytes")
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def number(self, code: str, what: str) -> int:
        value: int = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]
        return value

    def count(self, most: int, what: str) -> int:
        value = self.number("Q", what)
        if value > most:
            raise self.fail(f"{what} is {value}, at most {most} are accepted")
        return value

    def text(self, what: str, most: int = MAX_TEXT_BYTES) -> str:
        raw = self.take(self.count(most, f"the length of {what}"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8 text") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        what = f"the value of {key[:80]!r}"
        if kind in _NUMBERS:
            return self._numbers(kind, 1, what)[0].item()
        if kind == _TEXT:
            return self.text(what)
        if kind != _ARRAY or depth >= MAX_DEPTH:
            raise self.fail(f"{what} has the unknown type {kind}")
        item, count = self.number("I", what), self.number("Q", what)
        if item in _NUMBERS:
            return self._numbers(item, count, what)
        if count > min(MAX_TEXTS, (self.size - self.at) // 8):
            raise self.fail(f"{what} is an array of {count} entries, more than the file can hold")
        if item == _TEXT:
            return self._texts(count, what)
        if count > MAX_PAIRS:  # each takes ten times what it takes in the file
            raise self.fail(f"{what} is an array of {count} arrays")
        return [self.value(item, key, depth + 1) for _ in range(count)]

    def _texts(self, count: int, what: str) -> list[str]:
        """So many texts: what `text` gives, in a loop that a vocabulary does not make long."""
        data, at, end = self.data, self.at, min(self.size, MAX_HEADER_BYTES)
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            length = length_at(data, at)[0] if at + 8 <= end else MAX_TEXT_BYTES + 1
            after = at + 8 + length
            if length > MAX_TEXT_BYTES or after > end:
                self.at = at
                found.append(self.text(what))  # says what is wrong
                at = self.at
                continue
            try:
                found.append(data[at + 8 : after].decode())
            except UnicodeDecodeError:
                raise self.fail(f"{what} is not UTF-8 text") from None
            at = after
        self.at = at
        return found

    def _numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype: np.dtype[Any] = np.dtype(_NUMBERS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        return values.astype(bool) if kind == _BOOL else values


def read_gguf(file: Path) -> GgufFile:
    """The header of one file. Raises ValueError that names the file and says what is wrong with it."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            if size < 24:
                raise ValueError(f"{file} is not a GGUF file: it has {size} bytes only. Download it again.")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Header(file, data))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None


def _read(header: _Header) -> GgufFile:
    if header.take(4, "the mark") != b"GGUF":
        raise header.fail("it does not begin with GGUF")
    version = header.number("I", "the version")
    if version & 0xFFFF == 0:
        raise header.fail("it is written for machines with the other byte order")
    if version not in (2, 3):
        raise header.fail(f"it has version {version}, expected 2 or 3")
    tensor_count = header.count(MAX_TENSORS, "the number of tensors")
    pairs = header.count(MAX_PAIRS, "the number of settings")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = header.text("a key", 1 << 16)
        if key in metadata:
            raise header.fail(f"the setting {key[:80]!r} occurs twice")
        metadata[key] = header.value(header.number("I", f"the type of {key[:80]!r}"), key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise header.fail(f"its alignment is {alignment!r}, expected a power of two")
    entries = [_tensor_entry(header) for _ in range(tensor_count)]
    start = -(-header.at // alignment) * alignment
    tensors, names = [], set()
    for name, kind, shape, offset in entries:
        if name in names:
            raise header.fail(f"the tensor {name!r} occurs twice")
        names.add(name)
        size = _num_bytes(header, name, kind, shape)
        if offset % alignment or start + offset + size > header.size:
            raise header.fail(f"tensor {name!r} lies at {start + offset} to {start + offset + size}, outside the file")
        tensors.append(GgufTensor(name, TYPES[kind][0], shape, start + offset, size, header.file))
    _check_apart(header, tensors)
    return GgufFile(header.file, metadata, tuple(tensors))


def _tensor_entry(header: _Header) -> tuple[str, int, tuple[int, ...], int]:
    name = header.text("a tensor's name", MAX_NAME_BYTES)
    dims = header.number("I", f"the dimensions of {name!r}")
    if not 1 <= dims <= 4:
        raise header.fail(f"tensor {name!r} has {dims} dimensions")
    sizes = tuple(header.number("Q", f"the shape of {name!r}") for _ in range(dims))
    kind = header.number("I", f"the type of {name!r}")
    if kind not in TYPES:
        raise header.fail(f"tensor {name!r} has the unknown type {kind}")
    return name, kind, sizes[::-1], header.number("Q", f"the offset of {name!r}")


def _num_bytes(header: _Header, name: str, kind: int, shape: tuple[int, ...]) -> int:
    _, values, size = TYPES[kind]
    if any(not 1 <= length < 2**40 for length in shape) or math.prod(shape) >= 2**50 or shape[-1] % values:
        raise header.fail(f"tensor {name!r} of type {TYPES[kind][0]} has the shape {list(shape)}")
    return math.prod(shape) // values * size


def _check_apart(header: _Header, tensors: list[GgufTensor]) -> None:
    """Tensors that share bytes would let a small file claim a large model."""
    end = 0
    for tensor in sorted(tensors, key=lambda t: t.start):
        if tensor.start < end:
            raise header.fail(f"tensor {tensor.name!r} overlaps another one")
        end = tensor.start + tensor.num_bytes


# ---- models in several files -------------------------------------------------------------------------------------


def files_of(first: Path) -> tuple[Path, ...]:
    """The files of the model that `first` belongs to, in order: itself, or all of its split.

    Raises ValueError if one is missing.
    """
    import re

    found = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", first.name)
    if found is None:
        return (first,)
    stem, count = found[1], int(found[3])
    if not 1 <= count <= 9999 or not 1 <= int(found[2]) <= count:
        raise ValueError(f"{first} is not one of {count} files.")
    files = tuple(first.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing: the model is split into {count} files. Is the download complete?")
    return files


def read_model(file: Path, read: Callable[[Path], GgufFile] = read_gguf) -> GgufFile:
    """The header of a model in one file or several: the first file's settings and the tensors of all."""
    files = files_of(file)
    parts = [read(part) for part in files]
    first = parts[0]
    expected = first.metadata.get("split.count", 1)
    if expected not in (0, len(files)):
        raise ValueError(
            f"{first.file} says that the model is split into {expected} files, but there are {len(files)}."
        )
    for number, part in enumerate(parts):
        if len(parts) > 1 and part.metadata.get("split.no", number) != number:
            raise ValueError(f"{part.file} says that it is file {part.metadata['split.no']} of the split, from 0.")
    tensors = [tensor for part in parts for tensor in part.tensors]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError(f"{first.file}: the same tensor occurs in several files of the split.")
    return GgufFile(first.file, first.metadata, tuple(tensors))
