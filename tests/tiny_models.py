"""Tiny random models with a real tokenizer, built on the spot; the same for everybody who tests the whole engine."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

TEXT = [
    "The capital of France is Paris. The capital of Japan is Tokyo. Hello, my name is Ada.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 100; symbols: {}[]()<>!?.,:;-_=+*/\\ \"'`~@#$%^&|",
    "Zwölf große Boxkämpfer jagen Viktor quer über den Sylter Deich. 世界 こんにちは 🙂🚀",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path, vocab_size: int = 320) -> int:
    """Train a byte-level BPE tokenizer, save it in Hugging Face format, return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return tokenizer.get_vocab_size()


def save_llama(
    folder: Path, *, seed: int = 0, sharpness: float = 4.0, dtype: str = "float32", **overrides: Any
) -> Path:
    """A random Llama with odd sizes. `sharpness` scales the weights so that its next-token distribution is peaked, not
    flat.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab = save_tokenizer(folder)
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 48,
        "intermediate_size": 78,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(sharpness)
    model.save_pretrained(folder)
    return folder


@lru_cache(maxsize=8)
def hf_model(folder: Path) -> Any:
    """The Hugging Face model of a folder, in fp32, for comparison."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hf_greedy(folder: Path, prompt: list[int], max_tokens: int, eos: int | None = None) -> list[int]:
    """Greedy continuation by a plain loop without any cache."""
    import torch

    model = hf_model(folder)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == eos:
                break
    return tokens[len(prompt) :]
