"""Calls whose parameters stand one by one between tags, as plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.tool_parsers.header_calls import NAME
from vllm.tool_parsers.machine import CallMachine, MakeId, Markers, Routine, drop
from vllm.tool_parsers.schema_values import as_json, types_of

Properties = Mapping[str, Mapping[str, Any]]


class _Parameters(CallMachine):
    """Writes the arguments of a call parameter by parameter; strings as they come, other values when complete."""

    def __init__(self, make_id: MakeId, properties: Properties, *, strips_lines: bool) -> None:
        super().__init__(make_id)
        self._properties = properties
        self._strips_lines = strips_lines
        self._name = ""
        self._types: dict[tuple[str, str], frozenset[str]] = {}  # of the parameters of functions, once looked up
        self._written: set[str] = set()

    def _begin_named(self, name: str) -> None:
        self._begin(name)
        self._name = name
        self._written = set()

    def _end_call(self) -> None:
        self._arguments("}" if self._written else "{}")

    def _types_of(self, key: str) -> frozenset[str]:
        schema = self._properties.get(self._name, {}).get(key)
        if schema is None:
            return types_of(None)
        place = self._name, key
        if place not in self._types:
            self._types[place] = types_of(schema)
        return self._types[place]

    def _parameter(self, key: str, ends: Markers) -> Routine[str | None]:
        """One value. Returns the marker behind it."""
        is_repeated = key in self._written
        types = self._types_of(key)
        if not is_repeated:
            self._arguments(("{" if not self._written else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            self._written.add(key)
        if types == {"string"} and not is_repeated:
            value = _StringValue(self._arguments, self._strips_lines)
            self._arguments('"')
            marker = yield from self._until(ends, value.add)
            value.end()
            if marker is not None:
                self._arguments('"')
            return marker
        text, marker = yield from self._read_until(ends)
        if not is_repeated and marker is not None:  # an object cannot have a key twice: the first one counts
            self._arguments(as_json(_without_line_ends(text) if self._strips_lines else text, types))
        return marker


class _StringValue:
    """Passes the inside of a JSON string on, without one line end at its beginning and one at its end."""

    def __init__(self, sink: Callable[[str], None], strips_lines: bool) -> None:
        self._sink = sink
        self._strips = strips_lines
        self._is_first = True
        self._held = ""

    def add(self, text: str) -> None:
        if self._strips:
            if self._is_first:
                text = text.removeprefix("\n")
            self._is_first = False
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._sink(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        self._held = ""


def _without_line_ends(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


@dataclass(frozen=True)
class XmlFormat:
    """The tags of a format; `function` and `parameter` are what stands before and after a name."""

    block: tuple[str, str]
    function: tuple[str, str]
    function_end: str
    parameter: tuple[str, str]
    parameter_end: str
    strips_lines: bool


QWEN3_CODER = XmlFormat(
    ("<tool_call>", "</tool_call>"), ("<function=", ">"), "</function>", ("<parameter=", ">"), "</parameter>", True
)
SEED_OSS = XmlFormat(
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<function=", ">"),
    "</function>",
    ("<parameter=", ">"),
    "</parameter>",
    True,
)
MINIMAX_M2 = XmlFormat(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ('<invoke name="', '">'),
    "</invoke>",
    ('<parameter name="', '">'),
    "</parameter>",
    False,
)


class XmlCalls(_Parameters):
    """Functions inside blocks, parameters inside functions. The block's tag and the ends of tags may be missing."""

    def __init__(self, form: XmlFormat, make_id: MakeId, properties: Properties) -> None:
        super().__init__(make_id, properties, strips_lines=form.strips_lines)
        self._form = form
        block, block_end = form.block
        function, parameter = form.function[0], form.parameter[0]
        self._starts = Markers(block, function)
        self._function_name = Markers(form.function[1])
        self._parameter_name = Markers(form.parameter[1])
        self._next = Markers(parameter, form.function_end, function, block, block_end)
        self._value_end = Markers(form.parameter_end, parameter, form.function_end, block_end)

    def _message(self) -> Routine[None]:
        marker = yield from self._until(self._starts, self._content)
        while marker is not None:
            self._attempt_from(marker)
            marker = yield from self._block(marker)
            self._give_up()
            if marker is None:
                marker = yield from self._until(self._starts, self._content)

    def _block(self, marker: str) -> Routine[str | None]:
        """A call, from the marker that announced it. Returns the marker of the next one, if that was met."""
        function = self._form.function[0]
        if marker != function:
            yield from self._skip_space()
            if not (yield from self._accept(function)):
                return None
        name, end = yield from self._read_until(self._function_name)
        name = name.strip().strip("\"'")
        if end is None or not NAME.fullmatch(name):
            return None
        self._begin_named(name)
        marker_after = yield from self._until(self._next, drop)
        while marker_after == self._form.parameter[0]:
            key, end = yield from self._read_until(self._parameter_name)
            if end is None:
                return None
            marker_after = yield from self._parameter(key.strip().strip("\"'"), self._value_end)
            if marker_after == self._form.parameter_end:
                marker_after = yield from self._until(self._next, drop)
        if marker_after is None:
            return None
        self._end_call()
        return marker_after if marker_after in (function, self._form.block[0]) else None


class GlmCalls(_Parameters):
    """GLM 4.5 on: the name, then keys and values in tags of their own."""

    def __init__(self, make_id: MakeId, properties: Properties) -> None:
        super().__init__(make_id, properties, strips_lines=False)
        self._starts = Markers("<tool_call>")
        self._name_end = Markers("\n", "<arg_key>", "</tool_call>")
        self._next = Markers("<arg_key>", "</tool_call>")
        self._key_end = Markers("</arg_key>")
        self._value_start = Markers("<arg_value>", "</tool_call>")
        self._value_end = Markers("</arg_value>")

    def _message(self) -> Routine[None]:
        while True:
            marker = yield from self._until(self._starts, self._content)
            if marker is None:
                return
            self._attempt_from(marker)
            yield from self._call()
            self._give_up()

    def _call(self) -> Routine[None]:
        yield from self._skip_space()
        name, marker = yield from self._read_until(self._name_end)
        name = name.strip()
        if marker is None or not NAME.fullmatch(name):
            return
        self._begin_named(name)
        if marker == "\n":
            marker = yield from self._until(self._next, drop)
        while marker == "<arg_key>":
            key, marker = yield from self._read_until(self._key_end)
            if marker is None:
                return
            marker = yield from self._until(self._value_start, drop)
            if marker == "<arg_value>":
                marker = yield from self._parameter(key.strip(), self._value_end)
                if marker is None:
                    return
                marker = yield from self._until(self._next, drop)
        if marker is not None:
            self._end_call()
