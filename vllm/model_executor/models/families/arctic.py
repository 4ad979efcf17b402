"""Snowflake Arctic: a dense MLP beside experts that read what entered the layer."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.models.families.llama import NAMES, ROTARY_FREQUENCIES, rope_of
from vllm.model_executor.models.families.moe import experts_of
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Attn, Block, BlockSpec, Decoder, Mlp, Moe, Norm
from vllm.step.kv_need import KVNeed


@dataclass(frozen=True, slots=True)
class ArcticBlock(BlockSpec):
    """a = x + A(N1 x), then a + F(N2 a) + E(N3 x). A: attention, F: `dense`, E: `experts`."""

    attn: Attn
    dense: Mlp
    experts: Moe
    norm: Norm

    def need(self, world: int) -> KVNeed | None:
        return Block(self.attn, self.dense, self.norm).need(world)

    def heads(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.kv_heads


def arctic(hf: HFConfig) -> Decoder:
    """Arctic: every `moe_layer_frequency`-th layer has experts, and beside them, if the config says so, a dense MLP."""
    norm = Norm("rms", hf.get_float("rms_norm_eps", minimum=0))
    attn = Attn(hf.num_heads, hf.num_kv_heads, hf.head_dim, rope=rope_of(hf))
    act, experts = hf.get_str("hidden_act"), experts_of(hf)
    every = hf.get_int("moe_layer_frequency")
    beside = hf.get_bool("parallel_attn_mlp_res", "use_residual", default=False)
    usual = ArcticBlock(attn, Mlp(act, hf.hidden_size), experts, norm) if beside else Block(attn, experts, norm)
    plain = Block(attn, Mlp(act, hf.get_int("intermediate_size")), norm)
    blocks = tuple(plain if (layer + 1) % every else usual for layer in range(hf.num_layers))
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings)


_MOE = "model.layers.{i}.block_sparse_moe"
_DENSE = "model.layers.{i}.residual_mlp"
ARCTIC_NAMES = renames(
    {
        f"{_MOE}.gate.{{p}}": "blocks.{i}.ffn.router.{p}",
        f"{_MOE}.experts.{{e}}.w1.weight": "blocks.{i}.ffn.experts.{e}.gate.weight",
        f"{_MOE}.experts.{{e}}.w3.weight": "blocks.{i}.ffn.experts.{e}.up.weight",
        f"{_MOE}.experts.{{e}}.w2.weight": "blocks.{i}.ffn.experts.{e}.down.weight",
        f"{_MOE}.mlp.w1.{{p}}": "blocks.{i}.ffn.gate.{p}",
        f"{_MOE}.mlp.w3.{{p}}": "blocks.{i}.ffn.up.{p}",
        f"{_MOE}.mlp.w2.{{p}}": "blocks.{i}.ffn.down.{p}",
        f"{_DENSE}.w1.{{p}}": "blocks.{i}.dense.gate.{p}",
        f"{_DENSE}.w3.{{p}}": "blocks.{i}.dense.up.{p}",
        f"{_DENSE}.w2.{{p}}": "blocks.{i}.dense.down.{p}",
        "model.layers.{i}.residual_layernorm.{p}": "blocks.{i}.norms.2.{p}",
    }
)
ARCTIC = Family(
    arctic,
    ARCTIC_NAMES + NAMES,
    harmless=ROTARY_FREQUENCIES,
    facts=Facts(
        Windows.NONE,
        defaults={
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "moe_layer_frequency": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
        },
    ),
    modules="vllm.model_executor.models.families.arctic_block",
)
