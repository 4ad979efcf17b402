"""The packaged model through the whole engine, against Hugging Face: fp32 exactly, bf16 within 0.05 per token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import vllm
from vllm import LLM, SamplingParams

FOLDER = Path(vllm.__file__).parent / "assets" / "demo"
PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "Once upon a time",
    "The capital of Japan is",
    "7 + 5 =",
    "Water",
    "The largest country in the world is Russia, and",
    "A robot may not injure a human being",
    "To be or not to be",
    "What is the meaning of life?",
    "In the morning, the boy went to the market and bought some bread, milk and",
    "Paris is the capital of",
    "My favourite colour is",
    "The sun",
]


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_fp32_gives_the_greedy_tokens_of_hugging_face(reference: torch.nn.Module) -> None:
    llm = LLM("demo", dtype="float32", max_model_len=256)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    for output in outputs:
        prompt, answer = output.prompt_token_ids, list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_bf16_logprobs_of_answers_are_near_fp32(reference: torch.nn.Module) -> None:
    llm = LLM("demo", dtype="bfloat16", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        ids = output.prompt_token_ids + list(output.outputs[0].token_ids)
        steps = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        got = torch.tensor([step[token].logprob for step, token in zip(steps, ids[1:], strict=True)])
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        want = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        error, answer = (got - want).abs(), len(output.prompt_token_ids) - 1
        assert error[answer:].max() < 0.05, output.prompt
        assert error[:answer].median() < 0.05  # a prompt may hold tokens that the model holds for nearly impossible
