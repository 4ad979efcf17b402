"""Request bodies are strict JSON within bounds; whatever is refused is refused with a ValueError."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    checked,
)
from vllm.entrypoints.openai.strict_json import MAX_DEPTH, MAX_INTEGER_DIGITS, MAX_VALUES, parse_object

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), values, max_size=5), st.booleans())
def test_json_is_read_as_the_standard_reader_does(value: dict, ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60))
def test_anything_else_is_a_value_error(body: bytes) -> None:
    try:
        assert isinstance(parse_object(body), dict)
    except ValueError as error:
        assert str(error)


def test_bounds() -> None:
    digits = "9" * MAX_INTEGER_DIGITS
    assert parse_object(f'{{"a": {digits}}}'.encode())["a"] == int(digits)
    with pytest.raises(ValueError, match="digits"):
        parse_object(f'{{"a": {digits}99}}'.encode())
    assert parse_object(f'{{"a": "{digits}9", "b": "\\"{digits}9"}}'.encode())["a"] == digits + "9"
    deep = MAX_DEPTH - 1
    assert parse_object(b'{"a": ' + b"[" * deep + b"]" * deep + b"}")
    with pytest.raises(ValueError, match="nested"):
        parse_object(b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}")
    assert parse_object(json.dumps({"a": "[" * 1000 + '\\"{'}).encode())


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": 1, "a": 1}', b'{"a": "\\ud800"}', b"[]", b"1",
        b'"a"', b"null", b"", b"\xef\xbb\xbf{}", b'{"a": "\x01"}', b"{} {}", b'{"a": 01}', b'{"a": +1}',
        b'{"\\udfff": 1}',
        b'{"a": "\xff"}', b"{'a': 1}", b'{"a": 1,}',
    ],
)  # fmt: skip
def test_what_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_object(body)


def test_the_number_of_values_is_bounded() -> None:
    """Before anything is read: a million values hold up everybody else while they are read."""
    assert len(parse_object(b'{"a": [' + b"5," * (MAX_VALUES - 10) + b"5]}")["a"]) == MAX_VALUES - 9
    for item in (b"5,", b'"",'):
        with pytest.raises(ValueError, match=f"more than {MAX_VALUES} values"):
            parse_object(b'{"a": [' + item * MAX_VALUES + b"5]}")
    for item in (b"[5],", b"{},", b'{"a":1},'):
        with pytest.raises(ValueError, match="counts for 3"):
            parse_object(b'{"a": [' + item * (MAX_VALUES // 4) + b"5]}")
    assert parse_object(b'{"a": "' + b"x" * (16 << 20) + b'"}')


def test_brackets_and_quotes_inside_strings_are_text() -> None:
    quoted = '\\"[{\\\\" \\\\\\"]' * 50
    assert parse_object(json.dumps({quoted: [quoted] * 40}).encode()) == {quoted: [quoted] * 40}
    with pytest.raises(ValueError, match="nested|JSON"):
        parse_object(b'{"a": "' + b'\\"[' * 100_000)


@pytest.mark.parametrize("mark", ['\\\\"', "\\\\\\\\", "]", '"', '"]'])
def test_marks_are_not_looked_at_one_by_one(mark: str) -> None:
    """A body of 16 MiB that consists of them would take seconds, in which all others wait to be read."""
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return count

    body = f'{{"a": "{"[" * 100}", "b": "{mark * 100_000}"}}'.encode()
    tracing = sys.gettrace()
    sys.settrace(count)
    try:
        with suppress(ValueError):
            parse_object(body)
    finally:
        sys.settrace(tracing)
    assert 0 < lines < 20_000  # of 100,000 marks


def test_more_strings_than_values_are_refused_before_they_are_taken_apart() -> None:
    with pytest.raises(ValueError, match="more strings than values"):
        parse_object(b'{"a": ' + b"[" * 70 + b'"' * (2 * MAX_VALUES + 1))


def test_a_byte_order_mark_is_named() -> None:
    with pytest.raises(ValueError, match="byte order mark"):
        parse_object('\ufeff{"a": 1}'.encode())


def test_an_error_begins_with_the_field_and_says_what_is_wrong() -> None:
    body = {"prompt": "x", "logit_bias": {str(i): 0.0 for i in range(100_001)}}
    with pytest.raises(APIError, match="^logit_bias: may have at most 100000 entries, got 100001$"):
        checked(CompletionRequest, body)


def test_long_integers_are_found_wherever_they_stand() -> None:
    digits = "9" * (MAX_INTEGER_DIGITS + 5)
    for before in (1, (1 << 20) - 20, (1 << 20) - 10 - MAX_INTEGER_DIGITS, 1 << 20, (1 << 20) + 1):
        with pytest.raises(ValueError, match="digits"):
            parse_object(f'{{"a": {" " * before}{digits}}}'.encode())


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * 1000}),
        (CompletionRequest, {"prompt": [[None] * 1000] * 10}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 1000}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(1000)}}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): 0.0 for i in range(100_001)}}),
        (CompletionRequest, {"prompt": "x", "allowed_token_ids": ["x"] * 1000, "bad_words": [None] * 1000}),
        (ChatCompletionRequest, {"messages": [], "documents": [{str(i): i for i in range(1000)}] * 1000}),
        (DetokenizeRequest, {"tokens": [True] * 1000}),
        (ResponsesRequest, {"input": "x", "metadata": {str(i): i for i in range(1000)}}),
    ],
)
def test_of_many_wrong_items_the_first_is_the_error(model: type[BaseModel], body: dict) -> None:
    """Each error costs as much as a hundred right items."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 4  # one for each type that the field may have
