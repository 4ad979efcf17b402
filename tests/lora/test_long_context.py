"""Adapters for longer sequences than the model's: their requests' positions are divided, others' are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.lora.adapters import save_adapter
from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

LENGTH, FACTORS = 64, (2.0, 4.0)
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "enable_lora": True, "max_loras": 3, "max_num_batched_tokens": 48, "block_size": 8,
    "num_gpu_blocks_override": 300, "skip_tokenizer_init": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Path]]:
    """The base, and adapters by the factor that they divide positions by."""
    root = tmp_path_factory.mktemp("long")
    base = save_llama(root / "base", sharpness=2.0, max_position_embeddings=LENGTH)
    adapters = {}
    for factor in (1, 2, 4):
        adapters[factor] = root / str(factor)
        save_adapter(base, adapters[factor], rank=8, seed=factor)
        if factor > 1:
            file = adapters[factor] / "adapter_config.json"
            settings = json.loads(file.read_text())
            file.write_text(json.dumps({**settings, "context_length": factor * LENGTH - 5}))
    return base, adapters


def oracle(base: Path, adapter: Path | None, factor: int, tokens: list[int]) -> torch.Tensor:
    """Logits of transformers' model with linearly scaled rotary embeddings and the adapter merged."""
    import peft

    rope = {"rope_type": "linear", "factor": float(factor), "rope_theta": 10000.0}
    options: dict[str, Any] = {} if factor == 1 else {"rope_parameters": rope}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **options)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(torch.tensor([tokens])).logits[0]
    return found


def test_each_request_has_the_positions_of_its_adapter(folders: tuple[Path, dict[int, Path]]) -> None:
    base, adapters = folders
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=1)
    generator = torch.Generator().manual_seed(0)
    work = []
    for factor, length in ((4, 230), (1, 30), (2, 100), (0, 40), (4, 40), (2, 20)):
        prompt = torch.randint(3, 200, (length,), generator=generator).tolist()
        adapter = LoRARequest(f"a{factor}", factor, str(adapters[factor])) if factor else None
        work.append((factor, adapter, prompt))
    with LLM(str(base), long_lora_scaling_factors=FACTORS, **OPTIONS) as llm:
        assert llm.llm_engine.model_config.max_model_len == 4 * LENGTH
        prompts: Any = [{"prompt_token_ids": prompt} for _, _, prompt in work]
        outputs = llm.generate(prompts, params, lora_request=[a for _, a, _ in work], use_tqdm=False)  # type: ignore
    for (factor, _, prompt), output in zip(work, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        logits = oracle(base, adapters.get(factor), max(factor, 1), [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist(), factor
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found = torch.tensor([by_id[token].logprob for by_id, token in zip(logprobs, tokens, strict=True)])
        torch.testing.assert_close(found, logits.log_softmax(-1).amax(-1), atol=1e-4, rtol=1e-4)


def test_sequences_are_as_long_as_their_adapter_allows(folders: tuple[Path, dict[int, Path]]) -> None:
    base, adapters = folders
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, detokenize=False)
    with LLM(str(base), long_lora_scaling_factors=FACTORS, **OPTIONS) as llm:

        def length(factor: int, prompt: int = 8, most: int | None = None) -> int:
            adapter = None
            if factor:
                adapter = LoRARequest(f"a{factor}", factor, str(adapters[factor]), long_lora_max_len=most)
            given: Any = {"prompt_token_ids": [5] * prompt}
            (output,) = llm.generate(given, params, lora_request=adapter, use_tqdm=False)
            return prompt + len(output.outputs[0].token_ids)

        assert [length(factor) for factor in (0, 1, 2, 4)] == [LENGTH, LENGTH, 2 * LENGTH, 4 * LENGTH]
        assert length(4, most=100) == 100
        for factor, most in ((0, None), (1, None), (2, 64)):
            with pytest.raises(ValueError, match="longer than the maximum model length of 64"):
                length(factor, LENGTH + 1, most)


def test_what_cannot_be_divided_is_said(folders: tuple[Path, dict[int, Path]], tmp_path: Path) -> None:
    base, adapters = folders
    for factors in (None, (4.0,)):
        message = "divides positions by 2. Add 2 to long_lora_scaling_factors"
        with (
            LLM(str(base), long_lora_scaling_factors=factors, **OPTIONS) as llm,
            pytest.raises(ValueError, match=message),
        ):
            prompt: Any = {"prompt_token_ids": [5]}
            llm.generate(prompt, lora_request=LoRARequest("a", 1, str(adapters[2])), use_tqdm=False)
    with pytest.raises(ValueError, match="must not be below 1"):
        LLM(str(base), long_lora_scaling_factors=(0.5,), **OPTIONS)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    other = save_llama(tmp_path / "yarn", rope_parameters=yarn)
    with pytest.raises(ValueError, match="the positions of this model cannot be divided"):
        LLM(str(other), long_lora_scaling_factors=(2.0,), **OPTIONS)
    for wrong in (0, -1, "8"):
        with pytest.raises(ValueError, match="long_lora_max_len"):
            LoRARequest("a", 1, "/p", long_lora_max_len=wrong)  # type: ignore[arg-type]
