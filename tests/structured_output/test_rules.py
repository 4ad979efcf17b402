"""Grammars without a finite text, and what a back end would get wrong, are found before anything is compiled."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.structured_output.corpus import cases
from tests.structured_output.driver import spec_of
from vllm.exceptions import VLLMValidationError
from vllm.structured_output.rules import has_finite_text
from vllm.structured_output.schema import SchemaError, _is_pattern, check_finite, is_recursive
from vllm.structured_output.support import BACKENDS

ENDLESS = [
    'root ::= "a" root',
    'root ::= "a" b\nb ::= "c" b | "d" b',
    'root ::= ("a" | "b") root | root "c"',
    'root ::= ("a" root){2,3}',
    'root ::= [a-z]+ "\\"" root',
    'start: "a" start',
    'start: a\na: "x" b\nb: "y" a',
    'start: "a"~2 start',
    "start: X start\nX: /a/",
    'start: NAME "(" start ")"\nNAME: /[a-z]+/',
]
FINITE = [
    'root ::= "a" root | "b"',
    'root ::= ("a" root)*',
    'root ::= ("a" root){0,3}',
    'root ::= x\nx ::= "["  (x ("," x)*)? "]"',
    'root ::= "a"\n# comment (\n',
    'start: a\na: "x" b | /z+/\nb: "y" a',
    '?start: [start] "x"',
    "start: x?\nx: x",
    "start: missing",
    "%import common.INT\nstart: start",  # not read
    "start: (((",
    "",
    # hostile: each is read in time that grows with its length
    "root ::= a{" + " " * 20_000 + "x",
    "root ::= " + "(" * 900 + '"a"' + ")" * 900,
    "root ::= " + "/a" * 20_000,
    "a" + " " * 50_000 + "b",
]


@pytest.mark.parametrize("grammar", ENDLESS)
def test_endless_grammars_are_found(grammar: str) -> None:
    assert not has_finite_text(grammar)


@pytest.mark.parametrize("grammar", FINITE)
def test_others_are_left_alone(grammar: str) -> None:
    assert has_finite_text(grammar)


def test_grammars_of_the_corpus_have_finite_texts() -> None:
    grammars = [case.arguments["grammar"] for case in cases(5, 400) if "grammar" in case.arguments]
    assert grammars and all(map(has_finite_text, grammars))
    for case in cases(6, 400):
        if isinstance(case.arguments.get("json"), dict):
            check_finite(case.arguments["json"])


def _defined(**schemas: object) -> dict[str, object]:
    return {"$defs": schemas, "$ref": "#/$defs/a"}


A = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        (_defined(a={"type": "object", "properties": {"x": A}, "required": ["x"]}), False),
        (_defined(a={"type": "array", "items": A, "minItems": 1}), False),
        (_defined(a={"type": "array", "prefixItems": [{"type": "null"}, A], "minItems": 2}), False),
        (_defined(a={"anyOf": [A, {"type": "array", "items": A, "minItems": 2}]}), False),
        (_defined(a={"type": "object", "additionalProperties": A, "required": ["k"]}), False),
        (_defined(a={"type": "array", "prefixItems": [{"type": "null"}, A], "minItems": 1}), True),
        (_defined(a={"type": "array", "items": A}), True),
        (_defined(a={"type": ["object", "null"], "properties": {"x": A}, "required": ["x"]}), True),
        (_defined(a={"anyOf": [{"type": "array", "items": A, "minItems": 2}, {"$ref": "#/$defs/b"}]}, b={}), True),
        (_defined(a={"type": "object", "properties": {"x": A}}), True),
    ],
)
def test_schemas_whose_values_need_each_other(schema: dict[str, object], ends: bool) -> None:
    assert is_recursive(schema)
    if ends:
        check_finite(schema)
    else:
        with pytest.raises(SchemaError, match="ever ends"):
            check_finite(schema)


def test_long_chains_of_schemas_are_read() -> None:
    schemas: dict[str, object] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(4000)}
    assert not is_recursive(_defined(a={"$ref": "#/$defs/a0"}, **schemas, a4000={"type": "null"}))
    check_finite(_defined(a={"$ref": "#/$defs/a0"}, **schemas, a4000={"type": "null"}))
    assert is_recursive(_defined(a={"$ref": "#/$defs/a0"}, **schemas, a4000={"$ref": "#/$defs/a7"}))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "\\", "(", ")", "[", "]", "*", "+", "?", "|", "^", "-", "\\d", "(?:"]), max_size=6)
)
def test_patterns_that_are_one_elsewhere_are_taken(parts: list[str]) -> None:
    pattern = "".join(parts)
    try:
        re.compile(pattern)
    except re.error:
        return
    assert _is_pattern(pattern)


@pytest.mark.parametrize("pattern", ["a\\", "(", "a)", "(a|b", "[a", "*a", "a|?", 3])
def test_patterns_that_are_one_nowhere_are_refused(pattern: object) -> None:
    assert not _is_pattern(pattern)


def test_many_sets_that_ignore_case_are_refused_by_the_library_that_compiles_in_the_core() -> None:
    many, few = "[a-f]" * 129, "[a-f]" * 128
    reference = {"$defs": {"item": {"pattern": many}}, "$ref": "#/$defs/item"}
    for refused in (
        {"regex": f"(?i){many}"},
        {"regex": f"a(?si:{many})"},
        {"json": {"type": "string", "pattern": f"(?i){many}"}},
        {"grammar": f"start: /{many}/i"},
    ):
        with pytest.raises(VLLMValidationError, match="guidance has no patterns that ignore case, with more than 128"):
            spec_of("guidance", **refused)
    for taken in ({"regex": f"(?i){few}"}, {"regex": many}, {"json": reference}, {"grammar": f"start: /{many}/"}):
        assert spec_of("guidance", **taken).backend == "guidance"


WRONG_TEXTS = [
    ("guidance", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}),
    ("guidance", {"type": ["number", "null"], "minimum": -1.5, "exclusiveMaximum": -1}),
    ("xgrammar", {"maxLength": 1}),
    ("xgrammar", {"type": "array", "items": {"pattern": "^a$"}}),
    ("xgrammar", {"type": "string", "enum": ["a", 1]}),
    ("xgrammar", {"type": "string", "pattern": "^(?=.*b)[a-z]+$"}),
    ("xgrammar", {"type": "string", "pattern": '^["x]$'}),
    ("xgrammar", {"type": "string", "pattern": "^\\n$"}),
    ("outlines", {"type": "string", "const": 1}),
    ("outlines", {"type": "string", "pattern": "^[^a]*$"}),
    ("outlines", {"type": "string", "pattern": "^[ -~]+$"}),
    ("outlines", {"type": "array", "minItems": 2, "maxItems": 1}),
    ("lm-format-enforcer", False),
    ("lm-format-enforcer", {"type": "array", "items": False}),
    ("lm-format-enforcer", {"type": "array", "items": {"type": "string"}, "maxItems": 0}),
    ("lm-format-enforcer", {"type": "object", "additionalProperties": False}),
    ("lm-format-enforcer", {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}}),
    ("lm-format-enforcer", {"type": "string", "pattern": "^$"}),
]


@pytest.mark.parametrize(("backend", "schema"), WRONG_TEXTS)
def test_what_a_library_would_write_wrongly_is_refused_by_name(backend: str, schema: object) -> None:
    with pytest.raises(VLLMValidationError, match=f"{backend} has no "):
        spec_of(backend, json=json.dumps(schema))


@pytest.mark.parametrize(
    ("backend", "schema"),
    [
        ("guidance", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
        ("guidance", {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5}),
        ("xgrammar", {"type": "string", "enum": ["a", "b"]}),
        ("xgrammar", {"type": "integer", "const": 1.0}),
        ("xgrammar", {"type": "string", "pattern": "^[^a]\\(?=.$"}),
        ("outlines", {"type": "string", "pattern": "^[a-z#-Z]\\w{2}\\u00e9$"}),
    ],
)
def test_what_it_writes_rightly_is_taken(backend: str, schema: object) -> None:
    assert spec_of(backend, json=json.dumps(schema)).backend == backend


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": {"a": 1}},
        {"properties": {"x": {"$anchor": []}}},
        {"oneOf": [{"properties": {"a": True}, "type": "object"}, {"properties": {"a": {"const": 1}}}]},
        {"exclusiveMinimum": 10**400, "maximum": 0.5},
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_schemas_are_taken_or_refused(backend: str, schema: object) -> None:
    with contextlib.suppress(VLLMValidationError):
        spec_of(backend, json=json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ('{"minLength": "x"}', "minLength must be a whole number"),
        ('{"minLength": 1e999}', "cannot be written as JSON"),
        ('{"properties": 7}', "properties must be an object"),
        ('{"$ref": "#/nowhere"}', "leads nowhere"),
        ('{"anyOf": [{"$ref": "#/anyOf/²"}]}', "leads nowhere"),
        ('{"anyOf": [{"$ref": "#/anyOf/%s"}]}' % ("1" * 5000), "leads nowhere"),
        ('{"format": {}}', "format must be a string"),
    ],
)
def test_schemas_of_structural_tags_are_checked(schema: str, problem: str) -> None:
    tag = f'{{"structures": [{{"begin": "<a>", "schema": {schema}, "end": "</a>"}}], "triggers": ["<a"]}}'
    with pytest.raises(VLLMValidationError, match=problem):
        spec_of("guidance", structural_tag=tag)
