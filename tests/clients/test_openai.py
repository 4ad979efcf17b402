"""OpenAI's client: chats, structured answers, streams, tools, responses, completions, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import QUESTION, WEATHER

pytestmark = pytest.mark.clients


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """Get the current weather"""

    city: str


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="EMPTY")


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_chats_plain_and_streamed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=ask(QUESTION), temperature=0)
    text = answer.choices[0].message.content
    assert text is not None and "Paris" in text and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.total_tokens > answer.usage.prompt_tokens > 0
    stream = client.chat.completions.create(
        model="demo", messages=ask(QUESTION), temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == answer.usage


async def test_the_asynchronous_client_runs_many_at_once(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="EMPTY") as client:
        calls = (client.chat.completions.create(model="demo", messages=ask(QUESTION), temperature=0) for _ in range(20))
        texts = {answer.choices[0].message.content for answer in await asyncio.gather(*calls)}
    assert len(texts) == 1 and "Paris" in str(texts)


def test_parse_gives_objects(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=ask("A person as JSON"), response_format=Person, temperature=0, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    with client.chat.completions.stream(
        model="demo", messages=ask("A person as JSON"), response_format=Person, temperature=0, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_tools_are_called_and_answered(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    messages = ask(WEATHER)
    answer = client.chat.completions.parse(model="demo", messages=messages, tools=[tool], temperature=0)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    with client.chat.completions.stream(model="demo", messages=messages, tools=[tool], temperature=0) as stream:
        (same,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert json.loads(same.function.arguments) == {"city": "Paris"}
    messages += [
        {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'},
    ]
    told = client.chat.completions.create(model="demo", messages=messages, tools=[tool], temperature=0)
    assert "21" in str(told.choices[0].message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_may_be_demanded(client: openai.OpenAI, choice: Any) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client.chat.completions.create(
        model="demo", messages=ask(WEATHER), tools=[tool], tool_choice=choice, max_tokens=100, temperature=0
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert GetWeather.model_validate_json(call.function.arguments) and call.function.name == "get_weather"


def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input=QUESTION, temperature=0)
    assert "Paris" in first.output_text and first.status == "completed"
    stored = client.responses.retrieve(first.id)
    assert stored.output_text == first.output_text
    following = client.responses.create(
        model="demo", input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=30
    )
    assert following.usage.input_tokens > first.usage.input_tokens
    with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        assert stream.get_final_response().output_text == first.output_text
    parsed = client.responses.parse(model="demo", input="A person", text_format=Person, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Person)


def test_completions_and_their_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=["The capital of France is", "The capital of Italy is"], max_tokens=4, temperature=0,
        logprobs=2, echo=True,
    )  # fmt: skip
    assert [" Paris" in answer.choices[0].text, " Rome" in answer.choices[1].text] == [True, True]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or ()) == "<|begin|>" + answer.choices[0].text


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.chat.completions.create(model="no-such", messages=ask("x"))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=ask("x"), temperature=-1)
    assert [model.id for model in client.models.list()] == ["demo"]
