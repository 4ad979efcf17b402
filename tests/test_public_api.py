"""Every public path, name, field, default and signature, against the table in `public_api.json`.

The table holds the API of several ages. `fields` lists the defaults that each field had in them: ours is one of these.
`positional_order` is the order in which fields may be given by position. `callables` are methods and functions: ours
take at least the same parameters, at the same positions, with the same defaults; whatever ours take more is optional.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

TABLE = json.loads((Path(__file__).parent / "public_api.json").read_text(encoding="utf-8"))
REQUIRED = "<required>"
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def find(path: str) -> Any:
    """The object at a dotted path: the longest prefix that is a module, then attributes."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        name = ".".join(parts[:cut])
        try:
            found: Any = import_module(name)
        except ModuleNotFoundError as error:
            # Only "there is no such module" means that the rest are attributes.
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def fields_of(cls: Any) -> dict[str, Any]:
    """Field name -> default, in the order of positional arguments, of a struct, a dataclass or a plain class."""
    if issubclass(cls, msgspec.Struct):
        fields = {}
        for item in msgspec.structs.fields(cls):
            factory = item.default_factory
            no_default = REQUIRED if factory is msgspec.NODEFAULT else factory()
            fields[item.name] = no_default if item.default is msgspec.NODEFAULT else item.default
        return fields
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return {
            item.name: item.default
            if item.default is not missing
            else (item.default_factory() if item.default_factory is not missing else REQUIRED)
            for item in dataclasses.fields(cls)
        }
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {p.name: REQUIRED if p.default is p.empty else p.default for p in parameters if p.kind != p.VAR_KEYWORD}


def same_default(ours: Any, expected: Any) -> bool:
    if isinstance(ours, (set, tuple)):
        ours = list(ours)
    if isinstance(expected, str) and expected.startswith("<") and expected != REQUIRED:
        return str(ours) == expected.strip("<>")
    if isinstance(ours, bool) or isinstance(expected, bool):
        return ours is expected
    return bool(ours == expected)


@pytest.mark.parametrize("module", TABLE["names"])
def test_module_has_its_public_names(module: str) -> None:
    found = import_module(module)
    missing = []
    for name in TABLE["names"][module]:
        try:
            getattr(found, name)
        except (AttributeError, ImportError) as error:
            missing.append(f"{name}: {error}")
    assert not missing


def test_all_lists_exactly_the_public_names_of_the_package() -> None:
    import vllm

    assert sorted(vllm.__all__) == sorted(TABLE["names"]["vllm"])
    assert set(vllm.__all__) <= set(dir(vllm))


@pytest.mark.parametrize("path", [path for path in TABLE["fields"] if path != "vllm.LLM"])
def test_class_has_its_fields_with_their_defaults(path: str) -> None:
    ours = fields_of(find(path))
    problems = []
    for name, expected in TABLE["fields"][path].items():
        if name not in ours:
            problems.append(f"{name} is missing")
        elif not any(same_default(ours[name], value) for value in expected):
            problems.append(f"{name} defaults to {ours[name]!r}, expected one of {expected}")
    assert not problems


def test_llm_takes_every_engine_argument() -> None:
    """By name or through its **kwargs."""
    parameters = inspect.signature(find("vllm.LLM.__init__")).parameters
    assert any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    engine_arguments = fields_of(find("vllm.EngineArgs"))
    problems = []
    for name, expected in TABLE["fields"]["vllm.LLM"].items():
        if name in parameters:
            default = parameters[name].default
            # The newest default of `model` makes it optional; it is the first argument in all ages.
            if name != "model" and not any(same_default(default, value) for value in expected):
                problems.append(f"{name} defaults to {default!r}, expected one of {expected}")
        elif name not in engine_arguments:
            problems.append(f"{name} is missing")
    assert not problems
    assert list(parameters)[:3] == ["self", "model", "tokenizer"]


@pytest.mark.parametrize("path", TABLE["positional_order"])
def test_fields_may_be_given_by_position(path: str) -> None:
    expected = TABLE["positional_order"][path]
    assert list(fields_of(find(path)))[: len(expected)] == expected


def parse_signature(text: str) -> ast.arguments:
    function = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def expected_default(node: ast.expr | None) -> Any:
    if node is None:
        return REQUIRED
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return f"<{ast.unparse(node)}>"
    return list(value) if isinstance(value, tuple) else value


def default_problem(parameter: inspect.Parameter, expected: Any) -> str:
    ours = REQUIRED if parameter.default is parameter.empty else parameter.default
    if expected == REQUIRED or same_default(ours, expected):  # a required parameter may become optional
        return ""
    return f"{parameter.name} defaults to {ours!r}, expected {expected!r}"


def signature_problems(function: Any, text: str, bound: bool) -> list[str]:
    """What keeps `function` from being called in each way that the signature `text` allows."""
    arguments = parse_signature(text)
    ours = inspect.signature(function).parameters
    positional = [p for p in ours.values() if p.kind in POSITIONAL][1 if bound else 0 :]
    wanted = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(wanted) - len(arguments.defaults)) + list(arguments.defaults)
    problems = []
    for i, (argument, default) in enumerate(zip(wanted, defaults, strict=True)):
        if i >= len(positional):
            problems.append(f"{argument.arg} is missing at position {i}")
        elif positional[i].name != argument.arg and argument not in arguments.posonlyargs:
            problems.append(f"position {i} is {positional[i].name}, expected {argument.arg}")
        else:
            problems.append(default_problem(positional[i], expected_default(default)))
    for argument, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if argument.arg not in ours:
            problems.append(f"{argument.arg} is missing")
        else:
            problems.append(default_problem(ours[argument.arg], expected_default(keyword_default)))
    known = {a.arg for a in [*wanted, *arguments.kwonlyargs]} | {p.name for p in positional[: len(wanted)]}
    for p in [*positional, *(p for p in ours.values() if p.kind is p.KEYWORD_ONLY)]:
        if p.name not in known and p.default is p.empty:
            problems.append(f"{p.name} is required, but callers do not know it")
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("path", TABLE["callables"])
def test_callable_has_its_signature(path: str) -> None:
    entry = TABLE["callables"][path]
    if entry["kind"] == "function":
        assert not signature_problems(find(path), entry["signature"], bound=False)
        return
    owner_path, _, name = path.rpartition(".")
    raw = inspect.getattr_static(find(owner_path), name)
    kinds = {property: "property", classmethod: "classmethod", staticmethod: "staticmethod"}
    assert kinds.get(type(raw), "method") == entry["kind"]
    if entry["kind"] == "property":
        return
    function = raw if inspect.isfunction(raw) else raw.__func__
    # An async generator is called in one way only, however it is written down.
    if not inspect.isasyncgenfunction(function):
        assert inspect.iscoroutinefunction(function) == entry["async"], "async" if entry["async"] else "not async"
    assert not signature_problems(function, entry["signature"], bound=entry["kind"] != "staticmethod")


@pytest.mark.parametrize("path", TABLE["newest_keywords"])
def test_callable_takes_the_newest_keywords(path: str) -> None:
    parameters = inspect.signature(find(path)).parameters
    assert not [name for name in TABLE["newest_keywords"][path] if name not in parameters]


@pytest.mark.parametrize("path", TABLE["base_class"])
def test_exception_can_be_caught_as_before(path: str) -> None:
    assert TABLE["base_class"][path] in [base.__name__ for base in find(path).__mro__]


def test_unknown_name_is_an_attribute_error() -> None:
    import vllm

    with pytest.raises(AttributeError, match="no attribute 'SamplingParam'"):
        _ = vllm.SamplingParam  # type: ignore[attr-defined]
