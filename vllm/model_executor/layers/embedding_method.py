"""How a table of vocabulary rows is stored, looked up and multiplied with: the interface of formats of embeddings and
heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm.distributed import TensorParallel
from vllm.model_executor.layers.linear_method import LinearMethod, LinearShape
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec, whole
from vllm.ops.embedding import embedding
from vllm.ops.linear import linear

if TYPE_CHECKING:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class EmbeddingMethod(ABC):
    """One format of a [vocabulary, dim] table. A layer owns the parameters, the method creates and reads them."""

    @abstractmethod
    def create_weights(
        self, layer: VocabParallelEmbedding, rows: Part, dim: int, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        """Register the layer's parameters, each a `ShardedParameter`, uninitialised, on torch's default device."""

    def process_after_load(self, layer: VocabParallelEmbedding) -> None:
        """Called once when every parameter of the layer is filled. By default nothing."""
        return

    def restore(self, layer: VocabParallelEmbedding) -> bool:
        """As of `LinearMethod`."""
        return False

    @abstractmethod
    def embed(self, layer: VocabParallelEmbedding, rows: Tensor) -> Tensor:
        """Rows of this rank's share of the table. rows: [tokens] int64 -> [tokens, dim] in the model's dtype."""

    @abstractmethod
    def project(self, layer: VocabParallelEmbedding, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """hidden @ table.T + bias. hidden: [rows, dim] -> [rows, this rank's rows of the table] fp32."""


class UnquantizedEmbeddingMethod(EmbeddingMethod):
    """The table as it is in the checkpoint: `weight`, or `packed` where a head that uses it has repacked it."""

    def create_weights(
        self, layer: VocabParallelEmbedding, rows: Part, dim: int, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        layer.weight = ShardedParameter.empty((rows.size, dim), ShardSpec(0, (rows,)), tp.rank, tp.world, dtype)

    def embed(self, layer: VocabParallelEmbedding, rows: Tensor) -> Tensor:
        out: Tensor = embedding(rows, layer.weight if layer.packed is None else layer.packed)
        return out

    def project(self, layer: VocabParallelEmbedding, hidden: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = linear(hidden, layer.weight if layer.packed is None else layer.packed, bias, torch.float32)
        return out


class LinearHeadMethod(EmbeddingMethod):
    """A head whose table is stored and multiplied as a linear layer's weight is."""

    def __init__(self, method: LinearMethod) -> None:
        self.method = method

    def create_weights(
        self, layer: VocabParallelEmbedding, rows: Part, dim: int, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        self.method.create_weights(layer, LinearShape(whole(dim), (rows,), "out"), dtype, tp)

    def process_after_load(self, layer: VocabParallelEmbedding) -> None:
        self.method.process_after_load(layer)

    def restore(self, layer: VocabParallelEmbedding) -> bool:
        return self.method.restore(layer)

    def embed(self, layer: VocabParallelEmbedding, rows: Tensor) -> Tensor:
        raise RuntimeError("A head is not looked up.")

    def project(self, layer: VocabParallelEmbedding, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return self.method.apply(layer, hidden, bias).float()
