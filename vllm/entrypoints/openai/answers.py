"""Whole answers as JSON. Large ones, with many log probabilities, are made so that streams get their turn meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.outputs import RequestOutput

# Log probabilities up to which an answer is built where it is; a thousand take about a millisecond.
INLINE_ENTRIES = 2000
ITEMS_PER_PIECE = 64


def count_entries(outputs: Iterable[RequestOutput | None]) -> int:
    """How many log probabilities there are to show."""
    count = 0
    for output in outputs:
        if output is not None:
            steps = [output.prompt_logprobs, *(choice.logprobs for choice in output.outputs)]
            count += sum(len(some) * len(some[-1] or ()) for some in steps if some)
    return count


async def encode(answer: dict[str, Any]) -> bytes:
    """The answer as JSON, encoded in pieces between which the event loop turns."""
    parts: list[bytes] = []
    for piece in _pieces(answer):
        parts.append(piece)
        if len(parts) % 8 == 0:
            await asyncio.sleep(0)
    return b"".join(parts)


def _pieces(value: Any, name: str = "") -> Iterator[bytes]:
    """Lists in slices, objects key by key if there are lists in them, so that no piece is large."""
    if isinstance(value, list) and name in ("choices", "data"):
        yield from _joined((_pieces(item) for item in value), b"[", b"]")
    elif isinstance(value, list) and len(value) > ITEMS_PER_PIECE:
        yield from _joined((_slice(value, i) for i in range(0, len(value), ITEMS_PER_PIECE)), b"[", b"]")
    elif isinstance(value, dict) and any(isinstance(item, (dict, list)) for item in value.values()):
        yield from _joined((_entry(key, item) for key, item in value.items()), b"{", b"}")
    else:
        yield json.dumps(value).encode()


def _slice(value: Sequence[Any], start: int) -> Iterator[bytes]:
    yield json.dumps(value[start : start + ITEMS_PER_PIECE]).encode()[1:-1]


def _entry(key: str, value: Any) -> Iterator[bytes]:
    yield json.dumps(key).encode() + b": "
    yield from _pieces(value, key)


def _joined(groups: Iterable[Iterator[bytes]], start: bytes, end: bytes) -> Iterator[bytes]:
    before = start
    for group in groups:
        for piece in group:
            yield before + piece
            before = b""
        before = b", "
    yield start + end if before == start else end
