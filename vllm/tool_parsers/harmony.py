"""gpt-oss: messages with channels. `analysis` is reasoning, `final` is content, a recipient makes a call."""

from __future__ import annotations

import re
from collections.abc import Callable

from vllm.tool_parsers.deltas import Content, Reasoning
from vllm.tool_parsers.header_calls import NAME
from vllm.tool_parsers.machine import CallMachine, MakeId, Markers, Routine

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL, CONSTRAIN = "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
_RECIPIENT = re.compile(r"\bto=([\w.:/-]{1,256})")
_MAX_HEADER = 1024


class HarmonyMessages(CallMachine):
    """Text outside of any message is content, so that damaged output stays readable."""

    def __init__(self, make_id: MakeId, *, takes_calls: bool = True) -> None:
        super().__init__(make_id)
        self._takes_calls = takes_calls
        self._outside = Markers(*MARKERS)
        self._header_end = Markers(MESSAGE, END, RETURN, CALL)
        self._body_end = Markers(END, RETURN, CALL, START, CHANNEL)

    def _message(self) -> Routine[None]:
        marker = yield from self._until(self._outside, self._text_of_nobody)
        while marker is not None:
            if marker in (START, CHANNEL):
                marker = yield from self._one(marker)
            else:
                marker = None
            if marker is None:
                marker = yield from self._until(self._outside, self._text_of_nobody)

    def _one(self, marker: str) -> Routine[str | None]:
        """A message from its first marker. Returns the marker behind it, if the next message begins there."""
        header, end = yield from self._read_until(self._header_end)
        if end != MESSAGE:
            return None  # control text without a message
        header = (marker + header)[:_MAX_HEADER]
        channel = header.partition(CHANNEL)[2].strip().split(" ")[0].split("<")[0]
        recipient = _RECIPIENT.search(header)
        sink: Callable[[str], None] = self._text_of_nobody
        if recipient is not None and self._takes_calls and recipient[1] != "assistant":
            name = recipient[1].removeprefix("functions.")
            if NAME.fullmatch(name):
                self._begin(name)
                sink = self._arguments
        elif channel == "analysis":
            sink = self._reasoning
        is_empty = (yield from self._peek()) == "<" and (yield from self._accept(END, RETURN, CALL)) is not None
        if sink == self._arguments and is_empty:
            sink("{}")
        if is_empty:
            return None
        marker_after = yield from self._until(self._body_end, sink)
        return marker_after if marker_after in (START, CHANNEL) else None

    def _text_of_nobody(self, text: str) -> None:
        self._deltas.append(Content(text))

    def _reasoning(self, text: str) -> None:
        self._deltas.append(Reasoning(text))
