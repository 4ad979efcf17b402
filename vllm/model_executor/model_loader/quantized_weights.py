"""Loading a quantized checkpoint: collects the tensors of each projection, then reads them layer by layer."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm.logger import init_logger
from vllm.model_executor.layers.embedding_method import LinearHeadMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import is_plain, plain_weight
from vllm.model_executor.layers.quantization.method import (
    EXPERT_PARTS,
    Draw,
    ModelQuantization,
    QuantizedExpertMethod,
    QuantizedLinearMethod,
    StoredEmbeddingMethod,
    containers_of,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.weight_layout import WeightLayout, canonical
from vllm.model_executor.model_loader.filler import WeightFiller
from vllm.model_executor.model_loader.gguf_weights import forget
from vllm.model_executor.models.blocks import Experts
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.spec import Decoder

logger = init_logger(__name__)

_EXPERT = re.compile(r"(?P<experts>\.experts)\.\d+\.")
# Scales of the cache, which belong to an attention layer and not to a projection.
_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".output_scale", ".prob_output_scale")


@dataclass
class _Module:
    """What a checkpoint holds of one projection, and where it comes from."""

    name: str
    file: Path
    layout: WeightLayout
    tensors: dict[str, Tensor] = field(default_factory=dict)


class QuantizedCheckpoint:
    """Takes tensors by their names in the checkpoint; `finish` fills the model with them."""

    def __init__(
        self,
        model: nn.Module,
        quantization: ModelQuantization,
        family: Family,
        spec: Decoder,
        is_elsewhere: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """is_elsewhere: whether a weight, by its canonical name, belongs to other stages of the pipeline."""
        self._quantization, self._format = quantization, quantization.format
        self._family, self._spec, self._is_elsewhere = family, spec, is_elsewhere
        leaves = sorted({*self._format.leaves, "weight"}, key=len, reverse=True)
        self._suffixes = tuple(f".{leaf}" for leaf in leaves)
        self._ignored = (*(f".{leaf}" for leaf in self._format.ignored), *_CACHE_SCALES)
        self._layers = {path: (layer, method) for path, layer, method in quantized_layers(model)}
        self._experts = dict(quantized_experts(model))
        self._tables = stored_tables(model)
        self._ties_head = self._spec.tied and "head" in self._layers
        self._kept: set[str] = set()  # containers whose plain tensors are kept too
        for path, (_, method) in self._layers.items():
            self._kept.update([path, *containers_of(path, method.shape)])
        self._kept.update(path for path, _, _ in self._tables)
        self._found: dict[str, _Module] = {}
        self._stacks: dict[str, _Module] = {}  # of all experts of a layer

    def take(self, name: str, tensor: Tensor, file: Path) -> bool:
        """Keep a tensor (a view of a file) if it is quantized or belongs to a quantized layer."""
        end = next((end for end in self._format.stacks if name.endswith(end)), None)
        if end is not None:
            stack = name.removesuffix(end)
            resolved = self._family.resolve(stack)
            if resolved is None or self._is_elsewhere(resolved[0]):
                return resolved is not None
            found = self._stacks.setdefault(resolved[0], _Module(stack, file, resolved[1]))
            found.tensors[end] = tensor
            return True
        if self._take_stack(name, tensor, file):
            return True
        suffix = next((suffix for suffix in self._suffixes if name.endswith(suffix)), None)
        if suffix is None:
            return name.endswith(self._ignored)
        module, leaf = name.removesuffix(suffix), suffix[1:]
        resolved = self._family.resolve(f"{module}.weight")
        if resolved is None:
            return False
        container = resolved[0].removesuffix(".weight")
        if container == "head" and (self._spec.tied or self._family.pool is not None):
            return True  # a copy of the embedding, or of no use to a model that pools
        if container == "embed" and self._ties_head:
            self._found.setdefault("head", _Module(module, file, resolved[1])).tensors[leaf] = tensor
        if self._is_elsewhere(resolved[0]):
            return True
        if not self._keeps(container) and is_plain({leaf: tensor}):
            return False
        found = self._found.setdefault(container, _Module(module, file, resolved[1]))
        if resolved[1] is WeightLayout.TRANSPOSED and is_plain({leaf: tensor}):
            tensor = tensor.t()  # formats store [out, in] whatever plain checkpoints do
        if leaf in found.tensors:
            raise ValueError(f"{file}: the tensor {name!r} occurs twice.")
        found.tensors[leaf] = tensor
        return True

    def reader_of_rows(self, name: str, table: str) -> Callable[[Tensor], Tensor] | None:
        """What makes numbers of rows of a tensor; None unless `table` is stored in it, each row by itself."""
        module, _, leaf = name.rpartition(".")
        resolved = self._family.resolve(f"{module}.weight")
        reader = self._quantization.reader_of(table, expert=False) if self._format.rows_apart else None
        if reader is None or leaf not in self._format.leaves or resolved is None or resolved[0] != f"{table}.weight":
            return None

        def numbers(rows: Tensor) -> Tensor:
            found = reader.read({leaf: rows}, len(rows), self._spec.hidden_size)
            return found if isinstance(found, Tensor) else found.dequantize(torch.float32)

        return numbers

    def finish(self, filler: WeightFiller, device: torch.device) -> tuple[int, list[str]]:
        """Fill the quantized layers and what else was stored quantized: (bytes, names of projections without tensors).

        A tensor is let go as soon as it has been read.
        """
        total, missing, dense, packed = 0, [], 0, 0
        plain = not (self._stacks or any(self._is_quantized(*found) for found in self._found.items()))
        if plain and not self._format.by_tensor:
            logger.warning(
                "%s: the weights are plain and stay so: there is none that this format would quantize. Plain weights "
                'are quantized while they are loaded with quantization="fp8" or "bitsandbytes", if their config.json '
                "does not say that they are quantized.",
                self._format.name,
            )
        for path, table, stored in self._tables:
            if path not in self._found:
                missing.append(" or ".join(self._quantization.names(path)) or path)
                continue
            module = self._found.pop(path)
            try:
                total += stored.load(table, module.tensors)
            except ValueError as error:
                raise ValueError(f"{module.file}: {module.name}: {error}.") from None
        # the largest first: what reading it takes beside its weights is taken while there are few others
        for path, (layer, method) in sorted(self._layers.items(), key=lambda item: -item[1][1].shape.out_features):
            modules, absent = self._modules_of(path, method)
            if absent:
                missing += absent
                continue
            first = next(iter(modules.values()))
            try:
                tensors = {part: module.tensors for part, module in modules.items()}
                total += method.load(layer, tensors, device, self._order(path, first, method.shape.out_features))
            except ValueError as error:
                names = " and ".join(module.name for module in modules.values())
                raise ValueError(f"{first.file}: {names}: {error}.") from None
            dense, packed = dense + method.dense_bytes, packed + method.packed_bytes
            forget(first.file)
        for path, experts in self._experts.items():
            total += self._load_experts(path, experts, device, missing)
            dense, packed = dense + experts.dense_bytes, packed + experts.packed_bytes
        for container, module in self._found.items():
            weight = self._plain(container, module, filler)
            packed_size = sum(tensor.numel() * tensor.element_size() for tensor in module.tensors.values())
            dense, packed = dense + weight.numel() * weight.element_size(), packed + packed_size
            filler.fill(f"{container}.weight", weight)
        for target in list(self._stacks):
            module = self._stacks.pop(target)
            weight = self._stack(target, module, filler, device)
            packed_size = sum(tensor.numel() * tensor.element_size() for tensor in module.tensors.values())
            dense, packed = dense + weight.numel() * weight.element_size(), packed + packed_size
            filler.fill(target, weight)
        if dense:
            logger.info(
                "%s: there is no kernel for some weights as they are on this device in this dtype, so they were turned "
                "into plain numbers while they were loaded: they take %.2f GiB instead of %.2f GiB.",
                self._format.name,
                dense / 2**30,
                packed / 2**30,
            )
        return total, missing

    def _is_quantized(self, container: str, module: _Module) -> bool:
        """Whether a weight is stored quantized, or becomes so while it is loaded."""
        reader = self._quantization.reader_of(container, expert=_EXPERT.search(container) is not None)
        return not is_plain(module.tensors) or (reader is not None and reader.reads_plain)

    def _keeps(self, container: str) -> bool:
        """Whether the plain weight of `container` is read by its format, or by the method of its layer."""
        if container in self._kept:
            return True
        found = _EXPERT.search(container)
        if found is None:
            return False
        if container[: found.end("experts")] in self._experts:
            return True
        reader = self._quantization.reader_of(container, expert=True)
        return reader is not None and reader.reads_plain

    def _take_stack(self, name: str, tensor: Tensor, file: Path) -> bool:
        """Keep the plain weights of all experts in one tensor where each is to be quantized."""
        resolved = self._family.resolve(name)
        if resolved is None or not is_plain({"weight": tensor}):
            return False
        path, _, leaf = resolved[0].rpartition(".")
        parts = ("gate", "up") if leaf == "gate_up" else (leaf,) if leaf in ("gate", "up", "down") else ()
        if not parts or not path.endswith(".experts"):
            return False
        if self._is_elsewhere(resolved[0]):
            return True
        if not self._keeps(f"{path}.0.{parts[0]}"):
            return False
        layout, rows = resolved[1], tensor.shape[0]
        experts = self._spec.blocks[int(path.split(".")[1])].ffn.experts  # type: ignore[attr-defined]
        if layout in (WeightLayout.STACKED, WeightLayout.STACKED_TRANSPOSED):
            if tensor.dim() != 2 or rows % experts:
                raise ValueError(
                    f"{file}: {name} has the shape {list(tensor.shape)}, which {experts} experts cannot share."
                )
            by_expert = tensor.unflatten(0, (experts, -1))
            tensor = by_expert if layout is WeightLayout.STACKED else by_expert.transpose(1, 2)
        elif tensor.dim() != 3 or rows != experts:
            raise ValueError(
                f"{file}: {name} has the shape {list(tensor.shape)}, expected a matrix of {experts} experts each."
            )
        elif layout is WeightLayout.TRANSPOSED:
            tensor = tensor.transpose(1, 2)
        else:
            tensor = canonical(tensor, layout, 0, 0)
        for expert, matrix in enumerate(tensor):
            for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True):
                module = _Module(name, file, WeightLayout.PLAIN, {"weight": piece})
                self._found[f"{path}.{expert}.{part}"] = module
        return True

    def _load_experts(self, path: str, method: QuantizedExpertMethod, device: torch.device, missing: list[str]) -> int:
        total = 0
        for expert in range(method.shape.experts):
            containers = [f"{path}.{expert}.{part}" for part in EXPERT_PARTS]
            absent = [" or ".join(self._quantization.names(c)) or c for c in containers if c not in self._found]
            if absent:
                missing += absent
                for container in containers:
                    self._found.pop(container, None)
                continue
            modules = [self._found.pop(container) for container in containers]
            readers = [self._quantization.reader_of(container, expert=True) for container in containers]
            try:
                total += method.load(readers, [module.tensors for module in modules], device)
            except ValueError as error:
                names = " and ".join(module.name for module in modules)
                raise ValueError(f"{modules[0].file}: {names}: {error}.") from None
        return total

    def _modules_of(self, path: str, method: QuantizedLinearMethod) -> tuple[dict[int | None, _Module], list[str]]:
        """The modules that hold a layer, by part, or what is missing."""
        containers = containers_of(path, method.shape)
        if len(containers) == 1 or path in self._found:
            containers = [path]
        absent = [" or ".join(self._quantization.names(c)) or c for c in containers if c not in self._found]
        if absent:
            for container in containers:
                self._found.pop(container, None)
            return {}, absent
        if containers == [path]:
            return {None: self._found.pop(path)}, []
        return {part: self._found.pop(container) for part, container in enumerate(containers)}, []

    def _order(self, path: str, module: _Module, rows: int) -> Tensor | None:
        """The checkpoint's rows in the layer's order, None if it is the same."""
        if module.layout in (WeightLayout.PLAIN, WeightLayout.TRANSPOSED):
            return None
        return canonical(torch.arange(rows), module.layout, *self._spec.blocks[int(path.split(".")[1])].heads())

    def _stack(self, target: str, module: _Module, filler: WeightFiller, device: torch.device) -> Tensor:
        """The numbers of all experts' matrices, in canonical layout."""
        shape = filler.expected_shape(target)
        if shape is None or len(shape) != 3:
            raise ValueError(f"{module.file}: the model has no experts {module.name}.")
        try:
            weight = self._format.read_stack(module.tensors, shape, filler.dtype_of(target), device)
        except ValueError as error:
            raise ValueError(f"{module.file}: {module.name}: {error}.") from None
        # stored as [experts, out, in] whatever plain checkpoints do
        pairs = module.layout in (WeightLayout.EXPERTS_PAIRS, WeightLayout.EXPERTS_TRANSPOSED_PAIRS)
        return canonical(weight, WeightLayout.EXPERTS_PAIRS, 0, 0) if pairs else weight

    def _plain(self, container: str, module: _Module, filler: WeightFiller) -> Tensor:
        """The numbers of a projection that no layer takes as it is."""
        shape = filler.expected_shape(f"{container}.weight")
        if shape is None or len(shape) != 2:
            raise ValueError(f"{module.file}: the model has no weight {module.name}.")
        reader = self._quantization.reader_of(container, expert=_EXPERT.search(container) is not None)
        try:
            if reader is None:
                return plain_weight(module.tensors, *shape)
            weight = reader.read(module.tensors, *shape)
        except ValueError as error:
            raise ValueError(f"{module.file}: {module.name}: {error}.") from None
        return weight if isinstance(weight, Tensor) else weight.dequantize(filler.dtype_of(f"{container}.weight"))


def quantized_layers(model: nn.Module) -> list[tuple[str, nn.Module, QuantizedLinearMethod]]:
    """The layers that the loader fills by their format, with their canonical names and methods."""
    found: list[tuple[str, nn.Module, QuantizedLinearMethod]] = []
    for path, module in model.named_modules():
        method: object = None
        if isinstance(module, LinearBase):
            method = module.method
        elif isinstance(module, ParallelLMHead) and isinstance(module.method, LinearHeadMethod):
            method = module.method.method
        if isinstance(method, QuantizedLinearMethod):
            found.append((path, module, method))
    return found


def stored_tables(model: nn.Module) -> list[tuple[str, VocabParallelEmbedding, StoredEmbeddingMethod]]:
    """The embeddings that stay as they are stored."""
    return [
        (path, module, module.method)
        for path, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding) and isinstance(module.method, StoredEmbeddingMethod)
    ]


def quantized_experts(model: nn.Module) -> list[tuple[str, QuantizedExpertMethod]]:
    """The experts that the loader fills by their format."""
    return [
        (path, module.method)
        for path, module in model.named_modules()
        if isinstance(module, Experts) and isinstance(module.method, QuantizedExpertMethod)
    ]


def fill_quantized_with_random_numbers(
    model: nn.Module, quantization: ModelQuantization, device: torch.device, seed: int, scale: float
) -> int:
    """Random weights for the quantized layers, as `fill_with_random_numbers` makes them for the others."""
    generator = torch.Generator(device)

    def start(path: str) -> None:
        generator.manual_seed((zlib.crc32(path.encode()) << 32 | seed & 0xFFFFFFFF) & 0x7FFFFFFFFFFFFFFF)

    def draw(shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, device=device).uniform_(-scale, scale, generator=generator)

    return _fill(model, quantization, device, draw, start)


def fill_quantized_without_memory(model: nn.Module, quantization: ModelQuantization) -> None:
    """Weights on "meta" for the quantized layers, packed as this process packs for that device."""
    meta = torch.device("meta")
    _fill(model, quantization, meta, lambda shape: torch.empty(shape, device=meta), lambda path: None)


def _fill(
    model: nn.Module, quantization: ModelQuantization, device: torch.device, draw: Draw, start: Callable[[str], None]
) -> int:
    """Examples for the quantized layers; `start` is told the path of each before its weights are drawn."""
    total = 0
    for path, layer, method in quantized_layers(model):
        start(path)
        total += method.load_random(layer, device, draw)
    for path, experts in quantized_experts(model):
        start(path)
        reader = quantization.reader_of(f"{path}.0.gate", expert=True)
        assert reader is not None
        total += experts.load_random(reader, device, draw)
    return total
