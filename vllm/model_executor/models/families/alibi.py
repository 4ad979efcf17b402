"""The families with ALiBi in place of, or as a choice beside, rotary positions: BLOOM, MPT, Falcon."""

from __future__ import annotations

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.models.families.llama import NO_WINDOWS, rope_of
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import (
    Alibi,
    Attn,
    Block,
    Decoder,
    HeadNorm,
    Layout,
    LearnedPositions,
    Mlp,
    Norm,
    layer_norm,
)


def bloom(hf: HFConfig) -> Decoder:
    """BLOOM and BLOOMZ: ALiBi, embeddings normalised."""
    if hf.get_bool("apply_residual_connection_post_layernorm", default=False):
        raise ValueError(f"{hf.file}: apply_residual_connection_post_layernorm is not supported, expected false.")
    norm = layer_norm(hf.get_float("layer_norm_epsilon", minimum=0))
    attn = Attn(hf.num_heads, hf.num_heads, hf.head_dim, qkv_bias=True, out_bias=True, alibi=Alibi())
    mlp = Mlp("gelu_new", 4 * hf.hidden_size, gated=False, bias=True)
    blocks = (Block(attn, mlp, norm),) * hf.num_layers
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings, embed_norm=norm)


def mpt_kv_heads(hf: HFConfig) -> int:
    """They stand in the attention's own config."""
    own = hf.nested("attn_config")
    kind = own.get_str("attn_type", default="multihead_attention")
    known = {"multihead_attention": hf.num_heads, "multiquery_attention": 1, "grouped_query_attention": None}
    if kind not in known:
        raise ValueError(f"{hf.file}: attn_config.attn_type is {kind!r}, expected one of {', '.join(known)}.")
    heads: int = own.get_int("kv_n_heads", default=None) or known[kind] or hf.num_heads
    return heads


def mpt(hf: HFConfig) -> Decoder:
    """MPT: ALiBi or learned positions, no biases; queries, keys and values clipped, or normalised, if the config says
    so.
    """
    own = hf.nested("attn_config")
    if own.get_bool("prefix_lm", default=False):
        raise ValueError(f"{hf.file}: attn_config.prefix_lm=True is not supported, expected False.")
    if not hf.get_bool("no_bias", default=True):
        raise ValueError(f"{hf.file}: no_bias=False is not supported, expected True.")
    norm = Norm("layer", hf.get_float("layer_norm_epsilon", default=1e-5, minimum=0))
    normal, clip = own.get_bool("qk_ln", default=False), own.get_float("clip_qkv", default=None) or None
    if normal and clip is not None:
        raise ValueError(f"{hf.file}: attn_config.qk_ln together with clip_qkv={clip} is not supported.")
    alibi = own.get_bool("alibi", default=True)
    attn = Attn(
        hf.num_heads,
        hf.num_kv_heads,
        hf.head_dim,
        scale=own.get_float("softmax_scale", default=None),
        alibi=Alibi(own.get_float("alibi_bias_max", default=8.0, minimum=0)) if alibi else None,
        qk_norm=norm if normal else None,
        qk_norm_over=HeadNorm.ALL if normal else HeadNorm.HEAD,
        clip_qkv=clip,
    )
    learned = not alibi and hf.get_bool("learned_pos_emb", default=True)
    mlp = Mlp("gelu", hf.get_int("expansion_ratio") * hf.hidden_size, gated=False)
    scale = hf.get("logit_scale", default=None)
    if scale is None:
        factor = 1.0
    elif scale == "inv_sqrt_d_model":
        factor = hf.hidden_size**-0.5
    else:
        factor = hf.get_float("logit_scale")
    blocks = (Block(attn, mlp, norm),) * hf.num_layers
    return Decoder(
        hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings, logit_scale=factor,
        positions=LearnedPositions(hf.get_int("max_seq_len")) if learned else None,
    )  # fmt: skip


def falcon_kv_heads(hf: HFConfig) -> int:
    """Groups of the newer architecture, else one for all query heads or one for each."""
    if _has_groups(hf):
        groups: int | None = hf.get_int("num_kv_heads", "n_head_kv", default=None)
        return hf.num_heads if groups is None else groups
    return 1 if hf.get_bool("multi_query", default=True) else hf.num_heads


def _has_groups(hf: HFConfig) -> bool:
    """Whether it is of the newer architecture, which the first configs do not say otherwise than by groups."""
    known: bool | None = hf.get_bool("new_decoder_architecture", default=None)
    return hf.get_int("n_head_kv", default=1) > 1 if known is None else known


def falcon(hf: HFConfig) -> Decoder:
    """Falcon: 7B (one key/value head, one norm for both branches), 40B and 180B (groups, two norms), RW (ALiBi)."""
    norm = layer_norm(hf.get_float("layer_norm_epsilon", minimum=0))
    bias = hf.get_bool("bias", default=False)
    alibi = hf.get_bool("alibi", default=False)
    attn = Attn(
        hf.num_heads,
        hf.num_kv_heads,
        hf.head_dim,
        rope=None if alibi else rope_of(hf),
        # it is scaled like the scores
        alibi=Alibi(factor=hf.head_dim**-0.5) if alibi else None,
        qkv_bias=bias,
        out_bias=bias,
    )
    inner = hf.get_int("ffn_hidden_size", default=None) or 4 * hf.hidden_size
    mlp = Mlp(hf.get_str("activation"), inner, gated=False, bias=bias)
    if _has_groups(hf):
        norms = hf.get_int("num_ln_in_parallel_attn", default=None) or 2
        layout = Layout.PARALLEL if norms == 2 else Layout.PARALLEL_SHARED
    else:
        layout = Layout.PARALLEL_SHARED if hf.get_bool("parallel_attn", default=True) else Layout.PRE
    blocks = (Block(attn, mlp, norm, layout),) * hf.num_layers
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings)


BLOOM_NAMES = renames(
    {
        "transformer.word_embeddings.{p}": "embed.{p}",
        "transformer.word_embeddings_layernorm.{p}": "embed_norm.{p}",
        "transformer.ln_f.{p}": "norm.{p}",
        "lm_head.{p}": "head.{p}",
        "transformer.h.{i}.input_layernorm.{p}": "blocks.{i}.norms.0.{p}",
        "transformer.h.{i}.post_attention_layernorm.{p}": "blocks.{i}.norms.1.{p}",
        "transformer.h.{i}.self_attention.dense.{p}": "blocks.{i}.attn.o.{p}",
        "transformer.h.{i}.mlp.dense_h_to_4h.{p}": "blocks.{i}.ffn.up.{p}",
        "transformer.h.{i}.mlp.dense_4h_to_h.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
_FUSED = {"transformer.h.{i}.self_attention.query_key_value.{p}": "blocks.{i}.attn.qkv.{p}"}
MPT_NAMES = renames(
    {
        "transformer.wte.{p}": "embed.{p}",
        "transformer.wpe.weight": "positions",
        "transformer.norm_f.{p}": "norm.{p}",
        "lm_head.{p}": "head.{p}",
        "transformer.blocks.{i}.norm_1.{p}": "blocks.{i}.norms.0.{p}",
        "transformer.blocks.{i}.norm_2.{p}": "blocks.{i}.norms.1.{p}",
        "transformer.blocks.{i}.attn.Wqkv.{p}": "blocks.{i}.attn.qkv.{p}",
        "transformer.blocks.{i}.attn.q_ln.{p}": "blocks.{i}.attn.q_norm.{p}",
        "transformer.blocks.{i}.attn.k_ln.{p}": "blocks.{i}.attn.k_norm.{p}",
        "transformer.blocks.{i}.attn.out_proj.{p}": "blocks.{i}.attn.o.{p}",
        "transformer.blocks.{i}.ffn.up_proj.{p}": "blocks.{i}.ffn.up.{p}",
        "transformer.blocks.{i}.ffn.down_proj.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
FALCON_NAMES = BLOOM_NAMES + renames(
    {
        "transformer.h.{i}.ln_attn.{p}": "blocks.{i}.norms.0.{p}",
        "transformer.h.{i}.ln_mlp.{p}": "blocks.{i}.norms.1.{p}",
    }
)

BLOOM = Family(bloom, BLOOM_NAMES + renames(_FUSED, WeightLayout.QKV_BY_HEAD), "transformer.", facts=NO_WINDOWS)
MPT = Family(mpt, MPT_NAMES, "transformer.", facts=Facts(Windows.NONE, kv_heads=mpt_kv_heads))
FALCON = Family(
    falcon,
    FALCON_NAMES + renames(_FUSED, WeightLayout.QKV_BY_GROUP),
    "transformer.",
    ("transformer.h.{i}.self_attention.rotary_emb.inv_freq",),
    Facts(
        Windows.NONE,
        kv_heads=falcon_kv_heads,
        defaults={"activation": "gelu", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},  # also of older types
    ),
)
