"""Token embedding and output head, their vocabulary rows dealt to tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel, current_tensor_parallel
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec
from vllm.ops.embedding import embedding, pack_table
from vllm.ops.linear import linear, pack_weight

DEFAULT_VOCAB_PADDING_SIZE = 64


def vocab_part(rows: int, padding_size: int, world: int) -> Part:
    """The vocabulary padded to a multiple of `padding_size` rows on each rank."""
    step = padding_size * world
    padded = -(-rows // step) * step
    return Part(rows, padded, "the vocabulary", padding=padded - rows)


class VocabParallelEmbedding(nn.Module):
    """Rows of a [vocabulary, embedding_dim] table; ranks look up their own and add up.

    org_num_embeddings: rows in the checkpoint, if fewer than `num_embeddings` (the rest stays zero).
    """

    weight: ShardedParameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
        *,
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self.packed: Any = None
        self.tp = current_tensor_parallel() if tp is None else tp
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        rows = num_embeddings if org_num_embeddings is None else org_num_embeddings
        self.org_vocab_size = rows
        padded = vocab_part(num_embeddings, padding_size, self.tp.world)
        self.part = Part(rows, padded.units, padded.name, padding=padded.units - rows)
        self.first_row, self.local_rows = self.part.cut(self.tp.rank, self.tp.world)
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.weight = ShardedParameter.empty(
            (rows, embedding_dim), ShardSpec(0, (self.part,)), self.tp.rank, self.tp.world, dtype
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: [tokens] int64 -> [tokens, embedding_dim]."""
        table = self.weight if self.packed is None else self.packed
        if self.tp.world == 1:
            out: Tensor = embedding(input_ids, table)
            return out
        local = input_ids - self.first_row
        foreign = (local < 0) | (local >= self.local_rows)
        rows = embedding(local.masked_fill(foreign, 0), table)
        return self.tp.all_reduce(rows.masked_fill(foreign[:, None], 0.0))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, world={self.tp.world}"


class ParallelLMHead(VocabParallelEmbedding):
    """The output head: hidden states to this rank's logits (`LogitsProcessor` gathers them).

    Its weight may be tied to an embedding's with `tie_weights`.
    """

    repacks_whole = True  # see LinearMethod

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
        *,
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix, tp=tp
        )
        self._tied: list[VocabParallelEmbedding] = []  # in a list, so that it does not become a child
        if bias:
            self.bias: ShardedParameter | None = ShardedParameter.empty(
                (self.org_vocab_size,), ShardSpec(0, (self.part,)), self.tp.rank, self.tp.world, self.weight.dtype
            )
        else:
            self.bias = None

    def tie_weights(self, embedding: VocabParallelEmbedding) -> ParallelLMHead:
        """Use `embedding`'s weight as this head's."""
        self.weight = embedding.weight
        self._tied.append(embedding)
        return self

    def process_after_load(self) -> None:
        """Repack the weight for this device's products where that pays; the embedding it is tied to follows."""
        weight = self.weight.data
        packed = pack_table(weight) if self._tied else pack_weight(weight)
        if packed is not weight:
            for module in (self, *self._tied):
                module.packed = packed
                module.weight = None  # type: ignore[assignment]  # frees the original

    def project(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, embedding_dim] -> this rank's logits [rows, padded vocabulary / world] fp32."""
        weight = self.weight if self.packed is None else self.packed
        out: Tensor = linear(hidden, weight, self.bias, torch.float32)
        return out

    def forward(self, input_ids: Tensor) -> Tensor:
        raise RuntimeError("ParallelLMHead is read by LogitsProcessor and is not called itself.")
