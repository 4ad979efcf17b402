"""Small tokenizers of every kind, trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog!",
    "def f(x):\n    return x * 2  # doubled\n\tprint('tab')",
    "Grüße aus Köln, señor. Ça va? Привет, мир! こんにちは世界 你好，世界 안녕하세요 สวัสดี",
    "emoji 😀 👩‍👩‍👧‍👦 🇩🇪 and numbers 12345 3.14159",
    "it's we've don't  two  spaces   three\r\nline",
] * 8

SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]

NASTY = [
    "",
    " ",
    "   leading and trailing   ",
    "\n\n\t mixed \r\n whitespace",
    "The capital of France is",
    "naïve café — “quotes” … 日本語テキスト",
    "👩‍👩‍👧‍👦🇩🇪🏳️‍🌈 zero\u200bwidth \u202eright-to-left\u202c",
    "a" * 300,
    "<|im_start|>user\nhi<|im_end|>",
    "</s><s>[INST]<unk><0x0A>",
    "\x00\x01\x7f control \ufeff bom \ufffd",
    "ﬁ ligature Å Å e\u0301 é İ ß",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff \ue000",
    "▁▁ the mark itself ▁",
    "1234567890 0x1F 1e-9 I'm you're",
]


def byte_level(vocab_size: int = 600, add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback(strip: bool = True) -> Tokenizer:
    """As Llama 2 (with `strip`) or Gemma (without): SentencePiece marks, bytes for what the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    mark = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark]) if strip else mark
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    english = [line for line in CORPUS if line.isascii()]
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special + byte_tokens, show_progress=False)
    tokenizer.train_from_iterator(english, trainer)
    # Training marks the byte tokens as special, which Llama's are not: they belong to the model only.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<s>", "</s>", "<sep>"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    return tokenizer


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, **settings: object) -> Path:
    """A model folder that holds this tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
