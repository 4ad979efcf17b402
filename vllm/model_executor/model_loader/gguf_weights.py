"""The tensors of a GGUF file under the names of Hugging Face's checkpoints, as views of the mapped file."""

from __future__ import annotations

import mmap
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from vllm.gguf.config import ROPE_TENSORS, Architecture, Settings, architecture_of
from vllm.gguf.container import GgufTensor, read_model
from vllm.model_executor.layers.quantization.gguf import LEAF

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
# files that are mapped, for as long as somebody has a tensor of theirs
_MAPPED: weakref.WeakValueDictionary[Path, mmap.mmap] = weakref.WeakValueDictionary()
_HALF_ROTARY = re.compile(r"blk\.\d+\.attn_(q|k)\.(weight|bias)")


def iterate_gguf(file: Path) -> Iterator[tuple[str, Tensor, Path]]:
    """(name, tensor, file) of a model, in all files of its split. Blocks are uint8 rows, named `.gguf_{type}`."""
    gguf = read_model(file)
    arch, settings = architecture_of(gguf), Settings(gguf)
    heads = settings.integer("attention.head_count")
    kv_heads = settings.integer("attention.head_count_kv", heads)
    names = _Names(arch)
    maps: dict[Path, mmap.mmap] = {}
    for entry in gguf.tensors:
        if entry.name in ROPE_TENSORS:
            continue
        if entry.file not in maps:
            with entry.file.open("rb") as stream:
                maps[entry.file] = _MAPPED[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        tensor = _view(maps[entry.file], entry)
        found = _HALF_ROTARY.fullmatch(entry.name) if arch.interleaved else None
        if found is not None:
            tensor = _halves_apart(tensor, heads if found[1] == "q" else kv_heads, entry)
        if arch.norm_offset and entry.name.endswith("_norm.weight"):
            tensor = tensor - arch.norm_offset
        for name, piece in names.of(entry.name, tensor):
            if entry.type not in _PLAIN:
                name = f"{name.removesuffix('.weight')}.{LEAF}{entry.type}"
            yield name, piece, entry.file


def forget(file: Path) -> None:
    """Take no memory for what has been read of a mapped file; what is read again comes from the system's cache."""
    mapped = _MAPPED.get(file)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


class _Names:
    """An architecture's table of names."""

    def __init__(self, arch: Architecture) -> None:
        self._patterns = []
        for ours, theirs in arch.names.items():
            pattern = re.escape(ours).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
            self._patterns.append((re.compile(pattern), theirs))

    def of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The names under which a tensor's content is known; experts of a stack one by one."""
        for pattern, target in self._patterns:
            found = pattern.fullmatch(name)
            if found is None:
                continue
            fields = found.groupdict()
            if "{e}" in target and "e" not in fields:
                for expert, matrix in enumerate(tensor):
                    yield target.format(**fields, e=expert), matrix
            else:
                yield target.format(**fields), tensor
            return
        yield name, tensor  # the loader says that it is unexpected


def _view(mapped: mmap.mmap, entry: GgufTensor) -> Tensor:
    dtype = _PLAIN.get(entry.type, torch.uint8)
    shape = entry.shape if entry.type in _PLAIN else (*entry.shape[:-1], entry.num_bytes // _rows(entry))
    if entry.start % dtype.itemsize == 0:
        count = entry.num_bytes // dtype.itemsize
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.start).view(shape)
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start)
    return raw.clone().view(dtype).view(shape)


def _rows(entry: GgufTensor) -> int:
    rows = 1
    for length in entry.shape[:-1]:
        rows *= length
    return rows


def _halves_apart(tensor: Tensor, heads: int, entry: GgufTensor) -> Tensor:
    """Rows of each head: first halves and second halves in turn -> all first halves, then all second ones."""
    if heads < 1 or len(tensor) % (2 * heads):
        raise ValueError(f"{entry.file}: tensor {entry.name!r} of {len(tensor)} rows cannot be cut into {heads} heads.")
    found: Tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
    return found
