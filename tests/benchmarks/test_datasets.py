"""Where a benchmark's requests come from: lengths that are asked for are lengths that are sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm.benchmarks.datasets import jsonl_samples, random_samples, sharegpt_samples
from vllm.config.model_source import resolve
from vllm.engine.tokenizer import Tokenizer
from vllm.engine.tokenizer_files import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("demo"))


def test_random_prompts_have_exactly_the_wanted_lengths(tokenizer):
    samples = random_samples(tokenizer, 20, 37, 11, 0.0, 5, 0)
    assert [len(s.prompt) for s in samples] == [42] * 20
    assert all(s.prompt_tokens == 42 and s.output_tokens == 11 for s in samples)
    assert len({tuple(s.prompt[:5]) for s in samples}) == 1  # the common prefix
    assert len({tuple(s.prompt) for s in samples}) == 20


def test_random_prompts_hold_no_special_token_and_only_known_ids(tokenizer):
    ids = {i for s in random_samples(tokenizer, 50, 100, 1, 0.0, 0, 3) for i in s.prompt}
    assert not ids & set(tokenizer.all_special_ids)
    assert min(ids) >= 0 and max(ids) < len(tokenizer)


def test_the_range_ratio_bounds_lengths_on_both_sides(tokenizer):
    samples = random_samples(tokenizer, 300, 100, 50, 0.2, 0, 1)
    prompts, outputs = {s.prompt_tokens for s in samples}, {s.output_tokens for s in samples}
    assert min(prompts) == 80 and max(prompts) == 120
    assert min(outputs) == 40 and max(outputs) == 60


def test_a_seed_gives_the_same_requests(tokenizer):
    assert random_samples(tokenizer, 5, 10, 4, 0.5, 2, 7) == random_samples(tokenizer, 5, 10, 4, 0.5, 2, 7)
    assert random_samples(tokenizer, 5, 10, 4, 0.5, 2, 7) != random_samples(tokenizer, 5, 10, 4, 0.5, 2, 8)


def test_random_texts_say_how_many_tokens_they_are(tokenizer):
    for sample in random_samples(tokenizer, 10, 40, 4, 0.0, 0, 0, as_text=True):
        assert isinstance(sample.prompt, str)
        assert sample.prompt_tokens == len(tokenizer.encode(sample.prompt, False))


@pytest.mark.parametrize("lengths", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_lengths_below_one_are_refused(tokenizer, lengths):
    input_len, output_len, prefix_len = lengths
    with pytest.raises(ValueError, match="1 or more"):
        random_samples(tokenizer, 1, input_len, output_len, 0.0, prefix_len, 0)


def test_a_range_ratio_of_one_is_refused(tokenizer):
    with pytest.raises(ValueError, match="range ratio"):
        random_samples(tokenizer, 1, 8, 8, 1.0, 0, 0)


def _conversation(question: str, answer: str) -> dict:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def test_sharegpt_takes_first_question_and_length_of_first_answer(tokenizer, tmp_path: Path):
    question, answer = "What is the capital of France?", "The capital of France is Paris, on the Seine."
    short = _conversation("Hi", "Yo")  # below four tokens: left out
    long = _conversation("word " * 3000, answer)  # above the limit: left out
    one_turn = {"conversations": [{"from": "human", "value": question}]}
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([short, long, one_turn, _conversation(question, answer)]))
    samples = sharegpt_samples(tokenizer, path, 3, None, 0)
    assert len(samples) == 3  # repeated up to the number asked for
    assert {s.prompt for s in samples} == {question}
    assert samples[0].prompt_tokens == len(tokenizer.encode(question))
    assert samples[0].output_tokens == len(tokenizer.encode(answer))
    assert sharegpt_samples(tokenizer, path, 1, 9, 0)[0].output_tokens == 9


def test_jsonl_reads_prompt_and_length(tokenizer, tmp_path: Path):
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "one two three"}\n\n{"prompt": "four", "output_tokens": 5}\n{"prompt": "five"}\n')
    samples = jsonl_samples(tokenizer, path, 2, 33)
    assert [(s.prompt, s.output_tokens) for s in samples] == [("one two three", 33), ("four", 5)]
    assert samples[0].prompt_tokens == len(tokenizer.encode("one two three"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": 3}\n', ":1: expected an object with a text `prompt`"),
        ('{"prompt": "a"}\n{"pro', ":2: not JSON"),
        ('"prompt"\n', ":1: expected an object"),
        ("\n", "no usable request"),
    ],
)
def test_a_bad_jsonl_file_is_named_with_its_line(tokenizer, tmp_path: Path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        jsonl_samples(tokenizer, path, 5, 8)
    assert "bad.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "must hold a list"), ("[", "not JSON"), ("[]", "no conversation"), ('[1, {"a": 2}]', "no conversation")],
)
def test_a_bad_sharegpt_file_is_refused(tokenizer, tmp_path: Path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        sharegpt_samples(tokenizer, path, 5, None, 0)


def test_a_missing_file_is_named(tokenizer, tmp_path: Path):
    with pytest.raises(ValueError, match="There is no file .*nowhere"):
        jsonl_samples(tokenizer, tmp_path / "nowhere.jsonl", 5, 8)
