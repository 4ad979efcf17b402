"""Which back end has which feature, and the choice between them. What a back end lacks is refused, never ignored."""

from __future__ import annotations

import importlib.util
import json
import re
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
    closed,
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

# A set whose characters' other cases are looked up takes guidance two milliseconds, in the core.
MAX_CASELESS_SETS = 128
_IGNORES_CASE = re.compile(r"\(\?[a-zA-Z]*i")
_LARK_IGNORES_CASE = re.compile(r"""\(\?[a-zA-Z]*i|[/"][a-z]*i\b""")

_NOBODY = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems", "contains",
     "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
     "propertyNames", "additionalItems"}
)  # fmt: skip
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
        return closed(schema, always=close)
    except SchemaError as error:
        raise VLLMValidationError(f"{name}: the JSON schema is invalid: {error}.", parameter=name) from None


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
    if kind == JSON:
        return next(_missing_of_schema(backend, schema), None)
    if kind == STRUCTURAL_TAG:
        return next((found for part in _schemas_of_tag(text) for found in _missing_of_tag(backend, part)), None)
    return None


def _num_sets(text: str) -> int:
    """At least as many as there are in the patterns of a constraint: [...], and classes like \\w."""
    return text.count("[") + text.count("\\")


def _schemas_of_tag(text: str) -> Iterator[Any]:
    """The JSON schemas in a structural tag of either form."""
    stack = [json.loads(text)]
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
    lacking, formats, check = _LACKING[backend], _FORMATS[backend], _COMBINATIONS[backend]
    for schema in subschemas(root):
        found = assertions(schema)
        yield from sorted(found & lacking)
        form = schema.get("format")
        if form is not None and form not in formats and "format" not in lacking:
            yield f"format {form!r}"
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


def _overlapping(branches: list[Any]) -> bool:
    """Whether a text might match two branches of a oneOf: they are told apart by their type, or by a constant."""
    if not all(isinstance(branch, dict) for branch in branches):
        return True
    types = [branch.get("type") for branch in branches]
    kinds = {"number" if kind == "integer" else kind for kind in types if isinstance(kind, str)}
    if len(kinds) == len(branches):
        return False
    for key in branches[0].get("properties", {}):
        values: list[str] = []
        for branch in branches:
            part = branch.get("properties", {}).get(key, {})
            own = [part["const"]] if "const" in part else part.get("enum", []) if isinstance(part, dict) else []
            if not own or key not in branch.get("required", []) or branch.get("type") != "object":
                break
            values += [json.dumps(value) for value in own]
        else:
            return len(set(values)) != len(values)
    return True


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


def _guidance_combinations(schema: Schema, found: frozenset[str]) -> str | None:
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
    if "oneOf" in found and _overlapping(schema["oneOf"]):
        return "oneOf whose branches may overlap"
    if "pattern" in found and found & {"minLength", "maxLength", "format"}:
        return "pattern beside length or format"
    if "format" in found and found & {"minLength", "maxLength"}:
        return "length beside format"
    if "patternProperties" in found and found & {"properties", "additionalProperties", "required"}:
        return "patternProperties beside properties"
    return _unlisted(schema) or _beside(found, _READ_ALONE)


def _outlines_combinations(schema: Schema, found: frozenset[str]) -> str | None:
    if "oneOf" in found and _overlapping(schema["oneOf"]):
        return "oneOf whose branches may overlap"
    if "pattern" in found and found & {"minLength", "maxLength", "format"}:
        return "pattern beside length or format"
    if "format" in found and found & {"minLength", "maxLength"}:
        return "length beside format"
    if not all(map(_needs_no_escape, schema.get("properties", {}))):
        return "property names with quotes, backslashes or control characters"
    return _unlisted(schema) or _beside(found, _READ_ALONE)


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
        return "oneOf"
    if isinstance(schema.get("items"), list):
        return "items as a list"
    if "pattern" in found and found & {"minLength", "maxLength"}:
        return "pattern beside length"
    return _unlisted(schema) or _beside(found, _READ_ALONE)


_COMBINATIONS: Mapping[str, Callable[[Schema, frozenset[str]], str | None]] = {
    GUIDANCE: _guidance_combinations,
    XGRAMMAR: _xgrammar_combinations,
    OUTLINES: _outlines_combinations,
    LMFE: _lmfe_combinations,
}
