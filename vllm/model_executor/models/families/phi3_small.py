"""Phi-3-small: block-sparse attention, a limited gate, and the multipliers of its width."""

from __future__ import annotations

from dataclasses import replace

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.rope import LinearScaling
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.models.families.llama import NAMES, llama_like, rope_of
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Block, BlockSparse, Decoder, Mlp, layer_norm


def phi3_small(hf: HFConfig) -> Decoder:
    """Phi-3-small: every so-manieth layer sees all keys, the others some blocks of them."""
    act = hf.get_str("hidden_act")
    if act != "gegelu":
        raise ValueError(f"{hf.file}: hidden_act={act!r} is not supported, expected 'gegelu'.")
    hidden = hf.get_int("ff_intermediate_size", "intermediate_size")
    ffn = Mlp("quick_gelu", hidden, bias=True, limit=hf.get_float("gegelu_limit", minimum=0))
    rope = replace(rope_of(hf), theta=hf.get_float("rope_embedding_base", minimum=1e-6))
    factor = hf.get_float("rope_position_scale", default=1.0, minimum=1e-6)
    if factor != 1.0:
        if rope.scaling is not None:
            raise ValueError(f"{hf.file}: rope_position_scale beside rope_scaling is not supported.")
        rope = replace(rope, scaling=LinearScaling(factor))
    scaled = hf.get_bool("mup_use_scaling")
    sparse = BlockSparse(
        hf.get_int("blocksparse_block_size"),
        hf.get_int("blocksparse_num_local_blocks"),
        hf.get_int("blocksparse_vert_stride"),
        hf.get_bool("blocksparse_homo_head_pattern"),
    )
    every = hf.get_int("dense_attention_every_n_layers", default=None)

    def choose(layer: int, block: Block) -> Block:
        if every is not None and (layer + 1) % every == 0:
            return block
        return replace(block, attn=replace(block.attn, sparse=sparse))

    silent = hf.get("dummy_token_indices", default=[])
    if not isinstance(silent, list) or not all(type(t) is int and 0 <= t < hf.vocab_size for t in silent):
        raise ValueError(f"{hf.file}: field `dummy_token_indices` is not a list of tokens.")
    return llama_like(
        hf,
        norm=layer_norm(hf.get_float("layer_norm_epsilon", minimum=0)),
        attn={
            "rope": rope,
            "qkv_bias": True,
            "out_bias": True,
            "scale": hf.get_float("mup_attn_multiplier") / hf.head_dim if scaled else hf.head_dim**-0.5,
        },
        ffn=ffn,
        per_layer=choose,
        embed_scale=hf.get_float("mup_embedding_multiplier", default=1.0) or 1.0,
        logit_scale=1.0 / (hf.get_float("mup_width_multiplier", default=1.0) or 1.0),
        silent=tuple(silent),
    )


PHI3_SMALL_NAMES = (
    renames(
        {
            "model.final_layernorm.{p}": "norm.{p}",
            "model.layers.{i}.self_attn.dense.{p}": "blocks.{i}.attn.o.{p}",
        }
    )
    + renames({"model.layers.{i}.self_attn.query_key_value.{p}": "blocks.{i}.attn.qkv.{p}"}, WeightLayout.QKV_BY_GROUP)
    + renames({"model.layers.{i}.mlp.up_proj.{p}": "blocks.{i}.ffn.gate_up.{p}"}, WeightLayout.PAIRS)
)
PHI3_SMALL = Family(
    phi3_small,
    PHI3_SMALL_NAMES + NAMES,
    harmless=("model.rotary_emb.inv_freq", "model.layers.{i}.self_attn.rotary_emb.inv_freq"),
    facts=Facts(
        Windows.NONE,
        defaults={
            "hidden_act": "gegelu",
            "gegelu_limit": 20.0,
            "layer_norm_epsilon": 1e-5,
            "rope_embedding_base": 1e6,
            "mup_use_scaling": True,
            "mup_attn_multiplier": 1.0,
            "mup_embedding_multiplier": 10.0,
            "mup_width_multiplier": 8.0,
            "blocksparse_block_size": 64,
            "blocksparse_num_local_blocks": 16,
            "blocksparse_vert_stride": 8,
            "blocksparse_homo_head_pattern": False,
            "dense_attention_every_n_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
)
