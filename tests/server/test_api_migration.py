"""What clients written for other servers send, and get: numbers, templates' variables, tools, stored responses."""

from __future__ import annotations

import gzip
import json
from typing import Any

import openai
import pytest

from tests.server.http_server import MODEL, Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def error_of(server: Server, route: str, body: Any, **kwargs: Any) -> tuple[int, str]:
    answer = server.post(route, body, **kwargs)
    return answer.status, answer.json["error"]["message"]


def test_integers_may_be_written_with_a_point(server: Server) -> None:
    """JSON has one kind of numbers; some languages write all of them as floats."""
    body = {"prompt": "Hi", "max_tokens": 3.0, "n": 1.0, "logprobs": 2.0, "temperature": 0.0, "ignore_eos": True}
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 200, answer.text
    assert answer.json["usage"]["completion_tokens"] == 3
    assert all(len(top) in (2, 3) for top in answer.json["choices"][0]["logprobs"]["top_logprobs"])
    assert error_of(server, COMPLETIONS, {**body, "max_tokens": 3.5}) == (
        400,
        "max_tokens: Input should be a valid integer",
    )
    refused = {**body, "logprobs": None, "stream": True, "prompt_logprobs": 1.0}
    assert error_of(server, COMPLETIONS, refused)[1] == "`prompt_logprobs` are not available when `stream=True`."
    for huge in (b"1e300", b"9007199254740993.0"):
        sent = b'{"prompt": "Hi", "max_tokens": ' + huge + b"}"
        assert error_of(server, COMPLETIONS, sent) == (400, "max_tokens: Input should be a valid integer")


def test_variables_of_the_template_are_the_clients(server: Server) -> None:
    """As for models whose template has a switch. A template itself, and what has a field of its own, is refused."""
    body = {"messages": USER, "max_tokens": 4, "temperature": 0}
    plain = server.post(CHAT, body).json["choices"]
    assert server.post(CHAT, {**body, "chat_template_kwargs": {"enable_thinking": False}}).json["choices"] == plain
    assert server.post("/tokenize", {"messages": USER, "chat_template_kwargs": {"x": [1]}}).status == 200
    for name in ("messages", "tools", "tokenize", "chat_template", "special_tokens", "is_literal", "template"):
        for route, fields in ((CHAT, body), ("/tokenize", {"messages": USER})):
            status, message = error_of(server, route, {**fields, "chat_template_kwargs": {name: "x"}})
            assert status == 400
            assert message == f"chat_template_kwargs is for the template's own variables; {name} is none of them."
    status, message = error_of(server, CHAT, {**body, "chat_template": "x"})
    assert status == 400
    assert "--trust-request-chat-template" in message


def test_a_prompt_is_cut_to_what_the_model_takes(server: Server) -> None:
    """truncate_prompt_tokens=-1 leaves room for the answer."""
    text = "word " * 600
    answer = server.post(COMPLETIONS, {"prompt": text, "max_tokens": 5, "truncate_prompt_tokens": -1, "temperature": 0})
    last = server.post("/tokenize", {"prompt": text}).json["tokens"][-507:]
    same = server.post(COMPLETIONS, {"prompt": last, "max_tokens": 5, "temperature": 0})
    assert answer.json["choices"] == same.json["choices"]
    assert answer.json["usage"]["prompt_tokens"] == 507
    messages = [{"role": "user", "content": text}]
    answer = server.post(CHAT, {"messages": messages, "truncate_prompt_tokens": -1})
    assert answer.json["usage"]["prompt_tokens"] == 511
    answer = server.post(CHAT, {"messages": messages, "truncate_prompt_tokens": -1, "max_completion_tokens": 12})
    assert answer.json["usage"]["prompt_tokens"] == 500
    assert error_of(server, COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": -2})[0] == 400


def test_a_compressed_body_is_refused_by_name(server: Server) -> None:
    plain = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    for encoding in ("gzip", "GZIP", "br, gzip"):
        status, message = error_of(server, COMPLETIONS, gzip.compress(plain), headers={"content-encoding": encoding})
        assert status == 415
        assert f"Content-Encoding '{encoding.lower()}'" in message
    for encoding in ("identity", ""):
        assert server.post(COMPLETIONS, plain, headers={"content-encoding": encoding}).status == 200


def test_a_response_honours_or_refuses_what_chats_know(server: Server) -> None:
    """Nothing that another route understands is dropped, least of all what constrains the answer."""
    ours = {"input": "Hi", "max_output_tokens": 6, "temperature": 0}
    theirs = {"messages": USER, "max_tokens": 6, "temperature": 0}
    honoured: tuple[dict[str, Any], ...] = (
        {"logit_bias": {"40": 100}},
        {"allowed_token_ids": [40, 41]},
        {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5},
        {"ignore_eos": True, "min_tokens": 6},
        {"stop_token_ids": [40], "logit_bias": {"40": 100}, "include_stop_str_in_output": True},
        {"truncate_prompt_tokens": 2, "skip_special_tokens": False},
        {"chat_template_kwargs": {"x": 1}, "priority": 0, "seed": 5, "user": "u"},
        {"response_format": {"type": "json_object"}},
        {"guided_json": {"type": "integer"}},
        {"structured_outputs": {"choice": ["a"]}},
    )
    for extra in honoured:
        response = server.post("/v1/responses", {**ours, **extra})
        assert response.status == 200, response.text
        chat = server.post(CHAT, {**theirs, **extra}).json
        assert response.json["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"], extra
        assert response.json["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    refused: tuple[dict[str, Any], ...] = (
        {"n": 2}, {"best_of": 2}, {"echo": True}, {"use_beam_search": True}, {"prompt_logprobs": 1}, {"max_tokens": 5},
        {"logprobs": True}, {"chat_template": "x"}, {"chat_template_kwargs": {"tools": []}}, {"min_tokens": 7},
        {"guided_regex": "(", "guided_choice": ["a"]}, {"guided_regex": "("},
        {"logit_bias": {"x": 1}}, {"bad_words": [""]}, {"n": 0},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
    )  # fmt: skip
    for extra in refused:
        assert error_of(server, "/v1/responses", {**ours, **extra})[0] == 400, extra
    neutral = {
        "n": 1,
        "echo": False,
        "best_of": None,
        "response_format": {"type": "text"},
        "stream": False,
        "logprobs": False,
    }
    assert server.post("/v1/responses", {**ours, **neutral}).status == 200


def test_stored_responses_are_not_found(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    assert made.id.startswith("resp_")
    assert made.output[0].id.startswith("msg_")
    calls = (
        client.responses.retrieve,
        client.responses.delete,
        client.responses.cancel,
        client.responses.input_items.list,
    )
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="VLLM_ENABLE_RESPONSES_API_STORE"):
            call(made.id)
