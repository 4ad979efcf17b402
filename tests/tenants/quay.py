"""A made-up family with cross attention: what its encoder says is a function of a number of tokens alone, since nothing
brings more to a worker yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.models.families.llama import NAMES
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Attn, Block, BlockSpec, Decoder, Mlp, Norm, Rope
from vllm.step.kv_need import TOKENS, KVNeed, KVTensor
from vllm.step.kv_policy import KVKind


@dataclass(frozen=True, slots=True)
class CrossBlock(BlockSpec):
    """x + O(A(Q N x, K f, V f)), f the first rows of a table: as many as the request's encoder has tokens."""

    heads_: int
    dim: int
    norm: Norm
    longest: int

    def need(self, world: int) -> KVNeed | None:
        shape = (2, self.heads_, TOKENS, self.dim)
        return KVNeed(KVKind.CROSS, (KVTensor(shape),), encoder_tokens=self.longest)


def quay(hf: HFConfig) -> Decoder:
    norm, heads, dim = Norm("rms", 1e-5), hf.num_heads, hf.head_dim
    plain = Block(Attn(heads, 2, dim, rope=Rope(dim, 10000.0)), Mlp("silu", 37), norm)
    cross = CrossBlock(2, dim, norm, hf.get_int("encoder_length"))
    return Decoder(hf.vocab_size, hf.hidden_size, (plain, cross, plain), norm, tied=True)


QUAY = Family(
    quay,
    renames(
        {
            "model.layers.{i}.cross.{p}.weight": "blocks.{i}.{p}.weight",
            "model.layers.{i}.cross.table": "blocks.{i}.table",
        }
    )
    + NAMES,
    facts=Facts(Windows.NONE, defaults={"tie_word_embeddings": True}),
    modules="tests.tenants.quay_block",
)
