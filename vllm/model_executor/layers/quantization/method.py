"""Linear layers with quantized weights, whatever the format: read part by part, cut for the rank, joined, packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel
from vllm.distributed.parallel_state import SINGLE
from vllm.model_executor.layers.embedding_method import EmbeddingMethod, UnquantizedEmbeddingMethod
from vllm.model_executor.layers.expert_method import Dealt, ExpertMethod, ExpertShape, dealt_to
from vllm.model_executor.layers.linear_method import LinearMethod, LinearShape, QuantizationConfig
from vllm.model_executor.layers.quantization.base_config import Format, Reader, Tensors, is_plain, plain_weight
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec, shard_part, whole
from vllm.ops.activation import activate_gated
from vllm.ops.lora import add_lora
from vllm.ops.moe import NO_EXTRAS, expert_mlp, expert_mlp_lora
from vllm.ops.quantized import (
    DenseWeight,
    pack_experts,
    pack_quantized,
    packs_experts,
    packs_stored,
    quantized_linear,
)
from vllm.ops.quantized_weights import GroupedWeight, StoredRows, grouped, joined, joined_rows
from vllm.step.inputs import RowView

if TYPE_CHECKING:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.models.family import Family


class ModelQuantization(QuantizationConfig):
    """A format and a family's names: chooses the method of each layer.

    packs_experts: experts are computed as they are stored, not as plain numbers.
    keeps_table: the embedding stays in the checkpoint's file, if the format allows it.
    linear_head: the canonical name of an output head that is a linear layer like the others, if one is.
    """

    def __init__(
        self,
        format: Format,
        family: Family,
        *,
        packs_experts: bool = False,
        keeps_table: bool = False,
        linear_head: str | None = None,
    ) -> None:
        self.format, self._family = format, family
        self._packs_experts, self._keeps_table = packs_experts, keeps_table
        self._linear_head = linear_head

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        """The method of the linear layer called `prefix`, None if no part of it is quantized."""
        shape: LinearShape = layer.shape  # type: ignore[assignment]
        containers = containers_of(prefix, shape)
        fused = self.names(prefix)
        reader_of = self.format.head_reader if prefix == self._linear_head else self.format.reader
        readers = [reader_of(fused + ([] if name == prefix else self.names(name))) for name in containers]
        if not any(readers):
            return None
        return QuantizedLinearMethod(self.format.name, tuple(readers))

    def get_expert_method(self, layer: nn.Module, prefix: str) -> ExpertMethod | None:
        """The method of the experts called `prefix`."""
        readers = [self.reader_of(f"{prefix}.0.{name}", expert=True) for name in EXPERT_PARTS]
        plain = layer.shape.is_plain  # type: ignore[union-attr]
        return QuantizedExpertMethod(self.format.name) if self._packs_experts and plain and any(readers) else None

    def get_embedding_method(self, layer: nn.Module, prefix: str) -> EmbeddingMethod | None:
        """The method of the token embedding called `prefix`."""
        reader = self.format.reader(self.names(prefix)) if self._keeps_table and self.format.rows_apart else None
        return None if reader is None else StoredEmbeddingMethod(reader)

    def get_head_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        """The method of the output head called `prefix`."""
        reader = self.format.head_reader(self.names(prefix))
        return None if reader is None else QuantizedLinearMethod(self.format.name, (reader,), torch.float32)

    def reader_of(self, container: str, *, expert: bool) -> Reader | None:
        """How a projection is stored that no layer takes as it is: an expert's, or a plain head's if the checkpoint
        has quantized that without saying so."""
        names = self.names(container)
        if container == "embed":
            return self.format.table_reader(names)
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


Weight = GroupedWeight | StoredRows | Tensor
WeightType = TypeVar("WeightType", GroupedWeight | Tensor, Weight)
Sink = Callable[[int, list[GroupedWeight | Tensor]], None]
Draw = Callable[[tuple[int, int]], Tensor]  # a weight of this shape, fp32


@dataclass(frozen=True)
class PackedPart:
    """What one product of the layer reads: consecutive outputs, packed.

    packed_bytes: what a weight would have taken that had to be turned back into numbers, else 0.
    """

    outputs: int
    weight: Any
    packed_bytes: int = 0


def packed_part(weight: Weight, device: torch.device, dtype: torch.dtype) -> PackedPart:
    """A weight for products on `device` with inputs of `dtype`."""
    if isinstance(weight, StoredRows):
        return PackedPart(weight.shape[0], pack_quantized.kernel(device.type)(weight, dtype))
    if isinstance(weight, Tensor):
        return PackedPart(weight.shape[0], DenseWeight(weight.to(device, dtype)))
    made = pack_quantized(weight.to(device), dtype)
    return PackedPart(weight.shape[0], made, weight.num_bytes if isinstance(made, DenseWeight) else 0)


@dataclass
class QuantizedLinearMethod(LinearMethod):
    """One layer's format. The loader hands over each part's tensors as they are in the checkpoint.

    readers: how each part is stored, None where plainly.   out_dtype: of results, as in `linear`.
    dense_bytes, packed_bytes: what the weights take that had to be turned back into numbers, and would have taken.
    sink: gets this rank's weights (0 and the list of its parts) in place of the layer.
    """

    format: str
    readers: tuple[Reader | None, ...]
    out_dtype: torch.dtype | None = None
    dense_bytes: int = 0
    packed_bytes: int = 0
    sink: Sink | None = None
    shape: LinearShape = field(init=False)
    dtype: torch.dtype = field(init=False)
    _tp: TensorParallel = field(init=False)

    def create_weights(self, layer: Any, shape: LinearShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        self.shape, self.dtype, self._tp = shape, dtype, tp
        layer.weight, layer.packed = None, ()

    def load(
        self, layer: Any, tensors: Mapping[int | None, Tensors], device: torch.device, order: Tensor | None
    ) -> int:
        """Read, cut and pack. tensors: of each part, or of the whole layer under None (a fused checkpoint); order: the
        checkpoint's rows of the whole layer, in the layer's order. Returns the bytes that the weights take.

        Raises ValueError that says what is wrong with the tensors.
        """
        cut = [self._cut(weight, part) for weight, part in self._parts(tensors, order, device)]
        return self.pack(layer, cut, device)

    def load_random(self, layer: Any, device: torch.device, draw: Draw) -> int:
        """Weights that `draw` makes of their shapes, stored about as the format would."""
        cut = []
        for reader, part in zip(self._readers(), self.shape.outputs, strict=True):
            weight = draw((part.size, self.shape.in_features))
            cut.append(self._cut(weight if reader is None else reader.example(weight), part))
        return self.pack(layer, cut, device)

    def _readers(self) -> Sequence[Reader | None]:
        return self.readers if len(self.readers) > 1 else self.readers * len(self.shape.outputs)

    def _parts(
        self, tensors: Mapping[int | None, Tensors], order: Tensor | None, device: torch.device
    ) -> list[tuple[Weight, Part]]:
        outputs = self.shape.outputs
        if None in tensors:
            reader = next((reader for reader in self.readers if reader is not None), None)
            whole = self._read(reader, tensors[None], self.shape.out_features, device)
            if order is not None:
                whole = _rows(whole, order)
            starts = [sum(part.size for part in outputs[:i]) for i in range(len(outputs))]
            return [
                (_rows(whole, slice(start, start + part.size)), part)
                for start, part in zip(starts, outputs, strict=True)
            ]
        return [
            (self._read(reader, tensors[i], part.size, device), part)
            for i, (reader, part) in enumerate(zip(self._readers(), outputs, strict=True))
        ]

    def _read(self, reader: Reader | None, tensors: Tensors, n: int, device: torch.device) -> Weight:
        """A projection; as its file stores it, if the device packs all of it as it is."""
        k = self.shape.in_features
        if reader is not None and self.sink is None and self._tp.world == 1:
            stored = reader.stored(tensors, n, k)
            if stored is not None and packs_stored.kernel(device.type)(stored, self.dtype):
                return stored
        return _read(reader, tensors, n, k)

    def _cut(self, weight: Weight, part: Part) -> Weight:
        """This rank's rows or columns."""
        if isinstance(weight, StoredRows):
            if tuple(weight.shape) == self._local_shape(part):
                return weight
            weight = grouped(weight)
        rank, world = self._tp.rank, self._tp.world
        if self.shape.split == "in":
            start, length = self.shape.inputs.cut(rank, world)
            return weight.narrow(1, start, length) if isinstance(weight, Tensor) else weight.columns(start, length)
        if self.shape.split == "none":
            return weight
        if isinstance(weight, Tensor):
            return shard_part(weight, part, 0, rank, world)
        start, length = part.cut(rank, world)
        return weight.rows(slice(start, start + length)).padded(length)

    def _local_shape(self, part: Part) -> tuple[int, int]:
        """What this rank has of a part, [out, in]."""
        rank, world = self._tp.rank, self._tp.world
        rows = part.cut(rank, world)[1] if self.shape.split == "out" else part.size
        return rows, self.shape.inputs.cut(rank, world)[1] if self.shape.split == "in" else self.shape.in_features

    def pack(self, layer: Any, weights: Sequence[Weight], device: torch.device) -> int:
        """Make the layer of its parts, cut for this rank. Returns the bytes that they take."""
        _check_shapes(weights, [self._local_shape(part) for part in self.shape.outputs])
        if self.sink is not None:
            self.sink(0, [grouped(w) if isinstance(w, StoredRows) else w for w in weights])
            return 0
        packed: list[PackedPart] = []
        for weight in _join_neighbours(weights):
            made = packed_part(weight, device, self.dtype)
            if made.packed_bytes:
                self.dense_bytes += made.weight.num_bytes
                self.packed_bytes += made.packed_bytes
            packed.append(made)
        layer.packed = tuple(packed)
        return sum(part.weight.num_bytes for part in packed)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = layer.packed
        if len(parts) == 1:
            out: Tensor = quantized_linear(x, parts[0].weight, bias, self.out_dtype)
            return out
        biases = [None] * len(parts) if bias is None else bias.split([part.outputs for part in parts])
        outs = [quantized_linear(x, p.weight, b, self.out_dtype) for p, b in zip(parts, biases, strict=True)]
        return torch.cat(outs, -1)


def _check_shapes(weights: Sequence[Weight], expected: list[tuple[int, int]]) -> None:
    """Raise ValueError unless the weights have these shapes: kernels read as much as a layer says."""
    found = [tuple(weight.shape) for weight in weights]
    if found != expected:
        raise ValueError(f"the weights have the shapes {found}, expected {expected}")


def _read(reader: Reader | None, tensors: Tensors, n: int, k: int) -> GroupedWeight | Tensor:
    """A projection. A checkpoint's tensors decide: what is stored plainly needs no entry in a list."""
    if reader is None or (is_plain(tensors) and not reader.reads_plain):
        return plain_weight(tensors, n, k)
    return reader.read(tensors, n, k)


def _rows(weight: WeightType, index: Tensor | slice) -> WeightType:
    return weight[index] if isinstance(weight, Tensor) else weight.rows(index)


def _join_neighbours(weights: Sequence[WeightType]) -> list[WeightType]:
    """Neighbouring weights of one kind become one, so that they are multiplied together."""
    runs: list[list[Any]] = []
    for weight in weights:
        last = runs[-1][-1] if runs else None
        both_plain = isinstance(weight, Tensor) and isinstance(last, Tensor)
        both_joined = isinstance(weight, GroupedWeight) and isinstance(last, GroupedWeight) and last.joins(weight)
        both_stored = isinstance(weight, StoredRows) and isinstance(last, StoredRows) and last.joins(weight)
        if both_plain or both_joined or both_stored:
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [_joined(run) for run in runs]


def _joined(run: list[Any]) -> Any:
    if isinstance(run[0], Tensor):
        return torch.cat(run)
    return joined_rows(run) if isinstance(run[0], StoredRows) else joined(run)


class StoredEmbeddingMethod(EmbeddingMethod):
    """A table that stays as the checkpoint's file stores it: rows become numbers when they are looked up."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._tensors: dict[str, Tensor] = {}

    def create_weights(
        self, layer: VocabParallelEmbedding, rows: Part, dim: int, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        layer.weight = None  # type: ignore[assignment]
        self._rows, self._dim, self._dtype = rows, dim, dtype

    def load(self, layer: VocabParallelEmbedding, tensors: Tensors) -> int:
        """Take the table as it is in the checkpoint; nothing is copied. Returns its bytes.

        Raises ValueError that says what is wrong with it.
        """
        for leaf, tensor in tensors.items():
            if len(tensor) != layer.org_vocab_size:
                raise ValueError(f"{leaf!r} has {len(tensor)} rows, expected {layer.org_vocab_size}")
        self._tensors = dict(tensors)
        self._numbers(torch.zeros(1, dtype=torch.int64))
        return sum(tensor.nbytes for tensor in tensors.values())

    def _numbers(self, rows: Tensor) -> Tensor:
        found = _read(self._reader, {leaf: t[rows] for leaf, t in self._tensors.items()}, len(rows), self._dim)
        return found.to(self._dtype) if isinstance(found, Tensor) else found.dequantize(self._dtype)

    def embed(self, layer: VocabParallelEmbedding, rows: Tensor) -> Tensor:
        flat = rows.flatten() + layer.first_row
        return self._numbers(flat).view(*rows.shape, self._dim)

    def project(self, layer: VocabParallelEmbedding, hidden: Tensor, bias: Tensor | None) -> Tensor:
        raise RuntimeError("A table that stays in its file is not multiplied; a head has weights of its own.")

    def restore(self, layer: VocabParallelEmbedding) -> bool:
        """From here on the table is numbers."""
        start, length = self._rows.cut(layer.tp.rank, layer.tp.world)
        numbers = torch.zeros(length, self._dim, dtype=self._dtype)
        here = min(length, layer.org_vocab_size - start)
        if here > 0:
            numbers[:here] = self._numbers(torch.arange(start, start + here))
        spec, full = ShardSpec(0, (self._rows,)), (layer.org_vocab_size, self._dim)
        layer.weight = ShardedParameter(numbers, full, spec, layer.tp.rank, layer.tp.world)
        layer.method, self._tensors = UnquantizedEmbeddingMethod(), {}
        return True


EXPERT_PARTS = ("gate", "up", "down")


@dataclass
class QuantizedExpertMethod(ExpertMethod):
    """Experts whose weights are multiplied as they are stored: all at once where the device has kernels for that, else
    one expert after the other.

    stacks: gate and up, and down, of all experts, as `expert_mlp` takes them; None where each is by itself.
    sink: gets this rank's weights (an expert's number, and its gate, up and down) in place of the layer.
    """

    format: str
    dense_bytes: int = 0
    packed_bytes: int = 0
    sink: Sink | None = None
    stacks: tuple[Any, Any] | None = None
    mine: range = range(0)  # the experts that this rank has, whole or a share of each
    _seen: int = 0
    _taken: int = 0
    _device: torch.device = torch.device("cpu")
    _waiting: list[tuple[GroupedWeight | Tensor, GroupedWeight | Tensor]] = field(default_factory=list)
    _parts: list[tuple[PackedPart, PackedPart]] = field(default_factory=list)  # of each expert: gate and up, down

    takes_adapters = True

    def create_weights(self, layer: Any, shape: ExpertShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        self.shape, self.dtype, self.tp, self.mine = shape, dtype, tp, range(shape.experts)

    def dealt(self) -> ExpertMethod:
        return DealtQuantizedExpertMethod(self.format)

    def place(self, layer: Any) -> tuple[torch.dtype, torch.device]:
        return self.dtype, self._device

    def load(self, readers: Sequence[Reader | None], tensors: Sequence[Tensors], device: torch.device) -> int:
        """The next expert's gate, up and down, as they are in the checkpoint. Returns the bytes they take.

        Raises ValueError that says what is wrong with the tensors.
        """
        self._seen += 1
        if self._seen - 1 not in self.mine:
            return 0
        inner, hidden = self.shape.inner, self.shape.hidden
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        weights = [_read(r, t, *shape) for r, t, shape in zip(readers, tensors, shapes, strict=True)]
        return self._add(weights, device)

    def load_random(self, reader: Reader, device: torch.device, draw: Draw) -> int:
        """Weights for all experts, as `QuantizedLinearMethod.load_random` makes them."""
        total, inner, hidden = 0, self.shape.inner, self.shape.hidden
        for expert in range(self.shape.experts):
            shapes = (inner, hidden), (inner, hidden), (hidden, inner)
            drawn = [draw(shape) for shape in shapes]
            if expert in self.mine:
                total += self._add([reader.example(weight) for weight in drawn], device)
        return total

    def _add(self, weights: list[GroupedWeight | Tensor], device: torch.device) -> int:
        start, length = whole(self.shape.inner).cut(self.tp.rank, self.tp.world)
        cut = [_rows(weight, slice(start, start + length)) for weight in weights[:2]]
        down = weights[2]
        down = down.narrow(1, start, length) if isinstance(down, Tensor) else down.columns(start, length)
        return self.keep([*cut, down], device)

    def keep(self, weights: list[GroupedWeight | Tensor], device: torch.device) -> int:
        """Take the next of this rank's experts: gate, up and down, cut for it. Returns the bytes that they take."""
        self._device = device
        inner, hidden = whole(self.shape.inner).cut(self.tp.rank, self.tp.world)[1], self.shape.hidden
        _check_shapes(weights, [(inner, hidden), (inner, hidden), (hidden, inner)])
        if self.sink is not None:
            self.sink(self._taken, weights)
            self._taken += 1
            return 0
        *cut, down = weights
        joined_pair = _join_neighbours(cut)
        if len(joined_pair) == 2:  # unlike gate and up: as numbers, which join
            joined_pair = [torch.cat([w if isinstance(w, Tensor) else w.dequantize() for w in cut])]
        if packs_experts(device):
            self._waiting.append((joined_pair[0], down))
            return self._stack(device) if len(self._waiting) == len(self.mine) else 0
        pair = (packed_part(joined_pair[0], device, self.dtype), packed_part(down, device, self.dtype))
        for part in pair:
            if part.packed_bytes:
                self.dense_bytes += part.weight.num_bytes
                self.packed_bytes += part.packed_bytes
        self._parts.append(pair)
        return sum(part.weight.num_bytes for part in pair)

    def _stack(self, device: torch.device) -> int:
        """Pack all of the rank's experts together. Returns the bytes that they take."""
        total, parts = 0, list(zip(*self._waiting, strict=True))
        stacks = [pack_experts.kernel(device.type)(weights, device, self.dtype) for weights in parts]
        if any(isinstance(stack, Tensor) for stack in stacks):  # kernels take both as they are, or none
            stacks = [stack if isinstance(stack, Tensor) else stack.numbers() for stack in stacks]
        for stack, weights in zip(stacks, parts, strict=True):
            total += stack.nbytes if isinstance(stack, Tensor) else stack.num_bytes
            if isinstance(stack, Tensor):
                self.dense_bytes += stack.nbytes
                self.packed_bytes += sum(w.nbytes if isinstance(w, Tensor) else w.num_bytes for w in weights)
        self.stacks = (stacks[0], stacks[1])
        self._waiting.clear()
        return total

    def compute(
        self, layer: Any, x: Tensor, weights: Tensor, experts: Tensor, adapters: Tensor | None = None
    ) -> Tensor:
        if self.stacks is not None:
            given = (x, weights, experts, *self.stacks, self.shape.act)
            if adapters is not None and layer.lora is not None:
                return expert_mlp_lora(*given, NO_EXTRAS, layer.lora.changes, adapters)
            sum_of_chosen: Tensor = expert_mlp(*given)
            return sum_of_chosen
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in experts.unique().tolist():
            if expert == len(self._parts):  # another rank's
                continue
            tokens, choice = (experts == expert).nonzero(as_tuple=True)
            gate_up, down = self._parts[expert]
            own = x[tokens]
            h = quantized_linear(own, gate_up.weight)
            view = None if adapters is None else RowView(adapters[tokens], ())
            if view is not None:
                add_lora(h, own, layer.lora.changes[expert][0], view)
            h = activate_gated(h, self.shape.act)
            y = quantized_linear(h, down.weight, None, torch.float32)
            if view is not None:
                add_lora(y, h, layer.lora.changes[expert][1], view)
            out.index_add_(0, tokens, y * weights[tokens, choice, None])
        return out.to(x.dtype)


class DealtQuantizedExpertMethod(Dealt, QuantizedExpertMethod):
    """Quantized experts that are dealt out. They stay where they are."""

    takes_adapters = False

    def create_weights(self, layer: Any, shape: ExpertShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        super().create_weights(layer, shape, dtype, SINGLE)
        self.mine = dealt_to(tp, shape.experts)
