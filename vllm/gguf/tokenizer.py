"""From a GGUF file's vocabulary to tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

import numpy as np

from vllm.gguf.container import GgufFile


class Kind(IntEnum):
    """What a token is, as the format numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER = 4
    UNUSED = 5
    BYTE = 6


_SPACE = "\u2581"
_MERGE_ROOM = 1 << 25  # letters, and 16 for each, that merges of pieces may have: twice those of 256,000 tokens

_LETTERS_DIGITS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# How text is cut before merging, by the name that the file gives it.
SPLITS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (_CONTRACTIONS + _LETTERS_DIGITS % r"\p{N}{1,3}",),
    "llama3": (_CONTRACTIONS + _LETTERS_DIGITS % r"\p{N}{1,3}",),
    "qwen2": (_CONTRACTIONS + _LETTERS_DIGITS % r"\p{N}",),
    "deepseek-r1-qwen": (_CONTRACTIONS + _LETTERS_DIGITS % r"\p{N}",),
    "gpt-2": (_GPT2,),
    "default": (_GPT2,),
    "phi-2": (_GPT2,),
    "starcoder": (r"\p{N}", _GPT2),
    "smollm": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "command-r": (r"\p{N}", _GPT2),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
# These begin a text with their first token unless the file says otherwise.
_BEGIN_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "tekken"})


class Vocabulary:
    """A file's tokenizer settings, checked."""

    def __init__(self, gguf: GgufFile) -> None:
        self.file, self._all = gguf.file, gguf.metadata
        self.tokens = self._texts("tokens")
        self.types = self._numbers("token_type", np.full(len(self.tokens), Kind.NORMAL))
        self.kind = self._all.get("tokenizer.ggml.model")
        self.pre = self._all.get("tokenizer.ggml.pre", "default")

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self._all.get(f"tokenizer.ggml.{name}", default)
        return value if type(value) is kind else default

    def token(self, name: str) -> str | None:
        """The text of the token that the setting `{name}_token_id` names."""
        index = self._all.get(f"tokenizer.ggml.{name}_token_id")
        return self.tokens[index] if type(index) is int and 0 <= index < len(self.tokens) else None

    def scores(self) -> np.ndarray:
        return self._numbers("scores", np.zeros(len(self.tokens)))

    def merges(self) -> list[tuple[str, str]]:
        """The merges of a byte-level vocabulary, those of known tokens, in order."""
        known, pairs = set(self.tokens), []
        for merge in self._texts("merges"):
            left, _, right = merge.partition(" ")
            pairs.append((left, right))
        for left, right in pairs:
            if left not in known or right not in known or left + right not in known:
                raise ValueError(f"{self.file}: the merge of {left[:40]!r} and {right[:40]!r} is not of known tokens.")
        return pairs

    def _texts(self, name: str) -> list[str]:
        value = self._all.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ValueError(
                f"{self.file} has no list of texts 'tokenizer.ggml.{name}'. Name a tokenizer: tokenizer=..."
            )
        return value

    def _numbers(self, name: str, default: np.ndarray) -> np.ndarray:
        value = self._all.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, np.ndarray) or value.shape != (len(self.tokens),):
            raise ValueError(f"{self.file}: 'tokenizer.ggml.{name}' needs one number for each of the tokens.")
        return value


def tokenizer_files(gguf: GgufFile) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json by name; empty if the file has no tokenizer.

    Raises ValueError if it has one that cannot be read.
    """
    whole = gguf.metadata.get("tokenizer.huggingface.json")
    if "tokenizer.ggml.model" not in gguf.metadata:
        return {} if whole is None else {"tokenizer.json": _checked(whole, gguf)}
    vocabulary = Vocabulary(gguf)
    if whole is not None:
        return {
            "tokenizer.json": _checked(whole, gguf),
            "tokenizer_config.json": json.dumps(_settings(vocabulary, gguf)),
        }
    if vocabulary.kind not in ("llama", "gpt2"):
        raise ValueError(
            f"{gguf.file}: its tokenizer is of the kind {vocabulary.kind!r}; llama and gpt2 are supported. "
            "Name another: tokenizer=..."
        )
    make = _sentence_pieces if vocabulary.kind == "llama" else _byte_level
    document = make(vocabulary)
    bos, eos = vocabulary.token("bos"), vocabulary.token("eos")
    settings = _settings(vocabulary, gguf)
    adds_eos = vocabulary.get("add_eos_token", bool, False) and eos is not None
    document["post_processor"] = _template(
        vocabulary, bos if settings["add_bos_token"] else None, eos if adds_eos else None
    )
    return {"tokenizer.json": json.dumps(document), "tokenizer_config.json": json.dumps(settings)}


def _checked(text: Any, gguf: GgufFile) -> str:
    """A whole tokenizer.json that a file carries."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise ValueError(
            f"{gguf.file}: 'tokenizer.huggingface.json' holds no tokenizer. Name the original one: tokenizer=..."
        )
    return str(text)


def _settings(vocabulary: Vocabulary, gguf: GgufFile) -> dict[str, Any]:
    """The fields of tokenizer_config.json."""
    begins = vocabulary.kind == "llama" or vocabulary.pre in _BEGIN_BY_DEFAULT
    adds_bos = vocabulary.get("add_bos_token", bool, begins) and vocabulary.token("bos") is not None
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": adds_bos}
    for name, ours in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = vocabulary.token(ours)
        if token is not None:
            settings[f"{name}_token"] = token
    template = _chat_template(gguf)
    if template is not None:
        settings["chat_template"] = template
    return settings


def end_tokens(gguf: GgufFile) -> list[int]:
    """The ids that end a text or a turn."""
    names = ("eos", "eot", "eom")
    found = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return list(dict.fromkeys(index for index in found if type(index) is int and index >= 0))


def _chat_template(gguf: GgufFile) -> str | list[dict[str, str]] | None:
    default = gguf.metadata.get("tokenizer.chat_template")
    names = gguf.metadata.get("tokenizer.chat_templates")
    if not isinstance(names, list):
        return default if isinstance(default, str) else None
    templates = [{"name": "default", "template": default}] if isinstance(default, str) else []
    for name in names:
        template = gguf.metadata.get(f"tokenizer.chat_template.{name}")
        if isinstance(name, str) and isinstance(template, str):
            templates.append({"name": name, "template": template})
    return templates or None


def _added(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are found in text before it is cut."""
    return [
        {
            "id": index, "content": vocabulary.tokens[index], "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": int(vocabulary.types[index]) != Kind.USER,
        }
        for index in np.flatnonzero(np.isin(vocabulary.types, (Kind.CONTROL, Kind.USER, Kind.UNKNOWN))).tolist()
        if vocabulary.tokens[index]
    ]  # fmt: skip


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise ValueError(f"{vocabulary.file}: a token occurs twice in its vocabulary.")
    return ids


def _document(vocabulary: Vocabulary, **parts: Any) -> dict[str, Any]:
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(vocabulary)}
    return {**base, "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, **parts}


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    splits = SPLITS.get(vocabulary.pre if isinstance(vocabulary.pre, str) else "")
    if splits is None:
        raise ValueError(
            f"{vocabulary.file}: its tokenizer cuts text in the way {str(vocabulary.pre)[:40]!r}, which is not "
            f"supported: {', '.join(SPLITS)} are. Name the original tokenizer: tokenizer=..."
        )
    cut = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in splits]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _document(
        vocabulary,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cut, bytes_]},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model=_bpe(_ids(vocabulary), vocabulary.merges(), ignore_merges=vocabulary.pre in _BEGIN_BY_DEFAULT),
    )


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": ids, "merges": [list(pair) for pair in merges], **options,
    }  # fmt: skip


def _sentence_pieces(vocabulary: Vocabulary) -> dict[str, Any]:
    """A SentencePiece vocabulary as merges: any two pieces may join to a third, the one with the best score first."""
    ids, scores = _ids(vocabulary), vocabulary.scores()
    merges: list[tuple[float, int, str, str]] = []
    room = _MERGE_ROOM
    for token, index in ids.items():
        if int(vocabulary.types[index]) not in (Kind.NORMAL, Kind.USER) or len(token) > 512:
            continue
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in ids and right in ids:
                room -= len(token) + 16
                if room < 0:  # pieces of a long text, and theirs: their number is cubic
                    raise ValueError(
                        f"{vocabulary.file}: its vocabulary has too many pieces of pieces. Name the original "
                        "tokenizer: tokenizer=..."
                    )
                merges.append((-float(scores[index]), ids[left], left, right))
    merges.sort(key=lambda merge: (merge[0], merge[1]))
    prefix = vocabulary.get("add_space_prefix", bool, True)
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    pairs = [(left, right) for _, _, left, right in merges]
    return _document(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
        model=_bpe(ids, pairs, unk_token=vocabulary.token("unknown"), fuse_unk=True, byte_fallback=True),
    )


def _template(vocabulary: Vocabulary, bos: str | None, eos: str | None) -> dict[str, Any]:
    """What is put around a text."""
    ids = {token: vocabulary.tokens.index(token) for token in (bos, eos) if token is not None}

    def around(letter: str, kind: int) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = [{"Sequence": {"id": letter, "type_id": kind}}]
        if bos is not None:
            pieces.insert(0, {"SpecialToken": {"id": bos, "type_id": kind}})
        if eos is not None:
            pieces.append({"SpecialToken": {"id": eos, "type_id": kind}})
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in ids.items()},
    }
