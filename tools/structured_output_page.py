"""Writes what each back end supports: `python -m tools.structured_output_page > docs/structured_support.md`.

Each cell is the answer to a constraint that was put to the back end: compiled, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.config.decoding import DecodingConfig
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import GuidedDecodingParams
from vllm.structured_output.compiler import GrammarCompiler
from vllm.structured_output.grammar import Grammar, GrammarError
from vllm.structured_output.spec import GrammarSpec, constraint_of
from vllm.structured_output.support import BACKENDS, resolve
from vllm.structured_output.vocabulary import vocabulary_of

_HEAD = """# What each back end supports

This page is generated: `python -m tools.structured_output_page > docs/structured_support.md`, which puts a constraint
of each form to each back end. What is not supported is an error (HTTP: 400) that names the feature, never ignored.
Where a library would read one of two keywords and ignore the other, "beside" says that both hold. The tests write
random texts under the masks of all that is supported, and validate them.

| feature | form | {backends} |
|---|---|{rules}|
"""
_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}


def _object(_more: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **(_more or {})}


def _tag(schema: dict[str, Any]) -> str:
    return json.dumps({"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]})


class Probe(NamedTuple):
    """One form of a feature, as arguments of `GuidedDecodingParams`."""

    feature: str
    form: str
    arguments: dict[str, Any]


_SCHEMAS: dict[str, dict[str, Any]] = {
    "types": {
        "string, integer, number, boolean, null": _object(
            s=_TEXT, i=_WHOLE, n={"type": "number"}, b={"type": "boolean"}, z={"type": "null"}
        ),
        "several at once": _object(x={"type": ["integer", "null"]}),
        "objects and arrays, nested": _object(a={"type": "array", "items": _object(b=_object(c=_WHOLE))}),
    },
    "`enum`, `const`": {
        "strings": _object(a={"enum": ["red", "green"]}, b={"const": "x"}),
        "other values": _object(a={"enum": [1, None, True]}, b={"const": [1, "a"]}),
        "outside ASCII": _object(a={"enum": ["größe", "日本"]}),
        "beside other keywords": _object(a={"enum": ["red", "green", "blueish"], "maxLength": 5}),
    },
    "names of properties": {
        "outside ASCII": _object(größe=_WHOLE),
        "with quotes or backslashes": _object(**{'q"uote': _WHOLE, "back\\slash": _WHOLE}),
    },
    "`minLength`, `maxLength`": {"": _object(a={"type": "string", "minLength": 2, "maxLength": 9})},
    "`pattern`": {
        "": _object(a={"type": "string", "pattern": "^[a-z]{2,5}$"}),
        "outside ASCII": _object(a={"type": "string", "pattern": "^[äöü]{1,3}$"}),
        "beside a length": _object(a={"type": "string", "pattern": "^[a-z]+$", "maxLength": 5}),
    },
    "`format`": {
        form: _object(a={"type": "string", "format": form})
        for form in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
    },
    "bounds of numbers": {
        "`minimum`, `maximum`": _object(a={"type": "integer", "minimum": -3, "maximum": 1200}),
        "exclusive": _object(a={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1.5}),
        "`multipleOf`": _object(a={"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7}),
    },
    "arrays": {
        "`items`, `minItems`, `maxItems`": {"type": "array", "items": _WHOLE, "minItems": 1, "maxItems": 3},
        "`prefixItems`": {"type": "array", "prefixItems": [_WHOLE, _TEXT], "items": False, "minItems": 2},
        "`uniqueItems`": {"type": "array", "items": _WHOLE, "uniqueItems": True},
        "`contains`": {"type": "array", "contains": _WHOLE, "maxItems": 3},
    },
    "objects": {
        "`required`, and optional properties": {**_object(a=_WHOLE, b=_TEXT), "required": ["b"]},
        "required properties that are not listed": {**_object(a=_WHOLE), "required": ["a", "b"],
                                                    "additionalProperties": _WHOLE},
        "`additionalProperties: false`": _object({"additionalProperties": False}, a=_WHOLE),
        "`additionalProperties` with a schema": _object({"additionalProperties": {"type": "boolean"}}, a=_WHOLE),
        "`patternProperties`": {"type": "object", "patternProperties": {"^z[0-9]$": {"type": "boolean"}}},
        "`patternProperties` beside `properties`": _object(
            {"patternProperties": {"^z[0-9]$": {"type": "boolean"}}, "additionalProperties": False}, a=_WHOLE
        ),
        "`maxProperties` beside required ones": _object(
            {"additionalProperties": _WHOLE, "maxProperties": 2}, a=_WHOLE
        ),
        "`maxProperties` beside optional ones": {**_object(a=_WHOLE, b=_WHOLE), "required": [], "maxProperties": 1},
        "`minProperties` beyond the required ones": {**_object(a=_WHOLE, b=_WHOLE), "required": [],
                                                     "minProperties": 1},
        "`propertyNames`": {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        "`dependentRequired`": {**_object(a=_WHOLE, b=_WHOLE), "required": [], "dependentRequired": {"a": ["b"]}},
        "`unevaluatedProperties`": {**_object(a=_WHOLE), "unevaluatedProperties": False},
    },
    "choices": {
        "`anyOf`": _object(a={"anyOf": [_WHOLE, {"type": "boolean"}, _object(b={"type": "null"})]}),
        "`anyOf` beside other keywords": {**_object(a=_WHOLE), "anyOf": [{"required": ["a"]}, {"minProperties": 0}]},
        "`oneOf`, told apart by type": _object(a={"oneOf": [_WHOLE, {"type": "boolean"}]}),
        "`oneOf`, told apart by a constant": {
            "oneOf": [_object({"additionalProperties": False}, kind={"const": k}, n=_WHOLE) for k in ("cat", "dog")]
        },
        "`oneOf` of references to such": {
            "$defs": {k: _object({"additionalProperties": False}, kind={"const": k}, n=_WHOLE) for k in ("cat", "dog")},
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        },
        "`oneOf` that may overlap": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        "`allOf` with one branch": _object(a={"allOf": [_WHOLE]}),
        "`allOf` with several": {"allOf": [_object(a=_WHOLE), _object(b={"type": "boolean"})]},
        "`not`": _object(a={"not": _WHOLE}),
        "`if`, `then`, `else`": {**_object(a=_WHOLE), "if": {"required": ["a"]}, "then": {"maxProperties": 3}},
    },
    "`$ref`": {
        "into the schema": _object({"$defs": {"p": _object(x=_WHOLE)}}, a={"$ref": "#/$defs/p"}),
        "recursive": {
            "$ref": "#/$defs/n",
            "$defs": {"n": {**_object(v=_WHOLE, next={"$ref": "#/$defs/n"}), "required": ["v"]}},
        },
        "beside other keywords": _object(
            {"$defs": {"p": {"type": "string"}}}, a={"$ref": "#/$defs/p", "maxLength": 4}
        ),
    },
}  # fmt: skip
_OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "JSON": {
        "without whitespace": {"json": _object(a=_WHOLE, b=_TEXT), "whitespace_pattern": ""},
        "`whitespace_pattern`": {"json": _object(a=_WHOLE), "whitespace_pattern": "[ ]{0,2}"},
        "`json_object`": {"json_object": True},
    },
    "`regex`": {
        "printable ASCII": {"regex": "v[0-9]{1,3}(-(alpha|beta))?"},
        "any text": {"regex": "[äöü日]{1,4}|naïve"},
    },
    "`choice`": {
        "printable ASCII": {"choice": ["yes", "no", "may be"]},
        "any text": {"choice": ["Zoë", "日本", "a\tb"]},
    },
    "grammars": {
        "EBNF": {"grammar": 'root ::= "(" item ("," item)? ")"\nitem ::= [a-f0-9]{1,3}\n'},
        "Lark": {"grammar": 'start: "(" item ("," item)? ")"\nitem: /[a-f0-9]{1,3}/\n'},
    },
    "structural tags": {
        "`structures` and `triggers`": {"structural_tag": _tag(_object({"additionalProperties": False}, a=_WHOLE))},
        "lengths of strings inside": {
            "structural_tag": _tag(_object({"additionalProperties": False}, a={"type": "string", "maxLength": 4}))
        },
        "`format`": {
            "structural_tag": json.dumps(
                {"type": "structural_tag", "format": {"type": "const_string", "value": "as it is"}}
            )
        },
    },
}


def probes() -> Iterator[Probe]:
    """All that is asked, in the page's order."""
    for feature, forms in _OTHERS.items():
        for form, arguments in forms.items():
            yield Probe(feature, form, arguments)
    for feature, schemas in _SCHEMAS.items():
        for form, schema in schemas.items():
            yield Probe(feature, form, {"json": schema})


def compiled(compiler: GrammarCompiler, backend: str, probe: Probe) -> Grammar | None:
    """The grammar that a back end makes of it, None if it refuses."""
    spec = _spec(backend, dict(probe.arguments))
    if spec is None:
        return None
    try:
        return compiler.compile(spec).result().grammar
    except GrammarError:
        return None


def _spec(backend: str, arguments: dict[str, Any]) -> GrammarSpec | None:
    """The constraint for one back end and no other, None if it lacks a feature."""
    compact = arguments.get("whitespace_pattern") == ""
    if compact:
        del arguments["whitespace_pattern"]
    params = GuidedDecodingParams(**arguments, disable_any_whitespace=compact)
    constraint = constraint_of(params, "guided_decoding")
    assert constraint is not None
    try:
        return resolve(constraint, DecodingConfig(f"{backend}:no-fallback"), "guided_decoding")
    except VLLMValidationError as error:
        if f"{backend} has no " not in str(error):
            raise
        return None


def markdown(supports: Callable[[str, Probe], bool]) -> str:
    """The page. supports: whether a back end takes a constraint."""
    head = _HEAD.format(backends=" | ".join(BACKENDS), rules="---|" * (len(BACKENDS) - 1) + "---")
    lines, last = [], ""
    for probe in probes():
        cells = ["yes" if supports(backend, probe) else "no" for backend in BACKENDS]
        lines.append(f"| {probe.feature if probe.feature != last else ''} | {probe.form} | {' | '.join(cells)} |")
        last = probe.feature
    return head + "\n".join(lines) + "\n"


def main() -> None:
    tokenizer = load_tokenizer(Path(vllm.__file__).parent / "assets" / "demo")
    compiler = GrammarCompiler(lambda: vocabulary_of(tokenizer, 4096))
    try:
        print(markdown(lambda backend, probe: compiled(compiler, backend, probe) is not None), end="")
    finally:
        compiler.close()


if __name__ == "__main__":
    main()
