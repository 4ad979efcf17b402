"""With a reasoning parser, the form holds for outputs that do not begin with thoughts, and after those that do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.structured_output.test_outputs import PERSON
from tests.tiny_llama import assert_idle
from vllm import LLM, SamplingParams
from vllm.engine import core
from vllm.sampling_params import GuidedDecodingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=512, num_gpu_blocks_override=500, max_num_seqs=16, reasoning_parser="qwen3") as llm:
        yield llm


def answers(llm: LLM, *wanted: dict[str, Any], prompt: str = "Describe a person:") -> list[str]:
    params = [
        SamplingParams(**{"max_tokens": 80, **way}, guided_decoding=GuidedDecodingParams(**form))
        for way in wanted
        if (form := way.pop("form"))
    ]
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    assert_idle(llm)
    return [choice.text for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("jump_seconds", [0.0, 1.0])
def test_an_output_without_thoughts_has_the_form(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, jump_seconds: float
) -> None:
    """The demo model has no tags for thoughts."""
    monkeypatch.setattr(core, "JUMP_SECONDS", jump_seconds)
    card, choice = {"json": PERSON}, {"choice": ["yes", "no"]}
    first, second, *choices, tag = answers(
        llm,
        {"form": card, "temperature": 0.0},
        {"form": card, "temperature": 1.0, "seed": 2, "min_tokens": 5},
        {"form": choice, "temperature": 1.0, "seed": 3, "n": 4},
        {"form": {"regex": "<[a-z]{3}>"}, "temperature": 0.0},
    )
    assert all(json.loads(text).keys() >= set(PERSON["required"]) for text in (first, second))
    assert set(choices) <= {"yes", "no"} and len(tag) == 5


def test_an_output_may_open_thoughts_and_no_tag_is_left_half_written(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    bias = {tokenizer.encode("<think>")[-4]: 100.0}
    assert tokenizer.decode(list(bias)) == "<"
    thinking, speaking = answers(
        llm,
        {"form": {"json": PERSON}, "temperature": 0.0, "logit_bias": bias},
        {"form": {"json": PERSON}, "temperature": 0.0, "logit_bias": dict.fromkeys(bias, -100.0)},
        prompt="Write <think>thoughts</think> first. Describe a person:",
    )
    assert thinking.startswith("<think>") and thinking.removeprefix("<think>").startswith("<<<<")
    assert json.loads(speaking)


def test_thoughts_of_the_prompt_go_on_without_the_form(llm: LLM) -> None:
    (text,) = answers(llm, {"form": {"regex": "[0-9]{90}"}, "temperature": 0.0}, prompt="<think>Paris is the capital")
    assert not text[0].isdigit()
    (text,) = answers(llm, {"form": {"regex": "[0-9]{4}"}, "temperature": 0.0}, prompt="<think>Paris</think>")
    assert text.isdigit()
