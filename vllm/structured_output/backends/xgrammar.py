"""xgrammar: pushdown automata whose masks are mostly computed when they are compiled, which may take seconds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xgrammar

from vllm.structured_output.grammar import Filled, Grammar, GrammarError, Matcher, end_of, fill_one_by_one, take_ends
from vllm.structured_output.spec import CHOICE, GRAMMAR, JSON, REGEX, GrammarSpec
from vllm.structured_output.vocabulary import WORD_BITS, Vocabulary

MAX_WHITESPACE = 40  # between two parts of JSON text
_COMPILE_THREADS = 2
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_PLACE = re.compile(r"^(\[[^]]*\] *)?/[\w/.+-]+:\d+: *")
_FILL_THREADS = 4
_PARALLEL_FROM = 8  # matchers: below, handing them to threads costs more than it saves


class XgrammarMatcher:
    """One text's matcher; `end` is the token with which the library says that a text may end."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, end: int, words: int) -> None:
        self.inner = matcher
        self._words = words
        self._word, self._bit = end // WORD_BITS, np.uint32(1 << (end % WORD_BITS))

    def fill(self, row: np.ndarray) -> bool:
        self.inner.fill_next_token_bitmask(_as_tensor(row[None]))
        may_end = bool(row[self._word] & self._bit)
        if may_end:
            row[self._word] ^= self._bit
        return may_end

    def accept(self, token: int) -> bool:
        return bool(self.inner.accept_token(token))

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)

    @property
    def is_terminated(self) -> bool:
        row: np.ndarray = np.zeros(self._words, np.uint32)
        return self.fill(row) and not row.any()

    def forced(self) -> int | None:
        return None  # the library knows the bytes that are forced, not the tokens


class XgrammarGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, end: int, words: int) -> None:
        self._compiled = compiled
        self._end = end
        self._words = words
        self.nbytes = int(compiled.memory_size_bytes)

    def start(self) -> Matcher:
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._end, self._words)


class Xgrammar:
    """The back end; see `grammar.Backend`."""

    isolated = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end = end_of(vocabulary)
        self._words = vocabulary.words
        self._vocabulary = vocabulary
        # By whether they are for JSON. Compilers are made in the process that compiles.
        self._infos: dict[bool, xgrammar.TokenizerInfo] = {}
        self._compilers: dict[bool, xgrammar.GrammarCompiler] = {}
        self._filler = xgrammar.BatchGrammarMatcher(max_threads=min(_FILL_THREADS, os.cpu_count() or 1))

    def _info(self, is_json: bool) -> xgrammar.TokenizerInfo:
        """The vocabulary. The library lets control characters into strings of bounded length: JSON does without."""
        if is_json not in self._infos:
            tokens = self._vocabulary.tokens
            if is_json:
                tokens = tuple(None if token is None or _CONTROL.search(token) else token for token in tokens)
            self._infos[is_json] = xgrammar.TokenizerInfo(
                [token or b"" for token in tokens],  # an empty token is one that no text can hold
                xgrammar.VocabType.RAW,
                vocab_size=self._vocabulary.width,
                stop_token_ids=[self._end],
            )
        return self._infos[is_json]

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
        return XgrammarGrammar(compiled, self._end, self._words)

    def fill_all(self, matchers: Sequence[Matcher], bits: np.ndarray, rows: Sequence[int]) -> Filled:
        if len(matchers) < _PARALLEL_FROM:
            return fill_one_by_one(matchers, bits, rows)
        known: list[Any] = list(matchers)
        self._filler.batch_fill_next_token_bitmask([matcher.inner for matcher in known], _as_tensor(bits), list(rows))
        return Filled(take_ends(bits, rows, self._end), {})


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
