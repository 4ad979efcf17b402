"""A made-up family that nothing in the package knows: gated linear recurrences between attention layers of unlike
heads, one of them with a window, and one that reads another's keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.models.families.llama import NAMES
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Attn, Block, BlockSpec, Decoder, Mlp, Norm, Rope
from vllm.step.kv_need import KVNeed, KVTensor
from vllm.step.kv_policy import KVKind


@dataclass(frozen=True, slots=True)
class WeirBlock(BlockSpec):
    """x + O(h silu(g)), with h_t = f_t h_{t-1} + (1 - f_t) c_t and c_t = k_0 u_t + k_1 u_{t-1} + k_2 u_{t-2}, where u,
    g and the forget gate f are products of N x.
    """

    width: int
    norm: Norm

    def need(self, world: int) -> KVNeed | None:
        return KVNeed(KVKind.RECURRENT, (KVTensor((self.width,), "float32"), KVTensor((2, self.width))))


@dataclass(frozen=True, slots=True)
class ReaderBlock(BlockSpec):
    """Attention of its own queries to the keys and values of layer `source`."""

    attn: Attn
    norm: Norm
    source: int

    def need(self, world: int) -> KVNeed | None:
        return KVNeed(KVKind.FULL, (), same_as=self.source)


def weir(hf: HFConfig) -> Decoder:
    norm, dim = Norm("rms", 1e-5), hf.head_dim
    rope, mlp = Rope(dim, 10000.0), Mlp("silu", hf.get_int("intermediate_size"))
    state = WeirBlock(hf.hidden_size, norm)
    blocks = (
        state,
        Block(Attn(hf.num_heads, 2, dim, rope=rope), mlp, norm),
        state,
        Block(Attn(hf.num_heads, 4, dim, rope=rope), mlp, norm),
        *(Block(Attn(hf.num_heads, n, dim, rope=rope, window=7), mlp, norm) for n in hf.get("window_kv_heads")),
        ReaderBlock(Attn(hf.num_heads, 2, dim), norm, 1),
    )
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, tied=True)


WEIR = Family(
    weir,
    renames(
        {
            "model.layers.{i}.mixer.inner.{p}": "blocks.{i}.inner.{p}",
            "model.layers.{i}.mixer.out.{p}": "blocks.{i}.out.{p}",
            "model.layers.{i}.mixer.kernel": "blocks.{i}.kernel",
            "model.layers.{i}.reader.q.{p}": "blocks.{i}.q.{p}",
            "model.layers.{i}.reader.o.{p}": "blocks.{i}.o.{p}",
        }
    )
    + NAMES,
    facts=Facts(Windows.NONE, defaults={"tie_word_embeddings": True}),
    modules="tests.tenants.weir_block",
)
