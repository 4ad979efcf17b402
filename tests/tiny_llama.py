"""A tiny random Llama with a tokenizer of its own, on disk, and an `LLM` that runs it: fixtures for several folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine import tokenizer_makers as make
from vllm import LLM

MAX_MODEL_LEN = 96
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_llama(folder: Path, *, extra_rows: int = 3, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """The model's vocabulary is a little larger than the tokenizer's, as real ones are."""
    tokenizer = make.byte_level(400)
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    make.save(folder, tokenizer, tokenizer_class="PreTrainedTokenizerFast", chat_template=TEMPLATE, **named)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + extra_rows,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # sharper distributions than a fresh model's
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "temperature": 0.5}))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def hf_model(model_folder) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


def make_llm(folder: Path, **options: object) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": 120, "block_size": 8}
    return LLM(str(folder), **{**defaults, "max_num_seqs": 32, "max_num_batched_tokens": 128, **options})


@pytest.fixture(scope="module")
def llm(model_folder) -> Iterator[LLM]:
    with make_llm(model_folder) as made:
        yield made


def assert_idle(llm: LLM) -> None:
    """No request is left, and every block is free."""
    report = llm.llm_engine.core.core.idle_report()
    assert report["requests"] == 0
    assert report["in_flight"] == 0
    assert report["blocks_free"] == report["blocks_total"]
    assert not llm.llm_engine.has_unfinished_requests()
