"""Outlines: forms against the server, and with an engine in the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import outlines
import pytest
from pydantic import BaseModel

from tests.clients.conftest import QUESTION
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.clients


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def engine(engine_settings: dict[str, Any]) -> Iterator[Any]:
    with LLM("demo", **engine_settings) as llm:
        yield outlines.from_vllm_offline(llm)


def test_forms_of_a_server(base_url: str) -> None:
    model = outlines.from_vllm(openai.OpenAI(base_url=base_url, api_key="EMPTY"), "demo")
    Person.model_validate_json(model("Describe a person", Person, max_tokens=200, temperature=0))
    assert model("Is it?", Literal["yes", "no"], max_tokens=20) in ("yes", "no")
    number = outlines.regex("[0-9]{3}")
    assert int(model("A number:", number, max_tokens=20)) in range(1000)
    assert "".join(model.stream("Is it?", Literal["yes", "no"], max_tokens=20)) in ("yes", "no")


def test_forms_in_the_process(engine: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    Person.model_validate_json(engine("Describe a person", Person, sampling_params=params))
    assert engine("Is it?", Literal["yes", "no"], sampling_params=params) in ("yes", "no")
    assert "Paris" in engine(QUESTION, sampling_params=SamplingParams(temperature=0, max_tokens=30))
    answers = engine.batch(["Is it?", "Or not?"], Literal["yes", "no"], sampling_params=params)
    assert [len(texts) for texts in answers] == [1, 1] and {text for texts in answers for text in texts} <= {
        "yes",
        "no",
    }
