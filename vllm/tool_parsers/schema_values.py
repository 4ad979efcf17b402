"""Values that a model writes as plain text, as JSON: the tool's schema says which types they may have."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PLAIN = frozenset({"string"})
ALL_TYPES = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})
_SYNONYMS = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "map": "object", "list": "array",
}  # fmt: skip
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,300}(\.[0-9]{0,300})?([eE][+-]?[0-9]{1,3})?")
MAX_SCHEMAS = 256  # that are looked at for the types of one parameter


def properties_of(tools: Sequence[Any] | None) -> dict[str, dict[str, Any]]:
    """Name of a function -> its parameters by name -> their schemas."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[function["name"]] = dict(properties) if isinstance(properties, Mapping) else {}
    return found


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows; a parameter without any is a string."""
    found: set[str] = set()
    waiting, left = [schema], MAX_SCHEMAS
    while waiting and left and not found >= ALL_TYPES:
        one = waiting.pop()
        left -= 1
        if not isinstance(one, Mapping):
            continue
        named = one.get("type")
        names = [named] if isinstance(named, str) else named[:MAX_SCHEMAS] if isinstance(named, list) else []
        own = {_SYNONYMS.get(name, name) for name in names if isinstance(name, str)}
        inner = [
            alternative
            for key in ("anyOf", "oneOf", "allOf")
            if isinstance(one.get(key), list)
            for alternative in one[key][:MAX_SCHEMAS]
        ]
        if not own and not inner:
            values = one.get("enum") if isinstance(one.get("enum"), list) else [one.get("const", "")]
            own = {_type_name(value) for value in (values or [""])[:MAX_SCHEMAS]}
        found |= own & ALL_TYPES
        waiting += inner
    return frozenset(found) or _PLAIN


def _type_name(value: Any) -> str:
    kinds: dict[type, str] = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return "null" if value is None else kinds.get(type(value), "string")


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value: of the first of these types whose form `text` has, else of a string."""
    stripped = text.strip()
    for kind, reader in _READERS:
        if kind in types:
            try:
                return json.dumps(reader(stripped), ensure_ascii=False)
            except (ValueError, RecursionError):
                continue
    return json.dumps(text, ensure_ascii=False)


def _null(text: str) -> None:
    if text.lower() not in ("null", "none"):
        raise ValueError


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError
    return int(text)


def _number(text: str) -> float | int:
    if not _NUMBER.fullmatch(text):
        raise ValueError
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _of_type(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = json.loads(text, parse_constant=_no_constant)
        if not isinstance(value, kind):
            raise ValueError
        return value

    return read


_READERS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("null", _null),
    ("integer", _integer),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _of_type(dict)),
    ("array", _of_type(list)),
)
