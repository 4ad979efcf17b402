"""llguidance: an Earley parser over lazily built lexers. Compiles in about a millisecond, mostly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from vllm.structured_output.grammar import (
    NO_TOKEN,
    Filled,
    Grammar,
    GrammarError,
    Matcher,
    address,
    end_of,
    refused,
    take_ends,
)
from vllm.structured_output.spec import CHOICE, GRAMMAR, JSON, REGEX, GrammarSpec, ascii_digits
from vllm.structured_output.vocabulary import WORD_BITS, Vocabulary

# Between the parts of JSON text: a few blanks, or a line break and an indentation. More would let a model that has lost
# its way write blanks until it runs out of tokens.
WHITESPACE = r"[ \t]{1,8}|[ \t]{0,2}\r?\n[ \t]{0,40}"
# A quarter of the library's own fuel: what takes more takes seconds, of which others wait for their grammars. And less
# than half of its items of a mask, which nobody can interrupt: as many as an `anyOf` needs whose rows just fit.
_LIMITS = llguidance.LLParserLimits(verbose_errors=False, initial_lexer_fuel=250_000, step_max_items=20_000)
MAX_RULES = 1000  # of EBNF: the library's translator takes time that grows with their square
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")  # nothing may follow, and the text may not end either
_NOT_ALLOWED = "doesn't satisfy the grammar"  # that is the token's fault, not the text's
_KNOWN_TEXTS, _KNOWN_LENGTH = 4096, 256  # of which the tokens are kept
_BASE_BYTES = 1 << 16
_BYTES_PER_CHARACTER = 64  # measured on schemas of many shapes; lexers grow as texts are matched
_GROUP = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*|\(')  # literals, sets, comments; brackets


class _Wrapper:
    """A vocabulary as the library wants it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        self.eos_token_id = end
        self.tokens = [b"\xff<[%d]>" % i if token is None else token for i, token in enumerate(vocabulary.tokens)]
        self.special_token_ids = [i for i, token in enumerate(vocabulary.tokens) if token is None]
        self._encode = vocabulary.encode
        self._known: dict[bytes | str, list[int]] = {}  # texts that must follow are few, and asked for again and again

    def __call__(self, text: bytes | str) -> list[int]:
        known = self._known.get(text)
        if known is None:
            known = self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
            if len(text) <= _KNOWN_LENGTH:
                if len(self._known) >= _KNOWN_TEXTS:
                    self._known.clear()
                self._known[text] = known
        return known


class GuidanceMatcher:
    """One text's matcher; `end` is the token with which the library says that a text may end."""

    def __init__(self, matcher: llguidance.LLMatcher, end: int) -> None:
        self.inner = matcher
        self.take: Callable[[int], bool] = matcher.consume_token  # asked for each token: without a call in between
        self.take_all: Callable[[list[int]], bool] = matcher.consume_tokens
        self._word, self._bit = end // WORD_BITS, np.uint32(1 << (end % WORD_BITS))

    def fill(self, row: np.ndarray) -> bool:
        self.inner.unsafe_compute_mask_ptr(address(row), row.nbytes)
        self.check(row)
        may_end = bool(row[self._word] & self._bit)
        if may_end:
            row[self._word] ^= self._bit
        return may_end

    def check(self, row: np.ndarray) -> None:
        """After a mask was computed: nothing may follow a dead end. Raises GrammarError for any other error."""
        if self.inner.is_error():
            problem = self.problem
            if problem not in _DEAD_ENDS:
                raise GrammarError(problem)
            row[:] = 0

    def accept(self, token: int) -> bool:
        return self.inner.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)

    @property
    def is_terminated(self) -> bool:
        return bool(self.inner.is_stopped())

    @property
    def problem(self) -> str | None:
        problem = self.inner.get_error().partition("\n")[0] if self.inner.is_error() else ""
        return None if _NOT_ALLOWED in problem else problem or None


class GuidanceGrammar:
    """A matcher that has seen nothing, of which each text gets a copy."""

    def __init__(self, matcher: llguidance.LLMatcher, end: int, nbytes: int) -> None:
        self._matcher = matcher
        self._end = end
        self.nbytes = nbytes

    def start(self) -> Matcher:
        return GuidanceMatcher(self._matcher.deep_copy(), self._end)


class Guidance:
    """The back end; see `grammar.Backend`."""

    places_decide = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end, self._words = end_of(vocabulary), vocabulary.words
        wrapper = llguidance.TokenizerWrapper(_Wrapper(vocabulary, self._end))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocabulary.width)

    def prepare(self) -> None:
        """Nothing is needed."""

    def build(self, spec: GrammarSpec) -> bytes:
        """Nothing that travels: `load` does the same again, of which is known by then that it is soon done. The
        library's limits leave out what takes minutes and memory by itself, as intersections of patterns do.
        """
        self.load(spec, b"").start().fill(np.zeros(self._words, np.uint32))
        return b""

    def load(self, spec: GrammarSpec, data: bytes) -> Grammar:
        matcher = llguidance.LLMatcher(self._tokenizer, _definition(spec), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_readable(matcher.get_error()))
        return GuidanceGrammar(matcher, self._end, _BASE_BYTES + _BYTES_PER_CHARACTER * len(spec.text))

    def fill_all(self, matchers: Sequence[Matcher], tokens: Sequence[int], bits: np.ndarray) -> Filled:
        known: list[GuidanceMatcher] = list(matchers)  # type: ignore[arg-type]
        place, stride, size = address(bits), bits.strides[0], bits.shape[1] * bits.itemsize
        dead, errors = [], {}
        for i, matcher, token in zip(range(len(known)), known, tokens, strict=True):
            inner = matcher.inner
            if token != NO_TOKEN and not inner.consume_token(token):
                errors[i] = refused(token, matcher)
                bits[i] = 0
            else:
                inner.unsafe_compute_mask_ptr(place, size)
                if inner.is_error():
                    try:
                        matcher.check(bits[i])
                        dead.append(i)
                    except GrammarError as error:
                        errors[i] = error
            place += stride
        return Filled(take_ends(bits, self._end), dead, errors)


make = Guidance


def _definition(spec: GrammarSpec) -> str:
    """The constraint in the library's own language. Raises GrammarError."""
    matcher = llguidance.LLMatcher
    if spec.kind == JSON:
        schema = json.loads(spec.text)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        schema.pop("x-guidance", None)  # would change how the library reads the schema
        return str(matcher.grammar_from_json_schema(schema, overrides=_json_options(spec.whitespace)))
    if spec.kind == REGEX:
        return str(matcher.grammar_from_regex(ascii_digits(spec.text)))
    if spec.kind == CHOICE:
        return str(matcher.grammar_from_lark("start: " + " | ".join(map(_literal, json.loads(spec.text)))))
    if spec.kind == GRAMMAR:
        return str(matcher.grammar_from_lark(_lark(spec.text)))
    return _structural_tag(json.loads(spec.text), spec.whitespace)


def _json_options(whitespace: str | None) -> Any:
    return {"whitespace_flexible": False} if whitespace == "" else {"whitespace_pattern": whitespace or WHITESPACE}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lark(text: str) -> str:
    """A grammar in Lark's language. EBNF, in which rules are written with "::=", is translated."""
    if "::=" not in text:
        return text
    if text.count("::=") > MAX_RULES:
        raise GrammarError(f"an EBNF grammar has at most {MAX_RULES} rules; Lark's language has no such limit")
    try:
        # The translator drops the brackets between two repetitions; it keeps those around two parts.
        return gbnf_to_lark(_GROUP.sub(lambda found: '("" ' if found.group() == "(" else found.group(), text))
    except RecursionError:
        raise GrammarError("the EBNF grammar is nested too deeply") from None
    except Exception as error:  # the library raises plain Exception
        raise GrammarError(f"the EBNF grammar cannot be read: {error}") from None


def _structural_tag(tag: object, whitespace: str | None) -> str:
    """Free text in which each trigger begins one of the tags: {"structures": [{begin, schema, end}], "triggers"}."""
    if not isinstance(tag, dict) or not isinstance(tag.get("structures"), list) or not tag["structures"]:
        raise GrammarError("a structural tag needs `structures`, a list of objects with begin, schema and end")
    triggers = tag.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("a structural tag needs `triggers`, a list of texts")
    order = {trigger: i for i, trigger in reversed(list(enumerate(triggers)))}
    lengths = sorted({len(trigger) for trigger in triggers})
    rules = []
    for i, item in enumerate(tag["structures"]):
        if not isinstance(item, dict) or not isinstance(item.get("begin"), str) or not isinstance(item.get("end"), str):
            raise GrammarError(f"structures[{i}] must have begin and end, which are texts")
        heads = (item["begin"][:length] for length in lengths if length <= len(item["begin"]))
        trigger = min((head for head in heads if head in order), key=order.__getitem__, default=None)
        if trigger is None:
            raise GrammarError(f"structures[{i}].begin starts with none of the triggers")
        schema = item.get("schema")
        if not isinstance(schema, dict):
            raise GrammarError(f"structures[{i}].schema must be a JSON schema")
        rest = item["begin"][len(trigger) :]
        parts = [
            _literal(rest) if rest else "",
            "%json " + json.dumps({**schema, "x-guidance": _json_options(whitespace)}),
        ]
        parts += [_literal(item["end"]) if item["end"] else ""]
        rules.append(
            f"trigger_{i}[lazy]: TEXT {_literal(trigger)}\ntag_{i}: trigger_{i} {' '.join(filter(None, parts))}"
        )
    names = " | ".join(f"tag_{i}" for i in range(len(rules)))
    return str(
        llguidance.LLMatcher.grammar_from_lark(
            f"%llguidance {{}}\nstart: ({names})* rest\nrest: TEXT\nTEXT: /(.|\\n)*/\n" + "\n".join(rules)
        )
    )


def _readable(error: str) -> str:
    """The library's message without the copy of the grammar that follows it."""
    if error.startswith("oneOf constraints are not supported"):
        return "oneOf whose branches may overlap is not supported; use anyOf, or tell them apart by a constant property"
    error = re.sub(r"^regex parse error:\n +(.*)\n[ ^]*\nerror: ", r"invalid pattern \1: ", error)  # within a schema
    error = re.sub(
        r"\(?in regex\)?: regex parse error:[\s\S]*?\nerror: |regex parse error:[\s\S]*?\nerror: ", ": ", error
    )
    error = re.sub(r"\n +\d+ \| [\s\S]*", "", re.sub(r"^at \d+\(\d+\): ", "", error))
    return " ".join(error.replace("Unimplemented keys: ", "not supported: ").split()).replace(" : ", ": ")
