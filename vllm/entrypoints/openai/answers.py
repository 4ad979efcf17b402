"""Whole answers as JSON. Large ones, with many log probabilities, are made so that streams get their turn meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput

# Log probabilities up to which an answer is built where it is; a thousand take about a millisecond.
INLINE_ENTRIES = 2000
SMALL = 4096  # tokens of prompts and answers, whose texts are encoded in one go
ITEMS_PER_PIECE = 64
NUMBERS_PER_PIECE = 1024
_SIMPLE = (str, int, float, bool, type(None))
FEW = 4  # objects of a list that are looked into one by one: each may be large


def has_logprobs(output: RequestOutput) -> bool:
    """Whether there are any to show; quick, since it is asked of each token of a stream."""
    return output.prompt_logprobs is not None or (bool(output.outputs) and output.outputs[0].logprobs is not None)


def count_entries(outputs: Iterable[RequestOutput]) -> int:
    """How many log probabilities there are to show."""
    count = 0
    for output in outputs:
        count += count_steps(output.prompt_logprobs) + sum(count_steps(choice.logprobs) for choice in output.outputs)
    return count


def count_steps(steps: Any) -> int:
    """How many log probabilities there are of the tokens of a prompt or an answer."""
    if not steps:
        return 0
    return len(steps.token_ids) if isinstance(steps, FlatLogprobs) else len(steps) * len(steps[-1] or ())


def is_small(outputs: Sequence[RequestOutput]) -> bool:
    """Whether the answer can be made and encoded in one go: it has no log probabilities, and few tokens."""
    tokens = 0
    for output in outputs:
        if has_logprobs(output):
            return False
        tokens += len(output.prompt_token_ids or ()) + sum(len(choice.token_ids) for choice in output.outputs)
    return tokens <= SMALL


class Part:
    """A part of an answer that has its own way to become JSON."""

    def pieces(self) -> Iterable[bytes]:
        """The JSON, in pieces."""
        raise NotImplementedError

    def listed(self) -> Any:
        """What the JSON stands for."""
        raise NotImplementedError


class Repeated(Part):
    """A list that comes several times in an answer; what its items become is made once."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._pieces: list[bytes] | None = None
        self._list: list[Any] | None = None

    def pieces(self) -> Iterator[bytes]:
        if self._pieces is not None:
            yield from self._pieces
            return
        found = []
        for piece in pieces(self._items):
            found.append(piece)
            yield piece
        self._pieces = found

    def listed(self) -> list[Any]:
        if self._list is None:
            self._list = list(self._items)
        return self._list


class Numbers(Part):
    """An array of one or two dimensions, of which few numbers are objects at a time."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def pieces(self) -> Iterator[bytes]:
        count = max(1, NUMBERS_PER_PIECE * len(self._array) // max(1, self._array.size))
        slices = (self._array[i : i + count].tolist() for i in range(0, len(self._array), count))
        yield from _joined(map(_part, slices), b"[", b"]")

    def listed(self) -> Any:
        return self._array.tolist()


def encode_at_once(answer: dict[str, Any] | list[Any]) -> bytes:
    """The answer as JSON. Lists in it may be iterators, of which little is there at a time."""
    return b"".join(pieces(answer))


def listed(value: Any) -> Any:
    """An answer with lists in place of its iterators."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    if isinstance(value, Part):
        return value.listed()
    return [listed(item) for item in value] if isinstance(value, Iterator) else value


async def encode(answer: dict[str, Any]) -> bytes:
    """The answer as JSON, encoded in pieces between which the event loop turns."""
    parts: list[bytes] = []
    for piece in pieces(answer):
        parts.append(piece)
        if len(parts) % 8 == 0:
            await asyncio.sleep(0)
    return b"".join(parts)


def pieces(value: Any, name: str = "") -> Iterator[bytes]:
    """Lists in slices, objects key by key if there are lists in them, so that no piece is large."""
    if isinstance(value, Part):
        yield from value.pieces()
    elif (name in ("choices", "data") and _may_be_large(value)) or _has_few_objects(value):
        yield from _joined((pieces(item) for item in value), b"[", b"]")
    elif isinstance(value, Iterator):
        lists = iter(lambda: list(islice(value, ITEMS_PER_PIECE)), [])
        yield from _joined((_part(items) for items in lists), b"[", b"]")
    elif isinstance(value, list) and len(value) > ITEMS_PER_PIECE:
        yield from _joined((_slice(value, i) for i in range(0, len(value), ITEMS_PER_PIECE)), b"[", b"]")
    elif isinstance(value, dict) and any(isinstance(item, dict | list | Iterator | Part) for item in value.values()):
        yield from _joined((_entry(key, item) for key, item in value.items()), b"{", b"}")
    else:
        yield json.dumps(value).encode()


def _slice(value: Sequence[Any], start: int) -> Iterator[bytes]:
    yield from _part(value[start : start + ITEMS_PER_PIECE])


def _may_be_large(value: Any) -> bool:
    """Whether items of this list may be; those of a vector are not."""
    return isinstance(value, Iterator) or (isinstance(value, list) and bool(value) and type(value[0]) not in _SIMPLE)


def _has_few_objects(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= FEW and any(isinstance(item, dict) for item in value)


def _part(items: Sequence[Any]) -> Iterator[bytes]:
    yield json.dumps(items).encode()[1:-1]


def _entry(key: str, value: Any) -> Iterator[bytes]:
    yield json.dumps(key).encode() + b": "
    yield from pieces(value, key)


def _joined(groups: Iterable[Iterator[bytes]], start: bytes, end: bytes) -> Iterator[bytes]:
    before = start
    for group in groups:
        for piece in group:
            yield before + piece
            before = b""
        before = b", "
    yield start + end if before == start else end
