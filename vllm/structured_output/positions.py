"""Masks of places in JSON texts, kept: where a text stands in a plain schema is known from its characters, so the mask
of a place is computed once, whatever was written before it.

What a place is: the objects and arrays around it (of objects the newest property, since properties have an order; of
arrays the number of items, where the schema counts them; masks are told apart by it only near its bounds), what of a
value, name or white space has been written, and the newest token, since libraries choose how the text that must follow
is cut into tokens. Of a string that may hold anything, nothing needs to be remembered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from vllm.structured_output.grammar import NO_TOKEN, GrammarError
from vllm.structured_output.spec import JSON, GrammarSpec

TABLE_BYTES = 64 << 20
_MAX_ROWS = 1 << 14
_MAX_DEPTH, _MAX_PARTIAL = 24, 64  # what is nested deeper, or written longer, is seldom met again
_WHITE = frozenset(b" \t\r\n")
_QUOTE, _BACKSLASH = b'"\\'
_COUNTS = {"minItems", "maxItems"}
_BOUNDS = {"minLength", "maxLength", "pattern", "format", "enum", "const"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_NOTES = {"title", "description", "default", "examples", "$schema"}
_PLAIN = {"type", "properties", "required", "items", "additionalProperties", *_COUNTS, *_BOUNDS, *_NUMBERS, *_NOTES}
# What is expected or being written: a value, a value or the end of an array, a name or the end of an object, a name's
# text, the colon, a string, a number or word, what follows a value.
_VALUE, _ITEM, _NAME, _IN_NAME, _COLON, _IN_STRING, _IN_WORD, _AFTER = range(8)


class _Schema:
    """What of a schema decides where a text stands. free: it is a string of any characters.   names: of properties, as
    they are written, None if any may follow.   items: of an array.   counted: whether items are.   least, most: how
    many there may be, if so.
    """

    __slots__ = ("counted", "free", "items", "least", "most", "names")

    def __init__(self) -> None:
        self.free = True
        self.names: dict[bytes, _Schema] | None = None
        self.items: _Schema = self
        self.counted = False
        self.least, self.most = 0, sys.maxsize

    def class_of(self, count: int, reach: int) -> int:
        """A number that is the same for counts of items between which no token makes a difference.

        reach: no token has so many items.
        """
        if count + reach < self.least:
            return -1
        return -2 if count >= self.least and count + reach < self.most else count


_ANY = _Schema()


def _read(schema: Any) -> _Schema | None:
    """None for a schema in which something may depend on more than the place."""
    if schema is True or schema == {}:
        return _ANY
    if not isinstance(schema, dict) or not schema.keys() <= _PLAIN:
        return None
    if any(isinstance(value, list | dict) for value in (*schema.get("enum", ()), schema.get("const"))):
        return None
    if set(schema.get("required", ())) - schema.get("properties", {}).keys():
        return None  # which of these are there still is not in the newest name
    found = _Schema()
    found.free = schema.get("type") == "string" and not schema.keys() & _BOUNDS
    found.counted = bool(schema.keys() & _COUNTS)
    found.least, found.most = schema.get("minItems", 0), schema.get("maxItems", sys.maxsize)
    if not isinstance(found.least, int | float) or not isinstance(found.most, int | float):
        return None
    items = _read(schema.get("items", True))
    if items is None:
        return None
    found.items = items
    if "properties" in schema or schema.get("additionalProperties") is False:
        if schema.get("additionalProperties", False) is not False:
            return None
        found.names = {}
        for name, inner in schema.get("properties", {}).items():
            child = _read(inner)
            if child is None:
                return None
            found.names[json.dumps(name, ensure_ascii=False)[1:-1].encode()] = child
    elif schema.get("additionalProperties", True) is not True:
        return None
    return found


# (schema, newest name) of an object; (schema, number of items) of an array
_Frame = tuple[_Schema, "bytes | int"]


class _Place:
    """Where a text stands; never changed once it is reached. partial: what of a name, string, number or word is
    written, as far as it matters.   white: characters written since the last part of JSON.
    """

    __slots__ = ("frames", "mode", "partial", "schema", "white")

    def __init__(self, schema: _Schema) -> None:
        self.frames: tuple[_Frame, ...] = ()
        self.mode = _VALUE
        self.schema = schema
        self.partial = self.white = b""

    def after(self, text: bytes) -> _Place | None:
        """The place behind some more characters; None if it cannot be told, or is not worth it."""
        new = _Place(self.schema)
        new.frames, new.mode, new.partial, new.white = self.frames, self.mode, self.partial, self.white
        for char in text:
            if not new._read(char):
                return None
        return new if len(new.frames) <= _MAX_DEPTH and len(new.partial) + len(new.white) <= _MAX_PARTIAL else None

    def key(self, token: int) -> tuple[Any, ...]:
        """Equal where all that may follow is equal. token: the newest."""
        inside = self.mode == _IN_STRING and self.schema.free and self.partial == b'"'
        return self.frames, self.mode, self.schema, self.partial, self.white, -1 if inside else token

    def classes(self, reach: int) -> tuple[Any, ...]:
        """Its frames, with one number for all counts of items between which no token makes a difference."""
        return tuple(
            (schema, schema.class_of(newest, reach)) if schema.counted and isinstance(newest, int) else (schema, newest)
            for schema, newest in self.frames
        )

    def _read(self, char: int) -> bool:
        mode = self.mode
        if mode == _IN_STRING:
            return self._in_string(char)
        if mode == _IN_NAME:
            return self._in_name(char)
        if mode == _IN_WORD:
            if char not in b",]}" and char not in _WHITE:
                self.partial += bytes((char,))
                return True
            self._value_ends()
            mode = self.mode
        if char in _WHITE:
            self.white += bytes((char,))
            return True
        self.white = b""
        if mode == _AFTER:
            return self._after_value(char)
        if mode == _NAME:
            if char == _QUOTE:
                self.mode, self.partial = _IN_NAME, b""
                return True
            return char == b"}"[0] and self._close()
        if mode == _COLON:
            self.mode = _VALUE
            return char == b":"[0]
        return self._value(char)

    def _value(self, char: int) -> bool:
        if char == _QUOTE:
            self.mode, self.partial = _IN_STRING, b'"'
        elif char == b"{"[0]:
            self.frames += ((self.schema, b""),)
            self.mode = _NAME
        elif char == b"["[0]:
            self.frames += ((self.schema, 0),)
            self.mode, self.schema = _ITEM, self.schema.items
        elif char == b"]"[0]:
            return self.mode == _ITEM and self._close()
        else:
            self.mode, self.partial = _IN_WORD, bytes((char,))
        return True

    def _in_string(self, char: int) -> bool:
        partial = self.partial
        if self.schema.free and _BACKSLASH not in partial:
            if char < 0x80 and len(partial) > 1:
                return False
            if char == _QUOTE:
                self._value_ends()
            elif char == _BACKSLASH:
                self.partial = b'"\\'
            elif char >= 0x80:
                partial += bytes((char,))
                self.partial = b'"' if _is_character(partial[1:]) else partial
            return True
        if char == _QUOTE and not _is_open_escape(partial):
            self._value_ends()
        else:
            self.partial = partial + bytes((char,))
        return True

    def _in_name(self, char: int) -> bool:
        if char != _QUOTE or _is_open_escape(self.partial):
            self.partial += bytes((char,))
            return True
        names, name = self.frames[-1][0].names, self.partial
        inner = _ANY if names is None else names.get(name)
        if inner is None:
            return False
        self.frames = (*self.frames[:-1], (self.frames[-1][0], b'"' if names is None else name))
        self.mode, self.partial, self.schema = _COLON, b"", inner
        return True

    def _value_ends(self) -> None:
        self.mode, self.partial = _AFTER, b""
        if not self.frames:
            self.schema = _ANY

    def _after_value(self, char: int) -> bool:
        if char != b","[0]:
            return char in b"]}" and self._close()
        if not self.frames:
            return False
        schema, newest = self.frames[-1]
        if isinstance(newest, bytes):
            self.mode = _NAME
        else:
            count = newest + 1 if schema.counted else 0
            self.frames = (*self.frames[:-1], (schema, count))
            self.mode, self.schema = _VALUE, schema.items
        return True

    def _close(self) -> bool:
        if not self.frames:
            return False
        self.schema = self.frames[-1][0]
        self.frames = self.frames[:-1]
        self._value_ends()
        return True


def _is_character(data: bytes) -> bool:
    """Whether these bytes, none of them ASCII, are a whole character."""
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


def _is_open_escape(text: bytes) -> bool:
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1


class MaskTable:
    """Masks of one vocabulary, up to `limit` bytes; when it is full, all are forgotten."""

    def __init__(self, words: int, limit: int = TABLE_BYTES) -> None:
        rows = max(1, min(_MAX_ROWS, limit // (4 * words)))
        self.bits: np.ndarray = np.empty((rows, words), np.uint32)  # takes memory as it is written
        self.generation = 0
        self.places: WeakSet[Places] = WeakSet()
        self._used = 0

    def has(self, node: Node) -> bool:
        """Whether the mask of a place is there."""
        return node.row >= 0 and node.generation == self.generation

    def keep(self, node: Node, row: np.ndarray) -> None:
        """Take in the mask of a place."""
        if self._used == len(self.bits):
            self._used = 0
            self.generation += 1
            for places in self.places:
                places.forget()
        self.bits[self._used] = row
        node.row, node.generation = self._used, self.generation
        self._used += 1


class Node:
    """A place that texts of one grammar have reached. row: of its mask in the table's generation, -1 if it is not
    known.   only: the one token that may follow, NO_TOKEN if there are several.   may_end: whether the text may.
    problem: why no text can go on there, if none can.
    """

    __slots__ = ("generation", "may_end", "only", "place", "problem", "row", "then")

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.then: dict[int, Node | None] = {}
        self.row = self.generation = -1
        self.only = NO_TOKEN
        self.may_end = False
        self.problem: GrammarError | None = None


class Places:
    """Of one grammar. Used by the thread that fills masks only."""

    def __init__(self, schema: _Schema, tokens: Sequence[bytes | None], table: MaskTable) -> None:
        self._schema, self._tokens, self.table = schema, tokens, table
        self._reach = 2 + max((len(token) for token in tokens if token is not None), default=0)
        self.forget()
        table.places.add(self)

    @classmethod
    def of(cls, spec: GrammarSpec, tokens: Sequence[bytes | None], table: MaskTable) -> Places | None:
        """None for a constraint that is not plain enough."""
        if spec.kind != JSON or spec.whitespace not in (None, ""):
            return None
        schema = _read(json.loads(spec.text))
        return None if schema is None else cls(schema, tokens, table)

    def forget(self) -> None:
        """Begin anew: the table has no masks any more."""
        self._nodes: dict[tuple[Any, ...], Node] = {}
        self._alike: dict[tuple[Any, ...], Node] = {}  # the first node of those with the same mask
        self.begin = Node(_Place(self._schema))  # before the first token

    def after(self, node: Node, token: int) -> Node | None:
        """The place behind a token; None if it cannot be told."""
        then = node.then
        if token in then:
            return then[token]
        text = self._tokens[token]
        place = None if text is None else node.place.after(text)
        found = None
        if place is not None:
            key = place.key(token)
            found = self._nodes.get(key)
            if found is None:
                found = self._nodes[key] = Node(place)
                first = self._alike.setdefault((place.classes(self._reach), *key[1:]), found)
                if first is not found and self.table.has(first):
                    found.row, found.generation = first.row, first.generation
                    found.only, found.may_end = first.only, first.may_end
        then[token] = found
        return found
