"""Tool calls over HTTP: the demo model writes Hermes calls, a server with the parser tells them from text."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.http_server import MODEL, Server, sse_events
from vllm.entrypoints.openai.message import _form
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.structured_output.support import BACKENDS, JSON, missing

EXAMPLES = Path(__file__).parents[2] / "examples"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
BODY: dict[str, Any] = {"messages": QUESTION, "tools": [TOOL], "temperature": 0}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", (1, 2))
def test_every_back_end_alone_takes_calls_that_must_be(backend, count):
    """What the server puts around the tools' own schemas needs nothing that one of them lacks."""
    tools = [{**TOOL, "function": {**TOOL["function"], "name": f"get_weather_{i}"}} for i in range(count)]
    form = _form("required", tools, one_call=False)
    assert form is not None
    schema = form.json
    assert missing(backend, JSON, schema, json.dumps(schema), None) is None
    call = {"name": "get_weather_0", "parameters": {"city": "Paris"}}
    jsonschema.validate([call], schema)
    for wrong in ([], [{**call, "name": "other"}], [{"name": "get_weather_0"}], ["get_weather_0"]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(Path("demo"), "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as running:
        yield running


def chat(server: Server, **fields: Any) -> Any:
    answer = server.post("/v1/chat/completions", {**BODY, **fields})
    assert answer.status == 200, answer.text
    return answer.json


def streamed_calls(events: list[Any], choice: int = 0) -> tuple[list[dict[str, Any]], str, str]:
    """(calls, content, finish reason) added up as clients do."""
    calls: list[dict[str, Any]] = []
    content, reason = "", ""
    for event in events:
        for part in event["choices"]:
            if part["index"] != choice:
                continue
            delta = part["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    assert call["id"] and call["type"] == "function" and call["function"]["arguments"] == ""
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    assert call["index"] == len(calls) - 1 and set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                calls[-1]["arguments"] += call["function"]["arguments"]
            reason = part["finish_reason"] or reason
    return calls, content, reason


def test_the_guides_example(tools: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "openai_chat_completion_client_with_tools.py"
    monkeypatch.setattr("sys.argv", [name, "--base-url", tools.url + "/v1"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    out = capsys.readouterr().out
    found = re.search(r"streamed tool call arguments: get_current_weather (\{.*\})", out)
    assert found is not None, out
    assert json.loads(found[1])["city"] == "Dallas"
    assert re.search(r"streamed tool call id: chatcmpl-tool-[0-9a-f]{32}\n", out)
    assert "sunny" in out.partition("Answer with the result:")[2]


def test_call_whole(tools: Server) -> None:
    choice = chat(tools)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_stream_says_what_the_whole_says(tools: Server) -> None:
    two = {"n": 2, "temperature": 1.0, "top_k": 1}
    whole = chat(tools, **two)["choices"][0]["message"]["tool_calls"][0]["function"]
    answer = tools.post("/v1/chat/completions", {**BODY, **two, "stream": True})
    events = sse_events(answer.text)
    ids = set()
    for choice in range(2):
        calls, content, reason = streamed_calls(events, choice)
        assert [(call["name"], call["arguments"]) for call in calls] == [(whole["name"], whole["arguments"])]
        assert (content, reason) == ("", "tool_calls")
        ids.add(calls[0]["id"])
    assert len(ids) == 2
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert sum("role" in event["choices"][0]["delta"] for event in events) == 2


def test_official_client_accumulates_the_stream(tools: Server) -> None:
    with openai.OpenAI(base_url=tools.url + "/v1", api_key="EMPTY", max_retries=0) as client:
        extra: Any = BODY
        with client.chat.completions.stream(model=MODEL, **extra) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert final.message.tool_calls is not None
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    assert final.finish_reason == "tool_calls"


def test_text_stays_text(tools: Server) -> None:
    hello = [{"role": "user", "content": "What is the capital of France?"}]
    choice = chat(tools, messages=hello)["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["message"]["tool_calls"] == [] and choice["finish_reason"] == "stop"
    events = sse_events(tools.post("/v1/chat/completions", {**BODY, "messages": hello, "stream": True}).text)
    assert streamed_calls(events) == ([], choice["message"]["content"], "stop")


def test_none_leaves_markers_in_the_text(tools: Server) -> None:
    message = chat(tools, tool_choice="none")["choices"][0]["message"]
    assert message["content"].startswith("<tool_call>") and message["tool_calls"] == []


def test_call_cut_by_length(tools: Server) -> None:
    whole = chat(tools, max_tokens=12, logprobs=True)["choices"][0]
    events = sse_events(
        tools.post("/v1/chat/completions", {**BODY, "max_tokens": 12, "logprobs": True, "stream": True}).text
    )
    calls, content, reason = streamed_calls(events)
    assert whole["finish_reason"] == reason == "length"
    assert [call["arguments"] for call in calls] == [
        call["function"]["arguments"] for call in whole["message"]["tool_calls"]
    ]
    assert content == (whole["message"]["content"] or "")
    # Tokens of markers have log probabilities like any others.
    shown = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    assert len(shown) == len(whole["logprobs"]["content"]) == 12


def test_usage_counts_all_tokens(tools: Server) -> None:
    whole = chat(tools)["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = sse_events(tools.post("/v1/chat/completions", {**BODY, "stream": True, "stream_options": options}).text)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["completion_tokens"]
    assert events[-2]["usage"]["completion_tokens"] == whole["completion_tokens"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": None, "tool_choice": "auto"}, "When using `tool_choice`, `tools` must be set."),
    ({"tool_choice": "maybe"}, 'Only named tools, "none", "auto" or "required" are supported.'),
    ({"tool_choice": {"type": "allowed_tools"}}, '"allowed_tools" is not supported: send these tools only'),
    ({"tool_choice": {}}, "Expected field `function` in `tool_choice`. Correct usage"),
    ({"tool_choice": {"type": "function", "function": {}}}, "Expected field `name` in `function` in `tool_choice`."),
    (
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        "The tool specified in `tool_choice` does not match any of the specified `tools`",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0] must look like"),
    ({"tools": [{"function": {"name": "f", "parameters": [1]}}]}, "tools[0].function.parameters must be a JSON schema"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "guided_choice": ["a"]},
        "You can only either use guided decoding or tools, not both.",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_requests_are_refused(tools: Server, fields: dict[str, Any], message: str) -> None:
    answer = tools.post("/v1/chat/completions", {**BODY, **fields})
    assert answer.status == 400 and message in answer.json["message"], answer.text


def test_auto_needs_the_flags(server: Server) -> None:
    for fields in ({}, {"tool_choice": "auto"}):
        answer = server.post("/v1/chat/completions", {**BODY, **fields})
        assert answer.status == 400
        expected = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        assert answer.json["message"].startswith(expected)


PLUGIN = """
from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParserManager


@ToolParserManager.register_module(["my_hermes"])
class Checking(MyParser):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        assert self.vocab["<|end|>"] == tokenizer.eos_token_id

    def extract_tool_calls_streaming(
        self, previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids, request
    ):
        assert current_text == previous_text + delta_text
        assert list(current_token_ids) == [*previous_token_ids, *delta_token_ids]
        return super().extract_tool_calls_streaming(
            previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids, request
        )
"""


def test_parser_of_the_users_own(tmp_path: Path) -> None:
    """The example's, which also streams what is no call."""
    path = tmp_path / "my_parser.py"
    path.write_text((EXAMPLES / "tool_parser_plugin.py").read_text() + PLUGIN)
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "my_hermes", "--tool-parser-plugin", str(path))
    with Server(Path("demo"), *flags) as running:
        choice = chat(running)["choices"][0]
        call = choice["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        assert choice["finish_reason"] == "tool_calls"
        events = sse_events(running.post("/v1/chat/completions", {**BODY, "stream": True}).text)
        calls, _, reason = streamed_calls(events)
        assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Paris"}]
        assert reason == "tool_calls"
        plain = {**BODY, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        whole = chat(running, **plain)["choices"][0]["message"]
        events = sse_events(running.post("/v1/chat/completions", {**plain, "stream": True}).text)
        calls, content, reason = streamed_calls(events)
        assert not calls and reason == "stop" and content == whole["content"] and "Paris" in content


# -- forced calls, whose form a grammar guarantees ---------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_named_function_is_called_whatever_is_asked(tools: Server) -> None:
    joke = [{"role": "user", "content": "Tell me a story about a fox."}]
    for stream in (False, True):
        answer = tools.post(
            "/v1/chat/completions",
            {**BODY, "messages": joke, "tool_choice": NAMED, "stream": stream, "max_tokens": 100},
        )
        if stream:
            calls, content, reason = streamed_calls(sse_events(answer.text))
            (call,) = calls
        else:
            choice = answer.json["choices"][0]
            (found,) = choice["message"]["tool_calls"]
            call, content, reason = found["function"], choice["message"]["content"] or "", choice["finish_reason"]
        assert call["name"] == "get_weather" and content == ""
        assert reason in ("stop", "length")
        if reason == "stop":
            assert isinstance(json.loads(call["arguments"])["city"], str)


def test_required_calls_are_guaranteed(tools: Server) -> None:
    other = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
    fields = {"tools": [TOOL, other], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    choice = chat(tools, **fields)["choices"][0]
    assert choice["finish_reason"] in ("tool_calls", "length")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("get_weather", "get_time")
    events = sse_events(tools.post("/v1/chat/completions", {**BODY, **fields, "stream": True}).text)
    calls, content, reason = streamed_calls(events)
    assert [(c["name"], c["arguments"]) for c in calls] == [(call["function"]["name"], call["function"]["arguments"])]
    assert content == "" and reason == choice["finish_reason"]


def test_references_within_required_tools_stay_within_their_tool(tools: Server) -> None:
    """Each tool has its own $defs, and its "#" is its own schema."""

    def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}

    def one(kind: str) -> dict[str, Any]:
        part = {"type": "object", "properties": {"n": {"type": kind}}, "required": ["n"]}
        return {"$defs": {"P": part}, "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"]}

    pair = {"properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]}
    tree = {"properties": {"v": {"enum": [3]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["v"]}
    schemas = {"count": one("integer"), "flag": one("boolean"), "pair": pair, "tree": tree}
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    found = chat(tools, tools=[tool(name, schema) for name, schema in schemas.items()], **fields)
    assert found["choices"][0]["message"]["tool_calls"]
    for name, schema in schemas.items():  # alone, so that it is called
        for seed in range(3):
            alone = chat(tools, tools=[tool(name, schema)], temperature=1, seed=seed, **fields)["choices"][0]
            if alone["finish_reason"] != "length":
                (call,) = alone["message"]["tool_calls"]
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    wrong = {**BODY, "tools": [tool("f", {"properties": {"a": {"type": "text"}}})], "tool_choice": "required"}
    error = tools.post("/v1/chat/completions", wrong).json["error"]
    assert "tools[0].function.parameters is no JSON schema: type must be" in error["message"]
    assert error["param"] == "tools"


def test_forced_calls_need_no_flags(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "max_tokens": 60, "temperature": 0}
    for choice in (NAMED, "required"):
        answer = server.post("/v1/chat/completions", {**body, "tool_choice": choice})
        assert answer.status == 200, answer.text
        message = answer.json["choices"][0]["message"]
        assert all(call["function"]["name"] == "get_weather" for call in message["tool_calls"])


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, "none"),
        ({"tools": []}, "none"),
        ({"tools": [TOOL]}, "auto"),
        ({"tools": [TOOL], "tool_choice": None}, "auto"),
        ({"tools": [TOOL], "tool_choice": "none"}, "none"),
        ({"tools": [TOOL], "tool_choice": "required"}, "required"),
    ],
)
def test_what_a_choice_is_that_nobody_made(fields: dict[str, Any], choice: str) -> None:
    assert ChatCompletionRequest(messages=QUESTION, **fields).tool_choice == choice
