"""One constraint in its checked, canonical form: what the core receives and what compiled grammars are kept by."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from vllm.exceptions import VLLMValidationError
from vllm.structured_output.params import GuidedDecodingParams, StructuredOutputsParams, backend_and_options

JSON, REGEX, CHOICE, GRAMMAR, STRUCTURAL_TAG = "json", "regex", "choice", "grammar", "structural_tag"
ANY_OBJECT = '{"type":"object"}'  # the schema of `json_object`
MAX_SCHEMA_CHARACTERS = 1 << 18
MAX_PATTERN_CHARACTERS = 1 << 16
MAX_SCHEMA_DEPTH = 64
MAX_BRACKETS_OPEN = 128  # at once, in a pattern or a grammar: libraries read them by recursion
_BRACKETS = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A constraint on a whole output.

    kind: one of the words above.   text: the schema, pattern, list of choices (JSON), grammar or tag (JSON).
    backend: the library that compiles it.   whitespace: pattern of what may stand between the parts of JSON text; None
    for the default, "" for nothing.
    """

    kind: str
    text: str
    backend: str
    whitespace: str | None = None

    @property
    def nbytes(self) -> int:
        return len(self.text.encode())


class Constraint(msgspec.Struct, frozen=True):
    """What a request asks for, in one of its spellings, before it is known which back end does it."""

    kind: str
    text: str
    whitespace: str | None = None
    backend: str | None = None  # what the request names
    fallback: bool = True
    close_objects: bool = False


def constraint_of(params: GuidedDecodingParams | StructuredOutputsParams, name: str) -> Constraint | None:
    """The constraint in `params`, None if there is none. Raises VLLMValidationError; `name` is the parameter's."""
    kind, text = _kind_and_text(params, name)
    if kind is None:
        return None
    _check_size(kind, text, name)
    if isinstance(params, StructuredOutputsParams):
        backend, options = (None, set()) if params._backend is None else backend_and_options(params._backend)
    else:
        backend, options = params.backend, {"disable_fallback"} if params.disable_fallback else set()
    compact = params.disable_any_whitespace or "disable_any_whitespace" in options
    whitespace = "" if compact else None
    if params.whitespace_pattern is not None:
        if kind != JSON:
            raise VLLMValidationError(
                f"whitespace_pattern is for JSON, but {name} asks for a {kind}. Leave it unset.", parameter=name
            )
        _check_size(REGEX, params.whitespace_pattern, f"{name}.whitespace_pattern")
        whitespace = params.whitespace_pattern
    return Constraint(
        kind=kind,
        text=text,
        whitespace=whitespace,
        backend=backend,
        fallback="disable_fallback" not in options,
        close_objects=params.disable_additional_properties or "disable_additional_properties" in options,
    )


def _kind_and_text(params: GuidedDecodingParams | StructuredOutputsParams, name: str) -> tuple[str | None, str]:
    if params.json is not None:
        return JSON, _schema_text(params.json, name)
    if params.json_object:
        return JSON, ANY_OBJECT
    if params.regex is not None:
        return REGEX, params.regex
    if params.choice is not None:
        return CHOICE, json.dumps(list(dict.fromkeys(params.choice)), ensure_ascii=False)
    if params.grammar is not None:
        return GRAMMAR, params.grammar
    if params.structural_tag is not None:
        tag = _parse_json(params.structural_tag, f"{name}.structural_tag")
        return STRUCTURAL_TAG, _as_text(tag, f"{name}.structural_tag")
    return None, ""


def _schema_text(schema: str | dict[str, Any], name: str) -> str:
    found = _parse_json(schema, f"{name}.json") if isinstance(schema, str) else schema
    if not isinstance(found, dict | bool):
        raise VLLMValidationError(
            f"{name}.json must be a JSON schema, which is an object; got {type(found).__name__}.", parameter=name
        )
    return _as_text(found, f"{name}.json")


def _as_text(value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise VLLMValidationError(f"{name} cannot be written as JSON: {error}", parameter=name) from None


def _parse_json(text: str, name: str) -> Any:
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise _too_long(name, len(text), MAX_SCHEMA_CHARACTERS)
    _check_brackets(text, name, MAX_SCHEMA_DEPTH * 4)

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise VLLMValidationError(f"{name} is not valid JSON: {error}", parameter=name) from None


def _check_size(kind: str, text: str, name: str) -> None:
    limit = MAX_SCHEMA_CHARACTERS if kind in (JSON, CHOICE, STRUCTURAL_TAG) else MAX_PATTERN_CHARACTERS
    if len(text) > limit:
        raise _too_long(name, len(text), limit)
    if "\0" in text:
        raise VLLMValidationError(f"{name} must not contain a NUL character ('\\x00')", parameter=name)
    if kind in (REGEX, GRAMMAR):
        _check_brackets(text, name, MAX_BRACKETS_OPEN)


def _check_brackets(text: str, name: str, limit: int) -> None:
    """Refuse a text that is nested too deeply, by a count that is never too low."""
    if text.count("(") + text.count("[") + text.count("{") <= limit:
        return
    depth = 0
    for found in _BRACKETS.finditer(text):
        mark = found.group()
        if mark in "([{":
            depth += 1
            if depth > limit:
                raise VLLMValidationError(
                    f"{name} is nested too deeply: more than {limit} brackets are open at once.", parameter=name
                )
        elif mark in ")]}":
            depth = max(0, depth - 1)


def unanchored(pattern: str) -> str:
    """A pattern without "^" at its beginning and "$" at its end, for libraries that match whole texts and do not know
    them. One with alternatives stays as it is: they might belong to one of them only.
    """
    if "|" in pattern:
        return pattern
    body = pattern.removeprefix("^")
    escapes = len(body) - len(body.removesuffix("$").rstrip("\\")) - 1
    return body[:-1] if body.endswith("$") and escapes % 2 == 0 else body


def ascii_digits(pattern: str) -> str:
    """A pattern in which \\d stands for 0 to 9 only, and not for the digits of all scripts."""
    found, inside, i = [], False, 0
    while i < len(pattern):
        part = pattern[i : i + 2] if pattern[i] == "\\" else pattern[i]
        if part == "\\d":
            found.append("0-9" if inside else "[0-9]")
        else:
            inside = part == "[" or (inside and part != "]")
            found.append(part)
        i += len(part)
    return "".join(found)


def _too_long(name: str, length: int, limit: int) -> VLLMValidationError:
    return VLLMValidationError(
        f"{name} has {length} characters; at most {limit} are compiled. Shorten it.", parameter=name
    )
