"""Instructor: objects by tools, by JSON mode and by schema."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.clients
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA]


class Person(BaseModel):
    name: str
    age: int


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_objects(base_url: str, mode: Any) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="EMPTY"), mode=mode)
    person = client.chat.completions.create(
        model="demo", messages=ask("Describe a person"), response_model=Person, temperature=0, max_tokens=200
    )
    assert isinstance(person, Person) and isinstance(person.age, int)


def test_objects_that_grow_while_they_are_written(base_url: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="EMPTY"), mode=instructor.Mode.JSON_SCHEMA)
    # An event a token, however far the client is behind.
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "extra_body": {"stream_interval": 1}}
    parts = list(
        client.chat.completions.create_partial(
            model="demo", messages=ask("Describe a person"), response_model=Person, **options
        )
    )
    assert len(parts) > 2 and Person.model_validate(parts[-1].model_dump())
