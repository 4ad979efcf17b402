"""Token embedding and output head, their vocabulary rows dealt to tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel, current_tensor_parallel
from vllm.model_executor.layers.embedding_method import (
    EmbeddingMethod,
    LinearHeadMethod,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.layers.linear_method import QuantizationConfig
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec
from vllm.ops.embedding import pack_table, unpack
from vllm.ops.linear import pack_weight
from vllm.step.inputs import RowView

DEFAULT_VOCAB_PADDING_SIZE = 64


def vocab_part(rows: int, padding_size: int, world: int) -> Part:
    """The vocabulary padded to a multiple of `padding_size` rows on each rank."""
    step = padding_size * world
    padded = -(-rows // step) * step
    return Part(rows, padded, "the vocabulary", padding=padded - rows)


class VocabParallelEmbedding(nn.Module):
    """Rows of a [vocabulary, embedding_dim] table; ranks look up their own and add up.

    org_num_embeddings: rows in the checkpoint, if fewer than `num_embeddings` (the rest stays zero).
    quant_config: chooses the format of the table called `prefix`.
    """

    weight: ShardedParameter
    bias: ShardedParameter | None
    method: EmbeddingMethod

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self.packed: Any = None
        self.lora: Any = None  # what adapters add to the output, where there are any
        self.tp = current_tensor_parallel() if tp is None else tp
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        rows = num_embeddings if org_num_embeddings is None else org_num_embeddings
        self.org_vocab_size = rows
        padded = vocab_part(num_embeddings, padding_size, self.tp.world)
        self.part = Part(rows, padded.units, padded.name, padding=padded.units - rows)
        self.first_row, self.local_rows = self.part.cut(self.tp.rank, self.tp.world)
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.params_dtype = dtype
        self.method = self._choose_method(quant_config, prefix)
        self.method.create_weights(self, self.part, embedding_dim, dtype, self.tp)

    def _choose_method(self, quant_config: QuantizationConfig | None, prefix: str) -> EmbeddingMethod:
        method = None if quant_config is None else quant_config.get_embedding_method(self, prefix)
        return UnquantizedEmbeddingMethod() if method is None else method

    @property
    def repacks_whole(self) -> bool:
        """As of `LinearMethod`."""
        return isinstance(self.method, UnquantizedEmbeddingMethod)

    @property
    def plain(self) -> bool:
        """Whether the table stands in `weight`, row by row in the model's dtype."""
        return isinstance(self.method, UnquantizedEmbeddingMethod) and self.packed is None

    def process_after_load(self) -> None:
        """Let the method repack the filled table."""
        self.method.process_after_load(self)

    def restore(self) -> bool:
        """As of `LinearBase`; a table that a head has repacked is restored by the head."""
        return self.method.restore(self)

    def project(self, hidden: Tensor, view: RowView | None = None) -> Tensor:
        """hidden: [rows, embedding_dim] -> this rank's logits [rows, padded vocabulary / world] fp32.

        view: of the rows, None if none of them uses an adapter; an embedding that is used as a head has no adapters.
        """
        return self.method.project(self, hidden, None)

    def forward(self, input_ids: Tensor, view: RowView | None = None) -> Tensor:
        """input_ids: [tokens] int64 -> [tokens, embedding_dim]. view: of the tokens, None without adapters, which may
        add tokens to the vocabulary.
        """
        if view is None or self.lora is None:
            return self._rows(input_ids)
        added = self.lora.added
        known = input_ids if added is None else added.known(input_ids)
        rows = self._rows(known)
        self.lora.add(rows, known, view)
        return rows if added is None else added.embed(rows, input_ids, view)

    def _rows(self, input_ids: Tensor) -> Tensor:
        if self.tp.world == 1:
            return self.method.embed(self, input_ids)
        local = input_ids - self.first_row
        foreign = (local < 0) | (local >= self.local_rows)
        rows = self.method.embed(self, local.masked_fill(foreign, 0))
        return self.tp.all_reduce(rows.masked_fill(foreign[:, None], 0.0))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, world={self.tp.world}"


class ParallelLMHead(VocabParallelEmbedding):
    """The output head: hidden states to this rank's logits (`LogitsProcessor` gathers them).

    Its weight may be tied to an embedding's with `tie_weights`. A format of its own is a `LinearMethod`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix, tp=tp
        )
        self._tied: list[VocabParallelEmbedding] = []  # in a list, so that it does not become a child
        if bias:
            self.bias = ShardedParameter.empty(
                (self.org_vocab_size,), ShardSpec(0, (self.part,)), self.tp.rank, self.tp.world, self.params_dtype
            )
        else:
            self.bias = None

    def _choose_method(self, quant_config: QuantizationConfig | None, prefix: str) -> EmbeddingMethod:
        method = None if quant_config is None else quant_config.get_head_method(self, prefix)
        return UnquantizedEmbeddingMethod() if method is None else LinearHeadMethod(method)

    def tie_weights(self, embedding: VocabParallelEmbedding) -> ParallelLMHead:
        """Use `embedding`'s table as this head's, in whatever format it is. A head with a format of its own keeps its
        own weights: it was quantized apart from the embedding.
        """
        if not isinstance(self.method, UnquantizedEmbeddingMethod):
            return self
        self._tied.append(embedding)
        if isinstance(embedding.method, UnquantizedEmbeddingMethod):
            self.weight = embedding.weight
        else:
            self.method = embedding.method
            del self.weight
        return self

    @property
    def tied(self) -> bool:
        """Whether the head uses an embedding's table."""
        return bool(self._tied)

    def process_after_load(self) -> None:
        """Repack the weight for this device's products where that pays; the embedding it is tied to follows."""
        if not isinstance(self.method, UnquantizedEmbeddingMethod):
            if not self._tied:
                self.method.process_after_load(self)
            return
        weight = self.weight.data
        packed = pack_table(weight) if self._tied else pack_weight(weight)
        if packed is not weight:
            self.plain_form = self.weight.form
            for module in (self, *self._tied):
                module.packed = packed
                module.weight = None  # type: ignore[assignment]  # frees the original

    def restore(self) -> bool:
        """As of `LinearBase`; the embedding it is tied to follows."""
        if not isinstance(self.method, UnquantizedEmbeddingMethod):
            return not self._tied and self.method.restore(self)
        if self.packed is None:
            return False
        weight = ShardedParameter(unpack(self.packed), *self.plain_form)
        for module in (self, *self._tied):
            module.weight, module.packed = weight, None
        return True

    def project(self, hidden: Tensor, view: RowView | None = None) -> Tensor:
        """hidden: [rows, embedding_dim] -> this rank's logits [rows, padded vocabulary / world] fp32.

        view: of the rows, None if none of them uses an adapter.
        """
        owner = self._tied[0] if self._tied and not isinstance(self.method, UnquantizedEmbeddingMethod) else self
        out = self.method.project(owner, hidden, self.bias)
        if view is not None and self.lora is not None:
            self.lora.add(out, hidden, view)
        return out

    def forward(self, input_ids: Tensor, view: RowView | None = None) -> Tensor:
        raise RuntimeError("ParallelLMHead is read by LogitsProcessor and is not called itself.")
