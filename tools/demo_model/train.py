"""Trains the demo model and its draft sibling from nothing: text, tokenizer, weights, Hugging Face folders.

``python -m tools.demo_model.train --out FOLDER`` makes both; see ``--help``. The text, its order and every random
number come from the seed; two runs with the same machine and libraries differ only where the device's sums do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.demo_model.card import write_card
from tools.demo_model.corpus import strings
from tools.demo_model.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer

MAX_LENGTH = 2048


@dataclass(frozen=True)
class Shape:
    """The size of one model."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    peak_lr: float


SHAPES = {"demo": Shape(256, 4, 384, 8, 2, 3e-3), "demo-draft": Shape(128, 2, 256, 4, 2, 5e-3)}


def config_of(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=True,
    )


def encode_shard(seed: int, characters: int, tokenizer_json: str, shard: int) -> bytes:
    """The token ids of one shard, as bytes of 16-bit numbers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_str(tokenizer_json)
    ids: list[int] = []
    texts = strings(seed, shard, characters)
    while batch := list(islice(texts, 1000)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            ids.extend(encoding.ids)
    return np.asarray(ids, dtype=np.uint16).tobytes()


def make_tokens(seed: int, megabytes: int, tokenizer: Tokenizer) -> torch.Tensor:
    """One stream of token ids: all shards, in order."""
    size = 2_000_000
    work = partial(encode_shard, seed, size, tokenizer.to_str())
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(work, range(max(1, megabytes * 1_000_000 // size))))
    return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=np.uint16) for part in parts]).astype(np.int32))


def batches(tokens: torch.Tensor, length: int, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """``[rows, length]`` token ids, without end; every epoch shifts the windows and shuffles them again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        shift = int(torch.randint(length, (1,), generator=generator))
        count = (len(tokens) - shift) // length
        if count < rows:
            raise ValueError(f"the text gives {count} windows of {length} tokens, but a batch needs {rows}")
        windows = tokens[shift : shift + count * length].view(count, length)
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - rows + 1, rows):
            yield windows[order[start : start + rows].to(tokens.device)].long()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine down to one hundredth."""
    warm = max(1, min(200, steps // 20))
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer_of(model: torch.nn.Module, peak: float, fused: bool) -> torch.optim.AdamW:
    """AdamW; norms have no weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=fused)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``[rows, heads, length, head_dim]``."""
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-right, left), dim=-1) * sin


def forward(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[rows, length, vocab]`` of whole windows: Llama without masks and caches, which compiles well."""
    config, length = model.config, ids.shape[1]
    size = config.head_dim
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=ids.device).float() / size)
    angles = torch.outer(torch.arange(length, device=ids.device).float(), rates).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    hidden = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        query, key, value = (
            part(normed).unflatten(-1, (-1, size)).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = (rotate(part, cos, sin).to(value.dtype) for part in (query, key))
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + attention.o_proj(found.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of every next token."""
    logits = forward(model, ids)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train_model(shape: Shape, tokens: torch.Tensor, args: argparse.Namespace, steps: int) -> LlamaForCausalLM:
    """A model trained on packed windows of the token stream."""
    torch.manual_seed(args.seed)
    device = tokens.device
    model = LlamaForCausalLM(config_of(shape)).to(device)
    compute_loss = torch.compile(loss_of) if args.compile else loss_of
    optimizer = optimizer_of(model, shape.peak_lr, device.type == "cuda")
    source = batches(tokens, args.length, args.batch_tokens // args.length, args.seed)
    started = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, shape.peak_lr)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compute_loss(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} seconds {time.perf_counter() - started:.1f}", flush=True)
    return model


def round_mantissa(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest bfloat16 numbers with this many bits (of seven) after the leading one.

    The files then compress to little more than half: the loss of the demo model grows by less than 0.001.
    """
    dropped = 23 - bits  # a float32 has 23 of them
    pattern = weight.float().view(torch.int32)
    return (((pattern + (1 << (dropped - 1))) >> dropped) << dropped).view(torch.float32).to(torch.bfloat16)


def save_model(
    model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path, bits: int, notes: dict[str, object]
) -> None:
    """Weights in bfloat16, configuration, tokenizer files and model card."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to("cpu").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(round_mantissa(weight, bits))
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=True, temperature=0.7, top_p=0.9
    )
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, MAX_LENGTH)
    write_card(folder, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets demo/ and demo-draft/")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=400, help="size of the generated text")
    parser.add_argument("--steps", type=int, default=5500, help="steps of the demo model")
    parser.add_argument("--draft-steps", type=int, default=4000, help="steps of the draft model")
    parser.add_argument("--batch-tokens", type=int, default=131072, help="tokens in a step")
    parser.add_argument("--length", type=int, default=MAX_LENGTH, help="tokens in a window")
    parser.add_argument("--mantissa-bits", type=int, default=3, choices=range(1, 8), help="precision of the weights")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--only", choices=list(SHAPES), help="train one of the two models")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")

    started = time.perf_counter()
    tokenizer = train_tokenizer(strings(args.seed, -1, 12_000_000 if args.megabytes >= 12 else 1_000_000))
    tokens = make_tokens(args.seed, args.megabytes, tokenizer)
    print(f"{len(tokens) / 1e6:.1f}M tokens after {time.perf_counter() - started:.1f} s", flush=True)
    tokens = tokens.to(args.device)
    for name, steps in (("demo", args.steps), ("demo-draft", args.draft_steps)):
        if args.only in (None, name):
            model = train_model(SHAPES[name], tokens, args, steps)
            notes = {
                "name": name,
                "steps": steps,
                "tokens": steps * args.batch_tokens,
                "options": f"--steps {args.steps} --draft-steps {args.draft_steps} --megabytes {args.megabytes}",
                "parameters": sum(p.numel() for p in model.parameters()),
            }
            save_model(model, tokenizer, args.out / name, args.mantissa_bits, notes)
            print(json.dumps(notes), flush=True)


if __name__ == "__main__":
    main()
