"""Llama and the families that are Llama up to a few fields: Mistral, Mixtral, Qwen 2 and 3, Gemma 1 and 2, Phi-3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.rope import scaling_from_params
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Attn, Block, Decoder, Layout, Mlp, Moe, Norm, Rope

NAMES = renames(
    {
        "model.embed_tokens.{p}": "embed.{p}",
        "model.norm.{p}": "norm.{p}",
        "lm_head.{p}": "head.{p}",
        "model.layers.{i}.input_layernorm.{p}": "blocks.{i}.norms.0.{p}",
        "model.layers.{i}.post_attention_layernorm.{p}": "blocks.{i}.norms.1.{p}",
        "model.layers.{i}.self_attn.q_proj.{p}": "blocks.{i}.attn.q.{p}",
        "model.layers.{i}.self_attn.k_proj.{p}": "blocks.{i}.attn.k.{p}",
        "model.layers.{i}.self_attn.v_proj.{p}": "blocks.{i}.attn.v.{p}",
        "model.layers.{i}.self_attn.o_proj.{p}": "blocks.{i}.attn.o.{p}",
        "model.layers.{i}.self_attn.q_norm.{p}": "blocks.{i}.attn.q_norm.{p}",
        "model.layers.{i}.self_attn.k_norm.{p}": "blocks.{i}.attn.k_norm.{p}",
        "model.layers.{i}.mlp.gate_proj.{p}": "blocks.{i}.ffn.gate.{p}",
        "model.layers.{i}.mlp.up_proj.{p}": "blocks.{i}.ffn.up.{p}",
        "model.layers.{i}.mlp.down_proj.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
ROTARY_FREQUENCIES = ("model.rotary_emb.inv_freq", "model.layers.{i}.self_attn.rotary_emb.inv_freq")


def rope_of(hf: HFConfig, *, interleaved: bool = False, layer_type: str = "full_attention") -> Rope:
    """The rotary embedding that a config describes for layers of a type."""
    settings = hf.rope_for(layer_type)
    scaling = scaling_from_params(settings.kind, settings.params, hf.max_position_embeddings)
    return Rope(int(hf.head_dim * settings.partial_rotary_factor), settings.theta, interleaved, scaling)


def windows_of(hf: HFConfig) -> tuple[int | None, ...]:
    """Each layer's window. Raises ValueError for layers of a kind that is not known, and for windows without a size."""
    known = {"full_attention": None, "sliding_attention": hf.sliding_window}
    for kind in hf.layer_types:
        if kind not in known:
            raise ValueError(
                f"{hf.file}: layers of type {kind!r} are not supported, expected one of {', '.join(known)}."
            )
    if "sliding_attention" in hf.layer_types and hf.sliding_window is None:
        switch = " and `use_sliding_window` true" if hf.facts.windows is Windows.ON_REQUEST else ""
        raise ValueError(
            f"{hf.file}: `layer_types` has layers of type 'sliding_attention', but there is no `sliding_window`, which "
            f"says how many tokens they see. Set `sliding_window`{switch}, or name these layers 'full_attention'."
        )
    return tuple(known[kind] for kind in hf.layer_types)


def llama_like(
    hf: HFConfig,
    *,
    norm: Norm | None = None,
    attn: dict[str, Any] | None = None,
    ffn: Mlp | Moe | None = None,
    act: str | None = None,
    layout: Layout = Layout.PRE,
    windows: tuple[int | None, ...] | None = None,
    per_layer: Callable[[int, Block], Block] | None = None,
    residual_scale: float = 1.0,
    **decoder: Any,
) -> Decoder:
    """A Llama decoder with some fields replaced: `attn` those of Attn, `decoder` those of Decoder.

    per_layer: (layer, its block so far) -> its block, where layers differ in more than their windows.
    """
    norm = norm or Norm("rms", hf.get_float("rms_norm_eps", minimum=0))
    ffn = ffn or Mlp(act or hf.get_str("hidden_act"), hf.get_int("intermediate_size"))
    sizes = {"heads": hf.num_heads, "kv_heads": hf.num_kv_heads, "head_dim": hf.head_dim}
    fields: dict[str, Any] = {**sizes, **(attn or {})}
    attention = Attn(**fields) if "rope" in fields else Attn(**fields, rope=rope_of(hf))
    block = Block(attention, ffn, norm, layout, residual_scale)
    windows = windows or (None,) * hf.num_layers
    blocks = [replace(block, attn=replace(attention, window=window)) for window in windows]
    return Decoder(
        hf.vocab_size,
        hf.hidden_size,
        tuple(block if per_layer is None else per_layer(i, block) for i, block in enumerate(blocks)),
        norm,
        hf.tie_word_embeddings,
        **decoder,
    )


def attention_bias(hf: HFConfig) -> dict[str, Any]:
    """Biases of all four products, or of none."""
    bias = hf.get_bool("attention_bias", "bias", default=False)
    return {"qkv_bias": bias, "out_bias": bias}


def llama(hf: HFConfig) -> Decoder:
    """Llama 1 to 3 (and Yi, ...)."""
    ffn = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), bias=hf.get_bool("mlp_bias", default=False))
    return llama_like(hf, attn=attention_bias(hf), ffn=ffn)


def mistral(hf: HFConfig) -> Decoder:
    """Mistral: a sliding window on every layer, if the config has one."""
    return llama_like(hf, windows=windows_of(hf))


def mixtral(hf: HFConfig) -> Decoder:
    """Mixtral: Mistral with a mixture of experts in each block."""
    experts, chosen = hf.get_int("num_local_experts"), hf.get_int("num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"{hf.file}: num_experts_per_tok is {chosen}, expected at most the {experts} local experts.")
    ffn = Moe(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), experts, chosen)
    return llama_like(hf, ffn=ffn, windows=windows_of(hf))


def qwen2(hf: HFConfig) -> Decoder:
    """Qwen 2 and 2.5: biased q, k and v; windows on the upper layers if `use_sliding_window`."""
    return llama_like(hf, attn={"qkv_bias": True}, windows=windows_of(hf))


def qwen3(hf: HFConfig) -> Decoder:
    """Qwen 3: each query and key head is normalised."""
    attn = {**attention_bias(hf), "qk_norm": Norm("rms", hf.get_float("rms_norm_eps", minimum=0))}
    return llama_like(hf, attn=attn, windows=windows_of(hf))


def gemma(hf: HFConfig) -> Decoder:
    """Gemma 1: scaled embeddings, norm weights stored minus 1. Its "gelu" has always meant the tanh approximation."""
    act = hf.get_str("hidden_activation", "hidden_act")
    return llama_like(
        hf,
        norm=Norm("rms", hf.get_float("rms_norm_eps", minimum=0), offset=1.0),
        attn=attention_bias(hf),
        act="gelu_pytorch_tanh" if act == "gelu" else act,
        embed_scale=hf.hidden_size**0.5,
    )


def gemma2(hf: HFConfig) -> Decoder:
    """Gemma 2: norms before and after each branch, alternating windows, soft caps."""
    scale = hf.get_float("query_pre_attn_scalar", minimum=1e-6) ** -0.5
    return llama_like(
        hf,
        norm=Norm("rms", hf.get_float("rms_norm_eps", minimum=0), offset=1.0),
        attn={
            **attention_bias(hf),
            "scale": scale,
            "softcap": hf.get_float("attn_logit_softcapping", default=None),
        },
        act=hf.get_str("hidden_activation", "hidden_act"),
        layout=Layout.SANDWICH,
        windows=windows_of(hf),
        embed_scale=hf.hidden_size**0.5,
        logit_softcap=hf.get_float("final_logit_softcapping", default=None),
    )


def phi3(hf: HFConfig) -> Decoder:
    """Phi-3: fused checkpoints, LongRoPE, a window on every layer if the config has one."""
    return llama_like(hf, windows=windows_of(hf))


MIXTRAL_NAMES = renames(
    {
        "model.layers.{i}.block_sparse_moe.gate.{p}": "blocks.{i}.ffn.router.{p}",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight": "blocks.{i}.ffn.experts.{e}.gate.weight",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight": "blocks.{i}.ffn.experts.{e}.up.weight",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight": "blocks.{i}.ffn.experts.{e}.down.weight",
        # as llm-compressor and GPTQModel name them with transformers 5
        **{
            f"model.layers.{{i}}.{moe}.experts.{{e}}.{x}_proj.weight": f"blocks.{{i}}.ffn.experts.{{e}}.{x}.weight"
            for moe in ("block_sparse_moe", "mlp")
            for x in ("gate", "up", "down")
        },
        # the newer form of Hugging Face: experts stacked
        "model.layers.{i}.mlp.gate.{p}": "blocks.{i}.ffn.router.{p}",
        "model.layers.{i}.mlp.experts.gate_up_proj": "blocks.{i}.ffn.experts.gate_up",
        "model.layers.{i}.mlp.experts.down_proj": "blocks.{i}.ffn.experts.down",
    }
)
GEMMA2_NAMES = renames(
    {
        "model.layers.{i}.post_attention_layernorm.{p}": "blocks.{i}.norms.1.{p}",
        "model.layers.{i}.pre_feedforward_layernorm.{p}": "blocks.{i}.norms.2.{p}",
        "model.layers.{i}.post_feedforward_layernorm.{p}": "blocks.{i}.norms.3.{p}",
    }
)
PHI3_NAMES = renames(
    {
        "model.layers.{i}.self_attn.qkv_proj.{p}": "blocks.{i}.attn.qkv.{p}",
        "model.layers.{i}.mlp.gate_up_proj.{p}": "blocks.{i}.ffn.gate_up.{p}",
    }
)

NO_WINDOWS = Facts(Windows.NONE)
LLAMA = Family(llama, NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS)
MISTRAL = Family(mistral, NAMES, harmless=ROTARY_FREQUENCIES)
MIXTRAL = Family(mixtral, MIXTRAL_NAMES + NAMES, harmless=ROTARY_FREQUENCIES)
QWEN2 = Family(qwen2, NAMES, harmless=ROTARY_FREQUENCIES, facts=Facts(Windows.ON_REQUEST))
QWEN3 = Family(qwen3, NAMES, harmless=ROTARY_FREQUENCIES, facts=Facts(Windows.ON_REQUEST))
GEMMA = Family(gemma, NAMES, harmless=ROTARY_FREQUENCIES, facts=NO_WINDOWS)
GEMMA2 = Family(
    gemma2, GEMMA2_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=Facts(window_pattern=2, wide_range=True)
)
# "yarn" is an early name of Phi-3's scaling
PHI3 = Family(phi3, PHI3_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=Facts(rope_kinds={"yarn": "longrope"}))
