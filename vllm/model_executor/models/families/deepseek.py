"""DeepSeek 1 to 3 and their kin: latent attention (MLA), experts chosen by groups, shared experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from vllm.config.facts import Facts
from vllm.config.hf import HFConfig
from vllm.model_executor.models.families.llama import (
    NAMES,
    NO_WINDOWS,
    ROTARY_FREQUENCIES,
    attention_bias,
    llama_like,
    rope_of,
)
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Block, BlockSpec, Decoder, Layout, Mlp, Moe, Norm, Rope
from vllm.step.kv_need import TOKENS, KVNeed, KVTensor
from vllm.step.kv_policy import KVKind


@dataclass(frozen=True, slots=True)
class LatentAttn:
    """Attention over one latent per token (`ops/latent_attention.py`).

    q_rank: width that queries are projected through, normalised there; None: they are projected at once.
    rank: of the latent, which is normalised.   nope_dim, rope_dim: dimensions of a query that are not, and are rotated.
    scale: of q k.   bias: of the projections to `q_rank` and to the latent, and of the output.
    """

    heads: int
    q_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: Rope
    scale: float
    norm: Norm
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LatentBlock(BlockSpec):
    """x + residual_scale * A(N1 x), then x + residual_scale * F(N2 x)."""

    attn: LatentAttn
    ffn: Mlp | Moe
    norm: Norm
    residual_scale: float = 1.0

    @property
    def layout(self) -> Layout:
        """Where its norms stand."""
        return Layout.PRE

    @property
    def attn_norm(self) -> bool:
        """Whether there is a norm before the attention."""
        return True

    def need(self, world: int) -> KVNeed | None:
        """One row per token, whole on every rank."""
        return KVNeed(KVKind.FULL, (KVTensor((TOKENS, self.attn.rank + self.attn.rope_dim)),))


def latent_attention(hf: HFConfig, *, interleaved: bool = True) -> LatentAttn:
    """The latent attention that a config describes."""
    nope_dim, rope_dim = hf.get_int("qk_nope_head_dim"), hf.get_int("qk_rope_head_dim")
    rope = replace(rope_of(hf, interleaved=interleaved), dim=rope_dim)
    scale = (nope_dim + rope_dim) ** -0.5
    settings = hf.rope
    whole = settings.params.get("mscale_all_dim")
    if settings.kind != "default" and whole:  # YaRN's factor of queries and keys, but for the part that is not rotated
        scale *= (0.1 * float(whole) * math.log(max(1.0, float(settings.params["factor"]))) + 1.0) ** 2
    q_rank, bias = hf.get_int("q_lora_rank", default=None), hf.get_bool("attention_bias", default=False)
    if bias and q_rank is None:
        raise ValueError(f"{hf.file}: attention_bias without q_lora_rank is not supported.")
    return LatentAttn(
        hf.num_heads,
        q_rank,
        hf.get_int("kv_lora_rank"),
        nope_dim,
        rope_dim,
        hf.get_int("v_head_dim"),
        rope,
        scale,
        Norm("rms", 1e-6),
        bias,
    )


def shared_and_routed(hf: HFConfig, *, method: str, score: str) -> Moe:
    """The experts of a config of DeepSeek's kind. method, score: how they are chosen if the config does not say."""
    act, width = hf.get_str("hidden_act"), hf.get_int("moe_intermediate_size")
    experts, chosen = hf.get_int("n_routed_experts", "num_experts"), hf.get_int("num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"{hf.file}: num_experts_per_tok is {chosen}, expected at most the {experts} experts.")
    count = hf.get_int("n_shared_experts", "num_shared_experts", default=None, minimum=0)
    method, score = hf.get_str("topk_method", default=method), hf.get_str("scoring_func", default=score)
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(
            f"{hf.file}: topk_method={method!r} is not supported, expected greedy, group_limited_greedy or noaux_tc."
        )
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"{hf.file}: scoring_func={score!r} is not supported, expected softmax or sigmoid.")
    groups = 1 if method == "greedy" else hf.get_int("n_group", default=None) or 1
    top_groups = hf.get_int("topk_group", default=None) or 1
    if experts % groups or top_groups > groups or (groups > 1 and chosen > experts // groups * top_groups):
        raise ValueError(
            f"{hf.file}: {experts} experts in n_group={groups} groups, of which topk_group={top_groups} are chosen, do "
            f"not give {chosen} experts to each token."
        )
    renormalize, scale = (
        hf.get_bool("norm_topk_prob", default=False),
        hf.get_float("routed_scaling_factor", default=1.0),
    )
    if method != "noaux_tc" and renormalize:
        scale = 1.0  # the weights of DeepSeek 2 are either made to sum to 1 or scaled
    return Moe(
        act,
        width,
        experts,
        chosen,
        renormalize,
        shared=Mlp(act, width * count) if count else None,
        score=score,
        scale=scale,
        choice_bias=method == "noaux_tc",
        groups=groups,
        top_groups=top_groups if groups > 1 else 1,
        group_best=2 if method == "noaux_tc" and groups > 1 else 1,
    )


def dense_layers(hf: HFConfig) -> list[bool]:
    """Which layers have one MLP in place of experts."""
    first = hf.get_int("first_k_dense_replace", default=0, minimum=0)
    every = hf.get_int("moe_layer_freq", default=1)
    return [layer < first or layer % every != 0 for layer in range(hf.num_layers)]


def _latent_decoder(hf: HFConfig, attn: LatentAttn, experts: Moe | None, **others: Any) -> Decoder:
    norm = Norm("rms", hf.get_float("rms_norm_eps", minimum=0))
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), bias=hf.get_bool("mlp_bias", default=False))
    scale = others.pop("residual_scale", 1.0)
    blocks = tuple(
        LatentBlock(attn, mlp if experts is None or dense else experts, norm, scale) for dense in dense_layers(hf)
    )
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings, **others)


def deepseek(hf: HFConfig) -> Decoder:
    """DeepSeek-MoE: Llama with shared experts beside the chosen ones."""
    experts, dense = shared_and_routed(hf, method="greedy", score="softmax"), dense_layers(hf)
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"))

    def choose(layer: int, block: Block) -> Block:
        return replace(block, ffn=mlp) if dense[layer] else block

    return llama_like(hf, attn=attention_bias(hf), ffn=experts, per_layer=choose)


def deepseek_v2(hf: HFConfig) -> Decoder:
    """DeepSeek 2: experts by the softmax of all logits, from the best groups of them."""
    return _latent_decoder(hf, latent_attention(hf), shared_and_routed(hf, method="greedy", score="softmax"))


def deepseek_v3(hf: HFConfig) -> Decoder:
    """DeepSeek 3 (and R1, Kimi K2, Moonlight): sigmoid scores, with a bias that balances the choice."""
    attn = latent_attention(hf, interleaved=hf.get_bool("rope_interleave", default=True))
    return _latent_decoder(hf, attn, shared_and_routed(hf, method="noaux_tc", score="sigmoid"))


def minicpm3(hf: HFConfig) -> Decoder:
    """MiniCPM 3: latent attention without experts, with MiniCPM's multipliers."""
    return _latent_decoder(
        hf,
        latent_attention(hf, interleaved=False),
        None,
        residual_scale=hf.get_float("scale_depth") / math.sqrt(hf.num_layers),
        embed_scale=hf.get_float("scale_emb"),
        logit_scale=hf.get_float("dim_model_base", minimum=1) / hf.hidden_size,
    )


LATENT_NAMES = renames(
    {
        "model.layers.{i}.self_attn.q_proj.{p}": "blocks.{i}.attn.q.{p}",
        "model.layers.{i}.self_attn.q_a_proj.{p}": "blocks.{i}.attn.q_a.{p}",
        "model.layers.{i}.self_attn.q_a_layernorm.{p}": "blocks.{i}.attn.q_norm.{p}",
        "model.layers.{i}.self_attn.q_b_proj.{p}": "blocks.{i}.attn.q_b.{p}",
        "model.layers.{i}.self_attn.kv_a_proj_with_mqa.{p}": "blocks.{i}.attn.kv_a.{p}",
        "model.layers.{i}.self_attn.kv_a_layernorm.{p}": "blocks.{i}.attn.kv_norm.{p}",
        "model.layers.{i}.self_attn.kv_b_proj.{p}": "blocks.{i}.attn.kv_b.{p}",
    }
)
SHARED_NAMES = renames(
    {
        "model.layers.{i}.mlp.gate.e_score_correction_bias": "blocks.{i}.ffn.choice_bias",
        "model.layers.{i}.mlp.gate.{p}": "blocks.{i}.ffn.router.{p}",
        "model.layers.{i}.mlp.experts.{e}.gate_proj.weight": "blocks.{i}.ffn.experts.{e}.gate.weight",
        "model.layers.{i}.mlp.experts.{e}.up_proj.weight": "blocks.{i}.ffn.experts.{e}.up.weight",
        "model.layers.{i}.mlp.experts.{e}.down_proj.weight": "blocks.{i}.ffn.experts.{e}.down.weight",
        "model.layers.{i}.mlp.shared_experts.gate_proj.{p}": "blocks.{i}.ffn.shared.gate.{p}",
        "model.layers.{i}.mlp.shared_experts.up_proj.{p}": "blocks.{i}.ffn.shared.up.{p}",
        "model.layers.{i}.mlp.shared_experts.down_proj.{p}": "blocks.{i}.ffn.shared.down.{p}",
    }
)
_MODULES = "vllm.model_executor.models.families.latent_block"
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}

DEEPSEEK = Family(
    deepseek,
    SHARED_NAMES + NAMES,
    harmless=ROTARY_FREQUENCIES,
    facts=Facts(NO_WINDOWS.windows, defaults=_DEFAULTS),
)
DEEPSEEK_V2 = Family(
    deepseek_v2,
    LATENT_NAMES + SHARED_NAMES + NAMES,
    harmless=ROTARY_FREQUENCIES,
    facts=Facts(NO_WINDOWS.windows, wide_range=True),
    modules=_MODULES,
)
DEEPSEEK_V3 = Family(
    deepseek_v3,
    LATENT_NAMES + SHARED_NAMES + NAMES,
    harmless=ROTARY_FREQUENCIES,
    facts=NO_WINDOWS,
    modules=_MODULES,
    extra_layers="model.layers.{i}.",
)
MINICPM3 = Family(minicpm3, LATENT_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS, modules=_MODULES)
