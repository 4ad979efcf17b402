"""Reading safetensors: a checked header, then tensors that are views of the memory-mapped file.

The format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data,
whose pieces lie back to back. Files come from strangers: everything is checked before the first tensor is touched.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_AHEAD = 128 << 20  # bytes
MAX_DIMENSIONS = 16

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `start` counts from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_entries(file: Path) -> list[TensorEntry]:
    """The tensors of `file` in file order. Raises ValueError that names the file if it is damaged in any way."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise _damaged(file, "it is a pointer of Git LFS, whose content `git lfs pull` fetches")
            length = int.from_bytes(start, "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(file, f"its header claims {length} bytes, but the file has {size} in all")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise _damaged(file, "its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    spans = sorted((_entry(file, name, fields, 8 + length) for name, fields in header.items()), key=lambda e: e.start)
    position = 8 + length
    for entry in spans:
        if entry.start != position:
            raise _damaged(file, f"tensor {entry.name!r} starts at byte {entry.start}, expected {position}")
        position += entry.num_bytes
    if position != size:
        raise _damaged(file, f"its tensors need {position} bytes, but the file has {size}")
    return spans


def _entry(file: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict):
        raise _damaged(file, f"the entry of tensor {name!r} is not an object")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _damaged(file, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _damaged(file, f"tensor {name!r} has the shape {shape!r}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise _damaged(file, f"tensor {name!r} has the data_offsets {offsets!r}")
    entry = TensorEntry(name, _DTYPES[dtype], tuple(shape), data_start + offsets[0])
    if entry.num_bytes != offsets[1] - offsets[0]:
        raise _damaged(file, f"tensor {name!r} has {offsets[1] - offsets[0]} bytes, its shape needs {entry.num_bytes}")
    return entry


def _is_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _damaged(file: Path, what: str) -> ValueError:
    return ValueError(f"{file} is not a complete safetensors file: {what}. Download it again.")


def iterate_tensors(file: Path, ahead: int = _AHEAD) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) in file order. A tensor is a view of the mapped file.

    ahead: bytes behind a tensor that the system is asked to read meanwhile.
    """
    entries = read_entries(file)
    with file.open("rb") as stream:
        # Copy-on-write, because torch wants writable memory; nobody writes, so no byte is copied. The mapping ends with
        # the last view of it, which may outlive this function.
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    asked = 0
    for entry in entries:
        wanted = min(len(mapped), entry.start + entry.num_bytes + ahead)
        if wanted > asked:  # read what comes next while this one is put in its place
            mapped.madvise(mmap.MADV_WILLNEED, asked, wanted - asked)
            asked = wanted // mmap.PAGESIZE * mmap.PAGESIZE
        yield entry.name, _view(mapped, entry)
        _forget(mapped, entry)


def _view(mapped: mmap.mmap, entry: TensorEntry) -> Tensor:
    count = math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    if entry.start % entry.dtype.itemsize == 0:
        return torch.frombuffer(mapped, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start)
    return raw.clone().view(entry.dtype).view(entry.shape)


def _forget(mapped: mmap.mmap, entry: TensorEntry) -> None:
    """Drop the pages of a tensor that has been used, so that the file does not count as this process's memory."""
    first = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (entry.start + entry.num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, first, length)
