"""lm-format-enforcer: parsers of characters, in Python. The model chooses the order of properties; masks are slow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

import numpy as np
from lmformatenforcer import (
    CharacterLevelParser,
    JsonSchemaParser,
    RegexParser,
    StringParser,
    TokenEnforcer,
    TokenEnforcerTokenizerData,
    UnionParser,
)
from lmformatenforcer.jsonschemaparser import NumberParsingState

from vllm.structured_output.grammar import Filled, Grammar, GrammarError, Matcher, end_of, fill_one_by_one
from vllm.structured_output.spec import CHOICE, JSON, REGEX, GrammarSpec, ascii_digits, unanchored
from vllm.structured_output.vocabulary import WORD_BITS, Vocabulary

_BYTES_PER_CHARACTER = 256


_characters_of_number = NumberParsingState.get_allowed_characters


def _without_exponent(state: NumberParsingState) -> str:
    """What may follow in a number. The library lets integers have exponents, but 1e-5 is none, and 1e999 not finite."""
    allowed = str(_characters_of_number(state))
    return allowed if state.allow_floating_point else allowed.replace("eE", "")


NumberParsingState.get_allowed_characters = _without_exponent  # the library makes its states itself


class LmfeMatcher:
    """One text: the tokens so far, and the library's memory of the states after them."""

    def __init__(self, enforcer: TokenEnforcer, end: int) -> None:
        self._enforcer = enforcer
        self._end = end
        self._tokens: list[int] = []

    def _allowed(self) -> list[int]:
        try:
            return list(self._enforcer.get_allowed_tokens(self._tokens).allowed_tokens)
        except Exception as error:  # the library raises plain Exception
            raise GrammarError(f"{type(error).__name__}: {error}") from None

    def fill(self, row: np.ndarray) -> bool:
        allowed = self._allowed()
        ids = np.array(allowed, np.int64)
        bits: np.ndarray = np.zeros(len(row) * WORD_BITS, np.uint8)
        bits[ids] = 1
        bits[self._end] = 0
        row[:] = np.packbits(bits, bitorder="little").view(np.uint32)
        # Where the library fails it says that the text ends, whatever the parser thinks.
        return self._end in allowed and bool(self._enforcer.prefix_states[tuple(self._tokens)].parser.can_end())

    def accept(self, token: int) -> bool:
        if token == self._end or token not in self._allowed():
            return False
        self._tokens.append(token)
        return True

    def take(self, token: int) -> bool:
        self._tokens.append(token)
        return True

    def take_all(self, tokens: list[int]) -> bool:
        self._tokens += tokens
        return True

    def rollback(self, count: int) -> None:
        if count:
            del self._tokens[-count:]

    @property
    def is_terminated(self) -> bool:
        return self._allowed() == [self._end]

    @property
    def problem(self) -> str | None:
        return None


class LmfeGrammar:
    """A parser, which is never changed: parsers make new ones as they read."""

    def __init__(self, parser: CharacterLevelParser, data: TokenEnforcerTokenizerData, end: int, nbytes: int) -> None:
        self._parser = parser
        self._data = data
        self._end = end
        self.nbytes = nbytes

    def start(self) -> Matcher:
        return LmfeMatcher(TokenEnforcer(self._data, self._parser), self._end)


class Lmfe:
    """The back end; see `grammar.Backend`."""

    places_decide = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end = end_of(vocabulary)
        # The library reads whole characters, and would let control characters into the strings of JSON.
        texts: dict[int, str] = {}
        for i, token in enumerate(vocabulary.tokens):
            if token is not None and min(token) >= 0x20:
                with contextlib.suppress(UnicodeDecodeError):
                    texts[i] = token.decode("utf-8")
        self._data = TokenEnforcerTokenizerData(
            # Every token is its own text, whatever comes before it.
            [(i, text, True) for i, text in texts.items()],
            lambda ids: "".join(texts[i] for i in ids),
            self._end,
            False,
            vocabulary.width,
        )

    def prepare(self) -> None:
        """Nothing is needed beyond the vocabulary's tree."""

    def build(self, spec: GrammarSpec) -> bytes:
        """Find out whether the library can read it in time; what it makes of it cannot be sent."""
        self.load(spec, b"").start().accept(self._end)
        return b""

    def load(self, spec: GrammarSpec, data: bytes) -> Grammar:
        try:
            parser = _parser(spec)
        except Exception as error:  # the library raises plain Exception
            raise GrammarError(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
        return LmfeGrammar(parser, self._data, self._end, _BYTES_PER_CHARACTER * len(spec.text) + (1 << 14))

    def fill_all(self, matchers: Sequence[Matcher], tokens: Sequence[int], bits: np.ndarray) -> Filled:
        return fill_one_by_one(matchers, tokens, bits)


make = Lmfe


def _parser(spec: GrammarSpec) -> CharacterLevelParser:
    if spec.kind == JSON:
        return JsonSchemaParser(json.loads(spec.text))
    if spec.kind == REGEX:
        return RegexParser(ascii_digits(unanchored(spec.text)))
    assert spec.kind == CHOICE
    return UnionParser([StringParser(choice) for choice in json.loads(spec.text)])
