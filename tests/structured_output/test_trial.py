"""Grammars are tried before anybody waits for their masks."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.structured_output.excess import EXCESS_SECONDS, MASK_SECONDS
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.spec import GRAMMAR, JSON, GrammarSpec
from vllm.structured_output.trial import NUM_TOKENS, Tried, refuse_slow_masks
from vllm.structured_output.vocabulary import Vocabulary

WORDS = 4


class Grammar:
    """Any of three tokens, for as long as one likes or until `length`; masks take what `cost` says by tokens before."""

    nbytes = 0

    def __init__(self, cost=lambda length: 0.0, length: int = 1000) -> None:
        self.cost, self.length = cost, length
        self.now = 0.0
        self.taken: list[int] = []

    def start(self) -> Grammar:
        return self

    def fill(self, row: np.ndarray) -> bool:
        self.now += self.cost(len(self.taken))
        row[:] = 0
        if len(self.taken) < self.length:
            row[[0, 1, 3]] = 1 << 5, 1 << 31, 1
        return True

    def take(self, token: int) -> bool:
        self.taken.append(token)
        return True

    def try_out(self) -> None:
        refuse_slow_masks(self, WORDS, lambda: self.now)  # type: ignore[arg-type]


def test_a_text_is_followed_along_tokens_that_its_masks_allow() -> None:
    grammar = Grammar(lambda length: MASK_SECONDS)
    grammar.try_out()
    assert len(grammar.taken) == NUM_TOKENS and set(grammar.taken) == {5, 63, 96}


def test_a_text_that_ends_is_followed_no_further() -> None:
    grammar = Grammar(length=2)
    grammar.try_out()
    assert len(grammar.taken) == 2


def test_what_masks_take_beyond_what_they_may_is_added_up() -> None:
    each = EXCESS_SECONDS / (NUM_TOKENS - 1.5)
    Grammar(lambda length: MASK_SECONDS + (each if length < NUM_TOKENS - 2 else 0.0)).try_out()
    with pytest.raises(GrammarError, match=f"behind {NUM_TOKENS - 2} tokens it takes 0.1 s"):
        Grammar(lambda length: MASK_SECONDS + each).try_out()


def test_schemas_without_patterns_are_not_tried() -> None:
    class Library:
        def __init__(self) -> None:
            self.loaded = 0

        def build(self, spec: GrammarSpec) -> bytes:
            return b""

        def load(self, spec: GrammarSpec, data: bytes) -> Grammar:
            self.loaded += 1
            return Grammar(lambda length: 0.0)

    library = Library()
    tried = Tried(library, Vocabulary((b"a",) * 128, (), lambda text: []))  # type: ignore[arg-type]
    tried.build(GrammarSpec(JSON, '{"type": "string"}', "library"))
    assert library.loaded == 0
    tried.build(GrammarSpec(JSON, '{"type": "string", "pattern": "a"}', "library"))
    tried.build(GrammarSpec(GRAMMAR, "start: A", "library"))
    assert library.loaded == 2
