"""Following a text of a new grammar for some tokens, to find out what its masks take before anybody waits for them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from vllm.structured_output.excess import EXCESS_SECONDS, MASK_SECONDS
from vllm.structured_output.grammar import Backend, Grammar, GrammarError
from vllm.structured_output.spec import CHOICE, JSON, GrammarSpec
from vllm.structured_output.vocabulary import Vocabulary

NUM_TOKENS = 32


class Tried:
    """A back end that tries what it has compiled. Of its interface this has what the process that compiles uses."""

    def __init__(self, backend: Backend, vocabulary: Vocabulary) -> None:
        self._backend, self._words = backend, vocabulary.words

    def prepare(self) -> None:
        """As of `Backend`."""
        self._backend.prepare()

    def build(self, spec: GrammarSpec) -> bytes:
        """As of `Backend`; raises GrammarError for slow masks, too, which choices and schemas without patterns have
        not."""
        data = self._backend.build(spec)
        if spec.kind != CHOICE and (spec.kind != JSON or '"pattern' in spec.text):
            refuse_slow_masks(self._backend.load(spec, data), self._words)
        return data


def refuse_slow_masks(grammar: Grammar, words: int, clock: Callable[[], float] = time.thread_time) -> None:
    """Follow a random text. Raises GrammarError where its masks take so long that requests would be ended.

    words: of a mask.
    """
    matcher = grammar.start()
    row: np.ndarray = np.zeros(words, np.uint32)
    choices, excess = random.Random(0), 0.0
    for length in range(NUM_TOKENS):
        begun = clock()
        matcher.fill(row)
        seconds = clock() - begun
        excess += max(0.0, seconds - MASK_SECONDS)
        if excess > EXCESS_SECONDS:
            raise GrammarError(
                f"behind {length} tokens it takes {seconds:.1f} s to say which may follow; a grammar by which a text "
                "can be read in fewer ways takes less"
            )
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed) or not matcher.take(int(choices.choice(allowed))):
            return
