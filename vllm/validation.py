"""Checks of single values from users. Each returns the value in its plain form, or says what was expected."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from vllm.exceptions import VLLMValidationError

Check = Callable[[str, Any], Any]  # (name, value) -> plain value

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT64_MAX = 2**64 - 1
MAX_LIST_LENGTH = 1_000_000  # ids and biases: more than any vocabulary
MAX_STRINGS = 4096  # stop strings and bad words
MAX_NESTING = 32
FLOAT32_MAX = 3.4e38  # what the device computes with


def show(value: object) -> str:
    """`value` for an error message, cut to a readable length."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."


def shorten(text: str, most: int) -> str:
    """A text for the log, with its length if more than `most` characters of it are left out."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def fail(name: str, value: object, expected: str) -> VLLMValidationError:
    """The error "`name` `expected`, got `value`."."""
    return VLLMValidationError(f"{name} {expected}, got {show(value)}.", parameter=name, value=value)


def _wrong_type(name: str, value: object, expected: str) -> VLLMValidationError:
    return VLLMValidationError(f"{name} must be {expected}, but is of type {type(value)}", parameter=name, value=value)


def integer(name: str, value: Any) -> int:
    """A whole number; bool is none."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise _wrong_type(name, value, "an int")
    return int(value)


def integer_in(low: int, high: int, too_low: str = "", too_high: str = "") -> Check:
    """A whole number in [low, high]; `too_low` and `too_high` replace the standard wording of "must be ..."."""
    too_low = too_low or f"must be at least {low}"
    too_high = too_high or f"must be at most {high}"

    def check(name: str, value: Any) -> int:
        number = integer(name, value)
        if number < low:
            raise fail(name, number, too_low)
        if number > high:
            raise fail(name, number, too_high)
        return number

    return check


def finite(name: str, value: Any) -> float:
    """A real number that is neither NaN nor infinite, also in single precision; bool is none."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise _wrong_type(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        raise fail(name, value, "must be a finite number") from None
    if not abs(number) <= FLOAT32_MAX:
        raise fail(name, number, "must be a finite number")
    return number


def number_where(accept: Callable[[float], bool], expected: str) -> Check:
    """A finite number that `accept` accepts; `expected` completes "name ..., got value."."""

    def check(name: str, value: Any) -> float:
        number = finite(name, value)
        if not accept(number):
            raise fail(name, value, expected)
        return number

    return check


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "True or False")
    return value


def text(name: str, value: Any) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise _wrong_type(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise VLLMValidationError(
            f"{name} must be valid Unicode, got {ascii(value)[:200]}, which has a lone surrogate.", parameter=name
        ) from None
    return value


def string_list(name: str, value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(name, value, "a list of strings")
    if len(value) > MAX_STRINGS:
        raise fail(name, f"{len(value)} of them", f"must be a list of at most {MAX_STRINGS} strings")
    return [text(f"{name}[{i}]", item) for i, item in enumerate(value)]


def token_ids(name: str, value: Any) -> list[int]:
    """A list of token ids: whole numbers from 0 on. Whether the model has them is known to the engine only."""
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(name, value, "a list of integers")
    if len(value) > MAX_LIST_LENGTH:
        raise fail(name, f"{len(value)} of them", f"must be a list of at most {MAX_LIST_LENGTH} token ids")
    kinds = set(map(type, value))
    if any(kind is bool or not issubclass(kind, Integral) for kind in kinds):
        raise fail(name, value, "must contain only integers")
    ids = list(value) if kinds <= {int} else [int(item) for item in value]
    if ids:
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme <= INT32_MAX:
                raise fail(name, extreme, f"must contain only token ids from 0 to {INT32_MAX}")
    return ids


def instance_of(kind: type) -> Check:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise _wrong_type(name, value, f"a {kind.__name__}")
        return value

    return check


def plain_data(name: str, value: Any, depth: int = 0) -> Any:
    """Data as in JSON (None, bool, number, string, bytes, list, dict with string keys) that fits a message."""
    if depth > MAX_NESTING:
        raise VLLMValidationError(f"{name} must nest at most {MAX_NESTING} levels deep.", parameter=name)
    if value is None or isinstance(value, (bool, float, bytes)):
        return value
    if isinstance(value, str):
        return text(name, value)
    if isinstance(value, int):
        if not INT64_MIN <= value <= UINT64_MAX:
            raise VLLMValidationError(f"{name} integers must be between -2**63 and 2**64 - 1.", parameter=name)
        return value
    if isinstance(value, (list, tuple)):
        return [plain_data(name, item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {text(f"a key of {name}", key): plain_data(name, item, depth + 1) for key, item in value.items()}
    raise _wrong_type(f"a value in {name}", value, "None, a bool, a number, a string, bytes, a list or a dict")


def plain_dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong_type(name, value, "a dict")
    return dict(plain_data(name, value))


def not_yet(default: object) -> Check:
    """For options that exist by name only: anything but the default is refused."""

    def check(name: str, value: Any) -> Any:
        if value == default and type(value) is type(default):
            return value
        raise VLLMValidationError(
            f"{name}={show(value)} is not supported by this version; leave {name} at its default, {default!r}.",
            parameter=name,
            value=value,
        )

    return check
