"""Tokens that must follow take no step of their own, which changes no token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.structured_output.test_outputs import PERSON
from tests.tiny_llama import assert_idle, save_tiny_llama
from vllm import LLM, SamplingParams
from vllm.engine import core
from vllm.engine.core import EngineCore
from vllm.outputs import RequestOutput
from vllm.sampling_params import GuidedDecodingParams

CARD = {
    "type": "object",
    "properties": {
        "identification_of_the_person": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a registered customer", "another registered person"]},
        "inner": PERSON,
    },
    "required": ["identification_of_the_person", "kind", "inner"],
}
FORMS: list[dict[str, Any]] = [
    {"json": CARD},
    {"json": CARD, "disable_any_whitespace": True},
    {"json": PERSON},
    {"choice": ["the same beginning, and one end", "the same beginning, and another end"]},
    {"regex": "(The capital of France is (Paris|Rome)\\. ){1,4}"},
]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "max_tokens": 7},
    {"temperature": 1.0, "seed": 7, "stop": ["ident", "ital of"]},
    {"temperature": 0.0, "min_tokens": 30, "ignore_eos": True},
    {"temperature": 1.0, "seed": 8, "n": 3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 9, "prompt_logprobs": 1},
    {"temperature": 0.0, "logit_bias": {5: 3.0}},
]


@pytest.fixture(autouse=True)
def jumps_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "JUMP_SECONDS", 0.0)


def params() -> list[SamplingParams]:
    guided = [
        SamplingParams(**{"max_tokens": 60, **way}, guided_decoding=GuidedDecodingParams(**form))
        for form in FORMS
        for way in WAYS
    ]
    free = [SamplingParams(max_tokens=40, temperature=t, seed=3) for t in (0.0, 1.0)]
    return guided + free


def answers(llm: LLM) -> tuple[list[Any], int]:
    """All that is said of each output, and how many steps it took."""
    before = steps(llm)
    outputs: list[RequestOutput] = llm.generate(["Describe a person:"] * len(params()), params(), use_tqdm=False)
    assert_idle(llm)
    found = [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs and [sorted(p) for p in c.logprobs])
        for output in outputs
        for c in output.outputs
    ]
    return found, steps(llm) - before


def steps(llm: LLM) -> int:
    return llm.llm_engine.core.core.scheduler._step_id


def test_tokens_are_those_of_single_steps(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    found, few = answers(demo)
    monkeypatch.setattr(EngineCore, "_jump", lambda self, outputs: outputs)
    expected, many = answers(demo)
    assert found == expected
    assert few <= many


def test_where_steps_are_short_only_ends_are_not_sampled(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    found, few = answers(demo)
    monkeypatch.setattr(core, "JUMP_SECONDS", 1e9)
    assert answers(demo)[0] == found
    form = GuidedDecodingParams(regex="The capital of France is (Paris|Rome)")
    before = steps(demo)
    (output,) = demo.generate(["So:"], SamplingParams(temperature=0, guided_decoding=form), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert steps(demo) - before == len(output.outputs[0].token_ids) - 1


def test_forced_tokens_take_no_step(demo: LLM) -> None:
    form = GuidedDecodingParams(regex="The capital of France is (Paris|Rome)")
    before = steps(demo)
    (output,) = demo.generate(["So:"], SamplingParams(temperature=0, guided_decoding=form), use_tqdm=False)
    tokens = len(output.outputs[0].token_ids)
    assert tokens >= 6 and steps(demo) - before <= 4
    before = steps(demo)
    asking = SamplingParams(temperature=0, guided_decoding=form, logprobs=1)
    (output,) = demo.generate(["So:"], asking, use_tqdm=False)
    assert len(output.outputs[0].logprobs or ()) == tokens == steps(demo) - before  # each has logprobs, so each a step


def test_preempted_requests_bring_their_forced_tokens(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_llama(tmp_path, max_model_len=512)
    plenty = {"dtype": "float32", "max_num_seqs": 32, "enable_prefix_caching": False}
    with LLM(str(folder), num_gpu_blocks_override=2000, **plenty) as llm:
        monkeypatch.setattr(EngineCore, "_jump", lambda self, outputs: outputs)
        expected, _ = answers(llm)
        monkeypatch.undo()
    with LLM(str(folder), num_gpu_blocks_override=40, **plenty) as llm:
        found, _ = answers(llm)
        assert llm.llm_engine.core.core.scheduler._stats.num_preemptions
    assert found == expected


def test_forced_tokens_that_steps_take_one_by_one_are_those(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that has room for one of them only, or takes one at a time, still brings all to the device."""
    folder = save_tiny_llama(tmp_path, max_model_len=512)
    small = {"dtype": "float32", "num_gpu_blocks_override": 2000}
    with LLM(str(folder), max_num_seqs=32, **small) as llm:
        monkeypatch.setattr(EngineCore, "_jump", lambda self, outputs: outputs)
        expected, _ = answers(llm)
        monkeypatch.undo()
    monkeypatch.setattr(core, "JUMP_SECONDS", 0.0)
    for options in ({"long_prefill_token_threshold": 1, "max_num_seqs": 32}, {"max_num_batched_tokens": 8}):
        with LLM(str(folder), **{"max_num_seqs": 8, **small, **options}) as llm:
            assert answers(llm)[0] == expected


def test_a_step_that_fails_is_tried_again_with_its_masks(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = answers(demo)
    executor = demo.llm_engine.core.core.executor
    submit, failures = executor.submit, iter([False] * 9 + [True])

    def sometimes(plan: Any) -> None:
        if next(failures, False):
            raise RuntimeError("a fault")
        submit(plan)

    monkeypatch.setattr(executor, "submit", sometimes)
    found, _ = answers(demo)
    assert found == expected and next(failures, None) is None


@pytest.mark.parametrize("most", [1, 200])
def test_of_a_text_that_goes_on_for_ever_no_more_is_taken_than_was_asked_for(demo: LLM, most: int) -> None:
    rules = [f"r{i}: r{i + 1} r{i + 1}" for i in range(60)]
    params = GuidedDecodingParams(grammar="\n".join(["start: r0", *rules, 'r60: "zq"']), backend="xgrammar:no-fallback")
    (output,) = demo.generate(["x"], SamplingParams(max_tokens=most, guided_decoding=params), use_tqdm=False)
    (answer,) = output.outputs
    assert len(answer.token_ids) == most and answer.finish_reason == "length"
    assert ("zq" * 200).startswith(answer.text)
    assert_idle(demo)
