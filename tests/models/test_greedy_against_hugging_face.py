"""Through the whole engine: 16 prompts of mixed lengths together, 64 greedy tokens each, the same as Hugging Face's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.harness import save_random_hf_model
from tests.models.own_models import NewLlamaForCausalLM, OldLlamaForCausalLM
from tests.models.test_against_hugging_face import CASES
from vllm import LLM, ModelRegistry, SamplingParams

FAMILIES = [
    "llama", "mistral", "mixtral", "qwen2-window", "qwen3", "gemma", "gemma2", "phi", "phi3-window", "opt", "opt-350m",
    "gpt2", "gpt_neox", "bloom", "falcon-40b", "cohere2", "olmo2", "qwen2_moe",
    "deepseek_v2-lite", "deepseek_v3", "gpt_oss", "llama4",
]  # fmt: skip
OWN = {"own-0.6": OldLlamaForCausalLM, "own-0.8": NewLlamaForCausalLM}
NEW_TOKENS = 64


@pytest.fixture
def registry() -> Iterator[Any]:
    before = dict(ModelRegistry._registered)
    yield ModelRegistry
    ModelRegistry._registered.clear()
    ModelRegistry._registered.update(before)


@pytest.mark.parametrize("case", [*FAMILIES, *OWN])
def test_engine_generates_the_same_tokens(case: str, registry: Any, tmp_path: Path) -> None:
    config = CASES["llama" if case in OWN else case]()
    config.max_position_embeddings = 128
    reference = save_random_hf_model(config, tmp_path)
    if case in OWN:
        registry.register_model("LlamaForCausalLM", OWN[case])
    lengths = torch.randint(1, 40, (16,))
    prompts = [torch.randint(0, 131, (int(length),)).tolist() for length in lengths]
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=8,
        max_num_batched_tokens=64,  # so that prompts are cut
        max_num_seqs=16,
        num_gpu_blocks_override=120,  # so that some requests have to make way
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == NEW_TOKENS
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert tokens == expected.argmax(-1).tolist()
    del llm
    gc.collect()
