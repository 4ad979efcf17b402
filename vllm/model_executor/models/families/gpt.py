"""The families with LayerNorm and a plain MLP: those called GPT, OPT, Phi, StarCoder 2, Persimmon, Nemotron."""

from __future__ import annotations

from dataclasses import replace

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.models.families.llama import NAMES as LLAMA_NAMES
from vllm.model_executor.models.families.llama import NO_WINDOWS, ROTARY_FREQUENCIES, llama_like, rope_of, windows_of
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import (
    Attn,
    Block,
    Decoder,
    Layout,
    LearnedPositions,
    Mlp,
    Norm,
    Rope,
    layer_norm,
)


def gpt2(hf: HFConfig) -> Decoder:
    """GPT-2: learned positions, weights stored transposed."""
    norm = layer_norm(hf.get_float("layer_norm_epsilon", minimum=0))
    attn = Attn(hf.num_heads, hf.num_heads, hf.head_dim, qkv_bias=True, out_bias=True)
    inner = hf.get_int("n_inner", default=None) or 4 * hf.hidden_size
    mlp = Mlp(hf.get_str("activation_function"), inner, gated=False, bias=True)
    scale = hf.head_dim**-0.5 if hf.get_bool("scale_attn_weights", default=True) else 1.0
    by_layer = hf.get_bool("scale_attn_by_inverse_layer_idx", default=False)
    blocks = tuple(
        Block(replace(attn, scale=scale / (i + 1) if by_layer else scale), mlp, norm) for i in range(hf.num_layers)
    )
    positions = LearnedPositions(hf.get_int("n_positions", "max_position_embeddings"))
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings, positions=positions)


def gpt_neox(hf: HFConfig) -> Decoder:
    """GPT-NeoX and Pythia: partial rotation, both branches of a block in parallel or one after the other."""
    norm = layer_norm(hf.get_float("layer_norm_eps", minimum=0))
    bias = hf.get_bool("attention_bias", default=True)
    attn = Attn(hf.num_heads, hf.num_heads, hf.head_dim, rope=rope_of(hf), qkv_bias=bias, out_bias=bias)
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), gated=False, bias=True)
    layout = Layout.PARALLEL if hf.get_bool("use_parallel_residual", default=True) else Layout.PRE
    blocks = (Block(attn, mlp, norm, layout),) * hf.num_layers
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings)


def opt(hf: HFConfig) -> Decoder:
    """OPT: learned positions from row 2 on; the 350m model has its norms after the branches and narrow embeddings."""
    norm = layer_norm(1e-5, affine=hf.get_bool("layer_norm_elementwise_affine", default=True))
    bias = hf.get_bool("enable_bias", default=True)
    attn = Attn(hf.num_heads, hf.num_heads, hf.head_dim, qkv_bias=bias, out_bias=bias)
    mlp = Mlp(hf.get_str("activation_function"), hf.get_int("ffn_dim"), gated=False, bias=bias)
    norm_first = hf.get_bool("do_layer_norm_before", default=True)
    blocks = (Block(attn, mlp, norm, Layout.PRE if norm_first else Layout.POST),) * hf.num_layers
    has_final_norm = norm_first and not hf.get_bool("_remove_final_layer_norm", default=False)
    width = hf.get_int("word_embed_proj_dim", default=None) or hf.hidden_size
    return Decoder(
        hf.vocab_size,
        hf.hidden_size,
        blocks,
        norm if has_final_norm else None,
        hf.tie_word_embeddings,
        embed_dim=None if width == hf.hidden_size else width,
        positions=LearnedPositions(hf.get_int("max_position_embeddings"), offset=2),
    )


def phi(hf: HFConfig) -> Decoder:
    """Phi-1 to 2: partial rotation, one norm for both branches, a biased head."""
    norm = layer_norm(hf.get_float("layer_norm_eps", minimum=0))
    attn = Attn(
        hf.num_heads,
        hf.num_kv_heads,
        hf.head_dim,
        rope=rope_of(hf),
        qk_norm=norm if hf.get_bool("qk_layernorm", default=False) else None,
        qkv_bias=True,
        out_bias=True,
    )
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), gated=False, bias=True)
    blocks = (Block(attn, mlp, norm, Layout.PARALLEL_SHARED),) * hf.num_layers
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings, head_bias=True)


def bigcode_kv_heads(hf: HFConfig) -> int:
    """One for all query heads, or one for each."""
    return 1 if hf.get_bool("multi_query", default=True) else hf.num_heads


def gpt_bigcode(hf: HFConfig) -> Decoder:
    """StarCoder and SantaCoder: GPT-2 with one key/value head."""
    norm = layer_norm(hf.get_float("layer_norm_epsilon", minimum=0))
    scale = None if hf.get_bool("scale_attn_weights", default=True) else 1.0
    attn = Attn(hf.num_heads, hf.num_kv_heads, hf.head_dim, scale=scale, qkv_bias=True, out_bias=True)
    inner = hf.get_int("n_inner", default=None) or 4 * hf.hidden_size
    mlp = Mlp(hf.get_str("activation_function"), inner, gated=False, bias=True)
    positions = LearnedPositions(hf.get_int("n_positions", "max_position_embeddings"))
    blocks = (Block(attn, mlp, norm),) * hf.num_layers
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings, positions=positions)


def gptj(hf: HFConfig) -> Decoder:
    """GPT-J: interleaved partial rotation, one norm for both branches, a biased head."""
    norm = layer_norm(hf.get_float("layer_norm_epsilon", minimum=0))
    dim = hf.get_int("rotary_dim", default=None) or hf.hidden_size
    if dim > hf.head_dim:
        raise ValueError(f"{hf.file}: rotary_dim is {dim}, expected at most the {hf.head_dim} dimensions of a head.")
    attn = Attn(hf.num_heads, hf.num_heads, hf.head_dim, rope=Rope(dim, interleaved=True))
    inner = hf.get_int("n_inner", default=None) or 4 * hf.hidden_size
    mlp = Mlp(hf.get_str("activation_function"), inner, gated=False, bias=True)
    blocks = (Block(attn, mlp, norm, Layout.PARALLEL_SHARED),) * hf.num_layers
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings, head_bias=True)


def starcoder2(hf: HFConfig) -> Decoder:
    """StarCoder 2: rotary positions, a window on every layer if the config has one."""
    norm = layer_norm(hf.get_float("norm_epsilon", minimum=0))
    bias = hf.get_bool("use_bias", default=True)
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), gated=False, bias=bias)
    attn = {"qkv_bias": bias, "out_bias": bias}
    return llama_like(hf, norm=norm, attn=attn, ffn=mlp, windows=windows_of(hf))


def persimmon(hf: HFConfig) -> Decoder:
    """Persimmon: squared ReLU, head norms, partial rotation."""
    norm = layer_norm(hf.get_float("layer_norm_eps", minimum=0))
    qk_norm = norm if hf.get_bool("qk_layernorm", default=True) else None
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), gated=False, bias=True)
    attn = {"kv_heads": hf.num_heads, "qk_norm": qk_norm, "qkv_bias": True, "out_bias": True}
    return llama_like(hf, norm=norm, attn=attn, ffn=mlp)


def nemotron(hf: HFConfig) -> Decoder:
    """Nemotron-3, -4 and Minitron: squared ReLU, LayerNorm weights stored minus 1, partial rotation."""
    norm = Norm("layer", hf.get_float("norm_eps", minimum=0), offset=1.0, bias=True)
    bias = hf.get_bool("attention_bias", default=False)
    mlp_bias = hf.get_bool("mlp_bias", default=False)
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), gated=False, bias=mlp_bias)
    return llama_like(hf, norm=norm, attn={"qkv_bias": bias, "out_bias": bias}, ffn=mlp)


GPT2_NAMES = renames(
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
        "transformer.h.{i}.mlp.c_fc.{p}": "blocks.{i}.ffn.up.{p}",
        "transformer.h.{i}.mlp.c_proj.{p}": "blocks.{i}.ffn.down.{p}",
    },
    WeightLayout.TRANSPOSED,
)
GPT_NEOX_NAMES = renames(
    {
        "gpt_neox.embed_in.{p}": "embed.{p}",
        "gpt_neox.final_layer_norm.{p}": "norm.{p}",
        "embed_out.{p}": "head.{p}",
        "lm_head.{p}": "head.{p}",
        "gpt_neox.layers.{i}.input_layernorm.{p}": "blocks.{i}.norms.0.{p}",
        "gpt_neox.layers.{i}.post_attention_layernorm.{p}": "blocks.{i}.norms.1.{p}",
        "gpt_neox.layers.{i}.attention.dense.{p}": "blocks.{i}.attn.o.{p}",
        "gpt_neox.layers.{i}.mlp.dense_h_to_4h.{p}": "blocks.{i}.ffn.up.{p}",
        "gpt_neox.layers.{i}.mlp.dense_4h_to_h.{p}": "blocks.{i}.ffn.down.{p}",
    }
) + renames({"gpt_neox.layers.{i}.attention.query_key_value.{p}": "blocks.{i}.attn.qkv.{p}"}, WeightLayout.QKV_BY_HEAD)
OPT_NAMES = renames(
    {
        "model.decoder.embed_tokens.{p}": "embed.{p}",
        "model.decoder.embed_positions.weight": "positions",
        "model.decoder.project_in.{p}": "project_in.{p}",
        "model.decoder.project_out.{p}": "project_out.{p}",
        "model.decoder.final_layer_norm.{p}": "norm.{p}",
        "lm_head.{p}": "head.{p}",
        "model.decoder.layers.{i}.self_attn_layer_norm.{p}": "blocks.{i}.norms.0.{p}",
        "model.decoder.layers.{i}.final_layer_norm.{p}": "blocks.{i}.norms.1.{p}",
        "model.decoder.layers.{i}.self_attn.q_proj.{p}": "blocks.{i}.attn.q.{p}",
        "model.decoder.layers.{i}.self_attn.k_proj.{p}": "blocks.{i}.attn.k.{p}",
        "model.decoder.layers.{i}.self_attn.v_proj.{p}": "blocks.{i}.attn.v.{p}",
        "model.decoder.layers.{i}.self_attn.out_proj.{p}": "blocks.{i}.attn.o.{p}",
        "model.decoder.layers.{i}.fc1.{p}": "blocks.{i}.ffn.up.{p}",
        "model.decoder.layers.{i}.fc2.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
PHI_NAMES = renames(
    {
        "model.final_layernorm.{p}": "norm.{p}",
        "model.layers.{i}.self_attn.dense.{p}": "blocks.{i}.attn.o.{p}",
        "model.layers.{i}.self_attn.q_layernorm.{p}": "blocks.{i}.attn.q_norm.{p}",
        "model.layers.{i}.self_attn.k_layernorm.{p}": "blocks.{i}.attn.k_norm.{p}",
        "model.layers.{i}.mlp.fc1.{p}": "blocks.{i}.ffn.up.{p}",
        "model.layers.{i}.mlp.fc2.{p}": "blocks.{i}.ffn.down.{p}",
    }
)

BIGCODE_NAMES = (
    renames({"transformer.h.{i}.attn.c_attn.{p}": "blocks.{i}.attn.qkv.{p}"}, WeightLayout.QKV_BY_GROUP)
    + renames(
        {
            "transformer.h.{i}.attn.c_proj.{p}": "blocks.{i}.attn.o.{p}",
            "transformer.h.{i}.mlp.c_fc.{p}": "blocks.{i}.ffn.up.{p}",
            "transformer.h.{i}.mlp.c_proj.{p}": "blocks.{i}.ffn.down.{p}",
        }
    )
    + GPT2_NAMES
)
GPTJ_NAMES = renames(
    {
        "transformer.wte.{p}": "embed.{p}",
        "transformer.ln_f.{p}": "norm.{p}",
        "lm_head.{p}": "head.{p}",
        "transformer.h.{i}.ln_1.{p}": "blocks.{i}.norms.0.{p}",
        "transformer.h.{i}.attn.q_proj.{p}": "blocks.{i}.attn.q.{p}",
        "transformer.h.{i}.attn.k_proj.{p}": "blocks.{i}.attn.k.{p}",
        "transformer.h.{i}.attn.v_proj.{p}": "blocks.{i}.attn.v.{p}",
        "transformer.h.{i}.attn.out_proj.{p}": "blocks.{i}.attn.o.{p}",
        "transformer.h.{i}.mlp.fc_in.{p}": "blocks.{i}.ffn.up.{p}",
        "transformer.h.{i}.mlp.fc_out.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
STARCODER2_NAMES = renames(
    {
        "model.layers.{i}.mlp.c_fc.{p}": "blocks.{i}.ffn.up.{p}",
        "model.layers.{i}.mlp.c_proj.{p}": "blocks.{i}.ffn.down.{p}",
    }
)
PERSIMMON_NAMES = renames(
    {"model.layers.{i}.self_attn.query_key_value.{p}": "blocks.{i}.attn.qkv.{p}"}, WeightLayout.QKV_BY_HEAD
) + renames(
    {
        "model.layers.{i}.mlp.dense_h_to_4h.{p}": "blocks.{i}.ffn.up.{p}",
        "model.layers.{i}.mlp.dense_4h_to_h.{p}": "blocks.{i}.ffn.down.{p}",
    }
)

# causal masks and the value of a masked score, which older checkpoints stored
_GPT2_MASKS = ("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias")
_NEOX_BUFFERS = (
    "gpt_neox.layers.{i}.attention.bias",
    "gpt_neox.layers.{i}.attention.masked_bias",
    "gpt_neox.layers.{i}.attention.rotary_emb.inv_freq",
    "gpt_neox.rotary_emb.inv_freq",
)

_LEARNED = Facts(Windows.NONE, learned_positions=True)
GPT2 = Family(gpt2, GPT2_NAMES, "transformer.", _GPT2_MASKS, _LEARNED)
GPT_NEOX = Family(gpt_neox, GPT_NEOX_NAMES, "gpt_neox.", _NEOX_BUFFERS, NO_WINDOWS)
OPT = Family(opt, OPT_NAMES, "model.", ("model.decoder.version",), _LEARNED)
GPT_BIGCODE = Family(
    gpt_bigcode,
    BIGCODE_NAMES,
    "transformer.",
    _GPT2_MASKS,
    Facts(Windows.NONE, learned_positions=True, kv_heads=bigcode_kv_heads),
)
GPTJ = Family(gptj, GPTJ_NAMES, "transformer.", _GPT2_MASKS, NO_WINDOWS)
STARCODER2 = Family(starcoder2, STARCODER2_NAMES + LLAMA_NAMES, "model.", ROTARY_FREQUENCIES)
PERSIMMON = Family(persimmon, PERSIMMON_NAMES + PHI_NAMES + LLAMA_NAMES, "model.", ROTARY_FREQUENCIES, NO_WINDOWS)
NEMOTRON = Family(nemotron, LLAMA_NAMES, "model.", ROTARY_FREQUENCIES, NO_WINDOWS)
PHI = Family(phi, PHI_NAMES + LLAMA_NAMES, "model.", ROTARY_FREQUENCIES, NO_WINDOWS)
