"""The one form to which every quantization format is read: integer or 8-bit float codes with scales for groups of
inputs. It can be cut by rows and by columns, joined, and turned back into numbers; kernels pack it for themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

_NUMBERS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class InputQuant:
    """How a format wants a product's inputs rounded. Kernels that keep more precision may ignore it.

    kind: "int8" or "fp8".   per: one scale for each token, for the whole tensor, or for each group of a token's inputs.
    scale, zero: fixed by the checkpoint; scale None: found for each input.   limit: the largest magnitude that counts.
    """

    kind: Literal["int8", "fp8"]
    per: Literal["token", "tensor", "group"] = "token"
    scale: float | None = None
    zero: int = 0
    limit: float | None = None


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [out, in]: w[n, j] = (codes[n, j] - zero) * scales[n, j // group] + offsets[n, j // group].

    codes:   [out, in] uint8 below 2 ** bits, or float8_e4m3fn (then bits is 8 and zero 0).
    scales:  [out, ceil(in / group)] fp32.   offsets: likewise, or None for zeros.
    table:   [16] or [out, 16] fp32: codes are indices of these values.
    order:   [in] int64: column j of the codes belongs to input order[j]; None: to input j.
    """

    codes: Tensor
    scales: Tensor
    group: int
    bits: Literal[4, 8]
    zero: int = 0
    offsets: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None
    inputs: InputQuant | None = None

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        expected = (n, -(-k // self.group))
        if self.scales.shape != expected or (self.offsets is not None and self.offsets.shape != expected):
            raise ValueError(f"the scales have the shape {list(self.scales.shape)}, expected {list(expected)}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        """What it takes when packed: codes, and scales of 16 bits."""
        scales = self.scales.numel() * (2 if self.offsets is None else 4)
        return self.codes.numel() * self.bits // 8 + scales

    def to(self, device: torch.device) -> GroupedWeight:
        """The same on another device."""
        moved = {
            name: value.to(device)
            for name in ("codes", "scales", "offsets", "table", "order")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def per_input(self, values: Tensor) -> Tensor:
        """[out, groups] -> [out, in]: each group's value for each of its inputs."""
        k = self.shape[1]
        if self.group >= k:
            return values.expand(-1, k)
        return values.repeat_interleave(self.group, 1)[:, :k]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as numbers, [out, in], computed in fp32, some rows at a time, so that little lies between."""
        n, k = self.shape
        rows = max(1, _NUMBERS_AT_ONCE // max(1, k))
        if n <= rows:
            return self._numbers().to(dtype)
        out = torch.empty(n, k, dtype=dtype, device=self.device)
        for start in range(0, n, rows):
            out[start : start + rows] = self.rows(slice(start, start + rows))._numbers()
        return out

    def _numbers(self) -> Tensor:
        values = self.values() * self.per_input(self.scales)
        if self.offsets is not None:
            values = values + self.per_input(self.offsets)
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        return values

    def values(self) -> Tensor:
        """The numbers before scales and offsets, [out, in] fp32."""
        if self.table is None:
            values = self.codes.float()
        elif self.table.dim() == 1:
            values = self.table[self.codes.long()]
        else:
            values = self.table.gather(1, self.codes.long())
        return values - self.zero if self.zero else values

    def rows(self, index: Tensor | slice) -> GroupedWeight:
        """Some outputs, in the order that `index` gives."""
        own_table = self.table is not None and self.table.dim() == 2
        return replace(
            self,
            codes=self.codes[index],
            scales=self.scales[index],
            offsets=None if self.offsets is None else self.offsets[index],
            table=self.table[index] if own_table and self.table is not None else self.table,
        )

    def padded(self, rows: int) -> GroupedWeight:
        """With outputs of zero behind the real ones, `rows` in all."""
        more = rows - self.shape[0]
        if more <= 0:
            return self

        def pad(values: Tensor) -> Tensor:
            # 8-bit floats cannot be padded themselves
            return torch.cat([values, torch.zeros(more, *values.shape[1:], dtype=torch.float32).to(values.dtype)])

        return replace(
            self,
            codes=pad(self.codes),
            scales=pad(self.scales),
            offsets=None if self.offsets is None else pad(self.offsets),
            table=pad(self.table) if self.table is not None and self.table.dim() == 2 else self.table,
        )

    def columns(self, start: int, length: int) -> GroupedWeight:
        """The inputs [start, start + length). A cut inside a group makes the groups smaller."""
        k = self.shape[1]
        if (start, length) == (0, k):
            return self
        if self.order is not None:
            return self._ordered_columns(start, length)
        group = math.gcd(self.group if self.group < k else math.gcd(start, length), start, length)
        if self.group >= k:  # one scale for each row serves any cut
            return replace(self, codes=self.codes[:, start : start + length], group=length)
        finer = self.regrouped(group)
        pieces = slice(start // group, (start + length) // group)
        return replace(
            finer,
            codes=finer.codes[:, start : start + length],
            scales=finer.scales[:, pieces],
            offsets=None if finer.offsets is None else finer.offsets[:, pieces],
        )

    def _ordered_columns(self, start: int, length: int) -> GroupedWeight:
        """The cut where groups are spread over all inputs: each input gets its own scale."""
        assert self.order is not None
        chosen = ((self.order >= start) & (self.order < start + length)).nonzero().flatten()
        return replace(
            self,
            codes=self.codes[:, chosen],
            scales=self.per_input(self.scales)[:, chosen],
            offsets=None if self.offsets is None else self.per_input(self.offsets)[:, chosen],
            order=self.order[chosen] - start,
            group=1,
        )

    def regrouped(self, group: int) -> GroupedWeight:
        """The same with smaller groups; `group` divides the present size."""
        if group == self.group:
            return self
        k, factor = self.shape[1], self.group // group
        count = -(-k // group)
        scales = self.scales.repeat_interleave(factor, 1)[:, :count]
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(factor, 1)[:, :count]
        return replace(self, scales=scales, offsets=offsets, group=group)

    def regrouped_to(self, group: int) -> GroupedWeight:
        """`regrouped`, also where one group holds all inputs, whatever its size is said to be."""
        k = self.shape[1]
        if self.group < k:
            return self.regrouped(group)
        count = -(-k // group)
        offsets = None if self.offsets is None else self.offsets.expand(-1, count)
        return replace(self, scales=self.scales.expand(-1, count), offsets=offsets, group=group)

    def joins(self, other: GroupedWeight) -> bool:
        """Whether both can be rows of one weight."""
        return (
            self.codes.dtype == other.codes.dtype
            and (self.group, self.bits, self.zero, self.inputs) == (other.group, other.bits, other.zero, other.inputs)
            and self.shape[1] == other.shape[1]
            and _equal(self.order, other.order)
            and (self.table is None) == (other.table is None)
            and (self.table is None or self.table.dim() == 2 or _equal(self.table, other.table))
        )


def joined(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Weights that join, as one, their outputs one after the other."""
    first = weights[0]
    if len(weights) == 1:
        return first
    offsets = None
    if any(w.offsets is not None for w in weights):
        offsets = torch.cat([torch.zeros_like(w.scales) if w.offsets is None else w.offsets for w in weights])
    table = first.table
    if table is not None and table.dim() == 2:
        table = torch.cat([w.table for w in weights if w.table is not None])
    return replace(
        first,
        codes=torch.cat([w.codes for w in weights]),
        scales=torch.cat([w.scales for w in weights]),
        offsets=offsets,
        table=table,
    )


@dataclass(frozen=True)
class StoredRows:
    """Rows of a weight [out, in] as a file stores them, which some devices pack as they are.

    kind: the name of a block format of GGUF.   pieces: uint8 [rows, bytes of a row], one behind the other.
    shape: [out, in].   read: (kind, piece, in) -> what a piece stands for.
    """

    kind: str
    pieces: tuple[Tensor, ...]
    shape: torch.Size
    read: Callable[[str, Tensor, int], GroupedWeight]

    @property
    def device(self) -> torch.device:
        return self.pieces[0].device

    def rows(self, index: Tensor | slice) -> StoredRows:
        """Some outputs, in the order that `index` gives."""
        chosen = (self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces))[index]
        return replace(self, pieces=(chosen,), shape=torch.Size((len(chosen), self.shape[1])))

    def joins(self, other: StoredRows) -> bool:
        """Whether both can be rows of one weight."""
        return (self.kind, self.shape[1], self.read) == (other.kind, other.shape[1], other.read)


def joined_rows(weights: Sequence[StoredRows]) -> StoredRows:
    """Weights that join, as one, their outputs one after the other. Nothing is copied."""
    shape = torch.Size((sum(weight.shape[0] for weight in weights), weights[0].shape[1]))
    return replace(weights[0], pieces=tuple(piece for weight in weights for piece in weight.pieces), shape=shape)


def grouped(weight: GroupedWeight | StoredRows) -> GroupedWeight:
    """What a weight stands for in the one form."""
    if isinstance(weight, GroupedWeight):
        return weight
    return joined([weight.read(weight.kind, piece, weight.shape[1]) for piece in weight.pieces])


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


# ---- rounding to a format ----------------------------------------------------------------------------------------


def round_to_groups(
    weight: Tensor, bits: Literal[4, 8], group: int, *, symmetric: bool = True, shrink: Tensor | None = None
) -> GroupedWeight:
    """A weight [out, in] rounded to nearest. group: inputs that share a scale; -1: all of a row.

    shrink: [out, groups], factors of each group's range (clipping). Symmetric codes are around 2 ** (bits - 1).
    """
    n, k = weight.shape
    group = k if group < 1 else min(group, k)
    padded = torch.nn.functional.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    most = 2**bits - 1
    low, high = padded.amin(-1).clamp(max=0.0), padded.amax(-1).clamp(min=0.0)
    if shrink is not None:
        low, high = low * shrink, high * shrink
    if symmetric:
        middle = 2 ** (bits - 1)
        scales = (torch.maximum(-low, high) / (middle - 0.5 if bits == 4 else middle - 1)).clamp(min=1e-12)
        codes = ((padded / scales[..., None]).round() + middle).clamp(0, most)
        return GroupedWeight(codes.view(n, -1)[:, :k].to(torch.uint8), scales, group, bits, zero=middle)
    scales = ((high - low) / most).clamp(min=1e-12)
    zeros = (-low / scales).round().clamp(0, most)
    codes = ((padded / scales[..., None]).round() + zeros[..., None]).clamp(0, most)
    return GroupedWeight(codes.view(n, -1)[:, :k].to(torch.uint8), scales, group, bits, offsets=-zeros * scales)


FP8_MAX = 448.0


def round_to_fp8(weight: Tensor, per: Literal["tensor", "channel"], inputs: InputQuant | None = None) -> GroupedWeight:
    """A weight [out, in] in float8_e4m3fn with one scale in all, or one for each output."""
    values = weight.float()
    largest = values.abs().amax(1, keepdim=True) if per == "channel" else values.abs().amax().expand(len(values), 1)
    scales = (largest / FP8_MAX).clamp(min=1e-12)
    codes = (values / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return GroupedWeight(codes, scales.contiguous(), weight.shape[1], 8, inputs=inputs)
