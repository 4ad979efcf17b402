"""DSPy: predictions by signatures, through its own way of asking."""

from __future__ import annotations

from typing import Literal

import dspy
import pytest

from tests.clients.conftest import QUESTION

pytestmark = pytest.mark.clients


@pytest.fixture
def lm(base_url: str) -> dspy.LM:
    return dspy.LM("openai/demo", api_base=base_url, api_key="EMPTY", temperature=0.0, max_tokens=200, cache=False)


def test_the_model_answers(lm: dspy.LM) -> None:
    (answer,) = lm(QUESTION)
    assert "Paris" in (answer if isinstance(answer, str) else answer["text"])


def test_signatures_are_filled_by_guided_decoding(lm: dspy.LM) -> None:
    class Judge(dspy.Signature):
        """Judge the text."""

        text: str = dspy.InputField()
        mood: Literal["happy", "sad"] = dspy.OutputField()
        points: int = dspy.OutputField()

    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["happy", "sad"]}, "points": {"type": "integer"}},
        "required": ["mood", "points"],
    }
    guided = lm.copy(extra_body={"guided_json": schema})
    with dspy.context(lm=guided, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Judge)(text="What a lovely day!")
    assert found.mood in ("happy", "sad") and isinstance(found.points, int)
