"""Turns a growing list of token ids into text, token by token, exactly as one decode of the whole list would.

A `Tokenizer` picks one stream class for its decoder. The concatenation of everything a stream returns from `feed` and
`finish` equals the decode of prompt and output together, minus the text of the prompt. Each `feed` costs O(1).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# How many trailing prompt tokens can still influence the first output token: no character has more bytes than these.
SEED_TOKENS = 16
# A run of byte tokens is rendered as a whole (see ByteFallbackStream). Beyond this many bytes its finished characters
# are let go, so that a text written entirely in byte tokens still streams.
MAX_HELD_BYTES = 16


class TokenStream(Protocol):
    def seed(self, prompt_token_ids: Sequence[int]) -> None:
        """Take note of the prompt, whose text is not returned. Call once, before the first `feed`."""

    def feed(self, token_id: int) -> str:
        """The text that is certain now and was not before."""

    def peek(self) -> str:
        """Text that is complete but may still be changed by the next token; `feed` or `finish` returns it later."""

    def finish(self) -> str:
        """What is left; incomplete characters become U+FFFD."""


def _byte_of_character() -> dict[str, int]:
    """The GPT-2 alphabet: printable bytes stand for themselves, the others are moved to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(moved)})
    return table


BYTE_OF_CHARACTER = _byte_of_character()


class PieceTable(dict[int, "str | bytes | int"]):
    """Token id -> what it contributes, computed on first use. Ids in `skip`, and unknown ids, contribute nothing."""

    def __init__(
        self,
        id_to_token: Callable[[int], str | None],
        to_piece: Callable[[str], str | bytes | int],
        skip: frozenset[int],
    ) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        self._to_piece = to_piece
        self._skip = skip

    def __missing__(self, token_id: int) -> str | bytes | int:
        token = None if token_id in self._skip else self._id_to_token(token_id)
        piece = "" if token is None else self._to_piece(token)
        self[token_id] = piece
        return piece

    def contributes(self, token_id: int) -> bool:
        return self[token_id] != ""


def byte_level_piece(token: str) -> str | bytes:
    """A token of a byte-level vocabulary as text, or as bytes if it is not whole characters."""
    try:
        raw = bytes(BYTE_OF_CHARACTER[c] for c in token)
    except KeyError:  # added tokens may hold characters outside the alphabet; they stand for themselves
        return token
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def byte_fallback_piece(replacements: Iterable[tuple[str, str]]) -> Callable[[str], str | int]:
    """Pieces of a vocabulary with `<0xE4>` tokens: that byte for those, else the token after the replacements."""
    pairs = tuple(replacements)

    def to_piece(token: str) -> str | int:
        for pattern, content in pairs:
            token = token.replace(pattern, content)
        byte = BYTE_TOKEN.fullmatch(token)
        return int(byte[1], 16) if byte else token

    return to_piece


class ByteLevelStream:
    """GPT-2 style vocabularies: tokens are bytes; text is their UTF-8 decoding."""

    __slots__ = ("_decoder", "_dirty", "_pieces", "_prompt_bytes_open")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._dirty = False  # bytes of an unfinished character are held
        self._prompt_bytes_open = False  # and they came from the prompt

    def seed(self, prompt_token_ids: Sequence[int]) -> None:
        for token_id in prompt_token_ids[-SEED_TOKENS:]:
            self.feed(token_id)
        self._prompt_bytes_open = self._dirty

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if not self._dirty and type(piece) is str:
            return piece
        raw = piece.encode("utf-8") if isinstance(piece, str) else piece
        assert isinstance(raw, bytes)
        text = self._decoder.decode(raw)
        self._dirty = bool(self._decoder.getstate()[0])
        return self._without_prompt_damage(text)

    def _without_prompt_damage(self, text: str) -> str:
        """A character that the prompt left broken belongs to the prompt's text, unless the output completes it."""
        if self._prompt_bytes_open and text:
            self._prompt_bytes_open = False
            return text.removeprefix(REPLACEMENT)
        return text

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        if not self._dirty:
            return ""
        self._dirty = False
        return self._without_prompt_damage(self._decoder.decode(b"", final=True))


class ByteFallbackStream:
    """SentencePiece style vocabularies with byte tokens, whose decoder is Replace, ByteFallback, Fuse and maybe Strip.

    A run of neighbouring byte tokens is text if all of it is valid UTF-8, else every byte of it is one U+FFFD. So a
    run is held until it ends; its text so far is visible through `peek`. The first `strip` characters of the whole text
    are dropped if they are `strip_character`.
    """

    __slots__ = ("_pieces", "_run", "_strip_character", "_strip_left")

    def __init__(self, pieces: PieceTable, strip_character: str = " ", strip: int = 0) -> None:
        self._pieces = pieces
        self._strip_character = strip_character
        self._strip_left = strip
        self._run = bytearray()

    def seed(self, prompt_token_ids: Sequence[int]) -> None:
        tail = prompt_token_ids[-SEED_TOKENS:]
        before = islice(prompt_token_ids, len(prompt_token_ids) - len(tail))
        if any(self._pieces.contributes(t) for t in before):
            self._strip_left = 0
        for token_id in tail:
            self.feed(token_id)
        if self._run:
            # Whole characters of an open run are the prompt's; an unfinished one may be completed by the output.
            self._strip_left = 0
            unfinished = self._unfinished_from()
            self._run = self._run[len(self._run) if unfinished is None else unfinished :]

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, int):
            self._run.append(piece)
            return self._release_long_run() if len(self._run) > MAX_HELD_BYTES else ""
        assert isinstance(piece, str)
        if self._run and piece:
            piece = self._end_run() + piece
        return self._strip(piece) if self._strip_left else piece

    def peek(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            return ""
        return text[self._strip_count(text) :]

    def finish(self) -> str:
        return self._strip(self._end_run()) if self._run else ""

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _unfinished_from(self) -> int | None:
        """Where the last, unfinished character of a run starts that is valid up to there; None if it is invalid."""
        try:
            self._run.decode("utf-8")
        except UnicodeDecodeError as error:
            return error.start if error.reason == "unexpected end of data" else None
        return len(self._run)

    def _release_long_run(self) -> str:
        # Only the last bytes decide, and a damaged run is kept until it ends: look at it once per 16 bytes.
        if len(self._run) % MAX_HELD_BYTES != 1:
            return ""
        end = self._unfinished_from()
        if end is None:
            return ""
        text = self._run[:end].decode("utf-8")
        self._run = self._run[end:]
        return self._strip(text)

    def _strip_count(self, text: str) -> int:
        count = 0
        while count < min(self._strip_left, len(text)) and text[count] == self._strip_character:
            count += 1
        return count

    def _strip(self, text: str) -> str:
        if not text:
            return text
        count = self._strip_count(text)
        # Anything that stays ends the stripping; a text that vanished entirely leaves the rest of it to the next.
        self._strip_left = self._strip_left - count if count == len(text) else 0
        return text[count:]


class MetaspaceStream:
    """SentencePiece style vocabularies without byte tokens: a mark stands for a space; the first one is dropped."""

    __slots__ = ("_drop_first", "_id_to_token", "_mark", "_pieces", "_started")

    def __init__(
        self, pieces: PieceTable, id_to_token: Callable[[int], str | None], mark: str, drop_first: bool
    ) -> None:
        self._pieces = pieces
        self._id_to_token = id_to_token
        self._mark = mark
        self._drop_first = drop_first
        self._started = False

    def seed(self, prompt_token_ids: Sequence[int]) -> None:
        self._started = any(self._pieces.contributes(t) for t in prompt_token_ids)

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        assert isinstance(piece, str)
        if self._started or not piece:
            return piece
        self._started = True
        return (self._id_to_token(token_id) or "").replace(self._mark, "") if self._drop_first else piece

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        return ""


class JoinStream:
    """Vocabularies without a decoder: every token is a word, and words are joined by a space.

    `glued` are the tokens between two of which no space is put (spaces_between_special_tokens=False).
    """

    __slots__ = ("_glued", "_pieces", "_started", "_was_glued")

    def __init__(self, pieces: PieceTable, glued: frozenset[int]) -> None:
        self._pieces = pieces
        self._glued = glued
        self._started = False
        self._was_glued = False

    def seed(self, prompt_token_ids: Sequence[int]) -> None:
        for token_id in reversed(prompt_token_ids):
            if self._pieces.contributes(token_id):
                self._started = True
                self._was_glued = token_id in self._glued
                return

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        assert isinstance(piece, str)
        if not piece:
            return ""
        glued = token_id in self._glued
        space = " " if self._started and not (glued and self._was_glued) else ""
        self._started = True
        self._was_glued = glued
        return space + piece

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        return ""


class WindowStream:
    """Any other tokenizer: decode a window of the last tokens with and without the new one, return the difference.

    Exact where a token's text depends only on its near neighbours, which holds for every known tokenizer.
    """

    __slots__ = ("_decode", "_emitted", "_window")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._emitted = 0  # tokens of the window whose text was returned

    def seed(self, prompt_token_ids: Sequence[int]) -> None:
        self._window = list(prompt_token_ids[-SEED_TOKENS:])
        self._emitted = len(self._window)

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        unfinished = text.endswith(REPLACEMENT) and len(self._window) - self._emitted < SEED_TOKENS
        return "" if unfinished or not text else self._advance(text)

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._emitted])
        return self._decode(self._window)[len(before) :]

    def _advance(self, text: str) -> str:
        # The tokens just emitted stay as the context of the next.
        del self._window[: self._emitted]
        self._emitted = len(self._window)
        return text

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        return self._advance(self._new_text()) if self._emitted < len(self._window) else ""
