"""LiteLLM: its provider for hosted vLLM servers."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

from tests.clients.conftest import QUESTION, WEATHER

pytestmark = pytest.mark.clients


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def settings(base_url: str) -> dict[str, Any]:
    return {"model": "hosted_vllm/demo", "api_base": base_url, "api_key": "EMPTY", "temperature": 0}


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_completion_plain_and_streamed(settings: dict[str, Any]) -> None:
    answer = litellm.completion(messages=ask(QUESTION), **settings)
    text = answer.choices[0].message.content
    assert "Paris" in text
    chunks = litellm.completion(messages=ask(QUESTION), stream=True, **settings)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


async def test_asynchronous_completion(settings: dict[str, Any]) -> None:
    answer = await litellm.acompletion(messages=ask(QUESTION), **settings)
    assert "Paris" in answer.choices[0].message.content


def test_tools_and_forms(settings: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the current weather", "parameters": parameters}
    answer = litellm.completion(messages=ask(WEATHER), tools=[{"type": "function", "function": function}], **settings)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    answer = litellm.completion(messages=ask("A person"), response_format=Person, max_tokens=200, **settings)
    Person.model_validate_json(answer.choices[0].message.content)


def test_text_completion(base_url: str) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/demo", prompt="The capital of France is", max_tokens=4, temperature=0,
        api_base=base_url, api_key="EMPTY",
    )  # fmt: skip
    assert "Paris" in answer.choices[0].text


def test_errors_are_those_of_the_client(settings: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=ask("x"), **{**settings, "temperature": -1})
