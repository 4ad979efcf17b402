"""LangChain: chats with tools and forms against the server, and `VLLM` in the process."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_community.llms import VLLM, VLLMOpenAI
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.clients.conftest import QUESTION, WEATHER

pytestmark = pytest.mark.clients


class Person(BaseModel):
    """A person"""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the current weather"""
    return f"21 degrees in {city}"


@pytest.fixture
def chat(base_url: str) -> ChatOpenAI:
    return ChatOpenAI(model="demo", base_url=base_url, api_key=SecretStr("EMPTY"), temperature=0)


def test_chats_plain_and_streamed(chat: ChatOpenAI) -> None:
    answer = chat.invoke(QUESTION)
    assert "Paris" in str(answer.content) and answer.usage_metadata["output_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == answer.content
    assert [str(a.content) for a in chat.batch([QUESTION] * 3)] == [answer.content] * 3


def test_bound_tools(chat: ChatOpenAI) -> None:
    answer = chat.bind_tools([get_weather]).invoke(WEATHER)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage) and isinstance(answer, AIMessage)
    told = chat.bind_tools([get_weather]).invoke([HumanMessage(WEATHER), answer, result])
    assert told.content and not told.tool_calls
    total: Any = None
    for chunk in chat.bind_tools([get_weather]).stream(WEATHER):
        total = chunk if total is None else total + chunk
    assert total.tool_calls[0]["args"] == {"city": "Paris"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Any) -> None:
    asking = chat.bind(max_tokens=200).bound.with_structured_output(Person, method=method)
    assert isinstance(asking.invoke("Describe a person"), Person)


def test_completions_of_a_server(base_url: str) -> None:
    llm = VLLMOpenAI(
        model_name="demo", openai_api_base=base_url, openai_api_key=SecretStr("EMPTY"), temperature=0, max_tokens=4
    )
    assert "Paris" in llm.invoke("The capital of France is")


def test_an_engine_in_the_process(engine_settings: dict[str, Any]) -> None:
    llm = VLLM(
        model="demo", temperature=0, max_new_tokens=4, trust_remote_code=False, vllm_kwargs=engine_settings, stop=["\n"]
    )
    texts = [g[0].text for g in llm.generate(["The capital of France is", "The capital of Italy is"]).generations]
    assert "Paris" in texts[0] and "Rome" in texts[1]
