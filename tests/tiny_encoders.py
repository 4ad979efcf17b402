"""Tiny random encoders with a WordPiece tokenizer, on disk: an embedder, and one that scores pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny_models import CHAT_TEMPLATE, TEXT


def save_wordpiece(folder: Path, template: bool = False) -> int:
    """Train a tokenizer that writes [CLS] a [SEP] b [SEP] as BERT's does; its size."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
    }
    settings |= {"sep_token": "[SEP]", "unk_token": "[UNK]", "chat_template": CHAT_TEMPLATE if template else None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def save_bert(folder: Path, *, classes: int = 0, template: bool = False, **config: Any) -> Any:
    """A random BERT, with a head for so many classes if it has any; the transformers model."""
    import torch
    import transformers as hf

    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 70}
    options = {**sizes, "vocab_size": save_wordpiece(folder, template), "max_position_embeddings": 96, **config}
    torch.manual_seed(0)
    if classes:
        model: Any = hf.BertForSequenceClassification(hf.BertConfig(**options, num_labels=classes))
    else:
        model = hf.BertModel(hf.BertConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


def save_sentence_files(folder: Path, mode: str, *, normalize: bool = True, length: int = 32, **dense: Any) -> None:
    """The files by which sentence-transformers says how a model pools. dense: the config of a dense layer."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", *(["2_Dense"] if dense else []), *([f"{len(kinds) - 1}_Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    chosen = {f"pooling_mode_{name}": name.startswith(mode) and name != "mean_sqrt_len_tokens" for name in names}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **chosen}))
    if dense:
        (folder / "2_Dense").mkdir(exist_ok=True)
        (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
