"""The families that transformers does not have: their makers publish code of their own, which is not needed here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.rope import LinearScaling, PromptScaling
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.models.families.llama import (
    NAMES,
    NO_WINDOWS,
    ROTARY_FREQUENCIES,
    llama_like,
    rope_of,
)
from vllm.model_executor.models.families.moe import experts_of
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import (
    Alibi,
    Attn,
    Block,
    Decoder,
    LearnedPositions,
    LogTemperature,
    Mlp,
    Norm,
    Rope,
    layer_norm,
)

# What their configuration classes say about fields left out.
_LLAMA_DEFAULTS: dict[str, Any] = {"tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6}


def plain_llama(hf: HFConfig) -> Decoder:
    """Aquila, Xverse: Llama without any bias."""
    return llama_like(hf)


def internlm(hf: HFConfig) -> Decoder:
    """InternLM 1: Llama, with biases in the attention of the 7B."""
    bias = hf.get_bool("bias", default=True)
    return llama_like(hf, attn={"qkv_bias": bias, "out_bias": bias})


def internlm2(hf: HFConfig) -> Decoder:
    """InternLM 2 and 2.5: queries, keys and values are stored by groups."""
    bias = hf.get_bool("bias", default=False)
    return llama_like(hf, attn={"qkv_bias": bias, "out_bias": bias})


def internlm3(hf: HFConfig) -> Decoder:
    """InternLM 3: biases by two fields."""
    bias = hf.get_bool("bias", default=False)
    ffn = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), bias=bias)
    return llama_like(hf, attn={"qkv_bias": hf.get_bool("qkv_bias", default=False), "out_bias": bias}, ffn=ffn)


def orion(hf: HFConfig) -> Decoder:
    """Orion: Llama with LayerNorm."""
    return llama_like(hf, norm=layer_norm(hf.get_float("rms_norm_eps", minimum=0)))


def exaone(hf: HFConfig) -> Decoder:
    """EXAONE 3: Llama under other names. Its norms are RMS, whatever the field is called."""
    return llama_like(
        hf, norm=Norm("rms", hf.get_float("layer_norm_epsilon", minimum=0)), act=hf.get_str("activation_function")
    )


def baichuan_rotary(hf: HFConfig) -> Decoder:
    """Baichuan 1 7B: Llama with fused projections."""
    return llama_like(hf)


_ROTARY_BAICHUAN = 4096  # width of the 7B, the only sign by which it can be told from the 13B
_BAICHUAN_2_VOCABULARY = 100_000  # tokens: the first has 64,000, the second 125,696 and those that are added


def baichuan(hf: HFConfig) -> Decoder:
    """Baichuan 1 13B and Baichuan 2: ALiBi in the 13B; the second's head has rows of unit length."""
    rotary = hf.hidden_size == _ROTARY_BAICHUAN
    return llama_like(
        hf,
        attn={} if rotary else {"rope": None, "alibi": Alibi()},
        unit_head_rows=hf.vocab_size > _BAICHUAN_2_VOCABULARY,
    )


def minicpm(hf: HFConfig) -> Decoder:
    """MiniCPM 1, 2, S and 4, also with experts: Llama with scaled embeddings, branches and logits. The activation of S
    leaves what is above a threshold.
    """
    depth, act = hf.get_float("scale_depth", default=1.0), hf.get_str("hidden_act")
    return llama_like(
        hf,
        act=f"{act} {hf.get_float('hidden_act_param', default=0.0)!r}" if act == "fatrelu" else act,
        ffn=experts_of(hf) if hf.get_int("num_experts", default=0, minimum=0) else None,
        residual_scale=depth * hf.num_layers**-0.5,
        embed_scale=hf.get_float("scale_emb", default=1.0),
        logit_scale=hf.get_float("dim_model_base", default=1.0, minimum=1e-6) / hf.hidden_size,
    )


def qwen(hf: HFConfig) -> Decoder:
    """Qwen 1. `intermediate_size` counts gate and up together. Beyond `seq_length` the base of rotations grows with the
    prompt, and queries with their position.
    """
    known, rope = qwen_known(hf), rope_of(hf)
    logn = hf.get_bool("use_logn_attn", default=True)
    return llama_like(
        hf,
        norm=Norm("rms", hf.get_float("layer_norm_epsilon", minimum=0)),
        attn={
            "qkv_bias": True,
            "rope": rope if qwen_known_prompt(hf) is None else replace(rope, scaling=PromptScaling(known)),
            "temperature": LogTemperature(known) if logn else None,
        },
        ffn=Mlp("silu", hf.get_int("intermediate_size", "ffn_hidden_size") // 2),
    )


def qwen_known(hf: HFConfig) -> int:
    """The length that the model was trained with."""
    known: int = hf.get_int("seq_length", default=8192, minimum=2)
    return known


def qwen_known_prompt(hf: HFConfig) -> int | None:
    """As of `Facts`."""
    return qwen_known(hf) if hf.get_bool("use_dynamic_ntk", default=True) else None


def chatglm_kv_heads(hf: HFConfig) -> int:
    """Groups, if there are any."""
    if not hf.get_bool("multi_query_attention", default=False):
        return hf.num_heads
    groups: int = hf.get_int("multi_query_group_num")
    return groups


def chatglm(hf: HFConfig) -> Decoder:
    """ChatGLM 2 and 3, GLM-4 9B and CodeGeeX in their original format: half of each head is rotated. `rope_ratio`
    multiplies the base, but in ChatGLM 2, whose config says so by its name alone, it divides positions.
    """
    for name, wanted in (
        ("multi_query_attention", True),
        ("post_layer_norm", True),
        ("rmsnorm", True),
        ("apply_residual_connection_post_layernorm", False),
    ):
        if hf.get_bool(name, default=False if name == "multi_query_attention" else wanted) is not wanted:
            raise ValueError(f"{hf.file}: a ChatGLM model with {name}={not wanted} is not supported.")
    if hf.is_multimodal:
        raise ValueError(f"{hf.file}: ChatGLM models that see images are not supported.")
    bias = hf.get_bool("add_bias_linear", default=False)
    ratio = hf.get_float("rope_ratio", default=1.0, minimum=1e-6)
    second = "chatglm2" in hf.get_str("_name_or_path", default="").lower()
    rope = Rope(
        hf.head_dim // 2,
        10000.0 if second else 10000.0 * ratio,
        interleaved=hf.get_bool("original_rope", default=True),
        scaling=LinearScaling(ratio) if second and ratio != 1.0 else None,
    )
    return llama_like(
        hf,
        norm=Norm("rms", hf.get_float("layernorm_epsilon", minimum=0)),
        attn={
            "rope": rope,
            "qkv_bias": hf.get_bool("add_qkv_bias", default=False) or bias,
            "out_bias": bias,
        },
        ffn=Mlp("silu", hf.get_int("ffn_hidden_size"), bias=bias),
    )


def jais(hf: HFConfig) -> Decoder:
    """Jais: GPT-2 with ALiBi, a gated MLP, and scales of maximal update parametrization."""
    norm = layer_norm(hf.get_float("layer_norm_epsilon", minimum=0))
    by_dim = hf.get_bool("mup_scale_qk_dot_by_d", "scale_qk_dot_by_d", default=False)
    placed = hf.get_str("position_embedding_type", default="learned")
    if placed not in ("learned", "alibi"):
        raise ValueError(f"{hf.file}: position_embedding_type={placed!r} is not supported, expected learned or alibi.")
    attn = Attn(
        hf.num_heads,
        hf.num_heads,
        hf.head_dim,
        scale=1.0 / hf.head_dim if by_dim else None,
        qkv_bias=True,
        out_bias=True,
        alibi=_jais_alibi(hf) if placed == "alibi" else None,
    )
    inner = hf.get_int("n_inner", default=None) or 4 * hf.hidden_size
    act = hf.get_str("activation_function")
    mlp = Mlp("silu" if act == "swiglu" else act, inner, gated=act == "swiglu", bias=True)
    width = hf.get_float("width_scale", default=None)
    if width is None:
        width = hf.get_float("mup_width_scale", default=1.0) * hf.get_float("mup_output_alpha", default=1.0)
    return Decoder(
        hf.vocab_size,
        hf.hidden_size,
        (Block(attn, mlp, norm),) * hf.num_layers,
        norm,
        hf.tie_word_embeddings,
        embed_scale=hf.get_float("embeddings_scale", "mup_embeddings_scale", default=1.0),
        positions=LearnedPositions(hf.get_int("n_positions")) if placed == "learned" else None,
        logit_scale=width,
        scale_positions=placed == "learned",
    )


def _jais_alibi(hf: HFConfig) -> Alibi:
    """Distances may be divided by a factor, or by how much longer the sequence is than those of training: then as it
    is when a query's token comes, which is what Jais computes when it generates token by token.
    """
    scaling = hf.nested("alibi_scaling")
    if not scaling.raw:
        return Alibi()
    factor, known = (
        scaling.get_float("factor", default=None, minimum=1e-6),
        scaling.get_int("train_seq_len", default=None),
    )
    if scaling.get_str("type", default="linear") != "linear" or (factor is None and known is None):
        raise ValueError(
            f"{hf.file}: alibi_scaling={scaling.raw} is not supported, expected a linear one with a factor or a "
            'train_seq_len. To run the model unscaled, as far as it was trained: hf_overrides={"alibi_scaling": null}.'
        )
    return Alibi(known=known) if factor is None else Alibi(factor=1.0 / float(factor))


INTERNLM2_NAMES = renames(
    {"model.layers.{i}.attention.wqkv.{p}": "blocks.{i}.attn.qkv.{p}"}, WeightLayout.QKV_BY_GROUP
) + renames(
    {
        "model.tok_embeddings.{p}": "embed.{p}",
        "model.norm.{p}": "norm.{p}",
        "output.{p}": "head.{p}",
        "model.layers.{i}.attention_norm.{p}": "blocks.{i}.norms.0.{p}",
        "model.layers.{i}.ffn_norm.{p}": "blocks.{i}.norms.1.{p}",
        "model.layers.{i}.attention.wo.{p}": "blocks.{i}.attn.o.{p}",
        "model.layers.{i}.feed_forward.w1.{p}": "blocks.{i}.ffn.gate.{p}",
        "model.layers.{i}.feed_forward.w3.{p}": "blocks.{i}.ffn.up.{p}",
        "model.layers.{i}.feed_forward.w2.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
EXAONE_NAMES = renames(
    {
        "transformer.wte.{p}": "embed.{p}",
        "transformer.ln_f.{p}": "norm.{p}",
        "lm_head.{p}": "head.{p}",
        "transformer.h.{i}.ln_1.{p}": "blocks.{i}.norms.0.{p}",
        "transformer.h.{i}.ln_2.{p}": "blocks.{i}.norms.1.{p}",
        "transformer.h.{i}.attn.attention.q_proj.{p}": "blocks.{i}.attn.q.{p}",
        "transformer.h.{i}.attn.attention.k_proj.{p}": "blocks.{i}.attn.k.{p}",
        "transformer.h.{i}.attn.attention.v_proj.{p}": "blocks.{i}.attn.v.{p}",
        "transformer.h.{i}.attn.attention.out_proj.{p}": "blocks.{i}.attn.o.{p}",
        "transformer.h.{i}.mlp.c_fc_0.{p}": "blocks.{i}.ffn.gate.{p}",
        "transformer.h.{i}.mlp.c_fc_1.{p}": "blocks.{i}.ffn.up.{p}",
        "transformer.h.{i}.mlp.c_proj.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
BAICHUAN_NAMES = renames({"model.layers.{i}.self_attn.W_pack.{p}": "blocks.{i}.attn.qkv.{p}"})
MINICPM_NAMES = renames(
    {
        "model.layers.{i}.mlp.gate.{p}": "blocks.{i}.ffn.router.{p}",
        "model.layers.{i}.mlp.experts.{e}.w1.weight": "blocks.{i}.ffn.experts.{e}.gate.weight",
        "model.layers.{i}.mlp.experts.{e}.w3.weight": "blocks.{i}.ffn.experts.{e}.up.weight",
        "model.layers.{i}.mlp.experts.{e}.w2.weight": "blocks.{i}.ffn.experts.{e}.down.weight",
    }
)
QWEN_NAMES = renames(
    {
        "transformer.wte.{p}": "embed.{p}",
        "transformer.ln_f.{p}": "norm.{p}",
        "lm_head.{p}": "head.{p}",
        "transformer.h.{i}.ln_1.{p}": "blocks.{i}.norms.0.{p}",
        "transformer.h.{i}.ln_2.{p}": "blocks.{i}.norms.1.{p}",
        "transformer.h.{i}.attn.c_attn.{p}": "blocks.{i}.attn.qkv.{p}",
        "transformer.h.{i}.attn.c_proj.{p}": "blocks.{i}.attn.o.{p}",
        "transformer.h.{i}.mlp.w2.{p}": "blocks.{i}.ffn.gate.{p}",
        "transformer.h.{i}.mlp.w1.{p}": "blocks.{i}.ffn.up.{p}",
        "transformer.h.{i}.mlp.c_proj.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
CHATGLM_NAMES = renames(
    {
        "transformer.embedding.word_embeddings.{p}": "embed.{p}",
        "transformer.encoder.final_layernorm.{p}": "norm.{p}",
        "transformer.output_layer.{p}": "head.{p}",
        "transformer.encoder.layers.{i}.input_layernorm.{p}": "blocks.{i}.norms.0.{p}",
        "transformer.encoder.layers.{i}.post_attention_layernorm.{p}": "blocks.{i}.norms.1.{p}",
        "transformer.encoder.layers.{i}.self_attention.query_key_value.{p}": "blocks.{i}.attn.qkv.{p}",
        "transformer.encoder.layers.{i}.self_attention.dense.{p}": "blocks.{i}.attn.o.{p}",
        "transformer.encoder.layers.{i}.mlp.dense_h_to_4h.{p}": "blocks.{i}.ffn.gate_up.{p}",
        "transformer.encoder.layers.{i}.mlp.dense_4h_to_h.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
JAIS_NAMES = renames(
    {
        "transformer.wte.{p}": "embed.{p}",
        "transformer.wpe.weight": "positions",
        "transformer.ln_f.{p}": "norm.{p}",
        "lm_head.{p}": "head.{p}",
        "transformer.h.{i}.ln_1.{p}": "blocks.{i}.norms.0.{p}",
        "transformer.h.{i}.ln_2.{p}": "blocks.{i}.norms.1.{p}",
    }
) + renames(
    {
        "transformer.h.{i}.attn.c_attn.{p}": "blocks.{i}.attn.qkv.{p}",
        "transformer.h.{i}.attn.c_proj.{p}": "blocks.{i}.attn.o.{p}",
        "transformer.h.{i}.mlp.c_fc2.{p}": "blocks.{i}.ffn.gate.{p}",
        "transformer.h.{i}.mlp.c_fc.{p}": "blocks.{i}.ffn.up.{p}",
        "transformer.h.{i}.mlp.c_proj.{p}": "blocks.{i}.ffn.down.{p}",
    },
    WeightLayout.TRANSPOSED,
)
_JAIS_BUFFERS = (
    "transformer.relative_pe.slopes",
    "transformer.h.{i}.attn.bias",
    "transformer.h.{i}.attn.masked_bias",
)

_LLAMA = Facts(Windows.NONE, defaults=_LLAMA_DEFAULTS)
PLAIN = Family(plain_llama, NAMES, harmless=ROTARY_FREQUENCIES, facts=_LLAMA)
INTERNLM = Family(internlm, NAMES, harmless=ROTARY_FREQUENCIES, facts=_LLAMA)
INTERNLM2 = Family(internlm2, INTERNLM2_NAMES, harmless=ROTARY_FREQUENCIES, facts=_LLAMA)
INTERNLM3 = Family(internlm3, NAMES, harmless=ROTARY_FREQUENCIES, facts=_LLAMA)
ORION = Family(orion, NAMES, harmless=ROTARY_FREQUENCIES, facts=_LLAMA)
EXAONE = Family(
    exaone,
    EXAONE_NAMES,
    "transformer.",
    ("transformer.rotary.inv_freq",),
    Facts(
        Windows.NONE,
        defaults={"tie_word_embeddings": False, "activation_function": "silu", "layer_norm_epsilon": 1e-6},
    ),
)
BAICHUAN_ROTARY = Family(baichuan_rotary, BAICHUAN_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=_LLAMA)
BAICHUAN = Family(baichuan, BAICHUAN_NAMES + NAMES, harmless=ROTARY_FREQUENCIES, facts=_LLAMA)
MINICPM = Family(
    minicpm,
    MINICPM_NAMES + NAMES,
    harmless=ROTARY_FREQUENCIES,
    facts=Facts(Windows.NONE, defaults={**_LLAMA_DEFAULTS, "tie_word_embeddings": True}),
)
QWEN = Family(
    qwen,
    QWEN_NAMES,
    "transformer.",
    ("transformer.rotary_emb.inv_freq",),
    Facts(
        Windows.NONE,
        defaults={"tie_word_embeddings": False, "layer_norm_epsilon": 1e-6},
        known_prompt=qwen_known_prompt,
    ),
)
CHATGLM = Family(
    chatglm,
    CHATGLM_NAMES,
    "transformer.",
    ("transformer.rotary_pos_emb.inv_freq",),
    Facts(
        Windows.NONE,
        defaults={"tie_word_embeddings": False, "layernorm_epsilon": 1e-5, "ffn_hidden_size": 13696},
        kv_heads=chatglm_kv_heads,
    ),
)
JAIS = Family(
    jais,
    JAIS_NAMES,
    "transformer.",
    _JAIS_BUFFERS,
    replace(
        NO_WINDOWS,
        defaults={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
    ),
)
