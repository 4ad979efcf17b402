"""The form of an answer over HTTP: every spelling, whole and streamed, and clients' own helpers for it."""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.http_server import MODEL, Server

USER: Any = [{"role": "user", "content": "Describe a person as JSON."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with Server(Path("demo")) as running:
        yield running
        assert running.alive


@pytest.fixture(scope="module")
def chat(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="EMPTY", max_retries=0) as opened:
        yield opened


def check_person(text: str | None) -> None:
    person = json.loads(text or "")
    assert set(person) == {"name", "age"}
    assert isinstance(person["name"], str) and 0 <= person["age"] <= 120


JSON_FORMS: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
    {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"},
    {"guided_json": SCHEMA, "guided_decoding_backend": "outlines"},
    {"structured_outputs": {"json": SCHEMA}, "guided_decoding_backend": "xgrammar:no-fallback,disable-any-whitespace"},
]


@pytest.mark.parametrize("form", JSON_FORMS, ids=lambda form: ",".join(form))
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_json_in_every_spelling(demo: Server, route: str, form: dict[str, Any]) -> None:
    prompt = {"prompt": "Describe a person:"} if route == COMPLETIONS else {"messages": USER}
    answer = demo.post(route, {**prompt, "max_tokens": 200, "temperature": 0, **form})
    assert answer.status == 200, answer.text
    choice = answer.json["choices"][0]
    check_person(choice["text"] if route == COMPLETIONS else choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_choice": ["positive", "negative"]}, "positive|negative"),
        ({"structured_outputs": {"choice": ["positive", "negative"]}}, "positive|negative"),
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_regex": "[a-c]{3}", "structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        (
            {
                "guided_grammar": 'start: "SELECT " /[ab]/',
                "structured_outputs": {"grammar": 'start: "SELECT " /[ab]/'},
                "guided_decoding_backend": "guidance",
            },
            "SELECT [ab]",
        ),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"guided_grammar": 'root ::= "SELECT " ("a" | "b") " FROM t"'}, "SELECT [ab] FROM t"),
        ({"guided_grammar": 'start: "SELECT " /[ab]/ " FROM t"'}, "SELECT [ab] FROM t"),
        ({"response_format": {"type": "json_object"}}, r"\{[\s\S]*\}"),
        ({"structured_outputs": {"json_object": True}}, r"\{[\s\S]*\}"),
    ],
)
def test_other_forms(chat: openai.OpenAI, form: dict[str, Any], pattern: str) -> None:
    answer = chat.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=300, extra_body=form)
    assert re.fullmatch(pattern, answer.choices[0].message.content or "")


def test_streams_are_what_whole_answers_are(chat: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 200}
    form: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
    whole = chat.chat.completions.create(**request, response_format=form).choices[0].message.content
    chunks = list(chat.chat.completions.create(**request, response_format=form, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert len(chunks) > 1
    check_person(whole)


def test_several_choices(chat: openai.OpenAI) -> None:
    answer = chat.chat.completions.create(
        model=MODEL, messages=USER, n=4, seed=1, max_tokens=200, extra_body={"guided_json": SCHEMA}
    )
    for choice in answer.choices:
        check_person(choice.message.content)


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["happy", "sad"]


def test_parse_of_the_openai_client(chat: openai.OpenAI) -> None:
    answer = chat.chat.completions.parse(model=MODEL, messages=USER, response_format=Person, max_tokens=200, seed=3)
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    with chat.chat.completions.stream(
        model=MODEL, messages=USER, response_format=Person, max_tokens=200, seed=3
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == person


def test_responses(chat: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    answer = chat.responses.create(model=MODEL, input="A person", max_output_tokens=200, text=form)
    check_person(answer.output_text)
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"
    parsed = chat.responses.parse(model=MODEL, input="A person", max_output_tokens=200, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "("}, "unclosed group"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guidance has no uniqueItems"),
    ({"guided_json": {"type": "frog"}}, "type must be one or several of"),
    ({"guided_json": {"$ref": "#/$defs/a/properties/b"}}, "$ref #/$defs/a/properties/b leads nowhere"),
    ({"guided_json": 5}, "must be a dict"),
    ({"guided_choice": []}, "cannot be an empty list"),
    ({"guided_choice": [1]}, "must be a string"),
    ({"guided_grammar": "start: x"}, "x"),
    ({"guided_regex": "a", "guided_json": {}}, "You can only use one kind of guided decoding"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "can be given once"),
    ({"guided_regex": "a", "guided_decoding_backend": 5}, "guided_decoding_backend must be a string"),
    ({"guided_grammar": "start: /a/", "guided_decoding_backend": "outlines:no-fallback"}, "outlines has no grammars"),
    (
        {"structured_outputs": {"grammar": "start: /a/"}, "guided_decoding_backend": "outlines:no-fallback"},
        "this grammar: outlines has no grammars (EBNF or Lark).",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "guided_decoding_backend": "xgrammar:magic"},
        "Unsupported option 'magic' of the guided decoding backend 'xgrammar'",
    ),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "can be given once"),
    ({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}, "can be given once"),
    ({"response_format": "json"}, "response_format must be an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "needs json_schema"),
    ({"structured_outputs": {}}, "must use one kind"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "only use one kind"),
    ({"structured_outputs": 5}, "must be an object"),
    ({"guided_decoding": {"regex": "a"}}, "guided_decoding is not a field of the API: send structured_outputs"),
    ({"guided_choice": ["a"], "use_beam_search": True, "best_of": 2, "temperature": 0}, "guided_decoding"),
]


@pytest.mark.parametrize(("form", "message"), REFUSED, ids=lambda v: str(v)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_a_400_with_the_reason(
    demo: Server, form: dict[str, Any], message: str, stream: bool
) -> None:
    for route, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        answer = demo.post(route, {**prompt, "max_tokens": 5, "stream": stream, **form})
        assert answer.status == 400, answer.text
        assert message in answer.json["error"]["message"]


def test_a_hard_compilation_holds_nobody_up(demo: Server) -> None:
    """Other streams go on, with and without a grammar, and the hard request is answered within its deadline."""
    hard = {"prompt": "x", "guided_regex": "(x{0,1000}y){0,1000}", "guided_decoding_backend": "outlines:no-fallback"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        work = pool.submit(demo.post, COMPLETIONS, {**hard, "max_tokens": 5})
        for _ in range(5):
            assert demo.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 4}).status == 200
            guided = demo.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 4, "guided_choice": ["yes"]})
            assert guided.json["choices"][0]["text"] == "yes"
        answer = work.result()
    assert answer.status == 400
    assert "compil" in answer.json["error"]["message"]


def test_a_request_that_leaves_while_its_grammar_is_compiled_leaves_nothing(demo: Server) -> None:
    hard = {"prompt": "x", "guided_regex": "(y{0,1000}z){0,1000}", "guided_decoding_backend": "outlines:no-fallback"}
    with (
        pytest.raises(openai.APITimeoutError),
        openai.OpenAI(base_url=demo.url + "/v1", api_key="EMPTY", max_retries=0, timeout=0.5) as hasty,
    ):
        hasty.completions.create(model=MODEL, prompt="x", extra_body=hard)
    deadline = time.monotonic() + 20
    while "num_requests_waiting{" in (text := demo.get("/metrics").text) and time.monotonic() < deadline:
        waiting = re.search(r"num_requests_waiting\{[^}]*\} (\S+)", text)
        if waiting and float(waiting[1]) == 0:
            break
        time.sleep(0.1)
    else:
        pytest.fail("The request still waits.")
    assert demo.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 2}).status == 200
