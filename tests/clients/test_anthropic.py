"""Anthropic's client: messages, streams, tools, counted tokens."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.clients.conftest import QUESTION, WEATHER

pytestmark = pytest.mark.clients
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the current weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(server: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server, api_key="EMPTY")


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


# Old versions take a temperature, new ones want it among the fields that they do not know.
GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": 100, "extra_body": {"temperature": 0}}


def test_messages_plain_and_streamed(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(messages=ask(QUESTION), **GREEDY)
    (block,) = answer.content
    assert block.type == "text" and "Paris" in block.text and answer.stop_reason == "end_turn"
    with client.messages.stream(messages=ask(QUESTION), **GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.usage.output_tokens == answer.usage.output_tokens


def test_tools(client: anthropic.Anthropic) -> None:
    messages = ask(WEATHER)
    answer = client.messages.create(messages=messages, tools=[TOOL], **GREEDY)
    assert answer.stop_reason == "tool_use"
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    with client.messages.stream(messages=messages, tools=[TOOL], **GREEDY) as stream:
        (same,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert same.input == use.input
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": '{"temperature": 21}'}]},
    ]
    told = client.messages.create(messages=messages, tools=[TOOL], **GREEDY)
    assert "21" in "".join(block.text for block in told.content if block.type == "text")


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="demo", messages=ask(QUESTION))
    answer = client.messages.create(messages=ask(QUESTION), **GREEDY)
    assert counted.input_tokens == answer.usage.input_tokens


def test_errors_are_those_of_the_client(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**GREEDY, "model": "no-such"}, messages=ask("x"))
