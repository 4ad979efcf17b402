"""A request's own logits processors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.sample.rows import Row, params, sample

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, 2.5])


def test_both_forms_get_the_tokens() -> None:
    seen: list[Any] = []

    def short(output: list[int], logits: Tensor) -> Tensor:
        seen.append(("short", output))
        logits[0] = 100.0
        return logits

    def long(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen.append(("long", prompt, output))
        return logits.neg()

    class Callable:
        def __call__(self, prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
            seen.append(("object", prompt, output))
            return logits

    rows = [
        Row(LOGITS, params(logits_processors=[short]), [1, 2], [3]),
        Row(LOGITS, params(logits_processors=[short, long]), [4], []),
        Row(LOGITS, params(logits_processors=[Callable()]), [1], [2, 3]),
        Row(LOGITS, params(logits_processors=[functools.partial(long, [9])]), [1], [2, 3]),
    ]
    assert sample(rows).token_ids.tolist() == [0, 1, 3, 0]
    assert seen == [
        ("short", [3]), ("short", []), ("long", [4], []), ("object", [1], [2, 3]), ("long", [9], [2, 3]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda output, logits: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda output, logits: None, "ValueError: it returned NoneType, expected a tensor of shape [5]"),
        (lambda output, logits: logits[:2], "ValueError: it returned [2], expected a tensor of shape [5]"),
    ],
)
def test_a_failure_fails_that_request_alone(function: Any, reason: str) -> None:
    rows = [Row(LOGITS, params()), Row(LOGITS, params(logits_processors=[function])), Row(LOGITS, params())]
    result = sample(rows)
    assert result.errors == {1: f"A logits processor of the request failed: {reason}"}
    assert result.token_ids.tolist()[::2] == [3, 3]


def test_nan_from_a_processor_is_not_blamed_on_the_model() -> None:
    rows = [Row(LOGITS, params(logits_processors=[lambda output, x: x * float("nan")])), Row(LOGITS, params())]
    result = sample(rows)
    assert result.finite.tolist() == [True, True]
    assert result.possible is not None and result.possible.tolist() == [False, True]


def test_masks_hold_whatever_a_processor_does() -> None:
    def push(output: list[int], logits: Tensor) -> Tensor:
        return logits + torch.tensor([0.0, 0.0, 0.0, 99.0, 0.0])

    rows = [Row(LOGITS, params(logits_processors=[push], allowed_token_ids=[0, 1]))]
    assert sample(rows).token_ids.tolist() == [1]
