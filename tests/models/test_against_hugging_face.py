"""Every family, tiny and with odd sizes: fp32 logits equal Hugging Face's everywhere, through the paged cache."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.kernels import kernels
from vllm.config.hf import HFConfig
from vllm.distributed import TensorParallel
from vllm.model_executor.model_loader.checkpoint import find_checkpoint
from vllm.model_executor.model_loader.loader import build_decoder, fill_from_checkpoint
from vllm.model_executor.models.decoder import without_idle_windows
from vllm.model_executor.models.registry import family_of
from vllm.model_executor.models.spec import Attn
from vllm.ops.cpu import library
from vllm.worker import cpu_blocks
from vllm.worker.decode_weights import covers

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
}
GQA = {**SIZES, "num_key_value_heads": 2}
GEMMA2 = {**GQA, "head_dim": 12, "num_hidden_layers": 5, "query_pre_attn_scalar": 10, "sliding_window": 7}
GPT = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "n_inner": 77}
OPT = {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_dim": 77}
MPT = {"vocab_size": 131, "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 64}
FALCON = {"vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 64}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
PLAIN_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LOCAL_AND_GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 128,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3, "logits_scaling": 2.0
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 29}
DBRX = {"vocab_size": 131, "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 64}
LATENT = {
    **SIZES, "intermediate_size": 78, "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10, "moe_intermediate_size": 30,
    "n_shared_experts": 2, "num_experts_per_tok": 2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
STATES = {"vocab_size": 131, "hidden_size": 40, "num_hidden_layers": 3, "state_size": 5, "conv_kernel": 3}
JAMBA = {
    **GQA, "num_hidden_layers": 5, "mamba_d_state": 7, "mamba_dt_rank": 5, "attn_layer_period": 3,
    "attn_layer_offset": 1,
}  # fmt: skip
NO_PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CASES: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**{**GQA, "num_key_value_heads": 3}, head_dim=12),
    "llama-tied-biased": lambda: hf.LlamaConfig(**GQA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-mha": lambda: hf.LlamaConfig(**SIZES),
    "llama-mqa": lambda: hf.LlamaConfig(**{**GQA, "num_key_value_heads": 1}),
    "llama-linear": lambda: hf.LlamaConfig(**GQA, rope_parameters=LINEAR),
    "llama-llama3": lambda: hf.LlamaConfig(**GQA, rope_parameters=LLAMA3),
    "llama-dynamic": lambda: hf.LlamaConfig(**{**GQA, "max_position_embeddings": 16}, rope_parameters=DYNAMIC),
    "mistral": lambda: hf.MistralConfig(**GQA, sliding_window=7),
    "mistral-no-window": lambda: hf.MistralConfig(**GQA, sliding_window=None),
    "mistral-wide-heads": lambda: hf.MistralConfig(**GQA, head_dim=12, sliding_window=None),
    "mixtral": lambda: hf.MixtralConfig(**GQA, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window": lambda: hf.MixtralConfig(**GQA, num_local_experts=4, num_experts_per_tok=3, sliding_window=9),
    "qwen2": lambda: hf.Qwen2Config(**GQA),
    "qwen2-window": lambda: hf.Qwen2Config(
        **{**GQA, "num_hidden_layers": 5}, use_sliding_window=True, sliding_window=7, max_window_layers=3
    ),
    "qwen2-yarn": lambda: hf.Qwen2Config(**GQA, rope_parameters=PLAIN_YARN),
    "qwen3": lambda: hf.Qwen3Config(**GQA, head_dim=10),
    "qwen3-tied": lambda: hf.Qwen3Config(**GQA, head_dim=16, tie_word_embeddings=True, attention_bias=True),
    "qwen3-window": lambda: hf.Qwen3Config(
        **GQA, head_dim=8, use_sliding_window=True, sliding_window=7, max_window_layers=1, rope_parameters=PLAIN_YARN
    ),
    "gemma": lambda: hf.GemmaConfig(**GQA, head_dim=14),
    "gemma-mqa": lambda: hf.GemmaConfig(**{**GQA, "num_key_value_heads": 1}, head_dim=14, hidden_act="gelu"),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA2, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma2-no-caps": lambda: hf.Gemma2Config(**GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None),
    "phi": lambda: hf.PhiConfig(**GQA, partial_rotary_factor=0.5),
    "phi-qk-norm": lambda: hf.PhiConfig(**SIZES, qk_layernorm=True),
    "phi3": lambda: hf.Phi3Config(**GQA, **NO_PAD),
    "phi3-window": lambda: hf.Phi3Config(**GQA, **NO_PAD, sliding_window=7),
    "phi3-partial": lambda: hf.Phi3Config(**GQA, **NO_PAD, rope_parameters=PARTIAL, tie_word_embeddings=True),
    "phi3-longrope": lambda: hf.Phi3Config(
        **{**GQA, "max_position_embeddings": 512},
        **NO_PAD,
        original_max_position_embeddings=64,
        rope_parameters={k: v for k, v in LONGROPE.items() if "mscale" not in k}
        | {"original_max_position_embeddings": 64},
    ),
    "opt": lambda: hf.OPTConfig(**OPT, word_embed_proj_dim=48),
    "opt-350m": lambda: hf.OPTConfig(**OPT, word_embed_proj_dim=20, do_layer_norm_before=False),
    "opt-plain": lambda: hf.OPTConfig(
        **OPT, word_embed_proj_dim=48, enable_bias=False, layer_norm_elementwise_affine=False
    ),
    "gpt2": lambda: hf.GPT2Config(**GPT),
    "gpt2-scaled": lambda: hf.GPT2Config(**GPT, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False),
    "bloom": lambda: hf.BloomConfig(vocab_size=131, hidden_size=48, n_layer=3, n_head=6),
    "bloom-untied": lambda: hf.BloomConfig(
        vocab_size=131, hidden_size=48, n_layer=3, n_head=4, tie_word_embeddings=False
    ),
    "mpt": lambda: hf.MptConfig(**MPT),
    "mpt-clipped": lambda: hf.MptConfig(
        **MPT, attn_config={"clip_qkv": 0.3, "softmax_scale": 0.3}, tie_word_embeddings=False
    ),
    "falcon-7b": lambda: hf.FalconConfig(**FALCON, num_attention_heads=6),
    "falcon-rw": lambda: hf.FalconConfig(
        **FALCON, num_attention_heads=4, alibi=True, bias=True, parallel_attn=False, multi_query=False
    ),
    "falcon-40b": lambda: hf.FalconConfig(
        **FALCON, num_attention_heads=6, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=77
    ),
    "falcon-11b": lambda: hf.FalconConfig(
        **FALCON,
        num_attention_heads=6,
        new_decoder_architecture=True,
        num_kv_heads=3,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
    ),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**GPT),
    "gpt_bigcode-mha": lambda: hf.GPTBigCodeConfig(**GPT, multi_query=False, tie_word_embeddings=False),
    "gptj": lambda: hf.GPTJConfig(**GPT, rotary_dim=6),
    "starcoder2": lambda: hf.Starcoder2Config(**GQA, sliding_window=7),
    "starcoder2-plain": lambda: hf.Starcoder2Config(**GQA, use_bias=False, tie_word_embeddings=False),
    "persimmon": lambda: hf.PersimmonConfig(**SIZES),
    "persimmon-no-head-norms": lambda: hf.PersimmonConfig(**SIZES, qk_layernorm=False),
    "nemotron": lambda: hf.NemotronConfig(**GQA, head_dim=10),
    "nemotron-biased": lambda: hf.NemotronConfig(**GQA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "stablelm": lambda: hf.StableLmConfig(**GQA),
    "stablelm-12b": lambda: hf.StableLmConfig(
        **GQA, qk_layernorm=True, use_parallel_residual=True, use_qkv_bias=True, tie_word_embeddings=True
    ),
    "cohere": lambda: hf.CohereConfig(**GQA, **NO_PAD, logit_scale=0.3),
    "cohere-plus": lambda: hf.CohereConfig(**GQA, **NO_PAD, use_qk_norm=True, attention_bias=True),
    "cohere2": lambda: hf.Cohere2Config(
        **{**GQA, "num_hidden_layers": 5}, **NO_PAD, sliding_window=7, head_dim=10, logit_scale=0.5
    ),
    "olmo": lambda: hf.OlmoConfig(**GQA, **NO_PAD),
    "olmo-clipped": lambda: hf.OlmoConfig(**GQA, **NO_PAD, clip_qkv=0.2, tie_word_embeddings=True),
    "olmo2": lambda: hf.Olmo2Config(**GQA, **NO_PAD),
    "olmo2-mha": lambda: hf.Olmo2Config(**SIZES, **NO_PAD, attention_bias=True, tie_word_embeddings=True),
    "granite": lambda: hf.GraniteConfig(**GQA, **MULTIPLIERS),
    "granite-biased": lambda: hf.GraniteConfig(**GQA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "glm": lambda: hf.GlmConfig(**GQA, **NO_PAD, head_dim=12, attention_bias=True),
    "glm4": lambda: hf.Glm4Config(**GQA, **NO_PAD, head_dim=12),
    "gemma3": lambda: hf.Gemma3TextConfig(**{**GEMMA2, "num_hidden_layers": 7}, rope_parameters=LOCAL_AND_GLOBAL),
    "gemma3-capped": lambda: hf.Gemma3TextConfig(
        **GEMMA2,
        final_logit_softcapping=5.0,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    ),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**GQA, **EXPERTS, shared_expert_intermediate_size=37),
    "qwen2_moe-mixed": lambda: hf.Qwen2MoeConfig(
        **{**GQA, "num_hidden_layers": 5},
        **EXPERTS,
        shared_expert_intermediate_size=37,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=2,
        qkv_bias=False,
        tie_word_embeddings=True,
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**GQA, **EXPERTS, head_dim=10, norm_topk_prob=True),
    "qwen3_moe-mixed": lambda: hf.Qwen3MoeConfig(
        **GQA, **EXPERTS, head_dim=16, attention_bias=True, mlp_only_layers=[1], tie_word_embeddings=True
    ),
    "olmoe": lambda: hf.OlmoeConfig(**GQA, **NO_PAD, num_experts=5, num_experts_per_tok=2),
    "olmoe-clipped": lambda: hf.OlmoeConfig(
        **GQA, **NO_PAD, num_experts=4, num_experts_per_tok=3, clip_qkv=0.5, norm_topk_prob=True
    ),
    "phimoe": lambda: hf.PhimoeConfig(
        **GQA,
        num_local_experts=5,
        num_experts_per_tok=2,
        router_jitter_noise=0.2,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=None,
    ),
    "phimoe-longrope": lambda: hf.PhimoeConfig(
        **GQA, num_local_experts=4, num_experts_per_tok=2, rope_parameters=LONGROPE, sliding_window=9
    ),
    "mamba": lambda: hf.MambaConfig(**STATES),
    "mamba-biased": lambda: hf.MambaConfig(
        **STATES, expand=3, use_bias=True, use_conv_bias=False, tie_word_embeddings=False, time_step_rank=4
    ),
    "falcon_mamba": lambda: hf.FalconMambaConfig(**STATES, mixer_rms_eps=1e-3, tie_word_embeddings=False),
    "mamba2": lambda: hf.Mamba2Config(**STATES, num_heads=10, head_dim=8, n_groups=2, expand=2),
    "mamba2-one-group": lambda: hf.Mamba2Config(
        **STATES,
        num_heads=6,
        head_dim=20,
        n_groups=1,
        expand=3,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=True,
    ),
    "jamba": lambda: hf.JambaConfig(**JAMBA, num_experts=5, num_experts_per_tok=2, expert_layer_offset=0),
    "jamba-dense": lambda: hf.JambaConfig(
        **{**JAMBA, "mamba_dt_rank": "auto"},
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_conv=2,
        mamba_expand=1,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
    ),
    "dbrx": lambda: hf.DbrxConfig(
        **DBRX,
        attn_config={"kv_n_heads": 2, "clip_qkv": 0.3, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 37, "moe_num_experts": 5, "moe_top_k": 2},
    ),
    "dbrx-unnormalised": lambda: hf.DbrxConfig(
        **DBRX,
        attn_config={"kv_n_heads": 3, "clip_qkv": 0.5, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 37, "moe_num_experts": 4, "moe_top_k": 3, "moe_normalize_expert_weights": None},
    ),
    "granitemoe": lambda: hf.GraniteMoeConfig(
        **GQA, **MULTIPLIERS, num_local_experts=5, num_experts_per_tok=2, attention_bias=True
    ),
    "deepseek_v2-lite": lambda: hf.DeepseekV2Config(
        **{**LATENT, "q_lora_rank": None}, n_routed_experts=5, first_k_dense_replace=1, rope_parameters=YARN
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **{**LATENT, "num_experts_per_tok": 3},
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=4.0,
        first_k_dense_replace=1,
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **{**LATENT, "n_shared_experts": 1},
        n_routed_experts=9,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v3-plain": lambda: hf.DeepseekV3Config(
        **{**LATENT, "q_lora_rank": None},
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        rope_interleave=False,
        tie_word_embeddings=True,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **{**GQA, "num_hidden_layers": 4, "intermediate_size": 30},
        head_dim=12,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=7,
        attention_bias=True,
        swiglu_limit=0.6,
        rope_parameters={**YARN, "mscale": None, "mscale_all_dim": None, "truncate": False},
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **{**GQA, "num_hidden_layers": 5, "intermediate_size": 30},
        **NO_PAD,
        head_dim=12,
        intermediate_size_mlp=34,
        num_local_experts=5,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=7,
        floor_scale=4,
        attn_scale=0.6,
    ),
    "llama4-scout": lambda: hf.Llama4TextConfig(
        **{**GQA, "num_hidden_layers": 4, "intermediate_size": 30},
        **NO_PAD,
        head_dim=10,
        num_local_experts=4,
        num_experts_per_tok=2,
        no_rope_layers=[1, 0, 1, 1],
        attention_chunk_size=16,
        use_qk_norm=False,
        attn_temperature_tuning=False,
    ),
    "llama4-yarn": lambda: hf.Llama4TextConfig(
        **{**GQA, "num_hidden_layers": 4, "intermediate_size": 30},
        **NO_PAD,
        head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        no_rope_layers=[1, 0, 1, 0],
        layer_types=["chunked_attention", "chunked_attention", "full_attention", "full_attention"],
        attention_chunk_size=7,
        floor_scale=4,
        attn_scale=0.6,
        rope_parameters=PLAIN_YARN,
    ),
    "smollm3": lambda: hf.SmolLM3Config(**{**GQA, "num_hidden_layers": 5}, **NO_PAD),
    "smollm3-no-rope": lambda: hf.SmolLM3Config(
        **GQA, **NO_PAD, no_rope_layers=[0, 1, 1], tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "seed_oss": lambda: hf.SeedOssConfig(**GQA, head_dim=12),
    "seed_oss-biased": lambda: hf.SeedOssConfig(
        **GQA, head_dim=8, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "exaone4": lambda: hf.Exaone4Config(
        **{**GQA, "num_hidden_layers": 5}, sliding_window=7, sliding_window_pattern=4, head_dim=12
    ),
    "exaone4-small": lambda: hf.Exaone4Config(
        **GQA, sliding_window=None, tie_word_embeddings=True, layer_types=["full_attention"] * 3
    ),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **{**GQA, "num_hidden_layers": 4},
        head_dim=12,
        moe_intermediate_size=29,
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        num_experts_per_tok=3,
        n_shared_experts=2,
        routed_scaling_factor=1.7,
        use_qk_norm=True,
        attention_bias=True,
        rope_parameters={**PARTIAL, "partial_rotary_factor": 0.5},
    ),
    "glm4_moe-air": lambda: hf.Glm4MoeConfig(
        **GQA,
        head_dim=8,
        moe_intermediate_size=29,
        n_routed_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    ),
    "dots1": lambda: hf.Dots1Config(
        **{**GQA, "num_hidden_layers": 4},
        moe_intermediate_size=29,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.0,
    ),
    "ernie4_5": lambda: hf.Ernie4_5Config(**GQA, head_dim=12),
    "ernie4_5-biased": lambda: hf.Ernie4_5Config(**GQA, head_dim=8, use_bias=True, tie_word_embeddings=False),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(
        **{**GQA, "num_hidden_layers": 4},
        moe_intermediate_size=29,
        moe_num_experts=5,
        moe_k=2,
        moe_layer_end_index=2,
    ),
    "hunyuan_dense": lambda: hf.HunYuanDenseV1Config(
        **GQA,
        head_dim=12,
        rope_parameters={"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 1e4},
    ),
    "hunyuan_dense-biased": lambda: hf.HunYuanDenseV1Config(**GQA, head_dim=8, attention_bias=True),
    "hunyuan_moe": lambda: hf.HunYuanMoEV1Config(**GQA, head_dim=12, num_experts=5, moe_topk=2),
    "minicpm3": lambda: hf.MiniCPM3Config(
        **{k: v for k, v in LATENT.items() if "experts" not in k and "moe" not in k},
        scale_emb=3,
        scale_depth=1.4,
        dim_model_base=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 5.0],
            "original_max_position_embeddings": 128,
        },
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**SIZES, rope_parameters=PARTIAL),
    "gpt_neox-sequential": lambda: hf.GPTNeoXConfig(
        **SIZES, rope_parameters=PARTIAL, use_parallel_residual=False, attention_bias=False
    ),
}


# models whose "eager" attention is wrong in Hugging Face: Falcon's adds ALiBi twice
SDPA = {"falcon-rw"}
# whose rotation depends on the length so far
BY_TOKEN = {"llama-dynamic"}
# cases whose layers run as one native call on the CPU
FUSED = {
    "llama", "llama-tied-biased", "llama-mha", "llama-mqa", "llama-linear", "llama-llama3", "llama-dynamic",
    "mistral-wide-heads", "qwen2-yarn", "qwen3-window", "gemma-mqa", "phi3-partial", "phi3-longrope",
    "mistral", "mistral-no-window", "qwen2", "qwen2-window", "qwen3",
    "qwen3-tied", "gemma", "phi3", "phi3-window", "opt", "opt-plain", "gpt2", "gpt2-scaled", "gpt_bigcode",
    "gpt_bigcode-mha", "starcoder2", "starcoder2-plain", "persimmon-no-head-norms", "nemotron", "nemotron-biased",
    "stablelm", "olmo", "granite-biased", "glm", "gpt_neox-sequential", "smollm3", "smollm3-no-rope", "seed_oss",
    "seed_oss-biased", "ernie4_5", "ernie4_5-biased",
}  # fmt: skip
# config.json -> whether a decode step on a GPU is the fused program
LARGE = {
    "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 12288, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
PROGRAM = {
    "llama": ("LlamaForCausalLM", {}, True),
    "qwen2": ("Qwen2ForCausalLM", {}, True),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}, True),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}, True),
    "granite": ("GraniteForCausalLM", {}, True),
    "granite-scaled": ("GraniteForCausalLM", {"residual_multiplier": 0.2}, True),
    "stablelm": ("StableLmForCausalLM", {}, True),
    "olmo2": ("Olmo2ForCausalLM", {}, True),
}


@pytest.mark.parametrize("case", PROGRAM)
def test_families_keep_to_the_fused_program_that_computes_them(case: str) -> None:
    architecture, fields, expected = PROGRAM[case]
    raw = {**LARGE, **fields, "model_type": case.partition("-")[0], "architectures": [architecture]}
    family = family_of(architecture)
    assert family is not None
    assert covers(family.decoder(HFConfig.from_dict(raw))) is expected


def without_each(spec: Any) -> Iterator[tuple[str, Any]]:
    """(name of a field, `spec` with it at its default, wherever it occurs) for every field that is not there yet."""

    def reset(part: Any, kind: type, name: str, default: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(reset(x, kind, name, default) for x in part)
        if not dataclasses.is_dataclass(part):
            return part
        inner = {f.name: reset(getattr(part, f.name), kind, name, default) for f in dataclasses.fields(part)}
        return dataclasses.replace(part, **inner | ({name: default} if type(part) is kind else {}))

    def fields(part: Any) -> Iterator[tuple[type, str, Any]]:
        if isinstance(part, tuple):
            for x in part:
                yield from fields(x)
        elif dataclasses.is_dataclass(part):
            for f in dataclasses.fields(part):
                value = getattr(part, f.name)
                same = type(part) is Attn and f.name == "scale" and math.isclose(value or 0.0, part.head_dim**-0.5)
                unused = f.name == "long_attention_factor"  # of sequences longer than these
                if f.name == "eps":
                    yield type(part), f.name, 1.0  # which shows, as its default would not
                elif f.default is not dataclasses.MISSING and value != f.default and not same and not unused:
                    yield type(part), f.name, f.default
                yield from fields(value)

    for kind, name, default in dict.fromkeys(fields(spec)):
        yield f"{kind.__name__}.{name}", reset(spec, kind, name, default)


def check_that_no_field_is_decoration(folder: Path, prompt: torch.Tensor, expected: torch.Tensor) -> None:
    """Without any one of the fields that the family sets, the checkpoint does not fit, or the logits are others."""
    config = HFConfig.load(folder)
    family = family_of(config.architectures[0])
    assert family is not None
    for name, spec in without_each(without_idle_windows(family.decoder(config), 64)):
        try:
            model = build_decoder(
                spec, torch.float32, 64, torch.device("cpu"), TensorParallel(), modules=family.modules
            )
            tensors = find_checkpoint(folder, "auto").tensors()
            fill_from_checkpoint(model, family, spec, tensors, torch.device("cpu"))
        except ValueError:
            continue
        (logits,) = PagedDriver(model).run([prompt], [64])
        assert relative_error(logits, expected) > 1e-4, name


def logits_of(reference: Any, prompt: torch.Tensor, case: str) -> torch.Tensor:
    """What Hugging Face computes at every position; token by token, where what is in the cache must not change."""
    with torch.inference_mode():
        if case not in BY_TOKEN:
            found: torch.Tensor = reference(prompt[None]).logits[0]
            return found
        cache, rows = None, []
        for token in prompt:
            out = reference(token[None, None], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
        return torch.stack(rows)


def check_wanted_rows(model: Any, prompts: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """A model that is asked for some rows only gives those, and leaves the cache as complete as otherwise."""
    heads, tails = (
        [(i, 0, p[:-1]) for i, p in enumerate(prompts)],
        [(i, len(p) - 1, p[-1:]) for i, p in enumerate(prompts)],
    )
    every, lengths = torch.cat([logits[:-1] for logits in expected]), [len(p) for p in prompts]
    for rows in (torch.randperm(len(every))[:9], torch.randperm(len(every)), torch.tensor([], dtype=torch.int64)):
        driver = PagedDriver(model, requests=len(prompts))
        found = driver.step([chunk for chunk in heads if len(chunk[2])], rows, lengths)
        assert found.shape == every[rows].shape
        if len(rows):
            assert relative_error(found, every[rows]) < 1e-5
        last = driver.step(tails, prompts=lengths)
        assert relative_error(last, torch.stack([logits[-1] for logits in expected])) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hugging_face_at_every_position(case: str, tmp_path: Path) -> None:
    reference = save_random_hf_model(CASES[case](), tmp_path, attention="sdpa" if case in SDPA else "eager")
    prompts = [torch.randint(0, 131, (length,)) for length in (23, 1, 38)]
    expected = [logits_of(reference, prompt, case) for prompt in prompts]
    for kind in ("reference", "fast", "fused"):
        with kernels(kind):
            model = load(tmp_path)
            if kind == "fused":
                cpu_blocks.fuse(model)
                assert (model.fused_blocks is not None) == (case in FUSED and library.find() is not None)
            ours = PagedDriver(model, requests=3).run(prompts, [5, 1, 7, 3])
            check_wanted_rows(model, prompts, ours)
        for logits, wanted in zip(ours, expected, strict=True):
            assert logits.dtype == torch.float32
            assert logits.shape == wanted.shape
            assert relative_error(logits, wanted) < 1e-5, kind
    with kernels("reference"):
        check_that_no_field_is_decoration(tmp_path, prompts[2], expected[2])


def test_the_text_model_inside_a_larger_one(tmp_path: Path) -> None:
    """As Llama 4 is published: names begin with the part's, the config stands in `text_config`, and there is vision."""
    reference = save_random_hf_model(CASES["llama4"](), tmp_path)
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file({**tensors, "vision_model.class_embedding": torch.zeros(3)}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    larger = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({**larger, "text_config": text}))
    prompt = torch.randint(0, 131, (38,))
    (logits,) = PagedDriver(load(tmp_path)).run([prompt], [7])
    with torch.inference_mode():
        assert relative_error(logits, reference(prompt[None]).logits[0]) < 1e-5


WINDOWS = ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3", "dots1"]


@pytest.mark.parametrize("case", WINDOWS)
def test_which_layers_have_a_window_where_there_are_no_layer_types(case: str, tmp_path: Path) -> None:
    made = CASES[case]().to_dict() | {"num_hidden_layers": 6, "sliding_window": 7}
    for name in ("layer_types", "no_rope_layers"):
        made.pop(name, None)
    prompt = torch.randint(0, 131, (38,))
    for fields in ({"max_window_layers": 3, "use_sliding_window": True}, {"max_window_layers": 4}):
        raw = json.loads(json.dumps({**made, "use_sliding_window": False, **fields}))
        reference = save_random_hf_model(hf.AutoConfig.for_model(**raw), tmp_path)
        raw["architectures"] = [type(reference).__name__]
        (tmp_path / "config.json").write_text(json.dumps(raw))
        logits = PagedDriver(load(tmp_path)).run([prompt], [7])[0]
        assert relative_error(logits, logits_of(reference, prompt, case)) < 1e-5, fields


def test_gpt_oss_without_rope_settings_has_those_of_transformers(tmp_path: Path) -> None:
    sizes = {**GQA, "max_position_embeddings": 131072, "intermediate_size": 30}
    reference = save_random_hf_model(hf.GptOssConfig(**sizes, num_local_experts=5, num_experts_per_tok=2), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    prompt = torch.randint(0, 131, (23,))
    for fields in ({}, {"rope_theta": 150000.0, "rope_scaling": None}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
        assert (
            relative_error(PagedDriver(load(tmp_path)).run([prompt], [5])[0], logits_of(reference, prompt, "gpt_oss"))
            < 1e-5
        )


def test_rotation_by_several_positions_is_the_usual_one_of_text(tmp_path: Path) -> None:
    reference = save_random_hf_model(CASES["qwen2"](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = torch.randint(0, 131, (23,))
    assert (
        relative_error(PagedDriver(load(tmp_path)).run([prompt], [5])[0], logits_of(reference, prompt, "qwen2")) < 1e-5
    )
