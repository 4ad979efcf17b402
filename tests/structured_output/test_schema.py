"""Schemas are rewritten without changing which texts they allow."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm
from tests.structured_output.driver import spec_of
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.structured_output.compiler import GrammarCompiler
from vllm.structured_output.schema import choose_freely, closed, drop_names
from vllm.structured_output.support import BACKENDS
from vllm.structured_output.vocabulary import vocabulary_of


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    vocabulary = vocabulary_of(load_tokenizer(Path(vllm.__file__).parent / "assets" / "demo"), 4096)
    made = GrammarCompiler(lambda: vocabulary)
    yield made
    made.close()


def pet(*kinds: Any, **more: Any) -> dict[str, Any]:
    kind = {"const": kinds[0]} if len(kinds) == 1 else {"enum": list(kinds)}
    return {"type": "object", "properties": {"kind": kind, "n": {"type": "integer"}}, "required": ["kind"], **more}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


DEFS: dict[str, Any] = {
    "cat": pet("cat"), "dog": pet("dog", "wolf"), "lion": pet("lion", "wolf"), "free": pet("cat", required=[]),
    "open": {"properties": {"kind": {"const": "cow"}}, "required": ["kind"]},
    "text": {"type": "string"}, "whole": {"type": "integer"}, "number": {"type": "number"}, "null": {"type": "null"},
    "nullable": {"type": ["string", "null"]}, "far": ref("near"), "near": ref("cat"), "round": ref("round"),
    "one": pet(1), "also one": pet(1.0), "true": pet(True), "yes": {"const": "yes"}, "no": {"enum": ["no", "never"]},
    "list": pet([1]), "other list": pet([2]), "beside": {**ref("cat"), "type": "null"}, "named": {"$ref": "#there"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("branches", "apart"),
    [
        (["cat", "dog"], True),
        (["cat", "dog", "lion"], False),
        (["cat", "lion", "null"], True),
        (["cat", "cat"], False),
        (["cat", "free"], False),
        (["free", "cat"], False),
        (["cat", "open"], True),
        (["open", "text"], False),
        (["text", "whole", "null"], True),
        (["whole", "number"], False),
        (["nullable", "whole"], True),
        (["nullable", "null"], False),
        (["far", "dog"], True),
        (["far", "cat"], False),
        (["round", "cat"], False),
        (["round", "round"], False),
        (["one", "also one"], False),
        (["one", "true"], True),
        (["yes", "no", "cat"], False),
        (["yes", "no"], True),
        (["yes", "yes"], False),
        (["list", "other list"], False),
        (["beside", "cat"], False),
        (["named", "null"], False),
        (["cat", {"type": "null"}], True),
        (["cat", pet("dog")], True),
        ([pet("cat"), "near"], False),
        (["cat", False], True),
        (["cat", True], False),
        (["null", {}], False),
    ],
)
def test_choices_of_branches_that_differ_need_no_care(branches: list[Any], apart: bool) -> None:
    parts = [ref(branch) if isinstance(branch, str) else branch for branch in branches]
    schema = {"$defs": copy.deepcopy(DEFS), "type": "object", "properties": {"p": {"oneOf": parts}}}
    choose_freely(schema)
    assert schema["properties"] == {"p": {"anyOf" if apart else "oneOf": parts}}


@pytest.mark.parametrize(
    "more", [{"anyOf": [{"minProperties": 1}]}, {"not": {"$ref": "#/oneOf/0"}}, {"items": {"$id": "a"}}]
)
def test_choices_that_have_to_stay_do(more: dict[str, Any]) -> None:
    schema = {"$defs": DEFS, "oneOf": [ref("cat"), ref("dog")], **more}
    found = copy.deepcopy(schema)
    choose_freely(found)
    assert found == schema


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_choices_of_references_reach_a_back_end_that_has_them(backend: str) -> None:
    defs = {name: pet(name, additionalProperties=False) for name in ("cat", "dog")}
    schema = {"$defs": defs, "oneOf": [ref("cat"), ref("dog"), {"type": "null"}]}
    assert "anyOf" in json.loads(spec_of(backend, json=schema).text)


@pytest.mark.parametrize(
    ("schema", "is_closed", "is_closed_always"),
    [
        ({"type": "object"}, False, True),
        ({"type": ["null", "object"]}, False, True),
        ({"properties": {"a": True}}, True, True),
        ({"patternProperties": {"^x": True}}, False, True),
        ({"properties": {"a": True}, "patternProperties": {"^x": True}}, False, True),
        ({"type": "object", "additionalProperties": True, "patternProperties": {"^x": True}}, False, False),
        ({"type": "string"}, False, False),
        ({}, False, False),
    ],
)
def test_objects_are_closed(schema: dict[str, Any], is_closed: bool, is_closed_always: bool) -> None:
    root = {"type": "array", "items": schema}
    for always, wanted in ((False, is_closed), (True, is_closed_always)):
        shut = closed(root, always)["items"]
        assert shut == ({**schema, "additionalProperties": False} if wanted else schema)


INNER = {"$id": "a", "properties": {"x": {"$ref": "#/$defs/cat"}}}


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ({"$id": "Output Format"}, {}),
        ({"$id": "#foo", "$schema": "my schema"}, {}),
        ({"id": "a b", "$schema": 5}, {}),
        ({"$schema": "http://json-schema.org/schema#"}, {}),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#"},
            {"$schema": "http://json-schema.org/draft-07/schema#"},
        ),
        ({"$id": "Form", "allOf": [{"$ref": "#/$defs/cat"}]}, {"allOf": [{"$ref": "#/$defs/cat"}]}),
        ({"$id": "Form", "allOf": [{"$ref": "Form"}]}, {"$id": "Form", "allOf": [{"$ref": "Form"}]}),
        ({"items": {"$id": "a b"}}, {"items": {}}),
        ({"items": INNER}, {"items": INNER}),
        (
            {"enum": [{"$id": "a b"}], "properties": {"$id": True}},
            {"enum": [{"$id": "a b"}], "properties": {"$id": True}},
        ),
    ],
)
def test_names_that_nothing_refers_to_are_dropped(names: dict[str, Any], kept: dict[str, Any]) -> None:
    defs = {"$defs": {"cat": DEFS["cat"]}}
    schema = copy.deepcopy({**names, **defs})
    drop_names(schema)
    assert schema == {**kept, **defs}


@pytest.mark.parametrize("name", ["Output Format", "#foo", "https://example.com/a.json"])
def test_schemas_may_be_called_anything(compiler: GrammarCompiler, name: str) -> None:
    schema = {"$id": name, "$schema": name, "$defs": {"a": {"$id": name, "type": "null"}}, "$ref": "#/$defs/a"}
    tag = json.dumps({"structures": [{"begin": "<n>", "schema": schema, "end": "</n>"}], "triggers": ["<n"]})
    for arguments in ({"json": schema}, {"structural_tag": tag}):
        compiler.compile(spec_of("guidance", **arguments)).result()
