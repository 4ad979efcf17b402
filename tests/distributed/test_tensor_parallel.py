"""Two ranks over gloo compute the logits of one, for every way of cutting a layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.distributed.rank import DUMMY, model_impl
from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.own_models import OldLlamaForCausalLM
from vllm.distributed import (
    TensorParallel,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    use_tensor_parallel,
)
from vllm.model_executor.models import ModelRegistry

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 78,
    "max_position_embeddings": 64,
}
NO_PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_dim": 78}
CASES: dict[str, Any] = {
    "llama-gqa": lambda: hf.LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "llama-one-kv-head-tied": lambda: hf.LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3),
    "opt": lambda: hf.OPTConfig(**OPT, word_embed_proj_dim=48),
    "opt-350m": lambda: hf.OPTConfig(**OPT, word_embed_proj_dim=20, do_layer_norm_before=False),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**SIZES),
    "gpt2": lambda: hf.GPT2Config(vocab_size=131, n_embd=48, n_layer=2, n_head=6, n_positions=64),
    "phi": lambda: hf.PhiConfig(**SIZES, num_key_value_heads=2),
    "phi3": lambda: hf.Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "gemma2": lambda: hf.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=12, sliding_window=7),
    "bloom": lambda: hf.BloomConfig(vocab_size=131, hidden_size=48, n_layer=2, n_head=6),
    "falcon-40b": lambda: hf.FalconConfig(
        vocab_size=131,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "cohere-plus": lambda: hf.CohereConfig(**SIZES, **NO_PAD, num_key_value_heads=2, use_qk_norm=True),
    "stablelm-12b": lambda: hf.StableLmConfig(**SIZES, qk_layernorm=True, num_key_value_heads=1),
    "olmo2": lambda: hf.Olmo2Config(**SIZES, **NO_PAD, num_key_value_heads=2),
    "olmo2-one-kv-head": lambda: hf.Olmo2Config(**SIZES, **NO_PAD, num_key_value_heads=1),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=30,
        shared_expert_intermediate_size=38,
    ),
    "mamba": lambda: hf.MambaConfig(vocab_size=131, hidden_size=48, num_hidden_layers=2, state_size=5, use_bias=True),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=131, hidden_size=48, num_hidden_layers=2, state_size=5, num_heads=6, head_dim=16, n_groups=2
    ),
    "mamba2-one-group": lambda: hf.Mamba2Config(
        vocab_size=131, hidden_size=48, num_hidden_layers=2, state_size=5, num_heads=6, head_dim=16, n_groups=1
    ),
    "jamba": lambda: hf.JambaConfig(
        **SIZES, num_key_value_heads=2, num_experts=3, mamba_d_state=7, attn_layer_period=2, attn_layer_offset=1
    ),
    "transformers-plain": lambda: hf.SmolLM3Config(**SIZES, **NO_PAD, num_key_value_heads=2),
    "transformers-gathered": lambda: hf.Olmo3Config(**SIZES, **NO_PAD, num_key_value_heads=2, sliding_window=7),
    "transformers-moe": lambda: hf.Glm4MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=30,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        head_dim=8,
    ),
    "own-model": lambda: hf.LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=8),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case's model, run by two ranks."""
    work = tmp_path_factory.mktemp("tp")
    for name, make in CASES.items():
        save_random_hf_model(make(), work / name)
        if name == "own-model":
            file = work / name / "config.json"
            file.write_text(file.read_text().replace("LlamaForCausalLM", "MyLlama"))
    torch.save([torch.randint(0, 131, (length,)) for length in (17, 26)], work / "prompts.pt")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.distributed.rank"]
    ranks = [subprocess.Popen([*command, str(rank), "2", str(work)], cwd=root) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return work


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_the_logits_of_one(case: str, work: Path) -> None:
    prompts = torch.load(work / "prompts.pt", weights_only=True)
    before = dict(ModelRegistry._registered)
    ModelRegistry.register_model("MyLlama", OldLlamaForCausalLM)
    try:
        for load_format in ("auto", "dummy") if case in DUMMY else ("auto",):
            model = load(work / case, load_format=load_format, model_impl=model_impl(case))
            single = PagedDriver(model, requests=2).run(prompts, [15, 20])
            for rank in range(2):
                sharded = torch.load(work / case / f"{load_format}-2-{rank}.pt", weights_only=True)
                for ours, expected in zip(sharded, single, strict=True):
                    assert ours.shape == expected.shape
                    assert relative_error(ours, expected) < 1e-5
    finally:
        ModelRegistry._registered.clear()
        ModelRegistry._registered.update(before)


def test_doors_for_own_models_name_the_current_ranks() -> None:
    assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (0, 1)
    with use_tensor_parallel(TensorParallel(2, 4)):
        assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (2, 4)
    assert get_tensor_model_parallel_world_size() == 1
    x = torch.randn(3)
    assert tensor_model_parallel_all_reduce(x) is x
    assert tensor_model_parallel_all_gather(x) is x
