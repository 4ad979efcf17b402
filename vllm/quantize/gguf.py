"""From a model folder to a GGUF file: which tensor becomes blocks of which type, and what that does to outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vllm.config.hf import HFConfig
from vllm.gguf.config import Architecture, config_of
from vllm.gguf.container import GgufFile, GgufTensor
from vllm.model_executor.layers.quantization.gguf_blocks import read_blocks
from vllm.model_executor.model_loader.checkpoint import find_checkpoint
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.spec import Decoder
from vllm.quantize.gguf_file import (
    Entry,
    architecture_for,
    encode,
    metadata_for,
    names_for,
    paired,
    tokenizer_metadata,
    write_gguf,
)
from vllm.quantize.rounding import Inputs, output_error

if TYPE_CHECKING:
    import numpy as np

# format -> (type of most matrices, of values and second MLP matrices, of embedding and head, the format's number)
FORMATS: dict[str, tuple[str, str, str, int]] = {
    "gguf-f16": ("f16", "f16", "f16", 1),
    "gguf-q8_0": ("q8_0", "q8_0", "q8_0", 7),
    "gguf-q4_0": ("q4_0", "q4_0", "q6_k", 2),
    "gguf-q4_k_m": ("q4_k", "q6_k", "q6_k", 15),
}
_BLOCK = {"f16": 1, "q8_0": 32, "q4_0": 32, "q4_k": 256, "q6_k": 256}


class GgufJob:
    """A model that is to become a GGUF file. Raises ValueError if it cannot."""

    def __init__(self, format: str, hf: HFConfig, source: Path, title: str) -> None:
        self._kinds, self._hf, self._source = FORMATS[format], hf, source
        name, self._arch = architecture_for(hf)
        self._rename = names_for(self._arch)
        self._metadata, self._divisors = metadata_for(hf, name, title)
        self._metadata["general.file_type"] = self._kinds[3]
        tokenizer, self.warning = tokenizer_metadata(source, hf.vocab_size)
        self._metadata |= tokenizer
        self.size = 0
        self.weights: dict[str, Tensor] = {}  # by the checkpoint's names
        for theirs, tensor, _ in find_checkpoint(source, "auto").tensors():
            if theirs.endswith("rotary_emb.inv_freq") or (theirs == "lm_head.weight" and hf.tie_word_embeddings):
                continue
            if self._rename(theirs) is None:
                raise ValueError(f"GGUF files of this architecture have no place for {theirs}, so none can be written.")
            self.size += tensor.numel() * tensor.element_size()
            self.weights[theirs] = tensor
        self._check_settings(Path(f"A GGUF file of {title}"))

    def _check_settings(self, file: Path) -> None:
        """Raise ValueError if what will be written is another model to a reader."""
        entries = (self._entry(name, tensor) for name, tensor in self.weights.items())
        tensors = tuple(GgufTensor(e.name, e.kind, e.shape, 0, e.num_bytes, file) for e in entries)
        found = HFConfig.from_dict(config_of(GgufFile(file, self._metadata, tensors)), file)
        ours, theirs = (_decoder(hf) for hf in (self._hf, found))
        lost = next(_differences(ours, theirs), None)
        if lost is not None:
            raise ValueError(f"{file} has no place for all of its settings: {lost}. So none can be written.")

    def _kind(self, name: str, tensor: Tensor) -> str:
        if tensor.dim() != 2:
            return "f32"
        most, careful, ends, _ = self._kinds
        kind = careful if name.endswith(("v_proj.weight", "down_proj.weight")) else most
        kind = ends if "embed" in name or name.startswith("lm_head") else kind
        return next((k for k in (kind, "q8_0", "f16") if tensor.shape[1] % _BLOCK[k] == 0), "f16")

    def error(self, name: str, inputs: Inputs) -> float:
        """How far the outputs of a projection will be from the original's."""
        weight = self.weights[name].float()
        kind = self._kind(name, weight)
        if kind == "f16":
            return output_error(weight, weight.half().float(), inputs)
        return output_error(weight, read_blocks(kind, encode(kind, weight), weight.shape[1]).dequantize(), inputs)

    def write(self, file: Path) -> None:
        """Write the file, tensor by tensor."""
        entries = [self._entry(name, tensor) for name, tensor in self.weights.items()]
        if self._divisors is not None:
            entries.append(_divisors_entry(self._divisors))
        write_gguf(file, self._metadata, entries)

    def _entry(self, name: str, tensor: Tensor) -> Entry:
        kind = self._kind(name, tensor)

        def data() -> Tensor:
            values = _as_stored(name, tensor.float(), self._arch, self._hf)
            if kind == "f32":
                return values
            return values.half() if kind == "f16" else encode(kind, values)

        return Entry(str(self._rename(name)), kind, tuple(tensor.shape), data)


def _decoder(hf: HFConfig) -> Decoder:
    family = ModelRegistry.resolve(hf.architectures)
    assert isinstance(family, Family)
    return family.decoder_of(hf)


def _differences(ours: Any, theirs: Any, name: str = "") -> Iterator[str]:
    """In what two specs differ, but for the scaling of rotary embeddings, which `metadata_for` has checked."""
    if is_dataclass(ours) and type(ours) is type(theirs):
        for field in fields(ours):
            if field.name != "scaling":
                inner = f"{name}.{field.name}".lstrip(".")
                yield from _differences(getattr(ours, field.name), getattr(theirs, field.name), inner)
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(*pair, f"{name}.{number}")
    elif isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, rel_tol=1e-6):
        return  # a file's numbers are of 32 bits
    elif ours != theirs:
        yield f"{name} is {ours!r}, and would be read as {theirs!r}"


def _as_stored(name: str, values: Tensor, arch: Architecture, hf: HFConfig) -> Tensor:
    """A tensor with its rows in the file's order, and norms with what the file adds."""
    heads = {"q": hf.num_heads, "k": hf.num_kv_heads}.get(name.rpartition("_proj.")[0][-1:])
    if arch.interleaved and heads is not None:
        return paired(values, heads, int(hf.head_dim * hf.rope.partial_rotary_factor))
    return values + arch.norm_offset if "norm" in name else values


def _divisors_entry(divisors: np.ndarray) -> Entry:
    import torch

    return Entry("rope_freqs.weight", "f32", divisors.shape, lambda: torch.from_numpy(divisors))
