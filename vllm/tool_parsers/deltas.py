"""What a piece of generated text adds to a message: visible text, reasoning, the beginning or arguments of a call."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Content(NamedTuple):
    """Text that the user is meant to read."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


class CallStart(NamedTuple):
    """A call of a function begins. Calls of a message are numbered from 0, one ends before the next begins."""

    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of the JSON text of the arguments of call `number`, the one that began last."""

    number: int
    text: str


Delta: TypeAlias = Content | Reasoning | CallStart | CallArguments
