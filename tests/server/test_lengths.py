"""T30: the exact boundaries of lengths. A prompt and its answer fit, or the refusal names the limit."""

from __future__ import annotations

import pytest

from tests.server.http_server import MAX_MODEL_LEN, Server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def ids(count: int) -> list[int]:
    return [5 + i % 50 for i in range(count)]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "status"),
    [
        (0, 1, 400),
        (1, 1, 200),
        (1, MAX_MODEL_LEN - 1, 200),
        (1, MAX_MODEL_LEN, 400),
        (2, MAX_MODEL_LEN - 1, 400),
        (MAX_MODEL_LEN - 1, 1, 200),
        (MAX_MODEL_LEN - 1, 2, 400),
        (MAX_MODEL_LEN, 1, 400),
        (MAX_MODEL_LEN + 1, 1, 400),
        (10 * MAX_MODEL_LEN, 1, 400),
        (5, 0, 400),
        (5, -1, 400),
        (5, 2**31, 400),
        (5, 2**63, 400),
        (5, 10**200, 400),
    ],
)
def test_prompt_and_answer_fit_or_are_refused(steady: Server, prompt: int, max_tokens: int, status: int) -> None:
    body = {"prompt": ids(prompt), "max_tokens": max_tokens, "ignore_eos": True}
    answer = steady.post(COMPLETIONS, body)
    assert answer.status == status, answer.text
    if status == 200:
        assert answer.json["usage"]["total_tokens"] == prompt + max_tokens
    elif prompt and max_tokens > 0:
        assert f"maximum context length is {MAX_MODEL_LEN} tokens" in answer.json["message"]
    elif prompt:
        assert "max_tokens must be at least 1" in answer.json["message"]


def test_the_refusal_names_both_numbers(steady: Server) -> None:
    answer = steady.post(COMPLETIONS, {"prompt": ids(500), "max_tokens": 100})
    assert answer.json["message"] == (
        "This model's maximum context length is 512 tokens. However, you requested 600 tokens (500 in the messages, "
        "100 in the completion). Please reduce the length of the messages or completion."
    )
    answer = steady.post(COMPLETIONS, {"prompt": ids(600), "max_tokens": None})
    assert answer.json["message"] == (
        "This model's maximum context length is 512 tokens. However, you requested 600 tokens in the messages, Please "
        "reduce the length of the messages."
    )


@pytest.mark.parametrize("size", [100_000, 10_000_000])
def test_texts_that_cannot_fit_are_refused(steady: Server, size: int) -> None:
    for route, body in (
        (COMPLETIONS, {"prompt": "hello " * (size // 6), "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "hello " * (size // 6)}], "max_tokens": 1}),
    ):
        answer = steady.post(route, body)
        assert answer.status == 400
        assert f"maximum context length is {MAX_MODEL_LEN} tokens" in answer.json["message"]


def test_truncation_keeps_the_end_of_the_prompt(steady: Server) -> None:
    whole = {"prompt": ids(30)[-7:], "max_tokens": 5, "temperature": 0}
    cut = {"prompt": ids(30), "truncate_prompt_tokens": 7, "max_tokens": 5, "temperature": 0}
    a, b = steady.post(COMPLETIONS, whole).json, steady.post(COMPLETIONS, cut).json
    assert a["choices"][0]["text"] == b["choices"][0]["text"]
    assert a["usage"] == b["usage"]
    for value in (0, -2, 1.5, "7"):
        answer = steady.post(COMPLETIONS, {"prompt": ids(30), "truncate_prompt_tokens": value})
        assert answer.status == 400, (value, answer.text)
    long = {"prompt": ids(9000), "truncate_prompt_tokens": 100, "max_tokens": 5}
    assert steady.post(COMPLETIONS, long).json["usage"]["prompt_tokens"] == 100


@pytest.mark.parametrize("field", ["min_tokens"])
@pytest.mark.parametrize(("value", "status"), [(0, 200), (5, 200), (6, 400), (-1, 400), (2**31, 400), (2**64, 400)])
def test_min_tokens(steady: Server, field: str, value: int, status: int) -> None:
    answer = steady.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 5, field: value})
    assert answer.status == status, answer.text
    if status == 200:
        assert answer.json["usage"]["completion_tokens"] >= value


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ({"stop": ["a"] * 64}, 200),
        ({"stop": ["a"] * 65}, 400),
        ({"stop": "a" * 1024}, 200),
        ({"stop": "a" * 1025}, 400),
        ({"stop": ""}, 400),
        ({"stop": [""]}, 400),
        ({"logprobs": 20}, 200),
        ({"logprobs": 21}, 400),
        ({"prompt_logprobs": 20}, 200),
        ({"prompt_logprobs": 21}, 400),
        ({"n": 1}, 200),
        ({"n": 0}, 400),
        ({"n": 2, "best_of": 1}, 400),
        ({"temperature": 0, "n": 2}, 400),
        ({"cache_salt": "x" * 128}, 200),
        ({"cache_salt": "x" * 129}, 400),
        ({"logit_bias": {str(i): 1.0 for i in range(300)}}, 200),
        ({"bad_words": ["x"] * 100_001}, 400),
        ({"bad_words": ["x"] * 1000, "n": 125}, 200),  # each counts for 16 of 2,000,000
        ({"bad_words": ["x"] * 1000, "n": 126}, 400),
    ],
)
def test_counts(steady: Server, extra: dict, status: int) -> None:
    answer = steady.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 2, **extra})
    assert answer.status == status, answer.text


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20, "stream": True, "best_of": 4001}, "logprobs"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
    ],
)
def test_what_choices_repeat_of_their_prompt_counts_for_each(steady: Server, extra: dict, param: str) -> None:
    body = {"prompt": list(range(5, 105)), "max_tokens": 1, "n": 4000, **extra}
    refused = steady.post("/v1/completions", body)
    assert refused.status == 400 and refused.json["error"]["param"] == param
    assert "8400000 log probabilities of its prompts" in refused.json["error"]["message"]


def test_conversations(steady: Server) -> None:
    answer = steady.post(CHAT, {"messages": [{"role": "user", "content": "a"}] * 2049, "max_tokens": 1})
    assert answer.status == 400
    assert "at most 2048 messages" in answer.json["message"]
    for name in ("max_tokens", "max_completion_tokens"):
        assert steady.post(CHAT, {"messages": [{"role": "user", "content": "a"}], name: 0}).status == 400
        assert steady.post(CHAT, {"messages": [{"role": "user", "content": "a"}], name: 512}).status == 400


def test_tokenize_has_a_limit_of_its_own(steady: Server) -> None:
    answer = steady.post("/tokenize", {"prompt": "a" * 1_000_001})
    assert answer.status == 400
    assert "At most 1000000 characters" in answer.json["message"]
