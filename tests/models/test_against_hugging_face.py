"""Every family, tiny and with odd sizes: fp32 logits equal Hugging Face's everywhere, through the paged cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.kernels import kernels
from vllm.worker import cpu_blocks

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
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
NO_PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CASES: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**{**GQA, "num_key_value_heads": 3}, head_dim=12),
    "llama-tied-biased": lambda: hf.LlamaConfig(**GQA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-mha": lambda: hf.LlamaConfig(**SIZES),
    "mistral": lambda: hf.MistralConfig(**GQA, sliding_window=7),
    "mistral-no-window": lambda: hf.MistralConfig(**GQA, sliding_window=None),
    "mixtral": lambda: hf.MixtralConfig(**GQA, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window": lambda: hf.MixtralConfig(**GQA, num_local_experts=4, num_experts_per_tok=3, sliding_window=9),
    "qwen2": lambda: hf.Qwen2Config(**GQA),
    "qwen2-window": lambda: hf.Qwen2Config(
        **{**GQA, "num_hidden_layers": 5}, use_sliding_window=True, sliding_window=7, max_window_layers=3
    ),
    "qwen3": lambda: hf.Qwen3Config(**GQA, head_dim=10),
    "qwen3-tied": lambda: hf.Qwen3Config(**GQA, head_dim=16, tie_word_embeddings=True, attention_bias=True),
    "gemma": lambda: hf.GemmaConfig(**GQA, head_dim=14),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA2, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma2-no-caps": lambda: hf.Gemma2Config(**GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None),
    "phi": lambda: hf.PhiConfig(**GQA, partial_rotary_factor=0.5),
    "phi-qk-norm": lambda: hf.PhiConfig(**SIZES, qk_layernorm=True),
    "phi3": lambda: hf.Phi3Config(**GQA, **NO_PAD),
    "phi3-window": lambda: hf.Phi3Config(**GQA, **NO_PAD, sliding_window=7),
    "opt": lambda: hf.OPTConfig(**OPT, word_embed_proj_dim=48),
    "opt-350m": lambda: hf.OPTConfig(**OPT, word_embed_proj_dim=20, do_layer_norm_before=False),
    "opt-plain": lambda: hf.OPTConfig(
        **OPT, word_embed_proj_dim=48, enable_bias=False, layer_norm_elementwise_affine=False
    ),
    "gpt2": lambda: hf.GPT2Config(**GPT),
    "gpt2-scaled": lambda: hf.GPT2Config(**GPT, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**SIZES, rope_parameters=PARTIAL),
    "gpt_neox-sequential": lambda: hf.GPTNeoXConfig(
        **SIZES, rope_parameters=PARTIAL, use_parallel_residual=False, attention_bias=False
    ),
}


def check_wanted_rows(model: Any, prompts: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """A model that is asked for some rows only gives those, and leaves the cache as complete as otherwise."""
    heads, tails = (
        [(i, 0, p[:-1]) for i, p in enumerate(prompts)],
        [(i, len(p) - 1, p[-1:]) for i, p in enumerate(prompts)],
    )
    every = torch.cat([logits[:-1] for logits in expected])
    for rows in (torch.randperm(len(every))[:9], torch.randperm(len(every)), torch.tensor([], dtype=torch.int64)):
        driver = PagedDriver(model, requests=len(prompts))
        found = driver.step([chunk for chunk in heads if len(chunk[2])], rows)
        assert found.shape == every[rows].shape
        if len(rows):
            assert relative_error(found, every[rows]) < 1e-5
        assert relative_error(driver.step(tails), torch.stack([logits[-1] for logits in expected])) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hugging_face_at_every_position(case: str, tmp_path: Path) -> None:
    reference = save_random_hf_model(CASES[case](), tmp_path)
    prompts = [torch.randint(0, 131, (length,)) for length in (23, 1, 38)]
    with torch.inference_mode():
        expected = [reference(prompt[None]).logits[0] for prompt in prompts]
    for kind in ("reference", "fast", "fused"):
        with kernels(kind):
            model = load(tmp_path)
            if kind == "fused":
                cpu_blocks.fuse(model)
            ours = PagedDriver(model, requests=3).run(prompts, [5, 1, 7, 3])
            check_wanted_rows(model, prompts, ours)
        for logits, wanted in zip(ours, expected, strict=True):
            assert logits.dtype == torch.float32
            assert logits.shape == wanted.shape
            assert relative_error(logits, wanted) < 1e-5, kind
