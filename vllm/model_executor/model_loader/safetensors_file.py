"""Reading safetensors: a checked header, then tensors that are views of the memory-mapped file. Writing them.

Files come from strangers: everything is checked before the first tensor is touched.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm.utils.safetensors_header import MAX_HEADER_BYTES, damaged, iterate_header

_AHEAD = 128 << 20  # bytes

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


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write `file`, or nothing. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode  # as of any file; the library's are for their owner only
    try:
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(mode)
    except SafetensorError as error:
        file.unlink()
        raise OSError(f"{file} cannot be written: {error}.") from None


def read_entries(file: Path, max_header: int = MAX_HEADER_BYTES, max_tensors: int | None = None) -> list[TensorEntry]:
    """The tensors of `file` in file order. Raises ValueError that names the file if it is damaged in any way.

    max_header: bytes of the header.   max_tensors: None for any number.
    """
    spans: list[TensorEntry] = []
    for name, dtype, shape, start, end in iterate_header(file, max_header):
        if len(spans) == max_tensors:
            raise ValueError(f"{file} has more than {max_tensors} tensors. Is it the right file?")
        if dtype not in _DTYPES:
            raise damaged(file, f"tensor {name!r:.200} has the unknown dtype {dtype!r:.100}")
        entry = TensorEntry(name, _DTYPES[dtype], shape, start)
        if entry.num_bytes != end - start:
            raise damaged(file, f"tensor {name!r:.200} has {end - start} bytes, its shape needs {entry.num_bytes}")
        spans.append(entry)
    spans.sort(key=lambda entry: entry.start)
    with file.open("rb") as stream:
        position = 8 + int.from_bytes(stream.read(8), "little")
    for entry in spans:
        if entry.start != position:
            raise damaged(file, f"tensor {entry.name!r:.200} starts at byte {entry.start}, expected {position}")
        position += entry.num_bytes
    size = file.stat().st_size
    if position != size:
        raise damaged(file, f"its tensors need {position} bytes, but the file has {size}")
    return spans


def iterate_tensors(
    file: Path, ahead: int = _AHEAD, *, max_header: int = MAX_HEADER_BYTES, max_tensors: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) in file order. A tensor is a view of the mapped file.

    ahead: bytes behind a tensor that the system is asked to read meanwhile.   max_header, max_tensors: as of
    `read_entries`.
    """
    entries = read_entries(file, max_header, max_tensors)
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
