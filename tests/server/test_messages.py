"""Thoughts and calls in the answers of the chat route: what a stream adds up to is what the whole body says."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.http_server import Server, sse_events
from tests.tool_parsers.outputs import CALLS, TOOLS
from vllm.engine.tokenizer import Tokenizer
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.entrypoints.openai import chat
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.logprobs import TokenText
from vllm.entrypoints.openai.message import ParsingSettings, wanted_of
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.sampling import RequestLimits
from vllm.outputs import CompletionOutput, RequestOutput

DEMO = Path(__file__).parents[2] / "vllm" / "assets" / "demo"
USER = {"role": "user", "content": "Hi"}
CONTEXT: Any = SimpleNamespace(cached_tokens=lambda outputs: None)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL_TEXT = "".join(f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in CALLS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def qwen3() -> Iterator[Server]:
    with Server(DEMO, "--reasoning-parser", "qwen3") as server:
        yield server


class Answer:
    """In place of a prompt: a text, whole and in pieces. encode: the tokens of each."""

    def __init__(self, text: str, reason: str, encode: Callable[[str], list[int]] = lambda text: [5]) -> None:
        self.text, self.reason, self.encode = text, reason, encode

    def _output(self, text: str, reason: str | None) -> RequestOutput:
        return RequestOutput(
            "r", "p", [1], None, [CompletionOutput(0, text, self.encode(text), None, None, reason)], reason is not None
        )

    async def generate(self) -> AsyncIterator[RequestOutput]:
        yield self._output(self.text, self.reason)

    def pieces(self, rng: random.Random) -> Iterator[RequestOutput]:
        at = 0
        while at < len(self.text):
            end = at + rng.randint(1, 12)
            yield self._output(self.text[at:end], self.reason if end >= len(self.text) else None)
            at = end


def answers(
    settings: ParsingSettings, tokenizer: Tokenizer, text: str, *, prompt: str = "", reason: str = "stop", **fields: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of a body, and that of a stream added up."""
    source: Any = Answer(text, reason)

    def work() -> chat.Chat:
        request = ChatCompletionRequest(messages=[USER], **fields)
        parsing = wanted_of(settings, tokenizer, request, prompt).parsing
        return chat.Chat(request, "chatcmpl-1", "m", 1, source, TokenText(None, True), "assistant", "", parsing)

    whole = asyncio.run(chat.complete(CONTEXT, work()))["choices"][0]
    events = chat.ChatEvents(CONTEXT, work())
    stream = b"".join([*(events.feed(0, output) for output in source.pieces(random.Random(text))), events.end()])
    return whole, added_up(sse_events(stream.decode()))


def added_up(events: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "reasoning": None, "tool_calls": []}
    reason = None
    for event in events:
        choice = event["choices"][0]
        for key in ("content", "reasoning_content", "reasoning"):
            if choice["delta"].get(key):
                message[key] = (message[key] or "") + choice["delta"][key]
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return {"message": message, "finish_reason": reason}


def same(whole: dict[str, Any], streamed: dict[str, Any]) -> None:
    for key in ("content", "reasoning_content"):
        assert (whole["message"][key] or None) == streamed["message"][key]
    assert whole["message"]["reasoning_content"] == whole["message"]["reasoning"]
    assert [c["function"] for c in whole["message"]["tool_calls"]] == [
        c["function"] for c in streamed["message"]["tool_calls"]
    ]
    assert whole["finish_reason"] == streamed["finish_reason"]


def calls_of(choice: dict[str, Any]) -> list[Any]:
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


BOTH = ParsingSettings("hermes", True, "qwen3")


def test_thoughts_then_text_then_calls(tokenizer: Tokenizer) -> None:
    text = f"<think>\nOr <tool_call>?\n</think>\n\nI look.{CALL_TEXT}"
    whole, streamed = answers(BOTH, tokenizer, text, tools=TOOLS)
    same(whole, streamed)
    assert calls_of(whole) == CALLS and whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "I look."
    assert whole["message"]["reasoning_content"] == "Or <tool_call>?"


def test_prompt_that_has_closed_the_thoughts(tokenizer: Tokenizer) -> None:
    settings = ParsingSettings(reasoning_parser="deepseek_r1")
    whole, streamed = answers(settings, tokenizer, "Yes.", prompt="assistant\n<think>\n\n</think>\n\n")
    assert whole["message"]["content"] == streamed["message"]["content"] == "Yes."
    whole, streamed = answers(settings, tokenizer, "Hm", prompt="assistant\n<think>\n", reason="length")
    same(whole, streamed)
    assert whole["message"]["content"] is None and whole["message"]["reasoning_content"] == "Hm"
    assert whole["finish_reason"] == "length"


def test_thoughts_that_are_not_wanted(tokenizer: Tokenizer) -> None:
    whole, streamed = answers(BOTH, tokenizer, f"<think>a</think>b{CALL_TEXT}", tools=TOOLS, include_reasoning=False)
    same(whole, streamed)
    assert whole["message"]["reasoning_content"] is None and whole["message"]["content"] == "b"
    assert calls_of(whole) == CALLS


def test_only_one_call_if_parallel_ones_are_not_wanted(tokenizer: Tokenizer) -> None:
    whole, streamed = answers(BOTH, tokenizer, CALL_TEXT, tools=TOOLS, parallel_tool_calls=False)
    same(whole, streamed)
    assert calls_of(whole) == CALLS[:1]


def test_named_function(tokenizer: Tokenizer) -> None:
    whole, streamed = answers(BOTH, tokenizer, '<think>a</think>{"city": "x"}', tools=TOOLS, tool_choice=NAMED)
    same(whole, streamed)
    assert calls_of(whole) == [("get_weather", {"city": "x"})]
    assert whole["finish_reason"] == "stop" and whole["message"]["reasoning_content"] == "a"


def test_required_calls(tokenizer: Tokenizer) -> None:
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in CALLS])
    for settings in (ParsingSettings(), ParsingSettings("kimi_k2"), ParsingSettings("mistral")):
        whole, streamed = answers(settings, tokenizer, text, tools=TOOLS, tool_choice="required")
        same(whole, streamed)
        assert calls_of(whole) == CALLS and whole["finish_reason"] == "tool_calls"
        ids = [call["id"] for call in whole["message"]["tool_calls"]]
        if settings.tool_parser == "kimi_k2":
            assert ids == ["functions.get_weather:0", "functions.get_time:1"]
        if settings.tool_parser == "mistral":
            assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_arguments_are_never_empty(tokenizer: Tokenizer) -> None:
    text = '<tool_call>{"name": "get_time", "arguments": '
    whole, streamed = answers(BOTH, tokenizer, text, tools=TOOLS, reason="length")
    same(whole, streamed)
    assert calls_of(whole) == [("get_time", {})] and whole["finish_reason"] == "length"


def test_gpt_oss_with_and_without_its_tool_parser(tokenizer: Tokenizer) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_time "
        "<|constrain|>json<|message|>{}<|call|>"
    )
    whole, streamed = answers(ParsingSettings("openai", True, "openai_gptoss"), tokenizer, text, tools=TOOLS)
    same(whole, streamed)
    assert calls_of(whole) == [("get_time", {})] and whole["finish_reason"] == "tool_calls"
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    whole, streamed = answers(ParsingSettings(reasoning_parser="openai_gptoss"), tokenizer, final)
    same(whole, streamed)
    assert (whole["message"]["reasoning_content"], whole["message"]["content"]) == ("Hm.", "Yes.")


def test_forms_of_forced_calls(tokenizer: Tokenizer) -> None:
    def form(**fields: Any) -> Any:
        request = ChatCompletionRequest(messages=[USER], **{"tools": TOOLS, **fields})
        found = wanted_of(ParsingSettings(), tokenizer, request, "").form
        assert found is not None
        return found.json

    assert form(tool_choice=NAMED) == TOOLS[0]["function"]["parameters"]
    bare = {"type": "function", "function": {"name": "f"}}
    assert form(tools=[bare], tool_choice=bare) == {"type": "object", "properties": {}}
    schema = form(tool_choice="required", parallel_tool_calls=False)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]] == [["get_weather"], ["get_time"]]
    assert "$defs" not in schema
    given = [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": kind}}}
        for kind in ("string", "integer")
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}} for parameters in given]
    schema = form(tools=tools, tool_choice="required")
    parts = [one["properties"]["parameters"] for one in schema["items"]["anyOf"]]
    assert parts == [{"$ref": "#/$defs/tool0"}, {"$ref": "#/$defs/tool1"}]
    for i, kind in enumerate(("string", "integer")):
        assert schema["$defs"][f"tool{i}"]["properties"] == {"a": {"$ref": f"#/$defs/tool{i}/$defs/a"}}
        assert schema["$defs"][f"tool{i}"]["$defs"] == {"a": {"type": kind}}
        assert given[i]["properties"] == {"a": {"$ref": "#/$defs/a"}}


def test_special_tokens_stay_visible_only_if_they_are_markers(tokenizer: Tokenizer) -> None:
    request = ChatCompletionRequest(messages=[USER], tools=TOOLS)
    assert not wanted_of(ParsingSettings("hermes", True), tokenizer, request, "").shows_special
    special: Any = SimpleNamespace(
        special_ids=frozenset({7}), token_to_id=lambda text: 7 if text == "<|python_tag|>" else None
    )
    assert wanted_of(ParsingSettings("llama3_json", True), special, request, "").shows_special
    assert not wanted_of(ParsingSettings("hermes", True), special, request, "").shows_special


DEFAULTS = ("--default-chat-template-kwargs", '{"enable_thinking": true}')


def test_answers_of_gpt_oss_end_with_its_own_marks(tokenizer: Tokenizer) -> None:
    ids = {"<|return|>": 5, "<|call|>": 6}
    harmony: Any = SimpleNamespace(special_ids=frozenset(ids.values()), token_to_id=ids.get, token_text=str)
    request = ChatCompletionRequest(messages=[USER])
    wanted = wanted_of(ParsingSettings(reasoning_parser="openai_gptoss"), harmony, request, "")
    assert wanted.stop_token_ids == (5, 6) and wanted.shows_special


def test_chats_that_the_tokenizer_writes() -> None:
    """mistral_common has rules of its own instead of a template."""
    asked: list[Any] = []

    def write(*arguments: Any) -> tuple[str, list[int]]:
        asked.append(arguments)
        return "text", [5, 6, 7]

    async def in_lane(size: int, function: Any) -> Any:
        return function()

    tokenizer = SimpleNamespace(writes_chats=True, chat=write)
    context: Any = SimpleNamespace(tokenizer=tokenizer, in_lane=in_lane, limits=RequestLimits())
    request = ChatCompletionRequest(messages=[USER], tools=TOOLS)
    assert asyncio.run(chat.prompt_of(context, request, None)) == ("text", [5, 6, 7])
    assert asyncio.run(chat.prompt_of(context, request, 2)) == ("text", [6, 7])
    assert asked[0] == ([USER], TOOLS, False)
    with pytest.raises(APIError, match="remove chat_template_kwargs"):
        asyncio.run(
            chat.prompt_of(context, ChatCompletionRequest(messages=[USER], chat_template_kwargs={"a": 1}), None)
        )


def test_grammar_begins_after_the_thoughts() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant:<think>"
        "{% if not enable_thinking %}</think>{% endif %}"
    )
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [USER], "max_tokens": 60, "temperature": 0, "response_format": form}
    with Server(DEMO, "--reasoning-parser", "qwen3", "--chat-template", template) as server:
        spoken = server.post("/v1/chat/completions", {**body, "reasoning_effort": "none"}).json["choices"][0]["message"]
        assert json.loads(spoken["content"]) == {"a": 1} and spoken["reasoning_content"] is None
        thinking = {**body, "chat_template_kwargs": {"enable_thinking": True}}
        thought = server.post("/v1/chat/completions", thinking).json["choices"][0]["message"]
        assert thought["content"] is None and not thought["reasoning_content"].lstrip().startswith("{")


@pytest.mark.parametrize("said", ["Hello <think>", "Hello <think> so", "Hello <think></think>", "Hello </think>"])
def test_no_text_of_a_user_does_without_the_form(qwen3: Server, said: str) -> None:
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 150, "temperature": 1}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for seed in range(4):
        asked = {**body, "seed": seed}
        message = qwen3.post("/v1/chat/completions", {**asked, "response_format": form}).json["choices"][0]["message"]
        assert json.loads(message["content"])["a"] in (1, 2) and message["reasoning_content"] is None
        asked |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        choice = qwen3.post("/v1/chat/completions", asked).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["a"] in (1, 2)


def test_an_answer_is_gone_on_with_in_its_own_thoughts_only(qwen3: Server) -> None:
    form = {"guided_regex": "[0-9]{4}", "add_generation_prompt": False, "continue_final_message": True}
    for begun, speaks in (("It is", True), ("<think>a</think>", True), ("<think>It is", False)):
        messages = [{"role": "user", "content": "Hello <think>"}, {"role": "assistant", "content": begun}]
        body = {"messages": messages, "max_tokens": 20, "temperature": 0, **form}
        message = qwen3.post("/v1/chat/completions", body).json["choices"][0]["message"]
        assert (len(message["content"] or "") == 4) is speaks and (message["reasoning_content"] is None) is speaks


def test_answers_without_thoughts_have_the_form_and_count_no_thoughts() -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    body = {"messages": [USER], "max_tokens": 150, "temperature": 0, "tools": [tool], "parallel_tool_calls": False}
    with Server(DEMO, "--reasoning-parser", "qwen3") as server:
        for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
            asked = {**body, "tool_choice": choice}
            whole = server.post("/v1/chat/completions", asked).json["choices"][0]
            assert whole["finish_reason"] == reason and whole["message"]["content"] is None
            assert all(isinstance(json.loads(c["function"]["arguments"]), dict) for c in whole["message"]["tool_calls"])
            same(whole, added_up(sse_events(server.post("/v1/chat/completions", {**asked, "stream": True}).text)))
        found = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 8}).json
        assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
        assert [item["type"] for item in found["output"]] == ["message"]


def test_thoughts_over_http() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant:"
        "{% if (thinking is defined and not thinking) or not enable_thinking %}<think></think>{% endif %}"
    )
    body = {"messages": [USER], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with Server(DEMO, "--reasoning-parser", "deepseek_r1", "--chat-template", template, *DEFAULTS) as server:
        whole = server.post("/v1/chat/completions", body).json["choices"][0]
        assert whole["message"]["content"] is None and whole["message"]["reasoning_content"]
        streamed = added_up(sse_events(server.post("/v1/chat/completions", {**body, "stream": True}).text))
        same(whole, streamed)
        off = {**body, "chat_template_kwargs": {"thinking": False}}
        message = server.post("/v1/chat/completions", off).json["choices"][0]["message"]
        assert message["content"] and message["reasoning_content"] is None
        effort = server.post("/v1/chat/completions", {**body, "reasoning_effort": "none"}).json["choices"][0]["message"]
        assert effort["content"] == message["content"]
        refused = server.post("/v1/chat/completions", {**body, "reasoning_effort": "some"})
        assert refused.status == 400 and "reasoning_effort" in refused.json["message"]


def test_grammar_of_an_answer_that_is_gone_on_with_begins_at_once() -> None:
    """A parser whose models think even without the opening tag: it is the conversation that says they speak already."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    body = {"messages": [USER, {"role": "assistant", "content": "It is"}], "max_tokens": 60, "temperature": 0}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    with Server(DEMO, "--reasoning-parser", "deepseek_r1", "--served-model-name", "demo") as server:
        chat_body = {**body, **form, "add_generation_prompt": False, "continue_final_message": True}
        message = server.post("/v1/chat/completions", chat_body).json["choices"][0]["message"]
        assert json.loads(message["content"]) == {"a": 1} and message["reasoning_content"] is None
        forced = {**chat_body, "tools": TOOLS, "tool_choice": NAMED}
        (call,) = server.post("/v1/chat/completions", forced).json["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() == {"city"}
        output = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        (block,) = server.post("/v1/messages", {**body, "model": "demo", **output}).json["content"]
        assert json.loads(block["text"]) == {"a": 1}
        thinking = server.post("/v1/chat/completions", {**body, **form}).json["choices"][0]["message"]
        assert thinking["content"] is None and thinking["reasoning_content"]
