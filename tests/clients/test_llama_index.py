"""LlamaIndex: `OpenAILike` against the server, and `Vllm` in the process."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from llama_index.llms.vllm import Vllm

from tests.clients.conftest import QUESTION, WEATHER

pytestmark = pytest.mark.clients


@pytest.fixture
def llm(base_url: str) -> OpenAILike:
    return OpenAILike(
        model="demo", api_base=base_url, api_key="EMPTY", is_chat_model=True, is_function_calling_model=True,
        temperature=0, context_window=2048,
    )  # fmt: skip


def test_chats_and_completions(llm: OpenAILike) -> None:
    answer = llm.chat([ChatMessage(role="user", content=QUESTION)])
    assert "Paris" in str(answer.message.content)
    assert "Paris" in llm.complete(QUESTION).text
    chunks = list(llm.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    assert chunks[-1].message.content == answer.message.content


def test_tools(llm: OpenAILike) -> None:
    def get_weather(city: str) -> str:
        """Get the current weather"""
        return f"21 degrees in {city}"

    answer = llm.chat_with_tools([FunctionTool.from_defaults(get_weather)], user_msg=WEATHER)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"})


def test_an_engine_in_the_process(engine_settings: dict[str, Any]) -> None:
    llm = Vllm(model="demo", temperature=0, max_new_tokens=4, top_k=-1, dtype="auto", vllm_kwargs=engine_settings)
    assert "Paris" in llm.complete("The capital of France is").text
    assert llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content  # without the model's template
