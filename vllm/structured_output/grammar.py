"""The interface of a compiled grammar, which every back end has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.vocabulary import WORD_BITS, Vocabulary


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

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens that were accepted."""

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete and nothing may follow."""

    def forced(self) -> int | None:
        """The one token that may follow, where the text may not end and the library knows it without a mask."""


class Grammar(Protocol):
    """A compiled constraint, shared by all texts that have it. `nbytes`: about how much memory it holds."""

    nbytes: int

    def start(self) -> Matcher:
        """A matcher at the beginning of a text."""


class Filled(NamedTuple):
    """What `fill` found of several matchers. may_end: [matchers] bool.   errors: by their places."""

    may_end: np.ndarray
    errors: dict[int, GrammarError]


class Backend(Protocol):
    """One library, for one vocabulary.

    isolated: compiling may take very long or end the process, and so happens in a process that can be killed: `build`
    runs there, `load` here with what it returned. Otherwise `load` is called with b"".
    """

    isolated: bool

    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def build(self, spec: GrammarSpec) -> bytes:
        """Compile. Raises GrammarError."""

    def load(self, spec: GrammarSpec, data: bytes) -> Grammar:
        """The grammar itself. Raises GrammarError."""

    def fill_all(self, matchers: Sequence[Matcher], bits: np.ndarray, rows: Sequence[int]) -> Filled:
        """`fill` for several of this back end's matchers, each into its row of `bits` [n, words] uint32, contiguous."""


def fill_one_by_one(matchers: Sequence[Matcher], bits: np.ndarray, rows: Sequence[int]) -> Filled:
    """`fill_all` for libraries that have no better way."""
    found = Filled(np.zeros(len(matchers), bool), {})
    for i, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
        try:
            found.may_end[i] = matcher.fill(bits[row])
        except GrammarError as error:
            found.errors[i] = error
    return found


def take_ends(bits: np.ndarray, rows: Sequence[int], end: int) -> np.ndarray:
    """Whether the token `end`, by which a library says that a text may end, is set in each of `rows`; it is no more
    afterwards.
    """
    word, bit = end // WORD_BITS, np.uint32(1 << (end % WORD_BITS))
    column = bits[:, word]
    if len(rows) == len(bits):
        found: np.ndarray = (column & bit) != 0
        column &= ~bit
        return found if list(rows) == list(range(len(bits))) else found[rows]
    found = (column[rows] & bit) != 0
    column[rows] &= ~bit
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
