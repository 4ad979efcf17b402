"""Kinds of settings: how a value is checked when it comes from Python, and how it is read from the command line."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from vllm import validation

_MAX_JSON_TEXT = 2**20
_HUMAN_INT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_readable_int(text: str) -> int:
    """ "1k" is 1,000 and "1K" is 1,024 (likewise m/M, g/G, t/T); "25.6k" is 25,600; plain digits as they are."""
    match = _HUMAN_INT.fullmatch(text.strip())
    if match is None:
        return _plain_int(text)
    number, suffix = match.groups()
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    if "." in number:
        raise argparse.ArgumentTypeError(
            f"Decimals are not allowed with binary suffixes like {suffix}. "
            f"Did you mean to use {number}{suffix.lower()} instead?"
        )
    return int(number) * _BINARY[suffix]


def _plain_int(text: str) -> int:
    if len(text) > 40:
        raise argparse.ArgumentTypeError(f"Value {text[:40]}... cannot be converted to {int}.")
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to {int}.") from None


def parse_json(text: str) -> Any:
    """The JSON value that `text` spells."""
    if len(text) > _MAX_JSON_TEXT:
        raise argparse.ArgumentTypeError(f"JSON value of {len(text)} characters, expected at most {_MAX_JSON_TEXT}.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to JSON.") from None


def key_values(text: str) -> dict[str, int]:
    """ "image=16,video=2" as a dictionary."""
    counts: dict[str, int] = {}
    for item in text.split(","):
        key, separator, value = (part.strip() for part in item.partition("="))
        if not separator or not key or "=" in value:
            raise argparse.ArgumentTypeError("Each item should be in the form KEY=VALUE")
        count = _plain_int(value)
        if counts.setdefault(key, count) != count:
            raise argparse.ArgumentTypeError(f"Conflicting values specified for key: {key}")
    return counts


@dataclass(frozen=True)
class Kind:
    """Base of all kinds. `optional` values may also be None ("None" on the command line)."""

    optional: bool = False

    @property
    def words(self) -> str:
        """The type, for the documentation."""
        return "any"

    def check(self, name: str, value: Any) -> Any:
        """`value` in its plain form; raises ValueError that names `name`."""
        plain = value.value if isinstance(value, Enum) else value  # older versions have enums for their choices
        return None if plain is None and self.optional else self._check(name, plain)

    def parse(self, text: str) -> Any:
        """The value that `text` spells on the command line; raises argparse.ArgumentTypeError."""
        return None if self.optional and text in ("", "None", "none", "null") else self._parse(text)

    def held(self, value: Any) -> Any:
        """`value` as users find it in EngineArgs and in parsed flags: what they gave, but for kinds with a class."""
        return value

    def cli(self) -> dict[str, Any]:
        """Keyword arguments for `add_argument`."""
        return {"type": self.parse}

    def _check(self, name: str, value: Any) -> Any:
        return value

    def _parse(self, text: str) -> Any:
        return text


@dataclass(frozen=True)
class Text(Kind):
    @property
    def words(self) -> str:
        return "text"

    def parse(self, text: str) -> Any:
        return super().parse(text) if text else text  # argparse also parses a default of ""

    def _check(self, name: str, value: Any) -> str:
        return validation.text(name, str(value) if isinstance(value, Path) else value)


@dataclass(frozen=True)
class Choice(Kind):
    """One of `values`. `error` makes the message for anything else, given the value; `any_case` ones are lower case."""

    values: tuple[str, ...] = ()
    error: Callable[[Any], str] | None = None
    any_case: bool = False

    @property
    def words(self) -> str:
        return ", ".join(self.values)

    def _check(self, name: str, value: Any) -> Any:
        if self.any_case and isinstance(value, str):
            value = value.lower()
        if not isinstance(value, str) or value not in self.values:
            raise ValueError(
                self.error(value) if self.error else f"{name} must be one of {', '.join(self.values)}, got {value!r}."
            )
        return value

    def _parse(self, text: str) -> str:
        return text.lower() if self.any_case else text

    def cli(self) -> dict[str, Any]:
        choices = [*self.values, None] if self.optional else list(self.values)
        return {"type": self.parse, "choices": choices, "metavar": "{" + ",".join(self.values) + "}"}


@dataclass(frozen=True)
class ClassPath(Kind):
    """A class, by the path under which every process can import it: "package.module.Class" or "package.module:Class".
    In Python also the class itself.

    names: words that stand for themselves.   error: of a value that is none of all this.
    """

    names: tuple[str, ...] = ()
    error: Callable[[Any], str] | None = None

    @property
    def words(self) -> str:
        return ", ".join([*self.names, "a class's path"])

    def _check(self, name: str, value: Any) -> str:
        if isinstance(value, type):
            if value.__module__ == "__main__" or "<" in value.__qualname__:
                raise ValueError(f"{name}: {value.__qualname__} must stand in a module that every process can import.")
            return f"{value.__module__}:{value.__qualname__}"
        if isinstance(value, str) and (value in self.names or "." in value.strip(".") or ":" in value.strip(":")):
            return value
        raise ValueError(self.error(value) if self.error else f"{name} must be a class or its path, got {value!r}.")

    def _parse(self, text: str) -> str:
        return text

    def cli(self) -> dict[str, Any]:
        return {"type": self.parse}


@dataclass(frozen=True)
class Integer(Kind):
    """A whole number in [low, high]. `human` ones may be written "16k" or "16K", also in Python."""

    low: int | None = None
    high: int = 2**63 - 1
    human: bool = False

    @property
    def words(self) -> str:
        return "integer, e.g. 4096, 4k or 4K" if self.human else "integer"

    def _check(self, name: str, value: Any) -> int:
        if self.human and isinstance(value, str):
            try:
                value = human_readable_int(value)
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{name}: {error}") from None
        number = validation.integer(name, value)
        if self.low is not None and number < self.low:
            raise validation.fail(name, number, f"must be at least {self.low}")
        if number > self.high:
            raise validation.fail(name, number, f"must be at most {self.high}")
        return number

    def _parse(self, text: str) -> int:
        return human_readable_int(text) if self.human else _plain_int(text)


@dataclass(frozen=True)
class Number(Kind):
    """A finite number, at least `low` if that is given."""

    low: float | None = None

    @property
    def words(self) -> str:
        return "number"

    def _check(self, name: str, value: Any) -> float:
        number = validation.finite(name, value)
        if self.low is not None and number < self.low:
            raise validation.fail(name, number, f"must be at least {self.low:g}")
        return number

    def _parse(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to {float}.") from None


@dataclass(frozen=True)
class Flag(Kind):
    """True or false: `--name` and `--no-name`; `value_follows` ones also take "true" or "false" as the next word."""

    value_follows: bool = False

    @property
    def words(self) -> str:
        return "true or false"

    def _check(self, name: str, value: Any) -> bool:
        return validation.flag(name, value)

    def cli(self) -> dict[str, Any]:
        return {}  # the parser has its own actions for flags


@dataclass(frozen=True)
class Json(Kind):
    """A JSON object."""

    @property
    def words(self) -> str:
        return "JSON object"

    def _check(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a dict (on the command line a JSON object), got {value!r}.")
        return dict(value)

    def _parse(self, text: str) -> Any:
        value = parse_json(text)
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to {dict}.")
        return value


@dataclass(frozen=True)
class JsonOr(Kind):
    """A JSON object, or whatever else `accept` takes in Python: a callable, a config object.

    `text`: words that are no JSON object stand for themselves. `bare`: the flag alone means True.
    """

    accept: Callable[[Any], bool] = callable
    expected: str = "a callable"
    text: bool = False
    bare: bool = False

    @property
    def words(self) -> str:
        return f"JSON object or {self.expected}"

    def _check(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        if self.accept(value):
            return value
        raise ValueError(f"{name} must be a dict or {self.expected}, got {value!r}.")

    def _parse(self, text: str) -> Any:
        if self.text and not text.lstrip().startswith("{"):
            return text
        value = parse_json(text)
        if isinstance(value, Mapping) or self.accept(value):
            return value
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to {dict}.")

    def cli(self) -> dict[str, Any]:
        return {"type": self.parse, "nargs": "?", "const": True} if self.bare else {"type": self.parse}


@dataclass(frozen=True)
class Counts(Kind):
    """Names with counts: JSON, or "image=16,video=2"."""

    @property
    def words(self) -> str:
        return "image=16,video=2 or JSON"

    def _check(self, name: str, value: Any) -> dict[str, int]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a dict of counts such as {{'image': 2}}, got {value!r}.")
        return {
            validation.text(f"a key of {name}", key): validation.integer(f"{name}[{key!r}]", count)
            for key, count in value.items()
        }

    def _parse(self, text: str) -> Any:
        return parse_json(text) if text.lstrip().startswith("{") else key_values(text)


@dataclass(frozen=True)
class TextList(Kind):
    """A list of texts; a single text stays what it is."""

    @property
    def words(self) -> str:
        return "one or more texts"

    def _check(self, name: str, value: Any) -> Any:
        return validation.text(name, value) if isinstance(value, str) else validation.string_list(name, value)

    def cli(self) -> dict[str, Any]:
        return {"type": str, "nargs": "+"}


@dataclass(frozen=True)
class NumberList(Kind):
    """A list of positive numbers (`whole`: integers)."""

    whole: bool = False

    @property
    def words(self) -> str:
        return "one or more integers" if self.whole else "one or more numbers"

    def _check(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list of positive numbers, got {value!r}.")
        item_check = validation.integer if self.whole else validation.finite
        numbers = [item_check(f"{name}[{i}]", item) for i, item in enumerate(value)]
        if any(number <= 0 for number in numbers):
            raise ValueError(f"{name} must be a list of positive numbers, got {value!r}.")
        return numbers

    def _parse(self, text: str) -> Any:
        return _plain_int(text) if self.whole else Number().parse(text)

    def cli(self) -> dict[str, Any]:
        return {"type": self._parse, "nargs": "+"}
