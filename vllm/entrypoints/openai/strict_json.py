"""Reads request bodies: strict JSON within bounds, else a `ValueError` that says what is wrong without echoing it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 300
# While values are read no other thread runs, so that their number must be bounded, not only that of the bytes: this
# many hold up the streams of others for less than a tenth of a second, and 16 MiB could be eight times as many. Lists,
# objects and their keys cost more than numbers.
MAX_VALUES = 1_000_000
_CONTAINER_COST = 3
_BRACKET = re.compile(r"[\[\]{}]")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS + 1:  # one for a sign
        raise ValueError("an integer has too many digits")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _reader(parse_int: Callable[[str], int] | None) -> Callable[[str], Any]:
    decoder = json.JSONDecoder(
        parse_constant=_refuse_constant, parse_float=_finite, parse_int=parse_int, object_pairs_hook=_unique
    )
    return decoder.decode


_READ = _reader(None)
_READ_LONG_INTEGERS = _reader(_integer)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises ValueError for anything else: bad UTF-8, lone surrogates, NaN and Infinity, numbers beyond all bounds,
    duplicate keys, nesting deeper than MAX_DEPTH, more than MAX_VALUES values.
    """
    if len(body) > MAX_VALUES // _CONTAINER_COST and cost_of(body) > MAX_VALUES:
        raise ValueError(
            f"The body has more than {MAX_VALUES} values (each list, object and key counts for {_CONTAINER_COST}); "
            "send less in one request."
        )
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("The body is not valid UTF-8.") from None
    if text.startswith("\ufeff"):
        raise ValueError("The body is not valid JSON: it begins with a byte order mark; send UTF-8 without one.")
    _check_depth(text)
    try:
        # Looking at the text once is far cheaper than a look at each of a million token ids.
        value = (_READ_LONG_INTEGERS if _has_many_digits(text) else _READ)(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"The body is not valid JSON: {error.msg} at {where}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The body is not acceptable JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError("The body must be a JSON object.")
    if "\\u" in text:
        _check_strings(value)
    return value


def cost_of(body: bytes) -> int:
    """What reading the body costs, in numbers read. Never too low; strings with such characters make it too high."""
    return body.count(b",") + _CONTAINER_COST * sum(map(body.count, (b"[", b"{", b":")))


def _has_many_digits(text: str) -> bool:
    """Whether there may be an integer of more than MAX_INTEGER_DIGITS digits: it would fill one of these pieces."""
    piece = MAX_INTEGER_DIGITS // 2
    return any(text[start : start + piece].isdigit() for start in range(0, len(text), piece))


def _check_depth(text: str) -> None:
    """Count brackets outside strings; stops at the first that is too deep."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    # Whole texts at a time: a look at each mark of 16 MiB of escapes takes seconds.
    bare = text.replace("\\\\", "").replace('\\"', "")
    if bare.count('"') > 2 * MAX_VALUES:
        raise ValueError("The body is not valid JSON: more strings than values.")
    depth = 0
    for found in _BRACKET.finditer("".join(bare.split('"')[::2])):
        depth += 1 if found.group() in "[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"The body is nested deeper than {MAX_DEPTH} levels.")
        if depth < 0:
            return  # no JSON, which its reader says


def _check_strings(value: Any) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError("A string has a lone surrogate, which is no character.") from None
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
