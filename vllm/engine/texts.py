"""The one place that tokenizes the texts a request brings: within bounds of work, and beside the event loop if long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, TypeVar

from vllm.engine.tokenizer import Tokenizer
from vllm.exceptions import EngineDeadError, QueueOverflowError
from vllm.sampling_params import token_ids_of_words

_S = TypeVar("_S")
_T = TypeVar("_T")

# Texts up to this many characters are tokenized where they are; the hop to another thread costs more.
INLINE_CHARACTERS = 2048
# Work of this size (in characters, or what takes as long) may take a tenth of a second: it has a thread of its own.
LONG_CHARACTERS = 64 * 1024
MAX_LONG_WAITING = 64
# An answer of this many log probabilities takes as long to write as many others: such wait for each other only.
LONG_ENTRIES = 32 * 1024
# Texts up to this many characters per token of the context are tokenized without further thought.
PLAUSIBLE_CHARACTERS_PER_TOKEN = 16
# A cut through a text changes no more tokens than this on either side of it: the words around it.
CUT_TOKENS = 128
CUT_CHARACTERS = 256
_CHARACTERS_PER_KEPT_TOKEN = 8
_CHARACTERS_PER_CALL = 32  # a call of the tokenizer takes as long as so many characters


class TooManyTokensError(ValueError):
    """A text has more tokens than the model takes: `at_least` so many, of which not all were counted."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"The text has {at_least} or more tokens.")
        self.at_least = at_least


class Texts:
    """Tokenizes for one model. The work of a call is bounded by the tokens that can be used, not by the text.

    Any thread may call it; long texts are tokenized without the interpreter's lock (`Tokenizer.encode`).
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self._limit = max_model_len

    def prompt(self, text: str, add_special_tokens: bool = True, keep: int | None = None) -> list[int]:
        """The token ids of a prompt.

        keep: only the last so many are wanted, and nothing before them is looked at. Where a text of more than
        `CUT_CHARACTERS` characters without any space is cut, the tokens are those of the part that is looked at.

        Raises TooManyTokensError for a text that certainly has more tokens than the model takes, after looking at about
        as much of it as the model would take.
        """
        return self._whole(text, add_special_tokens) if keep is None else self._end(text, add_special_tokens, keep)

    def _whole(self, text: str, special: bool) -> list[int]:
        limit = self._limit
        size = limit * PLAUSIBLE_CHARACTERS_PER_TOKEN
        if len(text) > size:
            per_token = self.tokenizer.max_characters_per_token
            if per_token is not None and len(text) > limit * per_token:
                raise TooManyTokensError(len(text) // per_token)
        while len(text) > size:  # few texts are that long and still fit
            found = len(self.tokenizer.encode(text[:size], special)) - CUT_TOKENS
            if found > limit:
                raise TooManyTokensError(found)
            size *= 2
        return self.tokenizer.encode(text, special)

    def _end(self, text: str, special: bool, keep: int) -> list[int]:
        size = keep * _CHARACTERS_PER_KEPT_TOKEN + CUT_CHARACTERS
        while len(text) > size:
            ids = self.tokenizer.encode(text[_word_start(text, len(text) - size) :], special)
            if len(ids) >= keep + CUT_TOKENS:
                return ids[-keep:]
            size *= 4
        return self.tokenizer.encode(text, special)[-keep:]

    def pair(
        self, first: str, second: str | None, add_special_tokens: bool = True, keep: int | None = None
    ) -> tuple[list[int], int | None]:
        """The token ids of a text, or of two as one prompt, and where the second begins (`Tokenizer.encode_pair`).

        keep: with at most so many tokens, special ones included; what is too much is cut off at the texts' ends, and
        not looked at. Raises TooManyTokensError as `prompt` does.
        """
        bounded = None if second is None else self._bounded(second, keep)
        return self.tokenizer.encode_pair(self._bounded(first, keep), bounded, add_special_tokens, keep)

    def pairs(
        self, first: str, seconds: Sequence[str], add_special_tokens: bool = True, keep: int | None = None
    ) -> Iterator[tuple[list[int], int | None]]:
        """`pair` of one text and each of several. The first is looked at once, however many there are."""
        first = self._bounded(first, keep)
        return self.tokenizer.encode_pairs(first, [self._bounded(s, keep) for s in seconds], add_special_tokens, keep)

    def _bounded(self, text: str, keep: int | None) -> str:
        """What has to be looked at of a text. Raises TooManyTokensError for one that may not be cut and cannot fit."""
        if keep is not None:
            return self._beginning(text, keep)
        if len(text) > self._limit * PLAUSIBLE_CHARACTERS_PER_TOKEN:
            self._whole(text, False)
        return text

    def _beginning(self, text: str, keep: int) -> str:
        """As much of a text as certainly has `keep` tokens, if it has them."""
        size = keep * _CHARACTERS_PER_KEPT_TOKEN + CUT_CHARACTERS
        while len(text) > size:
            part = text[: _word_start(text, size)]
            if len(self.tokenizer.encode(part, False)) >= keep + CUT_TOKENS:
                return part
            size *= 4
        return text

    def bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of bad words, see `SamplingParams.update_from_tokenizer`."""
        return token_ids_of_words(self.tokenizer, words)


def characters_of_words(words: Sequence[str]) -> int:
    """What tokenizing bad words costs, in characters of one text."""
    return 2 * (sum(map(len, words)) + _CHARACTERS_PER_CALL * len(words))


def _word_start(text: str, position: int) -> int:
    """Where a word ends, before `position` and near it: most tokenizers never put a token across that place."""
    space = text.rfind(" ", max(0, position - CUT_CHARACTERS), position)
    return position if space < 0 else space


class Lanes:
    """Threads beside an event loop, on which short work never waits for long work, nor long work without bound."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="short-work")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-work")
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="large-answers")
        self._long_answers = ThreadPoolExecutor(1, thread_name_prefix="long-answers")
        self._long_waiting = 0
        self._is_closed = False
        self.num_writing = 0  # large answers

    async def write(self, function: Callable[..., _T], *args: Any, size: int = 0) -> _T:
        """`function(*args)`, which writes a large answer, or a large part of one. Long texts do not hold it up, nor do
        much longer answers.

        size: how many log probabilities there are to write.
        """
        lane = self._long_answers if size > LONG_ENTRIES else self._answers
        self.num_writing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(lane, function, *args)
        finally:
            self.num_writing -= 1

    async def join(self, pieces: Iterable[bytes], size: int) -> bytes:
        """The pieces of a large answer of `size` log probabilities as one, which `write` makes for as long as somebody
        waits for it. Raises EngineDeadError when it is still being made at the end (`close`).
        """
        is_left = False

        def joined() -> bytes:
            found = []
            for piece in pieces:
                if is_left or self._is_closed:
                    raise EngineDeadError("The server is shutting down.")
                found.append(piece)
            return b"".join(found)

        try:
            return await self.write(joined, size=size)
        except asyncio.CancelledError:
            is_left = True
            raise

    async def run(self, size: int, function: Callable[..., _T], *args: Any) -> _T:
        """`function(*args)`, on the event loop if its `size` is small. Raises what it raises, and QueueOverflowError if
        too much waits already.

        size: how many characters there are to tokenize, or what takes as long.
        """
        if size <= INLINE_CHARACTERS:
            return function(*args)
        loop = asyncio.get_running_loop()
        if size <= LONG_CHARACTERS:
            return await loop.run_in_executor(self._short, function, *args)
        if self._long_waiting >= MAX_LONG_WAITING:
            raise QueueOverflowError(f"{MAX_LONG_WAITING} long texts wait to be worked on. Try again later.")
        self._long_waiting += 1
        work = loop.run_in_executor(self._long, function, *args)
        work.add_done_callback(self._on_long_done)
        return await work

    async def run_each(self, size: int, function: Callable[[_S], _T], items: Iterable[_S]) -> list[_T]:
        """`run` of a function for each of some items, for as long as somebody waits for it."""
        is_left = False

        def work() -> list[_T]:
            return [function(item) for item in takewhile(lambda _: not is_left, items)]

        try:
            return await self.run(size, work)
        finally:
            is_left = True

    def _on_long_done(self, work: asyncio.Future[Any]) -> None:
        self._long_waiting -= 1

    def close(self) -> None:
        """Begin nothing more, and end what `join` has begun."""
        self._is_closed = True
        for pool in (self._short, self._long, self._answers, self._long_answers):
            pool.shutdown(wait=False, cancel_futures=True)
