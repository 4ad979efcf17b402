"""Loading a quantized checkpoint: collects the tensors of each projection, then reads them layer by layer."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import is_plain, plain_weight
from vllm.model_executor.layers.quantization.method import ModelQuantization, QuantizedLinearMethod, containers_of
from vllm.model_executor.layers.weight_layout import WeightLayout, canonical
from vllm.model_executor.model_loader.filler import WeightFiller
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.spec import Decoder

logger = init_logger(__name__)

_EXPERT = re.compile(r"\.experts\.\d+\.")
# Scales of the cache, which belong to an attention layer and not to a projection.
_CACHE_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "output_scale", "prob_output_scale")


@dataclass
class _Module:
    """What a checkpoint holds of one projection, and where it comes from."""

    name: str
    file: Path
    layout: WeightLayout
    tensors: dict[str, Tensor] = field(default_factory=dict)


class QuantizedCheckpoint:
    """Takes tensors by their names in the checkpoint; `finish` fills the model with them."""

    def __init__(self, model: nn.Module, quantization: ModelQuantization, family: Family, spec: Decoder) -> None:
        self._quantization, self._format = quantization, quantization.format
        self._family, self._spec = family, spec
        leaves = sorted({*self._format.leaves, "weight"}, key=len, reverse=True)
        self._suffixes = tuple(f".{leaf}" for leaf in leaves)
        self._ignored = tuple(f".{leaf}" for leaf in (*self._format.ignored, *_CACHE_SCALES))
        self._layers = dict(quantized_layers(model))
        self._parts: dict[str, tuple[str, int | None]] = {}  # container -> (layer's path, part)
        for path, layer in self._layers.items():
            containers = containers_of(path, layer.shape)
            self._parts.update({container: (path, i) for i, container in enumerate(containers)})
            if containers != [path]:
                self._parts[path] = (path, None)
        self._found: dict[str, _Module] = {}

    def take(self, name: str, tensor: Tensor, file: Path) -> bool:
        """Keep a tensor (a view of a file) if it is quantized or belongs to a quantized layer."""
        suffix = next((suffix for suffix in self._suffixes if name.endswith(suffix)), None)
        if suffix is None:
            return name.endswith(self._ignored)
        module, leaf = name.removesuffix(suffix), suffix[1:]
        resolved = self._family.resolve(f"{module}.weight")
        if resolved is None:
            return False
        container = resolved[0].removesuffix(".weight")
        if container not in self._parts and is_plain({leaf: tensor}) and not self._rounds_expert(container):
            return False
        if container == "head" and self._spec.tied:
            return True  # a copy of the embedding
        found = self._found.setdefault(container, _Module(module, file, resolved[1]))
        if leaf in found.tensors:
            raise ValueError(f"{file}: the tensor {name!r} occurs twice.")
        found.tensors[leaf] = tensor
        return True

    def finish(self, filler: WeightFiller, device: torch.device) -> tuple[int, list[str]]:
        """Fill the quantized layers and what else was stored quantized: (bytes, names of projections without tensors).

        A tensor is let go as soon as it has been read.
        """
        total, missing, dense, packed = 0, [], 0, 0
        for path, layer in self._layers.items():
            modules, absent = self._modules_of(path, layer)
            if absent:
                missing += absent
                continue
            method = layer.method
            assert isinstance(method, QuantizedLinearMethod)
            first = next(iter(modules.values()))
            try:
                tensors = {part: module.tensors for part, module in modules.items()}
                total += method.load(layer, tensors, device, self._order(path, first, layer.output_size))
            except ValueError as error:
                names = " and ".join(module.name for module in modules.values())
                raise ValueError(f"{first.file}: {names}: {error}.") from None
            dense, packed = dense + method.dense_bytes, packed + method.packed_bytes
        for container, module in self._found.items():
            weight = self._plain(container, module, filler)
            packed_size = sum(tensor.numel() * tensor.element_size() for tensor in module.tensors.values())
            dense, packed = dense + weight.numel() * weight.element_size(), packed + packed_size
            filler.fill(f"{container}.weight", weight)
        if dense:
            logger.info(
                "%s: there is no kernel for some weights as they are on this device in this dtype, so they were turned "
                "into plain numbers while they were loaded: they take %.2f GiB instead of %.2f GiB.",
                self._format.name,
                dense / 2**30,
                packed / 2**30,
            )
        return total, missing

    def _rounds_expert(self, container: str) -> bool:
        """Whether the plain weight of an expert is to be quantized."""
        if _EXPERT.search(container) is None:
            return False
        reader = self._quantization.reader_of(container, expert=True)
        return reader is not None and reader.reads_plain

    def _modules_of(self, path: str, layer: LinearBase) -> tuple[dict[int | None, _Module], list[str]]:
        """The modules that hold a layer, by part, or what is missing."""
        containers = containers_of(path, layer.shape)
        if containers != [path] and path in self._found:
            return {None: self._found.pop(path)}, []
        found: dict[int | None, _Module] = {}
        absent = []
        for part, container in enumerate(containers):
            if container in self._found:
                found[part if len(layer.shape.outputs) > 1 and len(containers) > 1 else None] = self._found.pop(
                    container
                )
            else:
                absent.append(" or ".join(self._quantization.names(container)) or container)
        return found, absent

    def _order(self, path: str, module: _Module, rows: int) -> Tensor | None:
        """The checkpoint's rows in the layer's order, None if it is the same."""
        if module.layout in (WeightLayout.PLAIN, WeightLayout.TRANSPOSED):
            return None
        return canonical(torch.arange(rows), module.layout, *self._spec.blocks[int(path.split(".")[1])].heads())

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
        return weight if isinstance(weight, Tensor) else weight.dequantize()


def quantized_layers(model: nn.Module) -> list[tuple[str, LinearBase]]:
    """The layers that the loader fills by their format, with their canonical names."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, LinearBase) and isinstance(module.method, QuantizedLinearMethod)
    ]


def fill_quantized_with_random_numbers(model: nn.Module, device: torch.device, seed: int, scale: float) -> int:
    """Random weights for the quantized layers, as `fill_with_random_numbers` makes them for the others."""
    generator, total = torch.Generator(device), 0
    for path, layer in quantized_layers(model):
        generator.manual_seed((zlib.crc32(path.encode()) << 32 | seed & 0xFFFFFFFF) & 0x7FFFFFFFFFFFFFFF)
        assert isinstance(layer.method, QuantizedLinearMethod)
        total += layer.method.load_random(layer, device, generator, scale)
    return total
