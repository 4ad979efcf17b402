"""Inspect evaluates the server through its providers for OpenAI's and for vLLM's servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

from tests.clients.conftest import QUESTION, WEATHER

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
CONFIG = GenerateConfig(temperature=0, max_tokens=100)


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """Get the current weather

        Args:
            city: The city
        """
        return f'{{"temperature": 21, "city": "{city}"}}'

    return execute


@pytest.mark.parametrize("provider", ["openai-api/local/demo", "vllm/demo"])
def test_tasks_are_scored(provider: str, base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_API_KEY", "EMPTY")
    model = get_model(provider, base_url=base_url, api_key="EMPTY", config=CONFIG)
    samples = [Sample(input=QUESTION, target="Paris"), Sample(input="What is the capital of Italy?", target="Rome")]
    task = Task(dataset=samples, solver=[generate()], scorer=includes())
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success" and log.results.scores[0].metrics["accuracy"].value == 1.0


def test_tools_are_run(base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_API_KEY", "EMPTY")
    model = get_model("openai-api/local/demo", base_url=base_url, api_key="EMPTY", config=CONFIG)
    task = Task(
        dataset=[Sample(input=WEATHER, target="21")], solver=[use_tools(get_weather()), generate()], scorer=includes()
    )
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success"
    roles = [message.role for message in log.samples[0].messages]
    assert "tool" in roles and "21" in str(log.samples[0].messages[roles.index("tool")].text)
