"""Hooks of model classes that change prompts before the model sees them."""

from __future__ import annotations

import pytest

from tests.tiny_llama import make_llm
from vllm import SamplingParams
from vllm.inputs import INPUT_REGISTRY, LLMInputs
from vllm.inputs.registry import InputContext, class_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def hook(monkeypatch, model_folder):
    """Installs a function as the hook of the tiny model's class, for the length of a test."""

    def install(function) -> None:
        with make_llm(model_folder) as llm:
            model_class = class_of(llm.llm_engine.model_config)
        monkeypatch.setitem(INPUT_REGISTRY._processors, model_class, function)

    return install


def test_prompt_is_what_the_hook_returns(hook, model_folder, llm):
    seen = []

    def double(context: InputContext, inputs: LLMInputs) -> LLMInputs:
        seen.append((context.model_config.max_model_len, inputs.get("prompt")))
        return LLMInputs(prompt_token_ids=inputs["prompt_token_ids"] * 2, prompt="doubled")

    hook(double)
    want = llm.generate({"prompt_token_ids": [5, 6, 7, 5, 6, 7]}, GREEDY, use_tqdm=False)[0]
    with make_llm(model_folder) as hooked:
        got = hooked.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, use_tqdm=False)[0]
        assert (got.prompt, got.prompt_token_ids) == ("doubled", [5, 6, 7, 5, 6, 7])
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert seen == [(96, None)]
        with pytest.raises(ValueError, match="longer than the maximum"):
            hooked.generate({"prompt_token_ids": [5] * 60}, GREEDY, use_tqdm=False)


def test_hook_cannot_smuggle_what_the_model_does_not_take(hook, model_folder):
    hook(lambda context, inputs: LLMInputs(**inputs, multi_modal_data={"image": object()}))
    with make_llm(model_folder) as hooked, pytest.raises(ValueError, match="not multimodal"):
        hooked.generate({"prompt_token_ids": [5, 6]}, GREEDY, use_tqdm=False)
