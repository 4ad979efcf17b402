"""Trains the byte-level BPE tokenizer on the generated text and writes the tokenizer files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.demo_model.corpus import BOS, EOS, PAD, START, TEMPLATE

VOCAB_SIZE = 4096
SPECIAL = (PAD, BOS, EOS, START)  # ids 0, 1, 2, 3
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")

# Words with the space before them, single digits (so that sums can be learned), runs of signs, white space.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer that turns any bytes into tokens and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL]
        + [AddedToken(text, special=False, normalized=False) for text in MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(tokenizer.to_str())
    # tokenizers has no word for "added, but not special" while it trains; the file has.
    for token in content["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "add_bos_token": True,
        "additional_special_tokens": [START],
        "added_tokens_decoder": {
            str(token["id"]): {key: token[key] for key in token if key != "id"} for token in content["added_tokens"]
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": TEMPLATE,
    }
    for name, value in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", {**names, "additional_special_tokens": [START]}),
    ):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
