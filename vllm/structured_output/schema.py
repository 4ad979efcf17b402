"""Reads JSON schemas without validating anything against them: the features they use, and objects to be closed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any
from urllib.parse import unquote

from vllm.structured_output.spec import MAX_SCHEMA_DEPTH
from vllm.validation import show

Schema = dict[str, Any]
MAX_ENTRIES = 5000  # properties, enum values and branches, of one schema each and of all together times ten

# An escape, a set of characters, a bracket, a repeat, or what stands for itself.
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\??|[)|*+?\\\[]|[^\\\[()|*+?]+", re.DOTALL)
TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_name_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_pattern(value: Any) -> bool:
    """Whether its brackets and escapes are closed, and repeats have something to repeat; back ends have further words
    to say. (Compiled here, a few sets of characters would hold up everybody for seconds.)
    """
    if not isinstance(value, str):
        return False
    depth, repeats = 0, False
    for found in _PATTERN_PART.finditer(value):
        part = found.group()
        if part in ("\\", "[") or (part in ("*", "+", "?") and not repeats):
            return False
        depth += (part[0] == "(") - (part == ")")
        if depth < 0:
            return False
        repeats = part[0] != "(" and part != "|"
    return depth == 0


def _any(value: Any) -> bool:
    return True


# Every keyword that can forbid something, and the form of its value. Others are annotations.
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), (_is_schema_list, "a list of schemas")),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"),
        (_is_schema_map, "an object whose values are schemas"),
    ),
    **dict.fromkeys(
        (
            "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else", "unevaluatedItems",
            "unevaluatedProperties", "additionalItems", "contentSchema",
        ),
        (_is_schema, "a schema"),
    ),
    "items": (lambda value: _is_schema(value) or isinstance(value, list), "a schema or a list of schemas"),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
         "maxContains"),
        (_is_count, "a whole number from 0 on"),
    ),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (_is_number, "a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number (booleans are of drafts before 6)")
    ),
    "required": (_is_name_list, "a list of names"),
    "dependentRequired": (lambda value: isinstance(value, dict), "an object"),
    "dependencies": (lambda value: isinstance(value, dict), "an object"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list with at least one value"),
    "const": (_any, ""),
    "type": (_is_type, "one or several of " + ", ".join(sorted(TYPES))),
    **dict.fromkeys(("format", "$ref", "$dynamicRef", "$recursiveRef"), (_is_text, "a string")),
    "pattern": (_is_pattern, "a regular expression"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
}  # fmt: skip
# Where the schemas inside a schema are.
_ONE = ("additionalProperties", "propertyNames", "contains", "not", "if", "then", "else", "unevaluatedItems",
        "unevaluatedProperties", "additionalItems", "items")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_NO_ASSERTIONS = frozenset({"$defs", "definitions", "contentSchema"})
# True forbids nothing, nor does an empty object, nor a bound that everything keeps.
_TRIVIAL: dict[str, tuple[Any, ...]] = {
    "additionalProperties": (True,), "uniqueItems": (False,), "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,), "additionalItems": (True,), "minLength": (0,), "minItems": (0,),
    "minProperties": (0,), "required": ([],), "dependentRequired": ({},), "dependencies": ({},),
    "dependentSchemas": ({},), "patternProperties": ({},), "properties": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "format": ("password", "binary", "path", "file-path", "directory-path"),  # OpenAPI's and pydantic's, of any text
}  # fmt: skip


class SchemaError(ValueError):
    """A JSON schema that is none."""


def subschemas(schema: Any) -> Iterator[Schema]:
    """A schema and every schema inside it, outermost first; True and False are left out.

    Raises SchemaError for keywords with values of a wrong form, and for schemas that are nested too deeply or large.
    """
    entries = 0
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        item, depth = stack.pop()
        if not isinstance(item, dict):
            continue
        if depth > MAX_SCHEMA_DEPTH:
            raise SchemaError(f"schemas are nested deeper than {MAX_SCHEMA_DEPTH} levels")
        for key, value in item.items():
            form = _FORMS.get(key)
            if form is not None and not form[0](value):
                raise SchemaError(f"{key} must be {form[1]}, got {show(json.dumps(value))}")
            if form is not None and isinstance(value, dict | list):
                entries += len(value)
                if len(value) > MAX_ENTRIES or entries > 10 * MAX_ENTRIES:
                    raise SchemaError(f"{key} brings more than {MAX_ENTRIES} entries, which is the most")
        yield item
        stack += [(item[key], depth + 1) for key in _ONE if key in item]
        stack += [(part, depth + 1) for key in _LISTS if isinstance(item.get(key), list) for part in item[key]]
        stack += [(part, depth + 1) for key in _MAPS if key in item for part in item[key].values()]


def assertions(schema: Schema) -> frozenset[str]:
    """The keywords of one schema that can forbid something."""
    return frozenset(
        key
        for key, value in schema.items()
        if key in _FORMS and key not in _NO_ASSERTIONS and not _is_trivial(schema, key, value)
    )


def _is_trivial(schema: Schema, key: str, value: Any) -> bool:
    """Whether a keyword forbids nothing. Formats are about strings: those of other types, such as int32, are hints."""
    kinds = schema.get("type", "string")
    if key == "format" and "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return True
    return value in _TRIVIAL.get(key, ())


def drop_trivial(root: Any, keys: Set[str]) -> None:
    """Take those of the keywords `keys` that forbid nothing out of a schema and of all inside it."""
    for schema in subschemas(root):
        for key in schema.keys() & keys:
            if _is_trivial(schema, key, schema[key]):
                del schema[key]


# Drafts that libraries know; a schema that names another one is read like one that names none.
_DRAFT = re.compile(
    r"http://json-schema\.org/draft-0[3467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)


def drop_names(root: Any) -> None:
    """Take out what a schema and those inside it are called, where no `$ref` needs it, and drafts that nobody knows:
    libraries refuse names that are no addresses.
    """
    parts = list(subschemas(root))
    references = [part["$ref"] for part in parts if "$ref" in part]
    for part in parts:
        if "$schema" in part and not (isinstance(part["$schema"], str) and _DRAFT.fullmatch(part["$schema"])):
            del part["$schema"]
    if not all(reference == "#" or reference.startswith("#/") for reference in references):
        return
    for part in parts:
        for key in part.keys() & {"$id", "id"}:
            if part is root or not any("$ref" in inner for inner in subschemas(part)):
                del part[key]


def move_references(root: Any, prefix: str) -> bool:
    """Let each `$ref` to a place in a schema lead to the same place of a document that holds it at `prefix` ("#/a").
    Returns whether there is any.
    """
    found = False
    for schema in subschemas(root):
        reference = schema.get("$ref", "")
        if reference == "#" or reference.startswith("#/"):
            schema["$ref"] = prefix + reference[1:]
            found = True
    return found


def check_references(root: Any) -> None:
    """Raise SchemaError for a `$ref` that leads nowhere or out of the schema."""
    named = (item.get(key) for item in subschemas(root) for key in ("$anchor", "$id"))
    anchors = {name for name in named if isinstance(name, str)}
    for item in subschemas(root):
        reference = item.get("$ref")
        if not isinstance(reference, str) or reference in anchors or reference.removeprefix("#") in anchors:
            continue
        if not reference.startswith("#"):
            raise SchemaError(f"$ref to another document ({show(reference)}) is not supported")
        _resolve(root, reference)


_INDEX = re.compile(r"[0-9]{1,9}")
_PASSES = 16  # over all schemas, to find out which have a finite text; more, and nobody says that one has none


def check_finite(root: Any) -> None:
    """Raise SchemaError for a schema whose texts cannot end, since each value needs another one inside it."""
    missing = list(subschemas(root))[::-1]  # most schemas come after those inside them
    if not any("$ref" in item for item in missing):
        return
    finite: set[int] = set()
    for _ in range(_PASSES):
        found = [item for item in missing if not _has_finite_text(item, root, finite)]
        if len(found) == len(missing):
            break
        missing = found
    else:
        return
    if isinstance(root, dict) and id(root) not in finite:
        raise SchemaError("no text of it ever ends: every value needs another one of the same kind inside it")


def _has_finite_text(schema: Schema, root: Any, finite: set[int]) -> bool:
    """Whether a schema has one, as far as is known of those that it names (`finite`, their ids); then it joins them."""

    def known(part: Any) -> bool:
        return id(part) in finite if isinstance(part, dict) else part is not False

    def ends(kind: str) -> bool:
        if kind == "object":
            properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            return all(known(properties.get(name, others)) for name in schema.get("required", ()))
        if kind == "array":
            items, count = schema.get("items", True), int(schema.get("minItems", 0))
            first = schema.get("prefixItems", items if isinstance(items, list) else [])
            rest = True if isinstance(items, list) else items
            return all(map(known, first[:count])) and (count <= len(first) or known(rest))
        return True

    kinds = schema.get("type", "any")
    reference = schema.get("$ref", "")
    named = [_resolve(root, reference)] if reference == "#" or reference.startswith("#/") else []
    good = (
        all(map(known, [*named, *schema.get("allOf", ())]))
        and all(any(map(known, schema[key])) for key in ("anyOf", "oneOf") if key in schema)
        and any(map(ends, kinds if isinstance(kinds, list) else [kinds]))
    )
    if good:
        finite.add(id(schema))
    return good


def _resolve(root: Any, reference: str) -> Any:
    """What a JSON pointer in a reference ("#/$defs/name") points at."""
    found = root
    for part in reference[1:].split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif isinstance(found, list) and _INDEX.fullmatch(part) and int(part) < len(found):
            found = found[int(part)]
        else:
            raise SchemaError(f"$ref {show(reference)} leads nowhere")
    if not _is_schema(found):
        raise SchemaError(f"$ref {show(reference)} does not lead to a schema")
    return found


def closed(schema: Any, always: bool) -> Any:
    """`schema` with `additionalProperties: false` in each object that lists its properties and is silent about others;
    if `always`, in each object that does not say `additionalProperties`.

    A schema that puts objects together (allOf, or properties beside a `$ref` or a choice) stays as it is unless
    `always`: its parts allow each other's properties.
    """
    if not always and any(_composes(item) for item in subschemas(schema)):
        return schema
    copy = json.loads(json.dumps(schema))
    for item in subschemas(copy):
        named = "properties" in item or (always and ("patternProperties" in item or "object" in item.get("type", ())))
        others = {"additionalProperties", "unevaluatedProperties"} | (set() if always else {"patternProperties"})
        if named and not item.keys() & others:
            item["additionalProperties"] = False
    return copy


_MAX_TAGS = 8  # properties that are looked at to tell the branches of a choice apart
_Values = list[Any] | None  # that a text may have; None for any


def choose_freely(root: Any) -> None:
    """Write `anyOf` for each `oneOf` of which no text matches two branches, which no back end has to find out then."""
    parts = list(subschemas(root))
    references = [part["$ref"] for part in parts if "$ref" in part]
    if any("/oneOf/" in reference for reference in references):
        return
    follows = not any("$id" in part for part in parts[1:])  # else references inside those lead elsewhere
    for part in parts:
        if "oneOf" in part and "anyOf" not in part and _are_apart([_behind(root, b, follows) for b in part["oneOf"]]):
            part["anyOf"] = part.pop("oneOf")


def _behind(root: Any, schema: Any, follows: bool = True) -> Any:
    """The schema that a `$ref` leads to, possibly through others, of which it says all; {} if that is not known."""
    for _ in range(MAX_SCHEMA_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        if not follows or not re.match(r"#(/|\Z)", schema["$ref"]):
            break
        schema = _resolve(root, schema["$ref"])
    return {}


def _are_apart(branches: list[Any]) -> bool:
    """Whether no value matches two schemas: those that take the same type differ in their constants, or in those of a
    property that all of them require.
    """
    kinds: dict[str, list[Schema]] = {}
    for branch in branches:
        if branch is True:
            return False
        for kind in _kinds(branch) if isinstance(branch, dict) else ():
            kinds.setdefault(kind, []).append(branch)
    return all(
        len(found) == 1
        or _differ(_constants(branch) for branch in found)
        or (kind == "object" and any(_differ(_tags(branch, name) for branch in found) for name in _tag_names(found[0])))
        for kind, found in kinds.items()
    )


def _kinds(schema: Schema) -> set[str]:
    """The types of which a value may match, of numbers the wider one."""
    kinds = schema.get("type", list(TYPES))
    return {"number" if kind == "integer" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds)}


def _constants(schema: Any) -> _Values:
    if not isinstance(schema, dict):
        return None
    values: _Values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values


def _tag_names(schema: Schema) -> list[str]:
    names = [name for name in schema.get("required", ()) if _constants(schema.get("properties", {}).get(name))]
    return names[:_MAX_TAGS]


def _tags(schema: Schema, name: str) -> _Values:
    """The values of a property, if it must be there."""
    return _constants(schema.get("properties", {}).get(name)) if name in schema.get("required", ()) else None


def _differ(found: Iterable[_Values]) -> bool:
    """Whether no value is in two of the lists, all of which are there and have plain values only."""
    seen: set[tuple[bool, Any]] = set()
    for values in found:
        if values is None or any(isinstance(value, dict | list) for value in values):
            return False
        own = {(isinstance(value, bool), value) for value in values}  # 1 is 1.0, but not true
        if own & seen:
            return False
        seen |= own
    return True


def _composes(schema: Schema) -> bool:
    parts = schema.keys() & {"allOf", "anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas"}
    about_objects = schema.keys() & {"properties", "required", "patternProperties", "additionalProperties"}
    return len(schema.get("allOf", ())) > 1 or len(parts) > 1 or bool(parts and about_objects)


def is_recursive(root: Any) -> bool:
    """Whether a `$ref` leads, possibly through others, to a schema that contains it."""
    open_, done = set(), set()  # ids of schemas whose parts are being looked at, and of those that are through
    stack = [(root, False)]
    while stack:
        schema, leave = stack.pop()
        if leave:
            open_.discard(id(schema))
            done.add(id(schema))
            continue
        if not isinstance(schema, dict) or id(schema) in done:
            continue
        if id(schema) in open_:
            return True
        open_.add(id(schema))
        stack.append((schema, True))
        stack += [(part, False) for key in _ONE if isinstance(part := schema.get(key), dict)]
        stack += [(part, False) for key in _LISTS if isinstance(schema.get(key), list) for part in schema[key]]
        stack += [(part, False) for key in ("properties", "patternProperties") for part in schema.get(key, {}).values()]
        if isinstance(schema.get("$ref"), str):
            stack.append((_resolve(root, schema["$ref"]), False))
    return False
