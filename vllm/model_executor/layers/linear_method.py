"""What a linear layer's weights are and how it computes: the interface that quantization formats fill in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec
from vllm.ops.embedding import unpack
from vllm.ops.linear import linear, pack_weight

if TYPE_CHECKING:
    from vllm.model_executor.layers.embedding_method import EmbeddingMethod
    from vllm.model_executor.layers.expert_method import ExpertMethod


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A full (unsharded) linear map and the dimension along which ranks share it.

    inputs: the input features, one part.   outputs: the output features, one part for each fused projection.
    split: "out" (column parallel), "in" (row parallel), "none" (every rank has all of it).
    """

    inputs: Part
    outputs: tuple[Part, ...]
    split: Literal["none", "out", "in"]

    @property
    def in_features(self) -> int:
        return self.inputs.size

    @property
    def out_features(self) -> int:
        return sum(part.size for part in self.outputs)


class LinearMethod(ABC):
    """One format of weights. A layer owns the parameters, the method creates and reads them.

    repacks_whole: `process_after_load` copies a weight or leaves it in its place, and keeps no view of it; then the
    loader may hand it weights that lie in a file.
    """

    repacks_whole = False

    @abstractmethod
    def create_weights(self, layer: Any, shape: LinearShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        """Register the layer's parameters, each a `ShardedParameter`, uninitialised, on torch's default device."""

    def process_after_load(self, layer: Any) -> None:
        """Called once when every parameter of the layer is filled: repack, dequantize. By default nothing."""
        return

    def restore(self, layer: Any) -> bool:
        """Make parameters of what `process_after_load` repacked without loss, for who wants to see or change them.

        Returns whether there was something to do; then that is called again afterwards.
        """
        return False

    @abstractmethod
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's part of x @ weight.T + bias. x: [tokens, in on this rank] -> [tokens, out on this rank]."""


class QuantizationConfig(ABC):
    """A quantization format: chooses the method of each layer by its name; None for a layer that is not quantized."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        """The method of the linear layer called `prefix`."""

    def get_expert_method(self, layer: nn.Module, prefix: str) -> ExpertMethod | None:
        """The method of the experts called `prefix`."""
        return None

    def get_embedding_method(self, layer: nn.Module, prefix: str) -> EmbeddingMethod | None:
        """The method of the token embedding called `prefix`; a head that is tied to it uses it too."""
        return None

    def get_head_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        """The method of the output head called `prefix`, which then has weights of its own, tied or not."""
        return None


def weight_spec(shape: LinearShape) -> ShardSpec:
    """The ShardSpec of an [out, in] weight."""
    if shape.split == "in":
        return ShardSpec(1, (shape.inputs,))
    # an uncut weight keeps its parts, so that q, k and v can still be loaded one by one
    return ShardSpec(0, shape.outputs)


class UnquantizedLinearMethod(LinearMethod):
    """Weights as they are in the checkpoint: `weight` [out, in], repacked after loading if the device gains by it."""

    repacks_whole = True

    def create_weights(self, layer: Any, shape: LinearShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        world, rank = (1, 0) if shape.split == "none" else (tp.world, tp.rank)
        full = (shape.out_features, shape.in_features)
        layer.weight = ShardedParameter.empty(full, weight_spec(shape), rank, world, dtype)
        layer.packed = None

    def process_after_load(self, layer: Any) -> None:
        if layer.weight is None:
            return  # packed before
        weight = layer.weight.data
        packed = pack_weight(weight)
        if packed is not weight:
            layer.packed, layer.plain_form = packed, layer.weight.form
            layer.weight = None  # frees the original

    def restore(self, layer: Any) -> bool:
        if layer.packed is None:
            return False
        layer.weight, layer.packed = ShardedParameter(unpack(layer.packed), *layer.plain_form), None
        return True

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = linear(x, layer.weight if layer.packed is None else layer.packed, bias)
        return out


class Fp32OutputMethod(UnquantizedLinearMethod):
    """Results in fp32, not rounded to the model's dtype: for scores that are close to each other."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = linear(x, layer.weight if layer.packed is None else layer.packed, bias, torch.float32)
        return out
