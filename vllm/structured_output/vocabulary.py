"""What each token of a model adds to a text, as bytes: all that a grammar needs to know of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.engine.tokenizer import Tokenizer

WORD_BITS = 32


@dataclass(frozen=True)
class Vocabulary:
    """tokens: what a token adds, None for ids that no text can hold: special tokens, and rows of the model without a
    token; one entry per logit.   end_ids: tokens with which the model may end a text, None in `tokens`.
    encode: the tokens of a text.
    """

    tokens: tuple[bytes | None, ...]
    end_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    @property
    def width(self) -> int:
        return len(self.tokens)

    @property
    def words(self) -> int:
        """Words of 32 bits in a mask."""
        return -(-len(self.tokens) // WORD_BITS)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal tokens."""
        digest = sha256()
        for token in self.tokens:
            digest.update(b"-" if token is None else len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()


def vocabulary_of(tokenizer: Tokenizer, width: int) -> Vocabulary:
    """The first `width` tokens, as many as the model has logits."""
    end = tokenizer.eos_token_id
    special = tokenizer.special_ids if end is None else tokenizer.special_ids | {end}
    tokens = tuple(None if i in special else tokenizer.token_bytes(i) or None for i in range(width))
    return Vocabulary(
        tokens,
        () if end is None or end >= width else (end,),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
