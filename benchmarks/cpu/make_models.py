"""Models of known shapes with random weights: a Hugging Face folder each, and a GGUF file if llama.cpp has it.

    python -m benchmarks.cpu.make_models /tmp/models qwen2.5-0.5b opt-125m

Weights are bf16 in both. The tokenizer is byte-level BPE with as many tokens as the shape's own, so that reading it
takes as long. Needs torch, transformers and gguf. A model that is there already is left alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
from itertools import islice, product
from pathlib import Path
from typing import Any

QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> model type and what differs from its defaults
    "qwen2.5-0.5b": (
        "qwen2",
        {**QWEN, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        {**QWEN, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    ),
    "opt-125m": ("opt", {"vocab_size": 50272}),  # the defaults are this shape
    "tiny": (
        "qwen2",
        {**QWEN, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        | {"vocab_size": 2048},
    ),
}
GGUF_FILE = "model-bf16.gguf"
LAYER_NAMES = {  # Hugging Face -> GGUF, below model.layers.N and blk.N
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte: itself if printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(b if b in printable else next(spare)) for b in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens (the last one ends a text) and merges: bytes, pairs of bytes, pairs with a third byte."""
    letters = byte_letters()
    tokens, merges = list(letters), []
    parts = letters
    while len(tokens) < size - 1:
        new = list(islice(product(parts, letters), size - 1 - len(tokens)))
        merges += new
        parts = [a + b for a, b in new]
        tokens += parts
    return [*tokens, "<|endoftext|>"], merges


def write_tokenizer(folder: Path, tokens: list[str], merges: list[tuple[str, str]]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = tokens[-1]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end).save_pretrained(folder)


def write_folder(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    """Config, random weights, tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    end = changes["vocab_size"] - 1
    config = AutoConfig.for_model(kind, **changes, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder, *vocabulary(changes["vocab_size"]))


def write_gguf(folder: Path) -> None:
    """The folder's Qwen2 weights and tokenizer as one file; matrices in bf16, norms and biases in fp32."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    target = folder / GGUF_FILE
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    tokens, merges = vocabulary(config["vocab_size"])
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([normal] * (len(tokens) - 1) + [control])
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_eos_token_id(len(tokens) - 1)
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if tensor.ndim == 1:
                writer.add_tensor(gguf_name(name), tensor.to(torch.float32).numpy())
            else:
                raw = tensor.contiguous().view(torch.uint8).numpy()
                writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def gguf_name(name: str) -> str:
    """A Qwen2 weight's name in a GGUF file."""
    stem, _, end = name.removeprefix("model.").rpartition(".")
    if stem == "embed_tokens":
        return f"token_embd.{end}"
    if stem == "norm":
        return f"output_norm.{end}"
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{end}"


def make(root: Path, name: str) -> Path:
    """The folder of one model, made if it is not there."""
    kind, changes = SHAPES[name]
    folder = root / name
    if not folder.exists():
        partial = root / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_folder(partial, kind, changes)
        partial.rename(folder)
    if kind == "qwen2" and not (folder / GGUF_FILE).exists():
        write_gguf(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("names", nargs="+", choices=list(SHAPES))
    args = parser.parse_args()
    for name in args.names:
        print(make(args.root, name), flush=True)


if __name__ == "__main__":
    main()
