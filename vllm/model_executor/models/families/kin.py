"""Nearer and further kin of Llama: StableLM, Command-R, OLMo, Granite, GLM, Gemma 3, SmolLM 3 and others."""

from __future__ import annotations

from dataclasses import replace

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.models.families.llama import (
    GEMMA2_NAMES,
    NAMES,
    NO_WINDOWS,
    PHI3_NAMES,
    ROTARY_FREQUENCIES,
    attention_bias,
    llama_like,
    rope_of,
    windows_of,
)
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Block, Decoder, HeadNorm, Layout, Mlp, Norm, layer_norm


def _rms(hf: HFConfig, offset: float = 0.0) -> Norm:
    return Norm("rms", hf.get_float("rms_norm_eps", minimum=0), offset=offset)


def stablelm(hf: HFConfig) -> Decoder:
    """StableLM: LayerNorm, partial rotation, sequential or parallel branches, a norm for each head in the 12B."""
    norm = layer_norm(hf.get_float("layer_norm_eps", "norm_eps", minimum=0))
    own = Norm("layer", norm.eps) if hf.get_bool("qk_layernorm", default=False) else None
    return llama_like(
        hf,
        norm=norm,
        attn={
            "qkv_bias": hf.get_bool("use_qkv_bias", default=False),
            "qk_norm": own,
            "qk_norm_over": HeadNorm.EACH if own else HeadNorm.HEAD,
        },
        layout=Layout.PARALLEL_SHARED if hf.get_bool("use_parallel_residual", default=False) else Layout.PRE,
    )


def cohere(hf: HFConfig) -> Decoder:
    """Command-R and R+: one norm for both branches, interleaved rotation, scaled logits; head norms in R+."""
    norm = Norm("layer", hf.get_float("layer_norm_eps", minimum=0))
    own = norm if hf.get_bool("use_qk_norm", default=False) else None
    return llama_like(
        hf,
        norm=norm,
        attn={
            **attention_bias(hf),
            "rope": rope_of(hf, interleaved=True),
            "qk_norm": own,
            "qk_norm_over": HeadNorm.EACH if own else HeadNorm.HEAD,
        },
        layout=Layout.PARALLEL_SHARED,
        logit_scale=hf.get_float("logit_scale"),
    )


def cohere2(hf: HFConfig) -> Decoder:
    """Command R7B and Command A: windows on three of four layers; the others have no positions."""

    def unplaced(_: int, block: Block) -> Block:
        return block if block.attn.window is not None else replace(block, attn=replace(block.attn, rope=None))

    return llama_like(
        hf,
        norm=Norm("layer", hf.get_float("layer_norm_eps", minimum=0)),
        attn={**attention_bias(hf), "rope": rope_of(hf, interleaved=True)},
        layout=Layout.PARALLEL_SHARED,
        windows=windows_of(hf),
        per_layer=unplaced,
        logit_scale=hf.get_float("logit_scale"),
    )


def olmo(hf: HFConfig) -> Decoder:
    """OLMo 1: norms without weights, queries, keys and values clipped if the config says so."""
    clip = hf.get_float("clip_qkv", default=None)
    return llama_like(hf, norm=layer_norm(1e-5, affine=False), attn={**attention_bias(hf), "clip_qkv": clip})


def olmo2(hf: HFConfig) -> Decoder:
    """OLMo 2: each branch's output is normalised, and all queries and all keys of a token together."""
    attn = {**attention_bias(hf), "qk_norm": _rms(hf), "qk_norm_over": HeadNorm.ALL}
    return llama_like(hf, attn=attn, layout=Layout.BRANCH)


def granite(hf: HFConfig) -> Decoder:
    """Granite 3 dense: Llama with four multipliers."""
    mlp_bias = hf.get_bool("mlp_bias", default=False)
    return llama_like(
        hf,
        attn={**attention_bias(hf), "scale": hf.get_float("attention_multiplier", default=1.0)},
        ffn=Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), bias=mlp_bias),
        residual_scale=hf.get_float("residual_multiplier", default=1.0),
        embed_scale=hf.get_float("embedding_multiplier", default=1.0),
        logit_scale=1.0 / hf.get_float("logits_scaling", default=1.0, minimum=1e-6),
    )


def glm(hf: HFConfig) -> Decoder:
    """GLM-4 9B and GLM-Edge: interleaved partial rotation, biased queries, keys and values."""
    bias = hf.get_bool("attention_bias", default=False)
    return llama_like(hf, attn={"rope": rope_of(hf, interleaved=True), "qkv_bias": bias})


def glm4(hf: HFConfig) -> Decoder:
    """GLM-4 0414: the same with norms behind the branches too."""
    bias = hf.get_bool("attention_bias", default=False)
    return llama_like(hf, attn={"rope": rope_of(hf, interleaved=True), "qkv_bias": bias}, layout=Layout.SANDWICH)


def gemma3(hf: HFConfig) -> Decoder:
    """Gemma 3, text: Gemma 2 with head norms in place of soft caps, another rotation in layers with a window."""
    local = rope_of(hf, layer_type="sliding_attention")
    kinds = hf.layer_types

    def placed(layer: int, block: Block) -> Block:
        return replace(block, attn=replace(block.attn, rope=local)) if kinds[layer] == "sliding_attention" else block

    return llama_like(
        hf,
        norm=_rms(hf, offset=1.0),
        attn={
            **attention_bias(hf),
            "qk_norm": _rms(hf, offset=1.0),
            "scale": hf.get_float("query_pre_attn_scalar", minimum=1e-6) ** -0.5,
            "softcap": hf.get_float("attn_logit_softcapping", default=None),
        },
        act=hf.get_str("hidden_activation", "hidden_act"),
        layout=Layout.SANDWICH,
        windows=windows_of(hf),
        per_layer=placed,
        embed_scale=hf.hidden_size**0.5,
        logit_softcap=hf.get_float("final_logit_softcapping", default=None),
    )


STABLELM_NAMES = renames(
    {
        "model.layers.{i}.self_attn.q_layernorm.norms.{e}.weight": "blocks.{i}.attn.q_norm.{e}.weight",
        "model.layers.{i}.self_attn.k_layernorm.norms.{e}.weight": "blocks.{i}.attn.k_norm.{e}.weight",
    }
)
OLMO2_NAMES = renames(
    {
        "model.layers.{i}.post_attention_layernorm.{p}": "blocks.{i}.norms.0.{p}",
        "model.layers.{i}.post_feedforward_layernorm.{p}": "blocks.{i}.norms.1.{p}",
    }
)
GLM4_NAMES = renames(
    {
        "model.layers.{i}.post_self_attn_layernorm.{p}": "blocks.{i}.norms.1.{p}",
        "model.layers.{i}.post_attention_layernorm.{p}": "blocks.{i}.norms.2.{p}",
        "model.layers.{i}.post_mlp_layernorm.{p}": "blocks.{i}.norms.3.{p}",
    }
)

_STABLELM_FACTS = Facts(Windows.NONE, defaults={"tie_word_embeddings": False})  # also of older types
STABLELM = Family(stablelm, STABLELM_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=_STABLELM_FACTS)
COHERE = Family(cohere, NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS)
COHERE2 = Family(cohere2, NAMES, harmless=ROTARY_FREQUENCIES, facts=Facts(window_pattern=4))
OLMO = Family(olmo, NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS)
OLMO2 = Family(olmo2, OLMO2_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS)
GRANITE = Family(granite, NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS)
GLM = Family(glm, PHI3_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS)
GLM4 = Family(
    glm4,
    GLM4_NAMES + PHI3_NAMES + NAMES,
    harmless=ROTARY_FREQUENCIES,
    facts=replace(NO_WINDOWS, wide_range=True),
)
GEMMA3 = Family(
    gemma3,
    GEMMA2_NAMES + NAMES,
    harmless=ROTARY_FREQUENCIES,
    facts=Facts(window_pattern=6, wide_range=True, length_has_scaling=True),
)
