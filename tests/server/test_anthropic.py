"""The Messages API, through Anthropic's own client: text, thoughts, tools, streams, counts, errors."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest

from tests.server.http_server import MODEL, Server
from tests.server.test_messages import CALL_TEXT, DEMO, Answer
from tests.tool_parsers.outputs import CALLS, TOOLS
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.entrypoints.openai import chat, messages
from vllm.entrypoints.openai.logprobs import TokenText
from vllm.entrypoints.openai.message import ParsingSettings, wanted_of
from vllm.entrypoints.openai.protocol import ChatCompletionRequest

KEY = "secret-key"
GREEDY: Any = {"extra_body": {"temperature": 0}}  # which the client has no name for any more
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the current weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
}
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CAPITAL: Any = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--api-key", KEY)
    with Server(Path("demo"), *flags, key=KEY) as server:
        yield server


@pytest.fixture
def client(running: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key=KEY, max_retries=0) as opened:
        yield opened


def test_text(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=50, messages=CAPITAL, **GREEDY, system="Be brief.")
    (block,) = answer.content
    assert block.type == "text" and "Paris" in block.text
    assert answer.stop_reason == "end_turn" and answer.role == "assistant" and answer.id.startswith("msg_")
    assert answer.usage.input_tokens > 5 and answer.usage.output_tokens > 2
    with client.messages.stream(model=MODEL, max_tokens=50, messages=CAPITAL, **GREEDY, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.usage == answer.usage and final.stop_reason == "end_turn"


def test_system_messages_within_a_chat(client: anthropic.Anthropic) -> None:
    """They are counted where they stand, and the client's blocks are one text."""
    blocks = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    within: Any = [
        *CAPITAL,
        {"role": "assistant", "content": "Paris."},
        {"role": "system", "content": blocks},
        *CAPITAL,
    ]
    as_text: Any = [*within[:2], {"role": "system", "content": "Be brief.\nBe kind."}, *CAPITAL]
    counts = [client.messages.count_tokens(model=MODEL, messages=m).input_tokens for m in (within, as_text)]
    assert counts[0] == counts[1] > client.messages.count_tokens(model=MODEL, messages=CAPITAL * 2).input_tokens
    assert client.messages.create(model=MODEL, max_tokens=20, messages=within, **GREEDY).content


def test_ends(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model=MODEL, max_tokens=2, messages=CAPITAL, **GREEDY)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
    stopped = client.messages.create(model=MODEL, max_tokens=50, messages=CAPITAL, **GREEDY, stop_sequences=["Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    begun = [*CAPITAL, {"role": "assistant", "content": "The capital of France is"}]
    answer = client.messages.create(model=MODEL, max_tokens=20, messages=begun, **GREEDY)
    assert answer.content[0].text.strip().startswith("Paris")  # type: ignore[union-attr]


def test_tool_use_result_and_answer(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 80, "tools": [TOOL], **GREEDY}
    first = client.messages.create(messages=WEATHER, **asked)
    (block,) = first.content
    assert block.type == "tool_use" and block.name == "get_weather" and block.input == {"city": "Paris"}
    assert first.stop_reason == "tool_use"
    with client.messages.stream(messages=WEATHER, **asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert streamed.content[0].input == block.input and streamed.stop_reason == "tool_use"  # type: ignore[union-attr]
    result = {
        "type": "tool_result",
        "tool_use_id": block.id,
        "content": [{"type": "text", "text": json.dumps({"temperature": 21, "condition": "sunny"})}],
    }
    followed = [*WEATHER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=followed, **asked)
    assert "21" in answer.content[0].text  # type: ignore[union-attr]
    none = client.messages.create(messages=WEATHER, tool_choice={"type": "none"}, **asked)
    assert none.content[0].type == "text"


def test_forced_tools_and_structured_text(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 90, "messages": CAPITAL, **GREEDY}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = client.messages.create(tools=[TOOL], tool_choice=choice, **asked)  # type: ignore[arg-type]
        assert {block.type for block in answer.content} == {"tool_use"}
        assert answer.stop_reason in ("tool_use", "max_tokens")
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    for spelled in ({"output_config": form}, {"output_format": form["format"]}):
        answer = client.messages.create(**{**asked, "extra_body": {**asked["extra_body"], **spelled}})
        assert json.loads(answer.content[0].text) == {"a": 1}  # type: ignore[union-attr]


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=WEATHER, tools=[TOOL]).input_tokens
    answer = client.messages.create(model=MODEL, messages=WEATHER, tools=[TOOL], max_tokens=1)
    assert counted == answer.usage.input_tokens > 50


def test_errors(client: anthropic.Anthropic, running: Server) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=5, messages=CAPITAL)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages\\[0\\].role must be user, assistant or system"),
        (
            {"messages": [{"role": "system", "content": [{"type": "image"}]}]},
            "messages\\[0\\].content may hold blocks of",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "blocks of type text only"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "this server calls no tools itself"),
        ({"tool_choice": {"type": "any"}, "tools": [{"name": 5}]}, "tools\\[0\\] must have a name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens must be at least 1024"),
        ({"thinking": {"type": "often"}}, "thinking.type must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must look like"),
        ({"output_config": {"effort": "much"}}, "reasoning_effort"),
    ]
    for fields, message in wrong:
        body: Any = {"model": MODEL, "max_tokens": 5, "messages": CAPITAL, **fields}
        with pytest.raises(anthropic.BadRequestError, match=message) as caught:
            client.messages.create(**body)
        assert caught.value.body["type"] == "error"  # type: ignore[index]
        assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0).messages.create(
            model=MODEL, max_tokens=5, messages=CAPITAL
        )
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="not multimodal"):
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [image]}])  # type: ignore


def test_thoughts_text_and_calls_are_blocks_in_order() -> None:
    text = f"<think>Hm.</think>I look.{CALL_TEXT}"
    context: Any = SimpleNamespace(cached_tokens=lambda outputs: None)
    source: Any = Answer(text, "stop")
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "q"}], tools=TOOLS)

    def work() -> chat.Chat:
        parsing = wanted_of(ParsingSettings("hermes", True, "qwen3"), load_tokenizer(DEMO), body, "").parsing
        return chat.Chat(body, "msg_1", "m", 1, source, TokenText(None, True), "assistant", "", parsing)

    whole = asyncio.run(messages.complete(context, work()))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(block["name"], block["input"]) for block in whole["content"][2:]] == CALLS
    assert whole["content"][0]["thinking"] == "Hm." and whole["content"][0]["signature"]
    assert whole["stop_reason"] == "tool_use"
    writer = messages.MessageEvents(context, work())
    stream = b"".join([*(writer.feed(0, output) for output in source.pieces(random.Random(0))), writer.end()]).decode()
    blocks: list[dict[str, Any]] = []
    open_block = None
    for part in stream.split("\n\n")[:-1]:
        head, _, data = part.partition("\ndata: ")
        event = json.loads(data)
        assert head == f"event: {event['type']}"
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(blocks)
            open_block = {**event["content_block"], "json": ""}
            blocks.append(open_block)
        elif event["type"] == "content_block_delta":
            assert open_block is not None and event["index"] == len(blocks) - 1
            delta = event["delta"]
            key = {"input_json_delta": "json", "text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if key is not None:
                open_block[key] += delta["partial_json" if key == "json" else key]
        elif event["type"] == "content_block_stop":
            open_block = None
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == "Hm." and blocks[1]["text"] == "I look."
    assert [(block["name"], json.loads(block["json"])) for block in blocks[2:]] == CALLS


def test_translation_of_a_conversation() -> None:
    ignored: list[str] = []
    context: Any = SimpleNamespace(log_unknown_fields=ignored.extend)
    request = messages.MessagesRequest(
        model="m",
        max_tokens=5000,
        system=[{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "s"}],
        messages=[
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "x"},
                    {"type": "redacted_thinking", "data": "y"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"x": "é"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "and", "cache_control": {"type": "ephemeral"}},
                    {"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True},
                ],
            },
        ],
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2000},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    made = messages.to_chat(context, request)
    assert ignored == ["thinking.budget_tokens"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    assert made.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "a", "reasoning_content": "t", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Error: no"},
        {"role": "user", "content": [{"type": "text", "text": "and"}]},
    ]
    assert made.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert made.parallel_tool_calls is False and made.add_generation_prompt
    assert made.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert made.reasoning_effort == "low" and made.response_format["json_schema"]["schema"] == {"type": "object"}
