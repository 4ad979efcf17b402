"""The core of all parsers: a routine over text that arrives in pieces, which cannot tell how the text was cut.

A machine is a generator that takes characters off the front of its text and yields where it needs more. What it decides
depends on the characters alone: it decides when they can no longer turn out otherwise, or when the text has ended. So a
stream and the whole text, which is the same machine fed once, give the same message. Every character is looked at a
bounded number of times and nothing but the beginning of a marker is kept waiting, so that the time is linear.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cache
from itertools import groupby
from typing import TypeVar

from vllm.tool_parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

_T = TypeVar("_T")
Routine = Generator[None, None, _T]
Sink = Callable[[str], None]

_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_INSIDE = re.compile(r'[^"\\]*')
_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[^\s,\]}{\[\"]*")
_DECODER = json.JSONDecoder(strict=False)
_CALL_TAIL = re.compile(r"\s*\}")


@cache
def _call_head(name_key: str, argument_keys: tuple[str, ...]) -> re.Pattern[str]:
    """What stands before the arguments of a call, with its name."""
    keys = "|".join(map(re.escape, argument_keys))
    return re.compile(rf'\{{\s*"{re.escape(name_key)}"\s*:\s*"([^"\\]+)"\s*,\s*"(?:{keys})"\s*:\s*(?=\{{)')


class Markers:
    """Strings to look for. None may contain another, or what is found would depend on how the text is cut."""

    def __init__(self, *markers: str) -> None:
        if any(a != b and a in b for a in markers for b in markers) or "" in markers:
            raise ValueError(f"A marker contains another one: {markers}")
        self._search = re.compile("|".join(map(re.escape, markers)) or "(?!)").search
        self._beginnings = frozenset(marker[:i] for marker in markers for i in range(1, len(marker)))
        self._first = frozenset(marker[0] for marker in markers)
        self._reach = max(map(len, markers), default=1) - 1

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._search(text, start)

    def held(self, text: str, start: int) -> int:
        """How many characters at the end of `text` may be the beginning of a marker."""
        tail = text[max(start, len(text) - self._reach) :] if self._reach else ""
        if self._first.isdisjoint(tail):
            return 0
        for i in range(len(tail)):
            if tail[i:] in self._beginnings:
                return len(tail) - i
        return 0


class Machine(ABC):
    """Turns text into deltas. Feed it the text in any pieces, then `finish`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # of the first character that was not taken yet
        self._ended = False
        self._attempt: list[str] | None = None  # what was taken since something began that may turn out to be text
        self._deltas: list[Delta] = []
        self._routine = self._run()
        self._is_done = False

    def feed(self, text: str) -> list[Delta]:
        """What `text` adds to the message."""
        self._text = self._text[self._at :] + text if self._at < len(self._text) else text
        self._at = 0
        return self._advance()

    def finish(self) -> list[Delta]:
        """The text has ended: what was kept waiting."""
        self._ended = True
        return self._advance()

    def whole(self, text: str) -> list[Delta]:
        """The message of a text that is complete."""
        return merged([*self.feed(text), *self.finish()])

    def _advance(self) -> list[Delta]:
        if not self._is_done:
            try:
                next(self._routine)
            except StopIteration:
                self._is_done = True
        deltas, self._deltas = self._deltas, []
        return merged(deltas) if len(deltas) > 1 else deltas

    @abstractmethod
    def _run(self) -> Routine[None]:
        """Take all of the text, until it has ended."""

    # -- what routines are made of -------------------------------------------------------------------------------------

    def _take(self, end: int) -> str:
        """The text up to position `end`, which is taken."""
        piece = self._text[self._at : end]
        self._at = end
        if self._attempt is not None:
            self._attempt.append(piece)
        return piece

    def _put_back(self, marker: str) -> None:
        """Undo the taking of the marker that was taken last."""
        self._at -= len(marker)
        if self._attempt is not None:
            self._attempt.pop()

    def _until(self, markers: Markers, sink: Sink) -> Routine[str | None]:
        """Hand everything before the first marker to `sink`. Returns the marker, which is taken, or None at the end."""
        while True:
            found = markers.find(self._text, self._at)
            if found is not None:
                if found.start() > self._at:
                    sink(self._take(found.start()))
                return self._take(found.end())
            held = 0 if self._ended else markers.held(self._text, self._at)
            if len(self._text) - held > self._at:
                sink(self._take(len(self._text) - held))
            if self._ended:
                return None
            yield

    def _read_until(self, markers: Markers) -> Routine[tuple[str, str | None]]:
        """The text before the first marker, and the marker."""
        parts: list[str] = []
        marker = yield from self._until(markers, parts.append)
        return "".join(parts), marker

    def _peek(self) -> Routine[str]:
        """The next character, "" at the end of the text."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _skip_space(self) -> Routine[str]:
        """Take white space. Returns the character after it, "" at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            if found.end() > self._at:
                self._take(found.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            yield

    def _accept(self, *markers: str) -> Routine[str | None]:
        """Take the marker that comes next, if one does."""
        while True:
            for marker in markers:
                if self._text.startswith(marker, self._at):
                    return self._take(self._at + len(marker))
            rest = self._text[self._at : self._at + max(map(len, markers))]
            if self._ended or not any(marker.startswith(rest) for marker in markers):
                return None
            yield

    def _json_value(self, sink: Sink) -> Routine[bool]:
        """Hand the text of one JSON value to `sink`. False if the text ends before it does.

        Only brackets and strings are looked at: what the model wrote is passed on as it is.
        """
        first = yield from self._peek()
        if first not in ('"', "{", "["):
            return (yield from self._json_scalar(sink))
        depth, in_string = 0, False
        while True:
            text, at = self._text, self._at
            is_over = False
            while at < len(text):
                found = (_INSIDE if in_string else _OUTSIDE).match(text, at)
                assert found is not None
                at = found.end()
                if at == len(text):
                    break
                character = text[at]
                if character == "\\":
                    if at + 1 == len(text) and not self._ended:
                        break  # together with what it escapes
                    at = min(at + 2, len(text))
                    continue
                at += 1
                if character == '"':
                    in_string = not in_string
                elif character in "{[":
                    depth += 1
                else:
                    depth -= 1
                if depth <= 0 and not in_string:
                    is_over = True
                    break
            if at > self._at:
                sink(self._take(at))
            if is_over or self._ended:
                return is_over
            yield

    def _json_scalar(self, sink: Sink) -> Routine[bool]:
        """A number, true, false or null: everything up to what cannot belong to it. False if there is nothing."""
        taken = False
        while True:
            found = _SCALAR.match(self._text, self._at)
            assert found is not None
            if found.end() > self._at:
                taken = True
                sink(self._take(found.end()))
            if self._at < len(self._text) or self._ended:
                return taken
            yield

    def _json_string(self) -> Routine[str | None]:
        """The string that comes next; None if none does, or a damaged one."""
        if (yield from self._peek()) != '"':
            return None
        parts: list[str] = []
        if not (yield from self._json_value(parts.append)):
            return None
        try:
            value = json.loads("".join(parts), strict=False)
        except ValueError:
            return None
        return value if isinstance(value, str) else None


def drop(text: str) -> None:
    """A sink for what is no part of the message."""


MakeId = Callable[[int, str], str]  # from the number and the name of a call


class CallMachine(Machine):
    """Text with calls in it. Until the first call everything is content, after it nothing is.

    White space alone before the first call is no content. `make_id` names calls that the model gives no id.
    """

    def __init__(self, make_id: MakeId) -> None:
        super().__init__()
        self._make_id = make_id
        self._calls = 0
        self._space: list[str] | None = []  # white space at the beginning of the content

    def _content(self, text: str) -> None:
        if self._calls or not text:
            return
        if self._space is not None:
            if text.isspace():
                self._space.append(text)
                return
            text = "".join(self._space) + text
            self._space = None
        self._deltas.append(Content(text))

    def _begin(self, name: str, call_id: str | None = None) -> None:
        """It is a call: what was taken of it is no text."""
        self._attempt = None
        self._deltas.append(CallStart(self._calls, call_id or self._make_id(self._calls, name), name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallArguments(self._calls - 1, text))

    def _attempt_from(self, marker: str = "") -> None:
        """What comes may be a call; `marker`, which is taken already, announced it."""
        self._attempt = [marker]

    def _give_up(self) -> None:
        """What was attempted is no call, but text."""
        if self._attempt is not None:
            taken, self._attempt = self._attempt, None
            self._content("".join(taken))

    def _json_call(
        self,
        name_key: str,
        argument_keys: tuple[str, ...],
        accepts: Callable[[str], bool] = lambda name: True,
        *,
        needs_arguments: bool = True,
    ) -> Routine[bool]:
        """A call as an object with a name and arguments, in any order, the next character being its brace. False if
        this is none, or not complete. It is one as soon as its name and the beginning of its arguments are known.
        """
        if self._whole_call(name_key, argument_keys, accepts):
            return True
        self._take(self._at + 1)
        name: str | None = None
        held: list[str] | None = None  # arguments that came before the name
        begun = False
        while True:
            character = yield from self._skip_space()
            if character == "}":
                self._take(self._at + 1)
                if not begun and name is not None and (held is not None or not needs_arguments) and accepts(name):
                    begun = True
                    self._begin(name)
                    self._arguments("".join(held or ()) or "{}")
                return begun
            if character == ",":
                self._take(self._at + 1)
                continue
            key = yield from self._json_string()
            if key is None or (yield from self._skip_space()) != ":":
                return False
            self._take(self._at + 1)
            yield from self._skip_space()
            if key == name_key and name is None:
                name = yield from self._json_string()
                if not name:
                    return False
            elif key in argument_keys and not begun and held is None:
                if name is None:
                    held = []
                elif accepts(name):
                    begun = True
                    self._begin(name)
                else:
                    return False
                if not (yield from self._json_arguments(self._arguments if held is None else held.append)):
                    return False
            elif not (yield from self._json_value(drop)):
                return False

    def _whole_call(self, name_key: str, argument_keys: tuple[str, ...], accepts: Callable[[str], bool]) -> bool:
        """Take a call as models write most of them, a name and then an object, if all of it is there."""
        text = self._text
        head = _call_head(name_key, argument_keys).match(text, self._at)
        if head is None or not accepts(head[1]):
            return False
        try:
            end = _DECODER.raw_decode(text, head.end())[1]
        except (ValueError, RecursionError):
            return False
        tail = _CALL_TAIL.match(text, end)
        if tail is None:
            return False
        self._begin(head[1])
        self._arguments(text[head.end() : end])
        self._at = tail.end()
        return True

    def _json_arguments(self, sink: Sink) -> Routine[bool]:
        """Arguments as JSON text: of an object as the model wrote it, of a string what it says, {} for null."""
        first = yield from self._peek()
        if first == "{":
            return (yield from self._json_value(sink))
        if first == '"':
            text = yield from self._json_string()
            sink(text if text and text.strip() else "{}")
            return text is not None
        parts: list[str] = []
        is_whole = yield from self._json_value(parts.append)
        text = "".join(parts)
        sink("{}" if text in ("null", "") else text)
        return is_whole

    def _run(self) -> Routine[None]:
        yield from self._message()
        self._give_up()
        yield from self._until(NOTHING, self._content)
        if self._space and not self._calls:
            self._deltas.append(Content("".join(self._space)))

    @abstractmethod
    def _message(self) -> Routine[None]:
        """Take the text up to where everything else is content."""


class ChosenCall(CallMachine):
    """Arguments of one function and nothing else."""

    def __init__(self, name: str, make_id: MakeId) -> None:
        super().__init__(make_id)
        self._name = name

    def _message(self) -> Routine[None]:
        if (yield from self._skip_space()):
            self._begin(self._name)
            yield from self._until(NOTHING, self._arguments)


NOTHING = Markers()


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours that continue each other as one."""

    def runs() -> Iterator[Delta]:
        for key, group in groupby(deltas, lambda delta: (type(delta), getattr(delta, "number", 0))):
            several = list(group)
            if len(several) == 1 or key[0] is CallStart:
                yield from several
                continue
            text = "".join(delta.text for delta in several if not isinstance(delta, CallStart))
            if key[0] is CallArguments:
                yield CallArguments(key[1], text)
            else:
                yield Reasoning(text) if key[0] is Reasoning else Content(text)

    return list(runs())
