"""Marlin on disk, and what is derived from it: codes in the order in which a GPU kernel's threads read them.

Layouts, with tiles of 16 x 16 of which four are permuted together, and scales permuted too:
  Marlin (IST-DASLab/marlin): `B` int32 [in / 16, 2 * out], symmetric codes of 4 bits; `s` float16 [in / group, out].
  Marlin 2:4 (IST-DASLab/Sparse-Marlin): `B_24` int32 [in / 32, out * bits / 2], the two weights that are kept of each
    four; `B_meta` int16 [in / 32, 2 * out], which two, in the order of CUTLASS's sparse products; `s`.
  QQQ (HandH1998/QQQ): `B`; `s_channel` fp32 [1, out]; `s_group` float16 [in / group, out], empty if there is one group.
    Without groups codes are signed, and their scales are for codes in the upper halves of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import Format, Reader, Tensors, group_size, setting, take
from vllm.model_executor.layers.quantization.packing import unpack
from vllm.ops.quantized_weights import GroupedWeight, InputQuant, round_to_groups

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the codes in a word
_SINGLE = (0, 1, 8, 9, 16, 17, 24, 25)


@dataclass(frozen=True)
class MarlinReader(Reader):
    """group: -1 for one of all inputs."""

    group: int

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        _check_size(n, k, 64, 16)
        codes = untiled(take(tensors, "B", (k // 16, 2 * n), torch.int32), 4, code_order(), n)
        group = k if self.group == -1 else self.group
        groups = -(-k // group)
        scales = reordered(take(tensors, "s", (groups, n), torch.float16).float(), scale_order(single=groups == 1))
        return GroupedWeight(codes.t().contiguous(), scales.t().contiguous(), min(group, k), 4, zero=8)

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_groups(weight, 4, self.group)


@dataclass(frozen=True)
class SparseMarlinReader(Reader):
    """group: -1 for one of all inputs.   names: of the codes, of which are kept, and of the scales."""

    bits: Literal[4, 8]
    group: int
    names: tuple[str, str, str] = ("B_24", "B_meta", "s")

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        _check_size(n, k, 64, 32)
        words, meta, stored = self.names
        packed = take(tensors, words, (k // 32, n * self.bits // 2), torch.int32)
        kept = untiled(packed, self.bits, sparse_code_order(self.bits), n).t()
        places = _kept_places(take(tensors, meta, (k // 32, 2 * n), torch.int16), n, k)
        zero = 2 ** (self.bits - 1)
        codes = torch.full((n, k), zero, dtype=torch.uint8).scatter_(1, places, kept.contiguous())
        group = k if self.group == -1 else self.group
        groups = -(-k // group)
        scales = take(tensors, stored, (groups, n), torch.float16).float()
        if groups > 1:
            scales = reordered(scales, torch.tensor([8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]))
        return GroupedWeight(codes, scales.t().contiguous(), min(group, k), self.bits, zero)

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_groups(weight, self.bits, self.group)


@dataclass(frozen=True)
class QqqReader(Reader):
    """group: -1 for one of all inputs. Inputs are meant to be rounded to 8 bits, token by token, and are multiplied by
    weights of 8 bits: of groups, codes of 4 bits times the group's factor, rounded.
    """

    group: int

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        _check_size(n, k, 64, 16)
        group = k if self.group == -1 else min(self.group, k)
        groups = -(-k // group)
        if groups == 1 and "s_group" in tensors and tensors["s_group"].numel():
            raise ValueError(f"'s_group' has the shape {list(tensors['s_group'].shape)}, expected none for one group")
        codes = untiled(
            take(tensors, "B", (k // 16, 2 * n), torch.int32), 4, code_order(four=True, signed=groups == 1), n
        ).t()
        whole = reordered(take(tensors, "s_channel", (1, n), torch.float32), scale_order(single=True)).t()
        inputs = InputQuant("int8", "token")
        if groups == 1:
            return GroupedWeight((codes + 8) & 15, whole.contiguous() * 16, k, 4, zero=8, inputs=inputs)
        parts = reordered(take(tensors, "s_group", (groups, n), torch.float16).float(), scale_order(single=False)).t()
        if not bool(parts.isfinite().all()):
            raise ValueError("'s_group' holds numbers that are not finite")
        products = (codes.float() - 8) * parts.repeat_interleave(group, 1)[:, :k]
        rounded = (products.round().clamp(-128, 127) + 128).to(torch.uint8)
        return GroupedWeight(rounded, whole.contiguous(), k, 8, zero=128, inputs=inputs)

    def example(self, weight: Tensor) -> GroupedWeight:
        one = self.group == -1 or self.group >= weight.shape[1]
        return round_to_groups(weight, 4 if one else 8, -1)


class GptqMarlin24(Format):
    """GPTQ checkpoints whose `checkpoint_format` is "marlin_24"."""

    name = "gptq_marlin_24"
    leaves = ("B_24", "B_meta", "s")
    ignored = ("workspace",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        bits = setting(settings, "bits wbits", int, 4, among=(4, 8))
        if setting(settings, "sym", bool, True) is False:
            raise ValueError("Marlin 2:4 files hold symmetric codes; this one says otherwise.")
        self._reader = SparseMarlinReader(bits, group_size(settings, "group_size groupsize", 128))
        self._quantizes_head = setting(settings, "lm_head", bool, False)

    def reader(self, names: Sequence[str]) -> Reader | None:
        return self._reader

    def head_reader(self, names: Sequence[str]) -> Reader | None:
        return self.reader(names) if self._quantizes_head else None


class Qqq(Format):
    """Weights of 4 bits, in groups or not, and activations of 8 bits."""

    name = "qqq"
    leaves = ("B", "s_channel", "s_group")
    ignored = ("workspace",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        setting(settings, "wbits bits", int, 4, among=(4,))
        self._reader = QqqReader(group_size(settings, "group_size groupsize", -1))

    def reader(self, names: Sequence[str]) -> Reader | None:
        return self._reader


def untiled(packed: Tensor, bits: int, order: Tensor, n: int) -> Tensor:
    """int32 words [rows of tiles, ...] -> uint8 codes [in, n]. order: as `code_order` gives it."""
    rows = len(packed)
    codes = torch.empty(rows, n * 16 // 1024, 1024, dtype=torch.uint8)
    codes[..., order] = unpack(packed, bits, 1).view(rows, -1, 1024)
    # [row block, column block, 16, 16] -> [in, out]
    return codes.view(rows, n // 16, 16, 16).transpose(1, 2).reshape(16 * rows, n)


def reordered(stored: Tensor, order: Tensor) -> Tensor:
    """Scales [groups, out] put back: what stands at place i of `len(order)` outputs belongs to output order[i]."""
    pieces = stored.view(len(stored), -1, len(order))
    scales = torch.empty_like(pieces)
    scales[..., order] = pieces
    return scales.view(stored.shape)


def _check_size(n: int, k: int, outputs: int, inputs: int) -> None:
    if k % inputs or n % outputs:
        raise ValueError(f"a weight of {n} x {k} cannot be in this layout: it has tiles of {outputs} x {inputs}")


@cache
def code_order(*, four: bool = False, signed: bool = False) -> Tensor:
    """Which of the 1,024 codes of four tiles, in row order tile after tile, stands at each place.

    four: a thread has four neighbouring inputs, not two and two.   signed: the order in a word is QQQ's without groups.
    """
    places = []
    for lane in range(32):
        first = 4 * (lane % 4) if four else 2 * (lane % 4)
        rows = [first + i for i in range(4)] if four else [first, first + 1, first + 8, first + 9]
        for tile in range(4):
            eight = [256 * tile + 16 * row + lane // 4 + 8 * half for half in (0, 1) for row in rows]
            places += [eight[i] for i in ((4, 0, 5, 1, 6, 2, 7, 3) if signed else _ORDER)]
    return torch.tensor(places)


@cache
def sparse_code_order(bits: int) -> Tensor:
    """As `code_order`, of Marlin 2:4: a thread's columns are 4 apart, and its tiles are neighbouring columns."""
    places = []
    for lane in range(32):
        first, column = 2 * (lane % 4), lane // 4
        for step in range(4):
            start = 256 * (column // 2) + 8 * (column % 2) + step
            eight = [start + 16 * row + 4 * half for half in (0, 1) for row in (first, first + 1, first + 8, first + 9)]
            if bits == 4:
                places += [eight[i] for i in _ORDER]
            else:
                places += [eight[i + j] for i in (0, 4) for j in (0, 2, 1, 3)]
    return torch.tensor(places)


@cache
def scale_order(*, single: bool) -> Tensor:
    """Which column's scale stands at each place of 64, or of 32 where there is one scale for all inputs."""
    if single:
        return torch.tensor([2 * i + j for i in range(4) for j in _SINGLE])
    return torch.tensor([i + 8 * j for i in range(8) for j in range(8)])


def _kept_places(meta: Tensor, n: int, k: int) -> Tensor:
    """The inputs [n, in / 2] whose weights are kept. meta: four bits for each four inputs, two places of two bits, the
    16 bits of 16 inputs in the order of CUTLASS (`reorder_meta`, interleaved by two columns).

    Raises ValueError if a place is named twice.
    """
    rows, columns = torch.arange(n)[:, None], torch.arange(k // 16)[None]
    moved = rows // 64 * 64 + rows % 2 * 2 + rows % 8 // 4 + rows % 4 // 2 * 32 + rows % 64 // 8 * 4
    # of 2 x 2 blocks the upper right and lower left change places
    shift = ((moved % 2 == 0) & (columns % 2 == 1)).long() - ((moved % 2 == 1) & (columns % 2 == 0)).long()
    moved, columns = moved + shift, columns - shift
    words = meta.flatten()[columns // 2 * (2 * n) + moved * 2 + columns % 2].long()
    pairs = (words[..., None] >> torch.arange(0, 16, 2)) & 3  # [n, in / 16, 8]
    pairs = pairs.view(n, k // 4, 2)
    if bool((pairs[..., 0] == pairs[..., 1]).any()):
        raise ValueError("of four weights, the same one is kept twice")
    return (pairs + 4 * torch.arange(k // 4)[:, None]).view(n, k // 2)
