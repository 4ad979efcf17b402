"""Reads just enough of EBNF and Lark grammars to find those without a finite text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*|//[^\n]*|->\s*\w+)
      | (?P<terminal>"(?:\\.|[^"\\\n])*"i?|'(?:\\.|[^'\\\n])*'|/(?:\\.|[^/\\\n])+/[a-z]*
          |\[\^?(?:\\.|[^\]\\])*\]|\.\.|\.)
      | (?P<head>[?!]?[A-Za-z_][\w-]*(?:\.\d+)?\s*(?:::=|:(?!:)))
      | (?P<name>[A-Za-z_][\w-]*)
      | (?P<repeat>[*+?]|\{[\s\d,]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
      | (?P<sign>[()|])""",
    re.X,
)
_PASSES = 64  # over all rules; more, and nobody says that there is none
Known = Callable[[str], bool]
_Expression = Callable[[Known], bool]  # whether it has a finite text, as far as is known of rules


class _Unknown(Exception):
    """Something that is not read here; whoever compiles the grammar says whether it is right."""


def has_finite_text(text: str) -> bool:
    """False if no text of the grammar ever ends: whatever its first rule leads to needs a rule that leads back to it.

    True as well for what is not understood.
    """
    try:
        return _begins(_rules(text), "root" if "::=" in text else "start")
    except (_Unknown, RecursionError):
        return True


def _begins(rules: dict[str, _Expression], start: str) -> bool:
    """Whether the rule `start` has a finite text."""
    finite: set[str] = set()

    def known(name: str) -> bool:
        return name in finite or name not in rules

    for _ in range(_PASSES):
        found = {name for name in rules if name not in finite and rules[name](known)}
        if not found:
            return known(start)
        finite |= found
        if start in finite:
            return True
    return True


def _rules(text: str) -> dict[str, _Expression]:
    """Raises _Unknown."""
    tokens: list[tuple[str, str]] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _Unknown
        place = match.end()
        if match.lastgroup != "skip":
            tokens.append((str(match.lastgroup), match.group()))
    tokens.append(("head", "end:"))
    if tokens[0][0] != "head":
        raise _Unknown
    rules: dict[str, _Expression] = {}
    heads = [i for i, (kind, _) in enumerate(tokens) if kind == "head"]
    for first, last in zip(heads, heads[1:], strict=False):
        name = re.split(r"[.:\s]", tokens[first][1].lstrip("?!"))[0]
        body, rest = _choice(tokens[first + 1 : last], 0)
        if rest != last - first - 1:
            raise _Unknown
        rules[name] = body
    return rules


def _choice(tokens: list[tuple[str, str]], i: int) -> tuple[_Expression, int]:
    branches: list[list[_Expression]] = []
    parts: list[_Expression] = []
    while i < len(tokens) and tokens[i][1] != ")":
        kind, word = tokens[i]
        i += 1
        if word == "|":
            branches.append(parts)
            parts = []
        elif word == "(":
            inner, i = _choice(tokens, i)
            if i >= len(tokens):
                raise _Unknown
            i += 1
            parts.append(inner)
        elif kind == "repeat":
            if not parts:
                raise _Unknown
            if word[0] in "*?" or re.match(r"[{~]\s*(0|,|\})", word):
                parts[-1] = _always
        elif kind == "name":
            parts.append(partial(_named, word))
        else:
            parts.append(_always)
    branches.append(parts)
    return lambda known: any(all(part(known) for part in branch) for branch in branches), i


def _named(name: str, known: Known) -> bool:
    return known(name)


def _always(known: Known) -> bool:
    return True
