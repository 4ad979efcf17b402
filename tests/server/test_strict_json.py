"""Request bodies are strict JSON within bounds; whatever is refused is refused with a ValueError."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.entrypoints.openai.strict_json import MAX_DEPTH, MAX_INTEGER_DIGITS, parse_object

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
