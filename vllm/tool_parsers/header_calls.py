"""Calls written as a header with the name, between special tokens, followed by the arguments as JSON."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import NamedTuple

from vllm.tool_parsers.machine import CallMachine, MakeId, Markers, Routine

NAME = re.compile(r"[\w.:/-]{1,256}")
_KIMI_ID = re.compile(r"(?:functions\.)?([\w./-]{1,256}):\d+")
_FENCE = re.compile(r"(?:```(?:json)?\s*)?(?:```)?")

_BRACE = "{"


class Header(NamedTuple):
    """Whose call it is. `id` is None where the format has none."""

    name: str
    id: str | None = None


class HeaderCalls(CallMachine):
    """`openers` announce calls and may be missing; each call is `begin` header `separators` arguments `end`."""

    openers: tuple[str, ...] = ()
    begin: str
    separators: tuple[str, ...]
    end: str

    def __init__(self, make_id: MakeId) -> None:
        super().__init__(make_id)
        self._starts = Markers(*self.openers, self.begin)
        self._separator = Markers(*self.separators, self.end)
        self._body = Markers(_BRACE, self.end)

    def _message(self) -> Routine[None]:
        while True:
            marker = yield from self._until(self._starts, self._content)
            if marker is None:
                return
            self._attempt_from(marker)
            yield from self._call(marker)
            self._give_up()

    def _call(self, marker: str) -> Routine[None]:
        if marker != self.begin:
            yield from self._skip_space()
            if not (yield from self._accept(self.begin)):
                return
        first, separator = yield from self._read_until(self._separator)
        if separator is None or separator == self.end:
            return
        between, marker_after = yield from self._read_until(self._body)
        header = self._header(first.strip(), between)
        if header is None or marker_after is None:
            return
        self._begin(*header)
        if marker_after == self.end:
            self._arguments("{}")
            return
        self._put_back(_BRACE)
        yield from self._json_value(self._arguments)

    @abstractmethod
    def _header(self, first: str, between: str) -> Header | None:
        """The call whose header is `first`, with the text `between` the separator and the arguments."""


class DeepseekCalls(HeaderCalls):
    """DeepSeek V3 and R1 (a type, then the name, then fenced JSON) and V3.1 (the name, then JSON)."""

    openers = ("<｜tool▁calls▁begin｜>",)
    begin = "<｜tool▁call▁begin｜>"
    separators = ("<｜tool▁sep｜>",)
    end = "<｜tool▁call▁end｜>"

    def _header(self, first: str, between: str) -> Header | None:
        between = between.strip()
        if not between:
            return Header(first) if NAME.fullmatch(first) else None
        name = between.partition("\n")[0].partition("`")[0]
        if first != "function" or not _FENCE.fullmatch(between[len(name) :].strip()):
            return None
        name = name.strip()
        return Header(name) if NAME.fullmatch(name) else None


class KimiCalls(HeaderCalls):
    """Kimi K2: the header is the id of the call, which names the function; the template wants it back unchanged."""

    openers = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    begin = "<|tool_call_begin|>"
    separators = ("<|tool_call_argument_begin|>",)
    end = "<|tool_call_end|>"

    def _header(self, first: str, between: str) -> Header | None:
        found = _KIMI_ID.fullmatch(first)
        if between.strip():
            return None
        if found is not None:
            return Header(found[1], first)
        name = first.removeprefix("functions.")
        return Header(name) if NAME.fullmatch(name) and not name.isdigit() else None


class MistralCalls(CallMachine):
    """Mistral: a JSON list of calls after the marker (until v7), or a name and arguments after each one (v11 on)."""

    def __init__(self, make_id: MakeId) -> None:
        super().__init__(make_id)
        self._starts = Markers("[TOOL_CALLS]")
        self._name_end = Markers("[CALL_ID]", "[ARGS]", _BRACE)
        self._id_end = Markers("[ARGS]", _BRACE)

    def _message(self) -> Routine[None]:
        while True:
            marker = yield from self._until(self._starts, self._content)
            if marker is None:
                return
            self._attempt_from(marker)
            if (yield from self._skip_space()) in ("[", _BRACE):
                yield from self._list()
            else:
                yield from self._named()
            self._give_up()

    def _list(self) -> Routine[None]:
        while True:
            character = yield from self._skip_space()
            if character == _BRACE:
                if not (yield from self._json_call("name", ("arguments", "parameters"))):
                    return
            elif character and character in "[,":
                self._take(self._at + 1)
            else:
                return

    def _named(self) -> Routine[None]:
        name, marker = yield from self._read_until(self._name_end)
        name = name.strip()
        call_id: str | None = None
        if marker == "[CALL_ID]":
            call_id, marker = yield from self._read_until(self._id_end)
            call_id = call_id.strip()
            if not re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
                call_id = None
        if marker is None or not NAME.fullmatch(name):
            return
        if marker == _BRACE:
            self._put_back(_BRACE)
        elif (yield from self._skip_space()) != _BRACE:
            return
        self._begin(name, call_id)
        yield from self._json_value(self._arguments)
