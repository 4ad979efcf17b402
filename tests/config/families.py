"""config.json documents of the twelve families, as their makers write them, and random variations."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

_COMMON = {"hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6, "vocab_size": 321}

# model_type -> (architecture, a typical config.json in the spelling of 2024, fields that may be left out)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
                "rope_type": "llama3",
            },
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": [7, 8, 9],
        },
    ),
    "mistral": (
        "MistralForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "sliding_window": 256,
            "rope_theta": 10000.0,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {**_COMMON, "num_key_value_heads": 2, "rope_theta": 1e6, "num_local_experts": 4, "sliding_window": None},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 2,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 2,
            "head_dim": 48,
            "rope_theta": 1000000,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
            "max_position_embeddings": 8192,
        },
    ),
    "gemma": ("GemmaForCausalLM", {**_COMMON, "num_key_value_heads": 1, "head_dim": 24, "rope_theta": 10000.0}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "sliding_window": 128,
            "query_pre_attn_scalar": 24,
            "max_position_embeddings": 8192,
        },
    ),
    "phi": (
        "PhiForCausalLM",
        {**_COMMON, "partial_rotary_factor": 0.5, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 6,
            "sliding_window": 2047,
            "max_position_embeddings": 8192,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
            },
        },
    ),
    "opt": (
        "OPTForCausalLM",
        {
            **_COMMON,
            "ffn_dim": 128,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 48,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 512, "vocab_size": 77}),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {**_COMMON, "rotary_pct": 0.25, "rotary_emb_base": 20000, "max_position_embeddings": 1024},
    ),
}  # fmt: skip


def document(model_type: str, /, **changes: Any) -> dict[str, Any]:
    """The config.json of a small model of one family."""
    architecture, fields = FAMILIES[model_type]
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "torch_dtype": "bfloat16",
        **deepcopy(fields),
        **changes,
    }


def variation(model_type: str, seed: int) -> dict[str, Any]:
    """The same with some fields left out, so that class defaults count, and often without the scaling."""
    rng = random.Random(f"{model_type} {seed}")
    fields = document(model_type)
    if rng.random() < 0.5:
        fields.pop("rope_scaling", None)
    for name in rng.sample(sorted(fields), k=rng.randint(0, 4)):
        if name not in ("model_type", "architectures"):
            fields.pop(name, None)
    return fields
