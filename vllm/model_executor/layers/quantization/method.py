"""Linear layers with quantized weights, whatever the format: read part by part, cut for the rank, joined, packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel
from vllm.model_executor.layers.linear_method import LinearMethod, LinearShape, QuantizationConfig
from vllm.model_executor.layers.quantization.base_config import Format, Reader, Tensors, is_plain, plain_weight
from vllm.model_executor.layers.sharding import Part, shard_part
from vllm.ops.quantized import DenseWeight, pack_quantized, quantized_linear
from vllm.ops.quantized_weights import GroupedWeight, joined

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.models.family import Family


class ModelQuantization(QuantizationConfig):
    """A format and a family's names: chooses the method of each layer."""

    def __init__(self, format: Format, family: Family) -> None:
        self.format, self._family = format, family

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        """The method of the linear layer called `prefix`, None if no part of it is quantized."""
        shape: LinearShape = layer.shape  # type: ignore[assignment]
        containers = containers_of(prefix, shape)
        fused = self.names(prefix)
        readers = [self.format.reader(fused + ([] if name == prefix else self.names(name))) for name in containers]
        if not any(readers):
            return None
        return QuantizedLinearMethod(self.format.name, tuple(readers))

    def reader_of(self, container: str, *, expert: bool) -> Reader | None:
        """How a projection that belongs to no linear layer is stored (an expert's, the output head's)."""
        names = self.names(container)
        return self.format.experts_reader(names) if expert else self.format.reader(names)

    def names(self, container: str) -> list[str]:
        """What checkpoints call the module whose canonical name is `container`."""
        return [name.removesuffix(".weight") for name in self._family.checkpoint_names(f"{container}.weight")]


def containers_of(prefix: str, shape: LinearShape) -> list[str]:
    """The canonical names of a layer's parts: itself, or the projections that are fused in it."""
    if len(shape.outputs) == 1 or not all(part.name for part in shape.outputs):
        return [prefix]
    parent = prefix.rpartition(".")[0]
    return [f"{parent}.{part.name}" if parent else part.name for part in shape.outputs]


@dataclass(frozen=True)
class PackedPart:
    """What one product of the layer reads: consecutive outputs, packed."""

    outputs: int
    weight: Any


@dataclass
class QuantizedLinearMethod(LinearMethod):
    """One layer's format. The loader hands over each part's tensors as they are in the checkpoint.

    readers: how each part is stored, None where plainly.   dense_bytes, packed_bytes: what the weights take that had to
    be turned back into numbers, and what they would have taken.
    """

    format: str
    readers: tuple[Reader | None, ...]
    dense_bytes: int = 0
    packed_bytes: int = 0
    _shape: LinearShape = field(init=False)
    _dtype: torch.dtype = field(init=False)
    _tp: TensorParallel = field(init=False)

    def create_weights(self, layer: LinearBase, shape: LinearShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        self._shape, self._dtype, self._tp = shape, dtype, tp
        layer.weight, layer.packed = None, ()

    def load(
        self, layer: LinearBase, tensors: Mapping[int | None, Tensors], device: torch.device, order: Tensor | None
    ) -> int:
        """Read, cut and pack. tensors: of each part, or of the whole layer under None (a fused checkpoint); order: the
        checkpoint's rows of the whole layer, in the layer's order. Returns the bytes that the weights take.

        Raises ValueError that says what is wrong with the tensors.
        """
        cut = [self._cut(weight, part) for weight, part in self._parts(tensors, order)]
        return self._pack(layer, cut, device)

    def load_random(self, layer: LinearBase, device: torch.device, generator: torch.Generator, scale: float) -> int:
        """Random weights between -scale and scale, stored about as the format would."""
        cut = []
        for reader, part in zip(self._readers(), self._shape.outputs, strict=True):
            weight = torch.empty(part.size, self._shape.in_features, device=generator.device)
            weight.uniform_(-scale, scale, generator=generator)
            cut.append(self._cut(weight if reader is None else reader.example(weight), part))
        return self._pack(layer, cut, device)

    def _readers(self) -> Sequence[Reader | None]:
        return self.readers if len(self.readers) > 1 else self.readers * len(self._shape.outputs)

    def _parts(
        self, tensors: Mapping[int | None, Tensors], order: Tensor | None
    ) -> list[tuple[GroupedWeight | Tensor, Part]]:
        k, outputs = self._shape.in_features, self._shape.outputs
        if None in tensors:
            reader = next((reader for reader in self.readers if reader is not None), None)
            whole = _read(reader, tensors[None], self._shape.out_features, k)
            if order is not None:
                whole = _rows(whole, order)
            starts = [sum(part.size for part in outputs[:i]) for i in range(len(outputs))]
            return [
                (_rows(whole, slice(start, start + part.size)), part)
                for start, part in zip(starts, outputs, strict=True)
            ]
        return [
            (_read(reader, tensors[i], part.size, k), part)
            for i, (reader, part) in enumerate(zip(self._readers(), outputs, strict=True))
        ]

    def _cut(self, weight: GroupedWeight | Tensor, part: Part) -> GroupedWeight | Tensor:
        """This rank's rows or columns."""
        rank, world = self._tp.rank, self._tp.world
        if self._shape.split == "in":
            start, length = self._shape.inputs.cut(rank, world)
            return weight.narrow(1, start, length) if isinstance(weight, Tensor) else weight.columns(start, length)
        if self._shape.split == "none":
            return weight
        if isinstance(weight, Tensor):
            return shard_part(weight, part, 0, rank, world)
        start, length = part.cut(rank, world)
        return weight.rows(slice(start, start + length))

    def _pack(self, layer: LinearBase, weights: list[GroupedWeight | Tensor], device: torch.device) -> int:
        packed: list[PackedPart] = []
        for weight in _join_neighbours(weights):
            if isinstance(weight, Tensor):
                parts = DenseWeight(weight.to(device, self._dtype))
            else:
                parts = pack_quantized(weight.to(device), self._dtype)
                if isinstance(parts, DenseWeight):
                    self.dense_bytes += parts.num_bytes
                    self.packed_bytes += weight.num_bytes
            packed.append(PackedPart(weight.shape[0], parts))
        layer.packed = tuple(packed)
        return sum(part.weight.num_bytes for part in packed)

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = layer.packed
        if len(parts) == 1:
            out: Tensor = quantized_linear(x, parts[0].weight, bias)
            return out
        biases = [None] * len(parts) if bias is None else bias.split([part.outputs for part in parts])
        return torch.cat([quantized_linear(x, p.weight, b) for p, b in zip(parts, biases, strict=True)], -1)


def _read(reader: Reader | None, tensors: Tensors, n: int, k: int) -> GroupedWeight | Tensor:
    """A projection. A checkpoint's tensors decide: what is stored plainly needs no entry in a list."""
    if reader is None or (is_plain(tensors) and not reader.reads_plain):
        return plain_weight(tensors, n, k)
    return reader.read(tensors, n, k)


def _rows(weight: GroupedWeight | Tensor, index: Tensor | slice) -> GroupedWeight | Tensor:
    return weight[index] if isinstance(weight, Tensor) else weight.rows(index)


def _join_neighbours(weights: list[GroupedWeight | Tensor]) -> list[GroupedWeight | Tensor]:
    """Neighbouring weights of one kind become one, so that they are multiplied together."""
    runs: list[list[Any]] = []
    for weight in weights:
        last = runs[-1][-1] if runs else None
        both_plain = isinstance(weight, Tensor) and isinstance(last, Tensor)
        both_joined = isinstance(weight, GroupedWeight) and isinstance(last, GroupedWeight) and last.joins(weight)
        if both_plain or both_joined:
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [torch.cat(run) if isinstance(run[0], Tensor) else joined(run) for run in runs]
