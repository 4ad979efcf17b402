"""outlines-core: one table of all transitions, token by token, of a regular expression. Large ones take very long."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
from outlines_core import Guide, Index
from outlines_core import Vocabulary as Words
from outlines_core.json_schema import build_regex_from_schema

from vllm.structured_output.grammar import Filled, Grammar, GrammarError, Matcher, end_of, fill_one_by_one
from vllm.structured_output.spec import CHOICE, JSON, GrammarSpec, ascii_digits, unanchored
from vllm.structured_output.vocabulary import WORD_BITS, Vocabulary

_MAX_ROLLBACK = 64
_LOADED_PER_BYTE = 4  # a table in memory, by its size as bytes


class OutlinesMatcher:
    """One text's place in a table. The library knows one token that ends a text, which is never shown to it."""

    def __init__(self, guide: Guide, end: int) -> None:
        self._guide = guide
        self._word, self._bit = end // WORD_BITS, np.uint32(1 << (end % WORD_BITS))

    def fill(self, row: np.ndarray) -> bool:
        row[:] = 0
        self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)
        may_end = bool(row[self._word] & self._bit)
        if may_end:
            row[self._word] ^= self._bit
        return may_end

    def accept(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def take(self, token: int) -> bool:
        try:
            self._guide.advance(token, return_tokens=False)
        except ValueError:
            return False
        return True

    def take_all(self, tokens: list[int]) -> bool:
        return all(map(self.take, tokens))

    def rollback(self, count: int) -> None:
        if count:
            self._guide.rollback_state(count)

    @property
    def is_terminated(self) -> bool:
        tokens = self._guide.get_tokens()
        return (
            len(tokens) == 1 and tokens[0] // WORD_BITS == self._word and bool(1 << tokens[0] % WORD_BITS & self._bit)
        )

    @property
    def problem(self) -> str | None:
        return None


class OutlinesGrammar:
    """A table."""

    def __init__(self, index: Index, end: int, nbytes: int) -> None:
        self._index = index
        self._end = end
        self.nbytes = nbytes

    def start(self) -> Matcher:
        return OutlinesMatcher(Guide(self._index, _MAX_ROLLBACK), self._end)


class Outlines:
    """The back end; see `grammar.Backend`."""

    places_decide = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end = end_of(vocabulary)
        self._vocabulary = vocabulary
        self._words: Words | None = None  # made in the process that compiles

    def prepare(self) -> None:
        ids: dict[bytes, list[int]] = {}
        for i, token in enumerate(self._vocabulary.tokens):
            if token is not None:
                ids.setdefault(token, []).append(i)
        self._words = Words(self._end, ids)

    def build(self, spec: GrammarSpec) -> bytes:
        if self._words is None:
            self.prepare()
        try:
            _, (data,) = Index(_pattern(spec), self._words).__reduce__()
        except (ValueError, TypeError, RuntimeError) as error:
            raise GrammarError(" ".join(str(error).split())) from None
        return bytes(data)

    def load(self, spec: GrammarSpec, data: bytes) -> Grammar:
        return OutlinesGrammar(Index.from_binary(data), self._end, _LOADED_PER_BYTE * len(data))

    def fill_all(self, matchers: Sequence[Matcher], tokens: Sequence[int], bits: np.ndarray) -> Filled:
        return fill_one_by_one(matchers, tokens, bits)


make = Outlines


def _pattern(spec: GrammarSpec) -> str:
    if spec.kind == JSON:
        return ascii_digits(build_regex_from_schema(spec.text, spec.whitespace))
    if spec.kind == CHOICE:
        # Of alternatives the library follows the first that matches: a word comes before those that it begins with.
        return "|".join(f"({re.escape(choice)})" for choice in sorted(json.loads(spec.text), key=len, reverse=True))
    return ascii_digits(unanchored(spec.text))
