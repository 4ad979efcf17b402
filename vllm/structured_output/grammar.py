"""The interface of a compiled grammar, which every back end has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.vocabulary import WORD_BITS, Vocabulary

NO_TOKEN = -1
_FIRST_WORDS = 64


class GrammarError(ValueError):
    """A constraint that cannot be compiled, with the reason. The request is at fault."""


class Matcher(Protocol):
    """Where one text stands in its grammar. Tokens are those of the grammar's vocabulary; nobody else uses it."""

    def fill(self, row: np.ndarray) -> bool:
        """Write which tokens may follow; whether the text may end here.

        row: uint32 [words], bit i of word i // 32 is token i. Tokens that end a text are not set.
        Raises GrammarError if the grammar has become too complex to go on.
        """

    def accept(self, token: int) -> bool:
        """Move on by one token; False, and nothing changes, if it is none that may follow."""

    def take(self, token: int) -> bool:
        """As `accept`, for a token that the last mask allowed. After False the matcher is of no more use."""

    def take_all(self, tokens: list[int]) -> bool:
        """`take` them one after the other."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens that were accepted."""

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete and nothing may follow."""

    @property
    def problem(self) -> str | None:
        """Why the library gave the text up, if it did: no token is to blame then."""


class Grammar(Protocol):
    """A compiled constraint, shared by all texts that have it. `nbytes`: about how much memory it holds."""

    nbytes: int

    def start(self) -> Matcher:
        """A matcher at the beginning of a text."""


class Filled(NamedTuple):
    """What `fill_all` found of several matchers, by their places: where the text may end, where nothing may follow, and
    which have failed.
    """

    may_end: list[int]
    dead: list[int]
    errors: dict[int, GrammarError]


class Backend(Protocol):
    """One library, for one vocabulary.

    Compiling may take very long or end the process, and so happens in a process that can be killed: `build` runs there,
    `load` here with what it returned.
    places_decide: a mask depends on nothing but where the text stands in its grammar (`positions.py`), and the newest
    token.
    """

    places_decide: bool

    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def prepare(self) -> None:
        """Make what every `build` needs; called once, in the process where they run."""

    def build(self, spec: GrammarSpec) -> bytes:
        """Compile. Raises GrammarError."""

    def load(self, spec: GrammarSpec, data: bytes) -> Grammar:
        """The grammar itself. Raises GrammarError."""

    def fill_all(self, matchers: Sequence[Matcher], tokens: Sequence[int], bits: np.ndarray) -> Filled:
        """`take` and then `fill` for several of this back end's matchers.

        tokens: what each is shown, which its last mask allowed, or NO_TOKEN.   bits: [matchers, words] uint32, whose
        rows are contiguous: the masks, each in its matcher's row.
        """


def refused(token: int, matcher: Matcher) -> GrammarError:
    """What is wrong with a request whose newest token its grammar does not allow."""
    return GrammarError(matcher.problem or f"Token {token} was sampled although the grammar does not allow it.")


def fill_one_by_one(matchers: Sequence[Matcher], tokens: Sequence[int], bits: np.ndarray) -> Filled:
    """`fill_all` for libraries that have no better way."""
    found = Filled([], [], {})
    for i, (matcher, token, row) in enumerate(zip(matchers, tokens, bits, strict=True)):
        try:
            if token != NO_TOKEN and not matcher.take(token):
                raise refused(token, matcher)
            if matcher.fill(row):
                found.may_end.append(i)
            if not row.any():
                found.dead.append(i)
        except GrammarError as error:
            found.errors[i] = error
    return found


def address(array: np.ndarray) -> int:
    """Where its numbers begin. (`array.ctypes` takes as long as a mask.)"""
    return int(array.__array_interface__["data"][0])


def empty_rows(bits: np.ndarray) -> list[int]:
    """The rows without a bit. Most have one among the first words."""
    found: list[int] = np.flatnonzero(~bits[:, :_FIRST_WORDS].any(1)).tolist()
    return [row for row in found if not bits[row].any()]


def take_ends(bits: np.ndarray, end: int) -> list[int]:
    """The rows in which the token `end` is set, by which a library says that a text may end; then it is set no more."""
    word, bit = end // WORD_BITS, np.uint32(1 << (end % WORD_BITS))
    column = bits[:, word]
    found: list[int] = (column & bit).nonzero()[0].tolist()
    if found:
        column &= ~bit
    return found


def end_of(vocabulary: Vocabulary) -> int:
    """The one token that stands for the end of a text inside a library: the first that ends one, else any special
    token. Raises GrammarError if there is none.
    """
    special = (i for i, token in enumerate(vocabulary.tokens) if token is None)
    end = next(chain(vocabulary.end_ids, special), None)
    if end is None:
        raise GrammarError("The tokenizer has no token that can end a text.")
    return end
