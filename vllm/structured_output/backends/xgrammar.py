"""xgrammar: pushdown automata whose masks are mostly computed when they are compiled, which may take seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xgrammar

from vllm.structured_output.grammar import (
    NO_TOKEN,
    Filled,
    Grammar,
    GrammarError,
    Matcher,
    empty_rows,
    end_of,
    refused,
    take_ends,
)
from vllm.structured_output.spec import CHOICE, GRAMMAR, JSON, REGEX, GrammarSpec
from vllm.structured_output.vocabulary import WORD_BITS, Vocabulary

MAX_WHITESPACE = 40  # between two parts of JSON text
_COMPILE_THREADS = 2
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_PLACE = re.compile(r"^(\[[^]]*\] *)?/[\w/.+-]+:\d+: *")


class _Surrogates:
    """Halves of surrogate pairs are no characters, and so no UTF-8, but the library's negated classes have them: their
    first byte is ED, and the next one is from A0 on (in characters that are some: below).

    begin: tokens that end with ED.   rest: [words] uint32, tokens that may follow one of these.
    """

    def __init__(self, tokens: Sequence[bytes | None], words: int) -> None:
        self.begin = frozenset(i for i, token in enumerate(tokens) if token and token[-1] == 0xED)
        self.rest: np.ndarray = np.full(words, 0xFFFFFFFF, np.uint32)
        for i, token in enumerate(tokens):
            if token and 0xA0 <= token[0] <= 0xBF:
                self.rest[i // WORD_BITS] &= ~np.uint32(1 << (i % WORD_BITS))


class XgrammarMatcher:
    """One text's matcher; `end` is the token with which the library says that a text may end."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, end: int, words: int, surrogates: _Surrogates) -> None:
        self.inner = matcher
        self._words = words
        self._surrogates = surrogates
        self._tokens: list[int] = []
        self._word, self._bit = end // WORD_BITS, np.uint32(1 << (end % WORD_BITS))

    def fill(self, row: np.ndarray) -> bool:
        self.inner.fill_next_token_bitmask(_as_tensor(row[None]))
        self.keep_characters(row)
        may_end = bool(row[self._word] & self._bit)
        if may_end:
            row[self._word] ^= self._bit
        return may_end

    def keep_characters(self, row: np.ndarray) -> None:
        """Take out of a mask what would make the last bytes none."""
        if self.is_open:
            row &= self._surrogates.rest

    @property
    def is_open(self) -> bool:
        """Whether the next byte decides about a surrogate."""
        return bool(self._tokens) and self._tokens[-1] in self._surrogates.begin

    def accept(self, token: int) -> bool:
        if self.is_open and not self._surrogates.rest[token // WORD_BITS] >> np.uint32(token % WORD_BITS) & 1:
            return False
        if not self.inner.accept_token(token):
            return False
        self.note(token)
        return True

    def note(self, token: int) -> None:
        """The library has taken in a token."""
        self._tokens.append(token)

    def take(self, token: int) -> bool:
        return self.accept(token)

    def take_all(self, tokens: list[int]) -> bool:
        return all(map(self.accept, tokens))

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)
            del self._tokens[-count:]

    @property
    def is_terminated(self) -> bool:
        row: np.ndarray = np.zeros(self._words, np.uint32)
        return self.fill(row) and not row.any()

    @property
    def problem(self) -> str | None:
        return None


class XgrammarGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, end: int, words: int, surrogates: _Surrogates) -> None:
        self._compiled = compiled
        self._surrogates = surrogates
        self._end = end
        self._words = words
        self.nbytes = int(compiled.memory_size_bytes)

    def start(self) -> Matcher:
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._end, self._words, self._surrogates)


class Xgrammar:
    """The back end; see `grammar.Backend`."""

    places_decide = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end = end_of(vocabulary)
        self._words = vocabulary.words
        # No text has a token that holds half of a surrogate pair.
        self._tokens = tuple(
            None if token is None or _SURROGATE.search(token) else token for token in vocabulary.tokens
        )
        self._width = vocabulary.width
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)
        self._surrogates = _Surrogates(self._tokens, vocabulary.words)
        # By whether they are for JSON. Compilers are made in the process that compiles.
        self._infos: dict[bool, xgrammar.TokenizerInfo] = {}
        self._compilers: dict[bool, xgrammar.GrammarCompiler] = {}

    def _info(self, is_json: bool) -> xgrammar.TokenizerInfo:
        """The vocabulary. The library lets control characters into strings of bounded length: JSON does without."""
        if is_json not in self._infos:
            tokens = self._tokens
            if is_json:
                tokens = tuple(None if token is None or _CONTROL.search(token) else token for token in tokens)
            self._infos[is_json] = xgrammar.TokenizerInfo(
                [token or b"" for token in tokens],  # an empty token is one that no text can hold
                xgrammar.VocabType.RAW,
                vocab_size=self._width,
                stop_token_ids=[self._end],
            )
        return self._infos[is_json]

    def prepare(self) -> None:
        for is_json in (False, True):
            self._info(is_json)

    def build(self, spec: GrammarSpec) -> bytes:
        is_json = spec.kind == JSON
        if is_json not in self._compilers:
            self._compilers[is_json] = xgrammar.GrammarCompiler(
                self._info(is_json), max_threads=_COMPILE_THREADS, cache_enabled=False
            )
        try:
            return self._compile(self._compilers[is_json], spec).serialize_json().encode()
        except (RuntimeError, ValueError, TypeError) as error:  # all that the library raises
            raise GrammarError(_readable(str(error))) from None

    @staticmethod
    def _compile(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        if spec.kind == JSON:
            compact = spec.whitespace == ""
            return compiler.compile_json_schema(
                spec.text,
                any_whitespace=not compact,
                separators=(",", ":") if compact else None,
                strict_mode=False,
                max_whitespace_cnt=None if compact else MAX_WHITESPACE,
            )
        if spec.kind == REGEX:
            return compiler.compile_regex(spec.text)
        if spec.kind == CHOICE:
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.text))
            return compiler.compile_grammar("root ::= " + " | ".join(choices))
        if spec.kind == GRAMMAR:
            return compiler.compile_grammar(spec.text) if "::=" in spec.text else compiler.compile_lark(spec.text)
        return compiler.compile_structural_tag(json.dumps(newer_tag(json.loads(spec.text)), ensure_ascii=False))

    def load(self, spec: GrammarSpec, data: bytes) -> Grammar:
        compiled = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info(spec.kind == JSON))
        return XgrammarGrammar(compiled, self._end, self._words, self._surrogates)

    def fill_all(self, matchers: Sequence[Matcher], tokens: Sequence[int], bits: np.ndarray) -> Filled:
        known: list[XgrammarMatcher] = list(matchers)  # type: ignore[arg-type]
        places = list(range(len(known)))
        errors = self._take_all([shown for shown in zip(places, known, tokens, strict=True) if shown[2] != NO_TOKEN])
        if errors:
            bits[list(errors)] = 0
            places = [i for i in places if i not in errors]
        self._batch.batch_fill_next_token_bitmask([known[i].inner for i in places], _as_tensor(bits), places)
        for i in places:
            if known[i].is_open:
                known[i].keep_characters(bits[i])
        may_end = take_ends(bits, self._end)
        return Filled(may_end, [row for row in empty_rows(bits) if row not in errors], errors)

    @staticmethod
    def _take_all(shown: list[tuple[int, XgrammarMatcher, int]]) -> dict[int, GrammarError]:
        """Show each matcher its token. shown: with their places. Returns what is wrong, by place."""
        taken = xgrammar.BatchGrammarMatcher.batch_accept_token(
            [matcher.inner for _, matcher, _ in shown], [token for _, _, token in shown]
        )
        errors = {}
        for (place, matcher, token), good in zip(shown, taken, strict=True):
            if good:
                matcher.note(token)
            else:
                errors[place] = refused(token, matcher)
        return errors


make = Xgrammar


def newer_tag(tag: Any) -> Any:
    """A structural tag in its newer form, {"type": "structural_tag", "format": ...}. Raises GrammarError."""
    if not isinstance(tag, dict) or ("format" not in tag and "structures" not in tag):
        raise GrammarError("a structural tag needs `format`, or `structures` and `triggers`")
    if "format" in tag:
        return {"type": "structural_tag", "format": tag["format"]}
    try:
        tags = [
            {
                "type": "tag",
                "begin": item["begin"],
                "content": {"type": "json_schema", "json_schema": item["schema"]},
                "end": item["end"],
            }
            for item in tag["structures"]
        ]
        return {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags},
        }
    except (KeyError, TypeError):
        raise GrammarError("structures must be objects with begin, schema and end, beside triggers") from None


def _as_tensor(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rows.view(np.int32))


def _readable(error: str) -> str:
    """The library's message without its place in the library's own source."""
    return " ".join(_PLACE.sub("", error).split())
