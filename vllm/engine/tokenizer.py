"""Loads a model's tokenizer, without importing transformers where tokenizer.json alone says everything."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.engine.token_streams import (
    BYTE_TOKEN,
    REPLACEMENT,
    ByteFallbackStream,
    ByteLevelStream,
    JoinStream,
    MetaspaceStream,
    PieceTable,
    TokenStream,
    WindowStream,
    byte_fallback_piece,
    byte_level_piece,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    import tokenizers

logger = init_logger(__name__)

# Of a text times the number of those it is paired with, where the tokenizer reads it anew for each.
MAX_REPEATED_CHARACTERS = 8 << 20

MISTRAL_CLASS = "MistralCommonBackend"
MAX_COMPOSED = 4
# `tokenizers` holds the interpreter's lock while it encodes or decodes one text, but not for a list of texts. Other
# threads may have to wait for as long as such a text takes: below a millisecond.
MAX_LOCKED_CHARACTERS = 1024
MAX_LOCKED_TOKENS = 1024


class Tokenizer(ABC):
    """Text to token ids and back, for one model.

    `special_tokens` maps names such as "eos_token" to token texts; `special_ids` are the tokens that
    skip_special_tokens leaves out, `added_ids` those and every other token outside the trained vocabulary.
    """

    def __init__(
        self,
        special_tokens: dict[str, str],
        special_ids: frozenset[int],
        added_ids: frozenset[int],
        max_token_id: int,
        vocab_size: int,
        chat_template: str | dict[str, str] | None,
    ) -> None:
        self.special_tokens = special_tokens
        self.special_ids = special_ids
        self.added_ids = added_ids
        self.max_token_id = max_token_id
        self.vocab_size = vocab_size
        self.chat_template = chat_template
        self.writes_chats = False

    @property
    @abstractmethod
    def hf_tokenizer(self) -> Any:
        """The transformers tokenizer of the same files, loaded when somebody asks for it."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...

    @abstractmethod
    def encode_pair(
        self, first: str, second: str | None, add_special_tokens: bool = True, most: int | None = None
    ) -> tuple[list[int], int | None]:
        """Token ids of one text or of two together, and the position from which they are the second's, None if the
        tokenizer makes no difference.

        most: cut the texts at their ends, the longer one first, until there are at most so many tokens, special ones
        included.
        """

    def encode_pairs(
        self, first: str, seconds: Sequence[str], add_special_tokens: bool = True, most: int | None = None
    ) -> Iterator[tuple[list[int], int | None]]:
        """`encode_pair` of one text and each of several.

        Raises ValueError if the first is long and would have to be tokenized again and again.
        """
        if len(first) * len(seconds) > MAX_REPEATED_CHARACTERS:
            raise ValueError(
                f"A text of {len(first)} characters cannot be paired with {len(seconds)} others at once: with this "
                f"tokenizer, their product may be at most {MAX_REPEATED_CHARACTERS}. Shorten it, or send fewer."
            )
        return (self.encode_pair(first, second, add_special_tokens, most) for second in seconds)

    @abstractmethod
    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str: ...

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """What one token stands for inside a text; bytes that are not a whole character give U+FFFD."""

    @property
    def max_characters_per_token(self) -> int | None:
        """No text has fewer tokens than its length divided by this; None if that cannot be said."""
        return None

    @abstractmethod
    def drop_caches(self) -> None:
        """Forget what only saves time: words that were tokenized before."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes | None:
        """What one token adds to a text that it continues; None for ids without a token, and if that is not known."""

    @abstractmethod
    def id_to_token(self, token_id: int) -> str | None: ...

    @abstractmethod
    def token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def get_vocab(self) -> dict[str, int]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        continue_final_message: bool,
    ) -> tuple[str, list[int]]:
        """The prompt for a conversation, text and ids, of a tokenizer that `writes_chats` itself."""
        raise NotImplementedError("This tokenizer has no rules for chats of its own; use its chat template.")

    @abstractmethod
    def _new_stream(self, skip_special_tokens: bool, spaces_between: bool) -> TokenStream: ...

    def stream(
        self,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> TokenStream:
        """A fresh incremental decoder for the tokens that follow `prompt_token_ids`."""
        stream = self._new_stream(skip_special_tokens, spaces_between_special_tokens)
        stream.seed(prompt_token_ids)
        return stream

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)


class FastTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` (`backend`), with an exact stream for each kind of decoder.

    `hf_tokenizer` is the transformers object it was taken from, or a function that loads it.   tells_pairs: models are
    told which text of a pair a token belongs to.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        chat_template: str | dict[str, str] | None,
        load_hf: Callable[[], Any],
        tells_pairs: bool = True,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        super().__init__(
            special_tokens,
            special_ids=frozenset(i for i, token in added.items() if token.special),
            added_ids=frozenset(added),
            # Vocabularies have no hole at the end: the count gives the largest id without building the dictionary.
            max_token_id=max([backend.get_vocab_size(with_added_tokens=False) - 1, *added]),
            vocab_size=backend.get_vocab_size(with_added_tokens=True),
            chat_template=chat_template,
        )
        self._backend = backend
        self._load_hf, self._tells_pairs = load_hf, tells_pairs
        self._pieces: dict[frozenset[int], PieceTable] = {}

    @cached_property
    def hf_tokenizer(self) -> Any:
        return self._load_hf()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > MAX_LOCKED_CHARACTERS:
            return self.encode_batch([text], add_special_tokens)[0]
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            _check_unicode(text)
            raise

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        try:
            # "fast" leaves out where in the text each token stands, which nobody needs here.
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                _check_unicode(text)
            raise
        return [encoding.ids for encoding in found]

    def encode_pair(
        self, first: str, second: str | None, add_special_tokens: bool = True, most: int | None = None
    ) -> tuple[list[int], int | None]:
        return self._joined(self._parts([first] if second is None else [first, second]), add_special_tokens, most)

    def encode_pairs(
        self, first: str, seconds: Sequence[str], add_special_tokens: bool = True, most: int | None = None
    ) -> Iterator[tuple[list[int], int | None]]:
        (one,) = self._parts([first])  # tokenized once: its work must not grow with the number of the others
        for second in seconds:
            yield self._joined([one, *self._parts([second])], add_special_tokens, most)

    def _parts(self, texts: list[str]) -> list[tokenizers.Encoding]:
        """Each text by itself, without special tokens."""
        try:
            return self._backend.encode_batch(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                _check_unicode(text)
            raise

    def _joined(
        self, parts: list[tokenizers.Encoding], add_special_tokens: bool, most: int | None
    ) -> tuple[list[int], int | None]:
        """One or two texts as one prompt, see `encode_pair`. What is too much is taken out here: the library keeps the
        pieces that it cuts off, and pairs each piece of one text with each of the other.
        """
        found = self._backend.post_process(parts[0], parts[1] if len(parts) == 2 else None, add_special_tokens)
        ids, types = found.ids, found.type_ids
        if most is not None and len(ids) > most:
            lengths = [len(part) for part in parts]
            left = _fitting(lengths, max(0, most - (len(ids) - sum(lengths))))
            keeps = (i < count for length, count in zip(lengths, left, strict=True) for i in range(length))
            kept = [i for i, added in enumerate(found.special_tokens_mask) if added or next(keeps)]
            ids, types = [ids[i] for i in kept], [types[i] for i in kept]
        return ids, types.index(1) if self._tells_pairs and 1 in types else None

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        if spaces_between_special_tokens or skip_special_tokens:
            if len(token_ids) > MAX_LOCKED_TOKENS:
                return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        stream = self.stream((), skip_special_tokens, spaces_between_special_tokens)
        return "".join([*map(stream.feed, token_ids), stream.finish()])

    def token_text(self, token_id: int) -> str:
        to_piece = self._to_piece
        if to_piece is None:
            return self.decode([token_id], skip_special_tokens=False)
        piece = self._piece_table(frozenset())[token_id]
        if isinstance(piece, int):
            return chr(piece) if piece < 0x80 else REPLACEMENT
        return piece.decode("utf-8", errors="replace") if isinstance(piece, bytes) else piece

    def drop_caches(self) -> None:
        clear = getattr(self._backend.model, "_clear_cache", None)  # of the library's newer versions
        if clear is not None:
            clear()

    def token_bytes(self, token_id: int) -> bytes | None:
        if self._backend.id_to_token(token_id) is None:
            return None
        if self._to_piece is None:
            return _whole(self._backend.decode([token_id], skip_special_tokens=False))
        piece = self._piece_table(frozenset())[token_id]
        if isinstance(piece, int):
            return bytes([piece])
        # Without a decoder, tokens are words: each that continues a text comes after a space.
        return piece if isinstance(piece, bytes) else (piece if self._decoder else " " + piece).encode("utf-8")

    def id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def max_characters_per_token(self) -> int | None:
        added = self._backend.get_added_tokens_decoder().values()
        if self._decoder is None or self._to_piece is None or any(token.lstrip or token.rstrip for token in added):
            return None  # text may vanish: between words, or around a token
        # Unicode normalisation composes at most this many characters into one.
        return MAX_COMPOSED * max(map(len, self.get_vocab()))

    @cached_property
    def _decoder(self) -> dict[str, Any] | None:
        """The decoder's own description: {"type": "ByteLevel", ...}, or None if the vocabulary has no decoder."""
        decoder = self._backend.decoder
        if decoder is None:
            return None
        state = json.loads(decoder.__getstate__())
        if not isinstance(state, dict):
            raise ValueError(f"The tokenizer's decoder describes itself as {state!r}, expected a JSON object.")
        return state

    @cached_property
    def _to_piece(self) -> Any:
        """How a token becomes a piece of text, for the decoders that have an exact stream; None for the others."""
        decoder = self._decoder
        if decoder is None:
            return str
        if decoder["type"] == "ByteLevel":
            return byte_level_piece
        if decoder["type"] == "Metaspace":
            mark = decoder["replacement"]
            return lambda token: token.replace(mark, " ")
        steps = _byte_fallback_steps(decoder)
        return None if steps is None else byte_fallback_piece(steps["replacements"])

    def _piece_table(self, skip: frozenset[int]) -> PieceTable:
        table = self._pieces.get(skip)
        if table is None:
            table = self._pieces[skip] = PieceTable(self.id_to_token, self._to_piece, skip)
        return table

    def _new_stream(self, skip_special_tokens: bool, spaces_between: bool) -> TokenStream:
        if self._to_piece is None:
            return WindowStream(lambda ids: self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        pieces = self._piece_table(self.special_ids if skip_special_tokens else frozenset())
        decoder = self._decoder
        if decoder is None:
            return JoinStream(pieces, glued=frozenset() if spaces_between else self.added_ids)
        if decoder["type"] == "ByteLevel":
            return ByteLevelStream(pieces)
        if decoder["type"] == "Metaspace":
            drop_first = decoder.get("prepend_scheme", "always") != "never"
            return MetaspaceStream(pieces, self.id_to_token, decoder["replacement"], drop_first)
        steps = _byte_fallback_steps(decoder)
        assert steps is not None
        return ByteFallbackStream(pieces, *steps["strip"])


class TransformersTokenizer(Tokenizer):
    """A tokenizer that only transformers can run: written in Python, with its own code, or mistral_common's."""

    def __init__(self, hf_tokenizer: Any) -> None:
        native = type(hf_tokenizer).__name__ == MISTRAL_CLASS
        added = hf_tokenizer.all_special_ids if native else hf_tokenizer.get_added_vocab().values()
        super().__init__(
            {name: str(token) for name, token in hf_tokenizer.special_tokens_map.items() if isinstance(token, str)},
            special_ids=frozenset(hf_tokenizer.all_special_ids),
            added_ids=frozenset(added),
            max_token_id=max(len(hf_tokenizer) - 1, *hf_tokenizer.get_vocab().values()),
            vocab_size=len(hf_tokenizer),
            chat_template=hf_tokenizer.chat_template,
        )
        self._hf_tokenizer = hf_tokenizer
        self.writes_chats = native

    @property
    def hf_tokenizer(self) -> Any:
        return self._hf_tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_pair(
        self, first: str, second: str | None, add_special_tokens: bool = True, most: int | None = None
    ) -> tuple[list[int], int | None]:
        found = self.hf_tokenizer(
            first, second, add_special_tokens=add_special_tokens, truncation=most is not None, max_length=most
        )
        types = list(found.get("token_type_ids", ()))
        return list(found["input_ids"]), types.index(1) if second is not None and 1 in types else None

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        # mistral_common puts no spaces between tokens, and does not know the option.
        more = {} if self.writes_chats else {"spaces_between_special_tokens": spaces_between_special_tokens}
        text: str = self.hf_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False, **more
        )
        return text

    def drop_caches(self) -> None:
        """There are none that could be reached."""

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes | None:
        token = self.id_to_token(token_id)
        if token is None:
            return None
        byte = BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        before = self._anchor  # a space at the very beginning would be lost
        text = self.decode([*before, token_id], skip_special_tokens=False)
        return _whole(text[len(self.decode(before, skip_special_tokens=False)) :])

    @cached_property
    def _anchor(self) -> list[int]:
        return self.encode("a", add_special_tokens=False)

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self.hf_tokenizer.convert_ids_to_tokens(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        return self.get_vocab().get(token)

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.hf_tokenizer.get_vocab()
        return vocab

    @property
    def eos_token_id(self) -> int | None:
        eos: int | None = self.hf_tokenizer.eos_token_id
        return eos

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        continue_final_message: bool,
    ) -> tuple[str, list[int]]:
        options = {"tools": tools, "continue_final_message": continue_final_message}
        ids = self.hf_tokenizer.apply_chat_template(list(messages), return_dict=False, **options)
        return self.decode(ids, skip_special_tokens=False), list(ids)

    def _new_stream(self, skip_special_tokens: bool, spaces_between: bool) -> TokenStream:
        return WindowStream(lambda ids: self.decode(ids, skip_special_tokens, spaces_between))


def _fitting(lengths: list[int], most: int) -> list[int]:
    """Lengths of one or two texts, cut to `most` together, the longer one first."""
    if sum(lengths) <= most:
        return lengths
    if len(lengths) == 1:
        return [most]
    short = min(*lengths, most // 2)
    return [short, most - short] if lengths[0] <= lengths[1] else [most - short, short]


def _byte_fallback_steps(decoder: dict[str, Any]) -> dict[str, Any] | None:
    """The parts of a Replace*, ByteFallback, Fuse, Strip? chain; None if the decoder is anything else."""
    if decoder["type"] != "Sequence":
        return None
    steps = list(decoder["decoders"])
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    if [step["type"] for step in steps[:2]] != ["ByteFallback", "Fuse"]:
        return None
    rest = steps[2:]
    if not rest:
        return {"replacements": replacements, "strip": (" ", 0)}
    if len(rest) == 1 and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        return {"replacements": replacements, "strip": (rest[0]["content"], rest[0]["start"])}
    return None


def _whole(text: str) -> bytes | None:
    """A token's text as bytes, None if some of its bytes are no whole character."""
    return None if REPLACEMENT in text else text.encode("utf-8")


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The prompt is not valid Unicode text: character {error.start} is a lone surrogate "
            f"(U+{ord(text[error.start]):04X}). Send UTF-8 text, or token ids."
        ) from None
