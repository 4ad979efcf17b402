"""The nouns of the text generator (facts, exchanges, documents) and the helpers that all writers share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Fact:
    """One piece of knowledge, in every form that a document can need."""

    questions: tuple[str, ...]  # the first one is the plain form
    statements: tuple[str, ...]  # full sentences that answer each of the questions
    short: str  # the answer alone, without a full stop


@dataclass(frozen=True)
class Exchange:
    """What a user says and what the assistant answers; ``short`` is the answer in a word or two, if there is one."""

    user: str
    assistant: str
    short: str = ""


@dataclass(frozen=True)
class Document:
    """One training example: plain text, or the messages (and tools) that the chat template renders."""

    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


@cache
def table(name: str) -> tuple[tuple[str, ...], ...]:
    """Rows of ``tables/NAME.txt``: one ``a|b|c`` line each, ``#`` starts a comment."""
    lines = (TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(tuple(line.split("|")) for line in lines if line and not line.startswith("#"))


@cache
def pairs(name: str) -> dict[str, str]:
    """A table of two columns as a dictionary."""
    return {row[0]: row[1] for row in table(name)}


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """The text with one full stop at its end, also after ``D.C.``."""
    return text if text.endswith(".") else text + "."


def a_or_an(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[:1].lower() in "aeiou" else "a ") + noun


def join_and(items: Sequence[str]) -> str:
    """``a, b and c``."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]


def sample_some(rng: random.Random, items: Sequence[T], low: int, high: int) -> list[T]:
    return rng.sample(list(items), min(len(items), rng.randint(low, high)))


def weighted(rng: random.Random, choices: Sequence[tuple[float, T]]) -> T:
    """One of ``(weight, value)``."""
    return rng.choices([value for _, value in choices], [weight for weight, _ in choices])[0]


def casual(rng: random.Random, text: str) -> str:
    """The text as a hurried person types it: sometimes lower case, sometimes without the mark at its end."""
    roll = rng.random()
    if roll < 0.06:
        text = text.lower()
    elif roll < 0.10:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.06:
        text = text.rstrip("?.!")
    return text
