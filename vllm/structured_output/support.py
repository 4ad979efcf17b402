"""Which back end has which feature, and the choice between them. What a back end lacks is refused, never ignored."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import string
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.structured_output.rules import has_finite_text
from vllm.structured_output.schema import (
    Schema,
    SchemaError,
    assertions,
    check_finite,
    check_references,
    choose_freely,
    closed,
    drop_names,
    drop_trivial,
    is_recursive,
    subschemas,
)
from vllm.structured_output.spec import (
    ANY_OBJECT,
    CHOICE,
    GRAMMAR,
    JSON,
    REGEX,
    STRUCTURAL_TAG,
    Constraint,
    GrammarSpec,
)

if TYPE_CHECKING:
    from vllm.config.decoding import DecodingConfig

logger = init_logger(__name__)

GUIDANCE, XGRAMMAR, OUTLINES, LMFE = "guidance", "xgrammar", "outlines", "lm-format-enforcer"
# In the order in which "auto" asks them.
BACKENDS = (GUIDANCE, XGRAMMAR, OUTLINES, LMFE)
_PACKAGES = {GUIDANCE: "llguidance", XGRAMMAR: "xgrammar", OUTLINES: "outlines_core", LMFE: "lmformatenforcer"}
_INSTALLED_BY = {GUIDANCE: "llguidance", XGRAMMAR: "xgrammar", OUTLINES: "outlines_core", LMFE: "lm-format-enforcer"}

# A set whose characters' other cases are looked up takes guidance two milliseconds.
MAX_CASELESS_SETS = 128
_IGNORES_CASE = re.compile(r"\(\?[a-zA-Z]*i")
_LARK_IGNORES_CASE = re.compile(r"""\(\?[a-zA-Z]*i|[/"][a-z]*i\b""")

_NOBODY = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems", "contains",
     "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
     "propertyNames", "additionalItems"}
)  # fmt: skip
_REFUSED_BY_NAME = _NOBODY | {"format"}  # by libraries, whatever their value is
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LACKING: dict[str, frozenset[str]] = {
    GUIDANCE: _NOBODY,
    XGRAMMAR: _NOBODY | {"minProperties", "maxProperties", "multipleOf"},
    OUTLINES: _NOBODY | _BOUNDS | {"minProperties", "maxProperties", "multipleOf", "patternProperties", "allOf"},
    LMFE: _NOBODY | _BOUNDS
    | {"minProperties", "maxProperties", "multipleOf", "patternProperties", "allOf", "prefixItems", "format",
       "minLength", "maxLength"},
}  # fmt: skip
_FORMATS: dict[str, frozenset[str]] = {
    GUIDANCE: frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}),
    XGRAMMAR: frozenset({"date-time", "time", "date", "duration", "email", "hostname", "uuid", "uri"}),
    OUTLINES: frozenset({"date", "uuid", "uri", "email"}),
    LMFE: frozenset(),
}
_KINDS: dict[str, frozenset[str]] = {
    GUIDANCE: frozenset({JSON, REGEX, CHOICE, GRAMMAR, STRUCTURAL_TAG}),
    XGRAMMAR: frozenset({JSON, REGEX, CHOICE, GRAMMAR, STRUCTURAL_TAG}),
    OUTLINES: frozenset({JSON, REGEX, CHOICE}),
    LMFE: frozenset({JSON, REGEX, CHOICE}),
}
_WORDS = {GRAMMAR: "grammars (EBNF or Lark)", STRUCTURAL_TAG: "structural tags"}


def resolve(constraint: Constraint, settings: DecodingConfig, name: str) -> GrammarSpec:
    """The constraint for the back end that does it. Raises VLLMValidationError, which names what is not supported.

    Asked are the back end that the request names, else the engine's, and then, unless that is forbidden, the others.
    """
    wanted = constraint.backend or settings.backend_name
    if wanted != "auto" and wanted not in BACKENDS:
        raise VLLMValidationError(
            f"Unknown guided decoding backend {wanted!r}: expected auto, {', '.join(BACKENDS)}.", parameter=name
        )
    fallback = constraint.fallback and not settings.disable_fallback
    candidates = list(BACKENDS) if wanted == "auto" else [wanted]
    if wanted != "auto" and fallback:
        candidates += [backend for backend in BACKENDS if backend != wanted]
    whitespace = constraint.whitespace
    if whitespace is None and settings.disable_any_whitespace:
        whitespace = ""
    schema = _schema(constraint, settings, name)
    text = constraint.text if schema is None else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    if constraint.kind == GRAMMAR and not has_finite_text(text):
        raise VLLMValidationError(
            f"{name}: no text of the grammar ever ends: its first rule leads to rules that need each other.",
            parameter=name,
        )
    if constraint.kind == STRUCTURAL_TAG:
        text = _checked_tag(text, name)
    reasons = []
    for backend in candidates:
        reason = missing(backend, constraint.kind, schema, text, whitespace)
        if reason is None:
            check_installed(backend, name)
            return GrammarSpec(constraint.kind, text, backend, whitespace)
        reasons.append(f"{backend} has no {reason}")
    raise VLLMValidationError(
        f"No guided decoding backend supports this {constraint.kind}: {'; '.join(reasons)}.", parameter=name
    )


def _schema(constraint: Constraint, settings: DecodingConfig, name: str) -> Any:
    """The schema that is compiled, None if the constraint is something else."""
    if constraint.kind != JSON:
        return None
    schema = json.loads(constraint.text)
    try:
        check_references(schema)
        check_finite(schema)
        close = constraint.close_objects or settings.disable_additional_properties
        schema = closed(schema, always=close)
        _simplify(schema)
        return schema
    except SchemaError as error:
        raise VLLMValidationError(f"{name}: the JSON schema is invalid: {error}.", parameter=name) from None


def _simplify(schema: Any) -> None:
    """Say the same in words that more back ends know."""
    drop_trivial(schema, _REFUSED_BY_NAME)
    drop_names(schema)
    choose_freely(schema)


def _checked_tag(text: str, name: str) -> str:
    """A structural tag as it is compiled. Raises VLLMValidationError for one with a schema that is none."""
    tag = json.loads(text)
    try:
        for part in _schemas_of_tag(tag):
            check_references(part)
            check_finite(part)
            _simplify(part)
    except SchemaError as error:
        raise VLLMValidationError(
            f"{name}: a JSON schema of the structural tag is invalid: {error}.", parameter=name
        ) from None
    return json.dumps(tag)


def check_installed(backend: str, name: str = "guided_decoding_backend") -> None:
    """Raise VLLMValidationError, with the command that installs it, if the back end's package is missing."""
    if importlib.util.find_spec(_PACKAGES[backend]) is None:
        raise VLLMValidationError(
            f"The guided decoding backend {backend} needs a package that is not installed: pip install "
            f"{_INSTALLED_BY[backend]} (or, for all of them, pip install 'vllm[structured]').",
            parameter=name,
        )


def missing(backend: str, kind: str, schema: Any, text: str, whitespace: str | None) -> str | None:
    """The first feature that the back end does not have, None if it has all."""
    if kind not in _KINDS[backend]:
        return _WORDS[kind]
    if backend == GUIDANCE and kind != CHOICE and _num_sets(text) > MAX_CASELESS_SETS:
        ignores = _LARK_IGNORES_CASE if kind == GRAMMAR else _IGNORES_CASE
        if ignores.search(text):
            return f"patterns that ignore case, with more than {MAX_CASELESS_SETS} sets of characters"
    if kind == STRUCTURAL_TAG and backend == GUIDANCE and "structures" not in text:
        return "structural tags with a format"
    if whitespace is not None and (backend == LMFE or (whitespace and backend == XGRAMMAR)):
        return "whitespace_pattern" if whitespace else "JSON without whitespace"
    if (
        backend == LMFE
        and kind in (REGEX, CHOICE)
        and not _is_plain("".join(json.loads(text)) if kind == CHOICE else text)
    ):
        return _NOT_PLAIN
    if backend == OUTLINES and kind == JSON and text == ANY_OBJECT:
        return "json_object, whose table takes too long to make"
    if kind == REGEX and backend == XGRAMMAR and (around := _looks_around(text)):
        return around
    if kind == JSON:
        return next(_missing_of_schema(backend, schema), None)
    if kind == STRUCTURAL_TAG:
        parts = _schemas_of_tag(json.loads(text))
        return next((found for part in parts for found in _missing_of_tag(backend, part)), None)
    return None


def _num_sets(text: str) -> int:
    """At least as many as there are in the patterns of a constraint: [...], and classes like \\w."""
    return text.count("[") + text.count("\\")


def _schemas_of_tag(tag: Any) -> Iterator[Any]:
    """The JSON schemas in a structural tag of either form."""
    stack = [tag]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            for key, value in item.items():
                if key in ("schema", "json_schema"):
                    yield value
                else:
                    stack.append(value)


def _missing_of_tag(backend: str, schema: Any) -> Iterator[str]:
    yield from _missing_of_schema(backend, schema)
    if backend == XGRAMMAR and any(part.keys() & {"minLength", "maxLength"} for part in subschemas(schema)):
        yield "length of strings inside structural tags"


def _missing_of_schema(backend: str, root: Any) -> Iterator[str]:
    if backend == LMFE and isinstance(root, bool):
        yield _TRUE_OR_FALSE
    lacking, formats, check = _LACKING[backend], _FORMATS[backend], _COMBINATIONS[backend]
    for schema in subschemas(root):
        found = assertions(schema)
        yield from sorted(found & lacking)
        if "format" in found - lacking and schema["format"] not in formats:
            yield f"format {schema['format']!r}"
        reason = check(schema, found)
        if reason:
            yield reason
    if backend == OUTLINES and is_recursive(root):
        yield "recursive $ref"


def _beside(found: frozenset[str], keys: tuple[str, ...]) -> str | None:
    """For back ends that read the first of these keywords only: the first that has company."""
    for key in keys:
        others = found - {key, "type"} if key in ("const", "enum") else found - {key}
        if key in found and others:
            return f"{sorted(others)[0]} beside {key}"
    return None


_OVERLAPPING = "oneOf whose branches may overlap"
_TRUE_OR_FALSE = "schemas that are true or false"
_NOT_PLAIN = "text outside printable ASCII"


def _is_plain(text: str) -> bool:
    return text.isascii() and (text.isprintable() or not text)


def _needs_no_escape(text: str) -> bool:
    """Whether a string stands for itself in JSON."""
    return json.dumps(text, ensure_ascii=False) == f'"{text}"'


def _unlisted(schema: Schema) -> str | None:
    """For back ends that write the properties that are listed, and of the others any."""
    if set(schema.get("required", ())) - set(schema.get("properties", {})):
        return "required properties that are not listed"
    return None


_READ_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")


_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
_NEED_TYPE = _OF_STRINGS | _BOUNDS | {"minItems", "maxItems", "patternProperties"}
_IS_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
}


def _of_other_types(schema: Schema) -> str | None:
    """For back ends that write a constant whatever its type is."""
    kinds: Any = schema.get("type")
    constants = [("const", schema["const"])] if "const" in schema else []
    constants += [("enum", value) for value in schema.get("enum", ())]
    checks = [] if kinds is None else [_IS_TYPE[kind] for kind in (kinds if isinstance(kinds, list) else [kinds])]
    for key, value in constants if checks else ():
        if not any(check(value) for check in checks):
            return f"{key} with values of another type than `type`"
    return None


# What a pattern may ask of what stands around it, but for ^ and $; escapes and sets are passed over.
_LOOKS_AROUND = re.compile(r"(?P<found>\\[AZz]|\(\?<?[=!])|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def _looks_around(pattern: str) -> str | None:
    """For back ends that read such parts as something else, or not at all."""
    if any(match.group("found") for match in _LOOKS_AROUND.finditer(pattern)):
        return "patterns that look ahead or behind, or anchors other than ^ and $"
    return None


# What stands for one character in a pattern: an escape, a set, a dot or itself.
_ATOM = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^()|*+?{}^$]", re.DOTALL)
_RANGE = re.compile(r"(\\x..|\\u.{4}|\\.|[^\\])-(\\x..|\\u.{4}|\\.|[^\\])", re.DOTALL)
_WIDE = frozenset({".", "\\s", "\\S", "\\D", "\\W"})
_CONTROLS = frozenset({"\\n", "\\t", "\\r", "\\f", "\\v", "\\a", "\\e", "\\0", "\\c"})
_WRITES_RAW = "patterns that match quotes, backslashes or control characters, which it would write without an escape"


def _code(atom: str) -> int:
    """Of the character that an escape, or a character itself, stands for; of a class, that of its letter."""
    if atom in _CONTROLS:
        return 0
    if len(atom) > 2:
        return int(atom[2:], 16) if all(digit in string.hexdigits for digit in atom[2:]) else 0
    return ord(atom[-1])


def _is_escaped(low: int, high: int) -> bool:
    """Whether any of these characters does not stand for itself in a JSON string."""
    return low < 0x20 or low <= ord('"') <= high or low <= ord("\\") <= high


def _matches_what_json_escapes(pattern: str, *, only_named: bool) -> bool:
    """Whether a pattern may match a character that does not stand for itself in a JSON string. Nothing is compiled.

    only_named: for back ends that leave such characters out of classes and ranges, and write only those named.
    """
    for atom in _ATOM.findall(pattern):
        inside = len(atom) > 1 and atom[0] == "["
        if inside and atom[1] == "^":
            if not only_named:
                return True
            continue
        parts = _ATOM.findall(atom[1:-1]) if inside else [atom]
        ranges = _RANGE.findall(atom[1:-1]) if inside and not only_named else []
        if any(_is_escaped(_code(low), _code(high)) for low, high in ranges):
            return True
        for part in parts:
            if part in _WIDE:
                if not only_named and not (inside and part == "."):
                    return True
            elif _is_escaped(_code(part), _code(part)):
                return True
    return False


def _narrow(schema: Schema) -> bool:
    """Whether numbers end beside a whole number that is excluded, less than 1 away from the other bound."""
    kinds = schema.get("type", "number")
    if "number" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    tops = [bound for bound in (schema.get("maximum"), high) if bound is not None]
    bottoms = [bound for bound in (schema.get("minimum"), low) if bound is not None]
    return any(
        bound is not None and bound == int(bound) and any(bound - 1 < other < bound + 1 for other in others)
        for bound, others in ((low, tops), (high, bottoms))
    )


def _guidance_combinations(schema: Schema, found: frozenset[str]) -> str | None:
    if _narrow(schema):  # it would let the excluded bound pass
        return "an excluded whole number less than 1 away from the other bound"
    counts = found & {"minProperties", "maxProperties"}
    required = set(schema.get("required", ()))
    if counts and set(schema.get("properties", {})) - required:
        return f"{sorted(counts)[0]} beside optional properties"
    if schema.get("minProperties", 0) > len(required):  # it might write one of them several times
        return "minProperties beyond the required ones"
    return None


def _xgrammar_combinations(schema: Schema, found: frozenset[str]) -> str | None:
    if len(schema.get("allOf", ())) > 1:
        return "allOf with several branches"
    if "oneOf" in found:
        return _OVERLAPPING
    if "pattern" in found and found & {"minLength", "maxLength", "format"}:
        return "pattern beside length or format"
    if "format" in found and found & {"minLength", "maxLength"}:
        return "length beside format"
    if "patternProperties" in found and found & {"properties", "additionalProperties", "required"}:
        return "patternProperties beside properties"
    if "type" not in schema and (untyped := sorted(found & _NEED_TYPE)):
        return f"{untyped[0]} without type"
    patterns = [schema.get("pattern", ""), *schema.get("patternProperties", ())]
    if any(_matches_what_json_escapes(pattern, only_named=True) for pattern in patterns):
        return _WRITES_RAW
    around = next(filter(None, map(_looks_around, patterns)), None)
    return around or _of_other_types(schema) or _unlisted(schema) or _beside(found, _READ_ALONE)


def _outlines_combinations(schema: Schema, found: frozenset[str]) -> str | None:
    if "oneOf" in found:
        return _OVERLAPPING
    if "pattern" in found and found & {"minLength", "maxLength", "format"}:
        return "pattern beside length or format"
    if "format" in found and found & {"minLength", "maxLength"}:
        return "length beside format"
    if not all(map(_needs_no_escape, schema.get("properties", {}))):
        return "property names with quotes, backslashes or control characters"
    if _matches_what_json_escapes(schema.get("pattern", ""), only_named=False):
        return _WRITES_RAW
    if schema.get("minItems", 0) > schema.get("maxItems", math.inf):
        return "minItems above maxItems"
    return _of_other_types(schema) or _unlisted(schema) or _beside(found, _READ_ALONE)


def _lmfe_combinations(schema: Schema, found: frozenset[str]) -> str | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    texts = [*schema.get("properties", {}), *(value for value in values if isinstance(value, str))]
    if not all(_needs_no_escape(text) and _is_plain(text) for text in texts):
        return "names and constants with quotes, backslashes or anything outside printable ASCII"
    if not _is_plain(schema.get("pattern", "")):
        return _NOT_PLAIN
    if any(not isinstance(value, str) for value in values):
        return "enum and const of anything but strings"
    if "oneOf" in found:
        return _OVERLAPPING
    if isinstance(schema.get("items"), list):
        return "items as a list"
    if "pattern" in found and found & {"minLength", "maxLength"}:
        return "pattern beside length"
    if not schema.get("pattern", "any").strip("^$"):
        return "patterns of nothing"
    if schema.get("maxItems", 1) == 0:
        return "arrays that must be empty"
    if schema.get("additionalProperties") is False and not schema.get("properties"):
        return "objects that must be empty"
    parts = [schema.get("items"), *schema.get("properties", {}).values(), *schema.get("anyOf", ())]
    if any(isinstance(part, bool) for part in parts):
        return _TRUE_OR_FALSE
    if isinstance(schema.get("type"), list) and len(found) > 1:
        return f"{sorted(found - {'type'})[0]} beside several types"
    return _of_other_types(schema) or _unlisted(schema) or _beside(found, _READ_ALONE)


_COMBINATIONS: Mapping[str, Callable[[Schema, frozenset[str]], str | None]] = {
    GUIDANCE: _guidance_combinations,
    XGRAMMAR: _xgrammar_combinations,
    OUTLINES: _outlines_combinations,
    LMFE: _lmfe_combinations,
}
