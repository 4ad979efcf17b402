"""Random constraints, and whether a text satisfies them, found out by somebody else than the engine's libraries."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
from jsonschema import Draft202012Validator

WORDS = (
    "red",
    "green",
    "blue",
    "Zoë",
    "naïve",
    "日本",
    "a b",
    'say "hi"',
    "tab\there",
    "back\\slash",
    "",
    "x" * 12,
    "🙂",
)
NAMES = ("name", "age", "tags", "größe", "first name", "id", "x", "名前", "is_ok", "a-b", 'q"uote', "nested")
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "hostname", "uri", "duration", "ipv6")
PATTERNS = (
    "^[a-z]{2,5}$", "^[A-Z][a-z]+( [A-Z][a-z]+)?$", "^[0-9]{3}-[0-9]{4}$", "^(yes|no|maybe)$", "^v[0-9]+\\.[0-9]+$",
    "^[äöü]{1,3}$",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A constraint as arguments of GuidedDecodingParams, and the check of a finished text: None, or what is wrong."""

    arguments: dict[str, Any]
    problem: Callable[[str], str | None]

    def __repr__(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)[:2000]


KINDS = ("json", "regex", "choice", "grammar", "structural_tag")


def cases(seed: int, count: int, kinds: tuple[str, ...] = KINDS) -> list[Case]:
    """`count` constraints; about half of them are JSON schemas if those are asked for."""
    rng = random.Random(seed)
    weights = [3 if kind == "json" else 1 for kind in kinds]
    return [_MAKERS[rng.choices(kinds, weights)[0]](rng) for _ in range(count)]


# -- JSON schemas ------------------------------------------------------------------------------------------------------


def json_case(rng: random.Random) -> Case:
    schema = random_schema(rng)
    return Case({"json": schema}, lambda text: json_problem(schema, text))


def json_problem(schema: Any, text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = jsonschema.FormatChecker(formats=["date", "ipv4", "ipv6", "regex", "email"])
    errors = list(Draft202012Validator(schema, format_checker=checker).iter_errors(value))
    return errors[0].message if errors else None


def random_schema(rng: random.Random) -> dict[str, Any]:
    """An object at the top, as users write them; definitions that it may refer to."""
    schema = _object(rng, 3)
    if rng.random() < 0.3:
        shared = {"point": _object(rng, 1), "word": {"enum": rng.sample(WORDS, 3)}}
        if rng.random() < 0.5:
            shared["node"] = {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        schema["$defs"] = shared
        for name in list(shared):
            schema["properties"][f"{name}_ref"] = {"$ref": f"#/$defs/{name}"}
    schema["title"], schema["description"] = "Thing", rng.choice(WORDS)
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _string, _enum, _integer, _number, _boolean, _types]
    if depth > 0:
        makers += [_object, _array, _array, _any_of, _one_of, _all_of]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(6)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randrange(3)
    bounds = {"maxLength": low + rng.randrange(10), **({"minLength": low} if rng.random() < 0.5 else {})}
    return {"type": "string", **bounds, **({"default": "x"} if rng.random() < 0.2 else {})}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": rng.choice([*WORDS, 3, 2.5, True, None, ["a", 1], {"k": "v"}])}
    found: dict[str, Any] = {"enum": rng.sample(WORDS, rng.randrange(1, 5))}
    if rng.random() < 0.3:
        found["enum"] += [7, None, False]
    elif rng.random() < 0.5:
        found["type"] = "string"
    return found


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-1200, 1200)
    high = low + rng.choice([0, 1, 7, 99, 12345])
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "integer", "minimum": low, "maximum": high}
    if kind == 1:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}
    if kind == 2:
        return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice([2, 3, 7, 25])}
    if kind == 3:
        return {"type": "integer", "minimum": rng.choice([0, 18, -3])}
    return {"type": "integer"}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = round(rng.uniform(-50, 50), 2)
    kind = rng.randrange(3)
    if kind == 0:
        return {"type": "number", "minimum": low, "maximum": round(low + rng.uniform(0.5, 20), 2)}
    if kind == 1:
        return {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    return {"type": "number"}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _types(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.sample(["integer", "boolean", "null"], 2)}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "array", "items": _value(rng, depth - 1), "maxItems": rng.randrange(1, 4)}
    if rng.random() < 0.3:
        found["minItems"] = rng.randrange(found["maxItems"] + 1)
    if rng.random() < 0.2:
        found["prefixItems"] = [_value(rng, 0), _value(rng, 0)]
        found["items"] = False
        found["maxItems"] = 2
        found["minItems"] = rng.randrange(3)
    if rng.random() < 0.05:
        found["uniqueItems"] = True
    return found


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    found: dict[str, Any] = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}}
    if rng.random() < 0.8:
        found["required"] = [name for name in names if rng.random() < 0.7]
    kind = rng.randrange(8)
    if kind < 3:
        found["additionalProperties"] = False
    elif kind == 3:
        found["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        found["required"] = list(names)
        found["maxProperties"] = len(names) + 1
    elif kind == 4 and rng.random() < 0.4:
        found["patternProperties"] = {"^z[0-9]$": {"type": "boolean"}}
        found["additionalProperties"] = False
    return found


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    def branch(tag: str) -> dict[str, Any]:
        found = _object(rng, depth - 1)
        found["properties"] = {"kind": {"const": tag}, **found["properties"]}
        found["required"] = ["kind"]
        found.pop("maxProperties", None)
        found["additionalProperties"] = False
        return found

    return {"oneOf": [branch("cat"), branch("dog")]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    first = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    second = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "maxProperties": 2}
    return {"allOf": [first, second]}


# -- regular expressions, choices --------------------------------------------------------------------------------------


def regex_case(rng: random.Random) -> Case:
    pattern = _regex(rng, 3)
    if rng.random() < 0.2 and "|" not in pattern:
        pattern = f"^{pattern}$"

    def problem(text: str) -> str | None:
        return None if re.fullmatch(pattern, text) else f"{text!r} does not match"

    return Case({"regex": pattern}, problem)


def _regex(rng: random.Random, depth: int) -> str:
    atoms = ("[a-z]", "[A-F0-9]", "\\d", "[^a-z\\n]", "yes", "é", "日", "\\.", "\\+", " ", "[äöü]", "[A-Za-z_]")
    parts = []
    for _ in range(rng.randrange(1, 4)):
        if depth > 0 and rng.random() < 0.3:
            part = f"({_regex(rng, depth - 1)}|{_regex(rng, depth - 1)})"
        else:
            part = rng.choice(atoms)
            part = f"({part})" if len(part) > 1 and part[0] not in "[\\" else part
        parts.append(part + rng.choice(["", "", "?", "{2}", "{1,3}", "{0,2}", "+" if depth == 3 else ""]))
    return "".join(parts)


def choice_case(rng: random.Random) -> Case:
    words = [word for word in rng.sample(WORDS, rng.randrange(1, 5)) if word] or ["yes"]
    words += [f"{rng.choice(words)} {i}" for i in range(rng.randrange(3))]
    return Case({"choice": words}, lambda text: None if text in words else f"{text!r} is none of them")


# -- grammars ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A part of a grammar: a literal, a set of characters, a sequence, alternatives, a repetition, a rule."""

    kind: str
    text: str = ""
    parts: tuple[Node, ...] = ()
    low: int = 0
    high: int = 0


def grammar_case(rng: random.Random) -> Case:
    rules = {"item": _node(rng, 2, ()), "list": _node(rng, 2, ("item",))}
    rules["start"] = _node(rng, 3, ("item", "list"))
    lark = rng.random() < 0.5

    def problem(text: str) -> str | None:
        ends = set(_ends(rules["start"], rules, text, 0))
        return None if len(text) in ends else f"{text!r} is not in the language"

    lines = [_line(name, node, lark) for name, node in rules.items()]
    return Case({"grammar": "\n".join(lines) + "\n"}, problem)


def _node(rng: random.Random, depth: int, names: tuple[str, ...]) -> Node:
    if names and rng.random() < 0.4:
        return Node("rule", rng.choice(names))
    if depth == 0:
        if rng.random() < 0.5:
            return Node("set", rng.choice(["a-f", "0-9", "x-z0-2", "äö"]))
        return Node("literal", rng.choice(["if", "(", ")", " + ", "日", '"', "\\"]))
    kind = rng.choice(["sequence", "sequence", "choice", "repeat"])
    if kind == "repeat":
        low = rng.randrange(2)
        return Node(kind, parts=(_node(rng, depth - 1, names),), low=low, high=low + rng.randrange(1, 4))
    return Node(kind, parts=tuple(_node(rng, depth - 1, names) for _ in range(rng.randrange(2, 4))))


def _line(name: str, node: Node, lark: bool) -> str:
    if lark:
        return f"{name}: {_written(node, lark)}"
    return f"{'root' if name == 'start' else name} ::= {_written(node, lark)}"


def _written(node: Node, lark: bool) -> str:
    if node.kind == "literal":
        return json.dumps(node.text, ensure_ascii=False)
    if node.kind == "set":
        return f"/[{node.text}]/" if lark else f"[{node.text}]"
    if node.kind == "rule":
        return node.text
    inner = [_written(part, lark) for part in node.parts]
    if node.kind == "sequence":
        return "(" + " ".join(inner) + ")"
    if node.kind == "choice":
        return "(" + " | ".join(inner) + ")"
    return f"({inner[0]}){{{node.low},{node.high}}}"


def _ends(node: Node, rules: dict[str, Node], text: str, start: int) -> Iterator[int]:
    """Where a match that begins at `start` may end, by trying everything."""
    if node.kind == "literal":
        if text.startswith(node.text, start):
            yield start + len(node.text)
    elif node.kind == "set":
        if start < len(text) and re.fullmatch(f"[{node.text}]", text[start]):
            yield start + 1
    elif node.kind == "rule":
        yield from _ends(rules[node.text], rules, text, start)
    elif node.kind == "choice":
        yield from {end for part in node.parts for end in _ends(part, rules, text, start)}
    elif node.kind == "sequence":
        found = {start}
        for part in node.parts:
            found = {end for place in found for end in _ends(part, rules, text, place)}
        yield from found
    else:
        found, reached = {start}, {start} if node.low == 0 else set()
        for count in range(1, node.high + 1):
            found = {end for place in found for end in _ends(node.parts[0], rules, text, place)}
            if count >= node.low:
                reached |= found
        yield from reached


# -- structural tags ---------------------------------------------------------------------------------------------------


def structural_tag_case(rng: random.Random) -> Case:
    names = rng.sample(["get_weather", "add", "search"], rng.randrange(1, 4))
    schemas: dict[str, Any] = {}
    for name in names:
        schemas[name] = {
            "type": "object",
            "properties": {"q": _string(rng, 0), "n": {"type": "integer"}},
            "required": ["q"],
            "additionalProperties": False,
        }
    structures = [{"begin": f"<f={name}>", "schema": schemas[name], "end": "</f>"} for name in names]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}

    def problem(text: str) -> str | None:
        rest = text
        while "<f=" in rest:
            rest = rest[rest.index("<f=") :]
            name = next((name for name in names if rest.startswith(f"<f={name}>")), None)
            if name is None:
                return f"an unknown tag at {rest[:30]!r}"
            body = rest[len(f"<f={name}>") :]
            try:
                value, end = json.JSONDecoder().raw_decode(body.lstrip())
            except ValueError:
                return None if "</f>" not in body else f"no JSON in {body!r}"
            wrong = json_problem(schemas[name], json.dumps(value))
            rest = body.lstrip()[end:].lstrip()
            if wrong or not rest.startswith("</f>"):
                return wrong or f"no end at {rest[:30]!r}"
        return None

    return Case({"structural_tag": json.dumps(tag)}, problem)


_MAKERS: dict[str, Callable[[random.Random], Case]] = {
    "json": json_case,
    "regex": regex_case,
    "choice": choice_case,
    "grammar": grammar_case,
    "structural_tag": structural_tag_case,
}
