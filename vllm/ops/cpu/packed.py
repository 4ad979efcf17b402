"""Weights packed for the native library, and the memory they live in."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import torch
from torch import Tensor

from vllm.ops.cpu.library import DTYPE_CODES
from vllm.ops.quantized_weights import GroupedWeight, StoredRows

_ALIGNMENT = 4096
_CHUNK_BYTES = 64 << 20


class PackedWeight:
    """A [out, in] weight in the library's panels. `shape` and `dtype` are the original's; `memory` holds the bytes."""

    __slots__ = ("code", "dtype", "memory", "pointer", "shape")

    def __init__(self, shape: torch.Size, dtype: torch.dtype, memory: Tensor) -> None:
        self.shape, self.dtype, self.memory = shape, dtype, memory
        self.code = DTYPE_CODES[dtype]
        self.pointer = memory.data_ptr()


class PackedInt8:
    """A [out, in] int8 weight in the library's panels; what it stands for is this times `scales` [out, 1]."""

    __slots__ = ("memory", "pointer", "scales", "shape")

    def __init__(self, shape: torch.Size, scales: Tensor, memory: Tensor) -> None:
        self.shape, self.scales, self.memory = shape, scales, memory
        self.pointer = memory.data_ptr()


class PackedGroups:
    """A quantized [out, in] weight in the library's panels. `order`: which input each column belongs to, or None."""

    __slots__ = ("bits", "group", "has_offsets", "memory", "num_bytes", "order", "pointer", "shape", "zero")

    def __init__(
        self, shape: torch.Size, group: int, bits: int, zero: int, has_offsets: bool, memory: Tensor,
        order: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.group, self.bits, self.zero = shape, group, bits, zero
        self.has_offsets, self.order = has_offsets, order
        self.memory, self.pointer, self.num_bytes = memory, memory.data_ptr(), memory.numel()


class WeightMemory:
    """Hands out memory for packed weights from large chunks, so that small weights share huge pages too.

    A chunk lives as long as any weight in it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, size: int) -> Tensor:
        """`size` bytes, page-aligned."""
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._chunk is None or self._used + padded > self._chunk.numel():
            self._chunk = self._new_chunk(max(padded, _CHUNK_BYTES))
            self._used = 0
        taken = self._chunk[self._used : self._used + size]
        self._used += padded
        return taken

    def _new_chunk(self, size: int) -> Tensor:
        raw = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        start = -raw.data_ptr() % _ALIGNMENT
        self._library.vllm_advise_huge_pages(raw.data_ptr(), raw.numel())
        return raw[start : start + size]


def pack(library: ctypes.CDLL, memory: WeightMemory, weight: Tensor) -> PackedWeight:
    """Copy `weight` [out, in] into panels."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    n, k = weight.shape
    code = DTYPE_CODES[weight.dtype]
    taken = memory.take(library.vllm_packed_bytes(n, k, code))
    library.vllm_pack_weight(taken.data_ptr(), weight.data_ptr(), n, k, weight.stride(0), code)
    return PackedWeight(weight.shape, weight.dtype, taken)


_MOST_GROUP = 128


def pack_groups(library: ctypes.CDLL, memory: WeightMemory, weight: GroupedWeight) -> PackedGroups | None:
    """Copy a weight of integer codes into panels; None if the library does not know groups of its size."""
    if weight.codes.dtype != torch.uint8:
        return None
    weight = as_integers(weight)
    n, k = weight.shape
    if weight.group > _MOST_GROUP or weight.group >= k:
        weight = weight.regrouped_to(math.gcd(k if weight.group >= k else weight.group, _MOST_GROUP))
    has_offsets = weight.offsets is not None
    size = (
        0
        if weight.table is not None
        else library.vllm_packed_groups_bytes(n, k, weight.group, weight.bits, has_offsets)
    )
    if not size:
        return None
    taken = memory.take(size)
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    offsets = None if weight.offsets is None else weight.offsets.contiguous()
    library.vllm_pack_groups(
        taken.data_ptr(), codes.data_ptr(), scales.data_ptr(), None if offsets is None else offsets.data_ptr(),
        n, k, weight.group, weight.bits,
    )  # fmt: skip
    return PackedGroups(weight.shape, weight.group, weight.bits, weight.zero, has_offsets, taken, weight.order)


# The block formats that the library packs as they are: GGUF's number, and as what they are packed: inputs that share a
# scale, bits, zero, whether there are offsets.
STORED = {
    "q4_0": (2, (32, 4, 8, False)),
    "q8_0": (8, (32, 8, 128, False)),
    "q4_k": (12, (32, 4, 0, True)),
    "q5_k": (13, (32, 8, 0, True)),
    "q6_k": (14, (16, 8, 32, False)),
}


def pack_stored(library: ctypes.CDLL, memory: WeightMemory, weight: StoredRows) -> PackedGroups | None:
    """Copy a weight into panels, straight from a file's blocks; None if the library does not know their format."""
    if weight.kind not in STORED or not weight.pieces:
        return None
    type_, form = STORED[weight.kind]
    n, k = weight.shape
    group, bits, _, has_offsets = form
    size = library.vllm_packed_groups_bytes(n, k, group, bits, has_offsets)
    if not size:
        return None
    taken = memory.take(size)
    pieces = [piece.contiguous() for piece in weight.pieces]
    places = (ctypes.c_void_p * len(pieces))(*[piece.data_ptr() for piece in pieces])
    rows = (ctypes.c_int64 * len(pieces))(*[len(piece) for piece in pieces])
    if library.vllm_pack_blocks(taken.data_ptr(), places, rows, n, k, type_):
        return None
    return PackedGroups(weight.shape, *form, taken)


def as_integers(weight: GroupedWeight) -> GroupedWeight:
    """A weight whose table holds integers or halves of them, without the table; others as they are."""
    table = weight.table
    if table is None:
        return weight
    doubled = table * 2
    factor = 1 if torch.equal(table, table.round()) else 2
    if not torch.equal(doubled, doubled.round()) or float(table.abs().max()) * factor > 127:
        return weight
    values = replace(weight, table=table * factor).values() + 128
    return replace(weight, codes=values.to(torch.uint8), scales=weight.scales / factor, bits=8, zero=128, table=None)


def pack_int8(library: ctypes.CDLL, memory: WeightMemory, weight: Tensor, scales: Tensor) -> PackedInt8:
    """Copy an int8 `weight` [out, in] into panels. scales: [out].

    Raises TypeError for another dtype or number of scales, ValueError if rows are too long for exact sums.
    """
    n, k = weight.shape
    if weight.dtype != torch.int8 or scales.shape != (n,):
        raise TypeError(f"pack_int8: expected int8 weights and {n} scales, got {weight.dtype}, {list(scales.shape)}")
    weight = weight.contiguous()
    taken = memory.take(library.vllm_packed_int8_bytes(n, k))
    if library.vllm_pack_int8(taken.data_ptr(), weight.data_ptr(), n, k, k):
        raise ValueError(f"pack_int8: rows of {k} weights could overflow 32-bit sums; expected at most 65536")
    return PackedInt8(weight.shape, scales.float().contiguous(), taken)
