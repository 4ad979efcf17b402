"""The families with experts in their blocks: Qwen 2 and 3 MoE, OLMoE, Phi-3.5-MoE, DBRX, Granite MoE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.models.families.llama import (
    MIXTRAL_NAMES,
    NAMES,
    NO_WINDOWS,
    ROTARY_FREQUENCIES,
    attention_bias,
    llama_like,
    rope_of,
    windows_of,
)
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Block, Decoder, HeadNorm, Mlp, Moe, Norm, layer_norm


def experts_of(hf: HFConfig, hidden: str = "intermediate_size", **others: object) -> Moe:
    """The experts that a config describes; `hidden` names the field of their width."""
    experts = hf.get_int("num_local_experts", "num_experts", "moe_num_experts")
    chosen = hf.get_int("num_experts_per_tok", "moe_top_k", "moe_k")
    if chosen > experts:
        raise ValueError(f"{hf.file}: num_experts_per_tok is {chosen}, expected at most the {experts} experts.")
    return replace(Moe(hf.get_str("hidden_act"), hf.get_int(hidden), experts, chosen), **others)  # type: ignore[arg-type]


def _mixed(hf: HFConfig) -> Callable[[int, Block], Block]:
    """Layers that have one MLP in place of experts, as Qwen's configs say."""
    step = hf.get_int("decoder_sparse_step", default=1)
    plain = hf.get("mlp_only_layers", default=[])
    if not isinstance(plain, list):
        raise ValueError(f"{hf.file}: field `mlp_only_layers` is {plain!r}, expected a list of layers.")
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"))

    def choose(layer: int, block: Block) -> Block:
        return replace(block, ffn=mlp) if layer in plain or (layer + 1) % step else block

    return choose


def qwen2_moe(hf: HFConfig) -> Decoder:
    """Qwen 1.5 and 2 MoE: a gated shared expert beside the chosen ones."""
    shared = Mlp(hf.get_str("hidden_act"), hf.get_int("shared_expert_intermediate_size"))
    renormalize = hf.get_bool("norm_topk_prob", default=False)
    ffn = experts_of(hf, "moe_intermediate_size", renormalize=renormalize, shared=shared, shared_gate=True)
    bias = hf.get_bool("qkv_bias", default=True)
    return llama_like(hf, attn={"qkv_bias": bias}, ffn=ffn, windows=windows_of(hf), per_layer=_mixed(hf))


def qwen3_moe(hf: HFConfig) -> Decoder:
    """Qwen 3 MoE: Qwen 3 with experts."""
    attn = {**attention_bias(hf), "qk_norm": Norm("rms", hf.get_float("rms_norm_eps", minimum=0))}
    ffn = experts_of(hf, "moe_intermediate_size", renormalize=hf.get_bool("norm_topk_prob", default=False))
    return llama_like(hf, attn=attn, ffn=ffn, windows=windows_of(hf), per_layer=_mixed(hf))


def olmoe(hf: HFConfig) -> Decoder:
    """OLMoE: all queries and all keys of a token are normalised together."""
    attn = {
        **attention_bias(hf),
        "qk_norm": Norm("rms", hf.get_float("rms_norm_eps", minimum=0)),
        "qk_norm_over": HeadNorm.ALL,
        "clip_qkv": hf.get_float("clip_qkv", default=None),
    }
    return llama_like(hf, attn=attn, ffn=experts_of(hf, renormalize=hf.get_bool("norm_topk_prob", default=False)))


def phimoe(hf: HFConfig) -> Decoder:
    """Phi-3.5-MoE: LayerNorm, SparseMixer routing, a biased head."""
    norm = layer_norm(hf.get_float("rms_norm_eps", minimum=0))
    ffn = experts_of(hf, jitter=hf.get_float("router_jitter_noise", default=0.01, minimum=0))
    if ffn.top_k != 2:
        raise ValueError(f"{hf.file}: num_experts_per_tok is {ffn.top_k}, expected 2: these models' router takes two.")
    return llama_like(
        hf,
        norm=norm,
        attn=attention_bias(hf),
        ffn=ffn,
        windows=windows_of(hf),
        head_bias=hf.get_bool("lm_head_bias", default=False),
    )


def dbrx_kv_heads(hf: HFConfig) -> int:
    """They stand in the attention's own config."""
    heads: int = hf.nested("attn_config").get_int("kv_n_heads", default=1)
    return heads


def dbrx(hf: HFConfig) -> Decoder:
    """DBRX: LayerNorm without bias, clipped queries, keys and values, sixteen experts."""
    attention, own = hf.nested("attn_config"), hf.nested("ffn_config")
    name = "moe_normalize_expert_weights"  # null turns it off
    power = own.get_float(name, default=None) if name in own.raw else 1.0
    if power not in (None, 1.0):
        raise ValueError(f"{hf.file}: moe_normalize_expert_weights={power} is not supported, expected 1 or null.")
    act = own.nested("ffn_act_fn").get_str("name", default="silu")
    experts, chosen = own.get_int("moe_num_experts", default=4), own.get_int("moe_top_k", default=1)
    ffn = Moe(act, own.get_int("ffn_hidden_size", default=3584), experts, chosen, renormalize=power is not None)
    theta = attention.get_float("rope_theta", default=None, minimum=1e-6)
    rope = rope_of(hf)
    return llama_like(
        hf,
        norm=Norm("layer", 1e-5),
        attn={
            "rope": rope if theta is None else replace(rope, theta=theta),
            "clip_qkv": attention.get_float("clip_qkv", default=None),
        },
        ffn=ffn,
    )


def granite_moe(hf: HFConfig) -> Decoder:
    """Granite 3 MoE: Granite with experts."""
    return llama_like(
        hf,
        attn={**attention_bias(hf), "scale": hf.get_float("attention_multiplier", default=1.0)},
        ffn=experts_of(hf),
        residual_scale=hf.get_float("residual_multiplier", default=1.0),
        embed_scale=hf.get_float("embedding_multiplier", default=1.0),
        logit_scale=1.0 / hf.get_float("logits_scaling", default=1.0, minimum=1e-6),
    )


QWEN_NAMES = renames(
    {
        "model.layers.{i}.mlp.gate.{p}": "blocks.{i}.ffn.router.{p}",
        "model.layers.{i}.mlp.experts.{e}.gate_proj.weight": "blocks.{i}.ffn.experts.{e}.gate.weight",
        "model.layers.{i}.mlp.experts.{e}.up_proj.weight": "blocks.{i}.ffn.experts.{e}.up.weight",
        "model.layers.{i}.mlp.experts.{e}.down_proj.weight": "blocks.{i}.ffn.experts.{e}.down.weight",
        "model.layers.{i}.mlp.shared_expert.gate_proj.{p}": "blocks.{i}.ffn.shared.gate.{p}",
        "model.layers.{i}.mlp.shared_expert.up_proj.{p}": "blocks.{i}.ffn.shared.up.{p}",
        "model.layers.{i}.mlp.shared_expert.down_proj.{p}": "blocks.{i}.ffn.shared.down.{p}",
        "model.layers.{i}.mlp.shared_expert_gate.{p}": "blocks.{i}.ffn.shared_gate.{p}",
    }
)
DBRX_NAMES = (
    renames(
        {
            "transformer.wte.{p}": "embed.{p}",
            "transformer.norm_f.{p}": "norm.{p}",
            "lm_head.{p}": "head.{p}",
            "transformer.blocks.{i}.norm_attn_norm.norm_1.{p}": "blocks.{i}.norms.0.{p}",
            "transformer.blocks.{i}.norm_attn_norm.norm_2.{p}": "blocks.{i}.norms.1.{p}",
            "transformer.blocks.{i}.norm_attn_norm.attn.Wqkv.{p}": "blocks.{i}.attn.qkv.{p}",
            "transformer.blocks.{i}.norm_attn_norm.attn.out_proj.{p}": "blocks.{i}.attn.o.{p}",
            "transformer.blocks.{i}.ffn.router.layer.{p}": "blocks.{i}.ffn.router.{p}",
        }
    )
    + renames(
        {
            "transformer.blocks.{i}.ffn.experts.mlp.w1": "blocks.{i}.ffn.experts.gate",
            "transformer.blocks.{i}.ffn.experts.mlp.v1": "blocks.{i}.ffn.experts.up",
        },
        WeightLayout.STACKED,
    )
    + renames(
        {"transformer.blocks.{i}.ffn.experts.mlp.w2": "blocks.{i}.ffn.experts.down"}, WeightLayout.STACKED_TRANSPOSED
    )
)
GRANITE_MOE_NAMES = renames(
    {
        "model.layers.{i}.block_sparse_moe.router.layer.{p}": "blocks.{i}.ffn.router.{p}",
        "model.layers.{i}.block_sparse_moe.input_linear.weight": "blocks.{i}.ffn.experts.gate_up",
        "model.layers.{i}.block_sparse_moe.output_linear.weight": "blocks.{i}.ffn.experts.down",
    }
)


def _qwen2_moe_window(hf: HFConfig, layer: int) -> bool:
    """Every second of the layers below `max_window_layers`."""
    end: int = hf.get_int("max_window_layers", default=0, minimum=0)
    return layer % 2 == 0 and layer < end


_QWEN2_MOE = Facts(Windows.ON_REQUEST, has_window=_qwen2_moe_window)
_QWEN3_MOE = Facts(Windows.ON_REQUEST, has_window=lambda hf, layer: True)
QWEN2_MOE = Family(qwen2_moe, QWEN_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=_QWEN2_MOE)
QWEN3_MOE = Family(qwen3_moe, QWEN_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=_QWEN3_MOE)
OLMOE = Family(olmoe, QWEN_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS)
# as transformers calls it in memory, and so peft in files
PHIMOE_NAMES = renames({"model.layers.{i}.mlp.router.{p}": "blocks.{i}.ffn.router.{p}"})
PHIMOE = Family(phimoe, PHIMOE_NAMES + MIXTRAL_NAMES + NAMES, harmless=ROTARY_FREQUENCIES)
DBRX = Family(dbrx, DBRX_NAMES, "transformer.", facts=Facts(Windows.NONE, kv_heads=dbrx_kv_heads))
GRANITE_MOE = Family(granite_moe, GRANITE_MOE_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS)
