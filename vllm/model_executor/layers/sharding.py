"""How a full tensor of a checkpoint is dealt to tensor-parallel ranks: pure functions, and the parameter they serve.

A parameter's canonical layout is the concatenation of its parts along one dimension: q | k | v, gate | up, or a single
part. Each part is dealt in whole units (heads, or single rows), so a rank's shard is again q | k | v with its own heads
only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PartId = str | int | None
MAX_NUMBERS = 1 << 48  # of one weight


@dataclass(frozen=True, slots=True)
class Part:
    """`size` rows of the full tensor along the sharded dimension, in `units` equal, indivisible units.

    When there are fewer units than ranks, neighbouring ranks hold the same unit (replicated key/value heads).
    `padding` rows of zeros follow the real ones before the cut (vocabularies); units count them.
    """

    size: int
    units: int
    name: str = ""
    padding: int = 0

    def cut(self, rank: int, world: int) -> tuple[int, int]:
        """(start, length) of the rank's rows. Raises ValueError if the units cannot be dealt evenly."""
        rows = (self.size + self.padding) // self.units
        if self.units % world == 0:
            per_rank = self.units // world
            return rank * per_rank * rows, per_rank * rows
        if world % self.units == 0:
            return rank // (world // self.units) * rows, rows
        what = f"{self.name or 'a weight'} has {self.units} parts of {rows} rows"
        raise ValueError(
            f"{what}, which {world} tensor-parallel ranks cannot share evenly. "
            f"Choose a tensor_parallel_size that divides {self.units} or is a multiple of it."
        )


def whole(size: int, name: str = "") -> Part:
    """A part whose every row is a unit."""
    return Part(size, size, name)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How one parameter is cut: along `dim`, part by part. `dim` None: every rank holds all of it.

    `stack`: leading dimensions that stack independent matrices (experts); `dim` counts them.
    `dealt`: the matrices of the stack are dealt out to the ranks, each whole (`share`); nothing is cut along `dim`.
    """

    dim: int | None = None
    parts: tuple[Part, ...] = ()
    stack: int = 0
    dealt: bool = False

    def local_size(self, world: int) -> int:
        """Rows that one rank holds along `dim`."""
        return sum(part.cut(0, world)[1] for part in self.parts)

    def local_shape(self, full: tuple[int, ...], world: int, rank: int = 0) -> tuple[int, ...]:
        """The shape of one rank's shard of a tensor whose full (unpadded) shape is `full`."""
        if self.dealt:
            return (len(share(full[0], rank, world)), *full[1:])
        if self.dim is None:
            return full
        return (*full[: self.dim], self.local_size(world), *full[self.dim + 1 :])

    def part_index(self, part: str | int) -> int:
        """The place of the part called `part` (a name, or already its index)."""
        if isinstance(part, int):
            if 0 <= part < len(self.parts):
                return part
        else:
            for index, candidate in enumerate(self.parts):
                if candidate.name == part:
                    return index
        known = ", ".join(repr(p.name or i) for i, p in enumerate(self.parts))
        raise ValueError(f"Unknown part {part!r} of a fused parameter; its parts are {known}.")

    def local_slice(self, part: str | int, world: int) -> tuple[int, int]:
        """(start, length) of a part within one rank's shard."""
        index = self.part_index(part)
        lengths = [p.cut(0, world)[1] for p in self.parts[: index + 1]]
        return sum(lengths[:-1]), lengths[-1]


def share(count: int, rank: int, world: int) -> range:
    """Which of `count` things a rank has when they are dealt out as evenly as can be, neighbours together."""
    each, more = divmod(count, world)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


REPLICATED = ShardSpec()


def shard_part(tensor: Tensor, part: Part, dim: int, rank: int, world: int) -> Tensor:
    """The rank's rows of one part. `tensor`: its `size` real rows along `dim`; padding rows come out as zeros."""
    start, length = part.cut(rank, world)
    real = max(0, min(length, part.size - start))
    piece = tensor.narrow(dim, min(start, part.size), real)
    if real == length:
        return piece
    shape = list(tensor.shape)
    shape[dim] = length - real
    return torch.cat([piece, tensor.new_zeros(shape)], dim)


def shard(tensor: Tensor, spec: ShardSpec, rank: int, world: int) -> Tensor:
    """The rank's shard of a full tensor in canonical layout (its parts concatenated along `spec.dim`, unpadded)."""
    if spec.dealt:
        mine = share(tensor.shape[0], rank, world)
        return tensor[mine.start : mine.stop]
    if spec.dim is None:
        return tensor
    pieces = tensor.split([part.size for part in spec.parts], spec.dim)
    cut = [shard_part(piece, part, spec.dim, rank, world) for piece, part in zip(pieces, spec.parts, strict=True)]
    return cut[0] if len(cut) == 1 else torch.cat(cut, spec.dim)


class ShardedParameter(nn.Parameter):
    """A rank's shard of a weight, with the spec that says which shard it is.

    `full_shape` is the unpadded shape of the whole tensor in a checkpoint.
    """

    full_shape: tuple[int, ...]
    shard_spec: ShardSpec
    rank: int
    world: int

    def __new__(
        cls, data: Tensor, full_shape: tuple[int, ...], spec: ShardSpec, rank: int, world: int
    ) -> ShardedParameter:
        parameter = super().__new__(cls, data, requires_grad=False)
        parameter.full_shape, parameter.shard_spec, parameter.rank, parameter.world = full_shape, spec, rank, world
        return parameter

    @classmethod
    def empty(
        cls, full_shape: tuple[int, ...], spec: ShardSpec, rank: int, world: int, dtype: torch.dtype
    ) -> ShardedParameter:
        """An uninitialised shard on torch's current default device. Raises ValueError for sizes that no memory has."""
        shape = spec.local_shape(full_shape, world, rank)
        if math.prod(shape) > MAX_NUMBERS:
            raise ValueError(f"The config.json asks for a weight of the shape {list(shape)}, which no device can hold.")
        return cls(torch.empty(shape, dtype=dtype), full_shape, spec, rank, world)

    def materialized(self, device: torch.device) -> ShardedParameter:
        """The same parameter, uninitialised, on a real device."""
        data = torch.empty(self.shape, dtype=self.dtype, device=device)
        return ShardedParameter(data, self.full_shape, self.shard_spec, self.rank, self.world)

    @property
    def form(self) -> tuple[tuple[int, ...], ShardSpec, int, int]:
        """All but the values: `ShardedParameter(values, *form)` is a parameter like this one."""
        return self.full_shape, self.shard_spec, self.rank, self.world

    def over(self, data: Tensor) -> ShardedParameter:
        """The same parameter with these values, which are not copied."""
        return ShardedParameter(data, self.full_shape, self.shard_spec, self.rank, self.world)

    @staticmethod
    def weight_loader(param: ShardedParameter, loaded_weight: Tensor, shard_id: PartId = None) -> None:
        """`load_weight` under the name by which out-of-tree models find it on a parameter."""
        load_weight(param, loaded_weight, shard_id)


def part_shape(param: ShardedParameter, part: PartId = None, expert: int | None = None) -> tuple[int, ...]:
    """The full shape that a checkpoint's tensor must have to fill `part` (and `expert`) of `param`."""
    spec, shape = param.shard_spec, list(param.full_shape)
    if part is not None and spec.dim is not None:
        shape[spec.dim] = spec.parts[spec.part_index(part)].size
    return tuple(shape if expert is None else shape[spec.stack :])


def load_weight(param: ShardedParameter, tensor: Tensor, part: PartId = None, expert: int | None = None) -> None:
    """Write the rank's shard of `tensor` (a full tensor of a checkpoint) into `param`, cast to its dtype.

    `part` names one part of a fused parameter; None means the whole of it. `expert` picks one matrix of a stack.
    Raises ValueError if the shape is wrong.
    """
    expected = part_shape(param, part, expert)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"wrong shape: got {list(tensor.shape)}, expected {list(expected)}")
    spec, rank, world = param.shard_spec, param.rank, param.world
    if spec.dealt:
        mine = share(param.full_shape[0], rank, world)
        rank, world = 0, 1
        if expert is None:
            tensor = tensor[mine.start : mine.stop]
        elif expert not in mine:
            return
        else:
            expert -= mine.start
    target = param.data if expert is None else param.data[expert]
    if spec.dim is None:
        target.copy_(tensor)
        return
    dim = spec.dim if expert is None else spec.dim - spec.stack
    indices = range(len(spec.parts)) if part is None else [spec.part_index(part)]
    begin = 0
    for index in indices:
        piece = spec.parts[index]
        start, length = spec.local_slice(index, world)
        source = tensor.narrow(dim, begin, piece.size)
        target.narrow(dim, start, length).copy_(shard_part(source, piece, dim, rank, world))
        begin += piece.size
