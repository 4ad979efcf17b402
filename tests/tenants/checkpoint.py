"""A tiny Weir on disk, and what it says: a loop that keeps everything and shares no code with the engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

ARCHITECTURE, FAMILY = "WeirForCausalLM", "tests.tenants.weir:WEIR"
VOCAB, HIDDEN, HEADS, DIM, MLP = 97, 24, 4, 6, 37
KINDS = ("state", "attn", "state", "attn", "attn", "attn", "reader")
KV_HEADS, WINDOWS = {1: 2, 3: 4, 4: 1, 5: 2}, {4: 7, 5: 7}


def save(folder: Path, seed: int = 0) -> Path:
    """A checkpoint without a tokenizer."""
    torch.manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape) * 1.5 * shape[-1] ** -0.5

    weights = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "model.norm.weight": 1 + torch.rand(HIDDEN)}
    for i, kind in enumerate(KINDS):
        layer = f"model.layers.{i}."
        weights[layer + "input_layernorm.weight"] = 1 + torch.rand(HIDDEN)
        if kind == "state":
            weights[layer + "mixer.inner.weight"] = matrix(3 * HIDDEN, HIDDEN)
            weights[layer + "mixer.out.weight"] = matrix(HIDDEN, HIDDEN)
            weights[layer + "mixer.kernel"] = torch.randn(3, HIDDEN)
        elif kind == "reader":
            weights[layer + "reader.q.weight"] = matrix(HEADS * DIM, HIDDEN)
            weights[layer + "reader.o.weight"] = matrix(HIDDEN, HEADS * DIM)
        else:
            weights[layer + "post_attention_layernorm.weight"] = 1 + torch.rand(HIDDEN)
            weights[layer + "self_attn.q_proj.weight"] = matrix(HEADS * DIM, HIDDEN)
            for name in ("k", "v"):
                weights[layer + f"self_attn.{name}_proj.weight"] = matrix(KV_HEADS[i] * DIM, HIDDEN)
            weights[layer + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * DIM)
            for name, shape in {"gate": (MLP, HIDDEN), "up": (MLP, HIDDEN), "down": (HIDDEN, MLP)}.items():
                weights[layer + f"mlp.{name}_proj.weight"] = matrix(*shape)
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "weir",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(KINDS),
        "num_attention_heads": HEADS,
        "head_dim": DIM,
        "intermediate_size": MLP,
        "window_kv_heads": [KV_HEADS[i] for i in WINDOWS],
        "max_position_embeddings": 160,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Oracle:
    """The model, token by token: every key and every state of a sequence in plain lists."""

    def __init__(self, folder: Path) -> None:
        self.weights = load_file(folder / "model.safetensors")

    def logits(self, tokens: list[int]) -> Tensor:
        """[tokens, vocabulary]."""
        w = self.weights
        keys: dict[int, list[Tensor]] = {i: [] for i in range(len(KINDS))}
        values: dict[int, list[Tensor]] = {i: [] for i in range(len(KINDS))}
        states = {i: torch.zeros(HIDDEN) for i in range(len(KINDS))}
        seen: dict[int, list[Tensor]] = {i: [torch.zeros(HIDDEN)] * 2 for i in range(len(KINDS))}
        out = []
        for position, token in enumerate(tokens):
            x = w["model.embed_tokens.weight"][token]
            for i, kind in enumerate(KINDS):
                layer = f"model.layers.{i}."

                def product(name: str, x: Tensor, layer: str = layer) -> Tensor:
                    return w[layer + name + ".weight"] @ x

                h = _rms(x, w[layer + "input_layernorm.weight"])
                if kind == "state":
                    u, gate, forget = product("mixer.inner", h).chunk(3)
                    seen[i].append(u)
                    k = w[layer + "mixer.kernel"]
                    mixed = k[0] * u + k[1] * seen[i][-2] + k[2] * seen[i][-3]
                    f = forget.sigmoid()
                    states[i] = f * states[i] + (1 - f) * mixed
                    x = x + product("mixer.out", states[i] * F.silu(gate))
                    continue
                if kind == "reader":
                    q = product("reader.q", h).view(HEADS, DIM)
                    x = x + product("reader.o", _attention(q, keys[1], values[1]))
                    continue
                q = _rotated(product("self_attn.q_proj", h).view(HEADS, DIM), position)
                keys[i].append(_rotated(product("self_attn.k_proj", h).view(-1, DIM), position))
                values[i].append(product("self_attn.v_proj", h).view(-1, DIM))
                window = WINDOWS.get(i, len(tokens))
                x = x + product("self_attn.o_proj", _attention(q, keys[i][-window:], values[i][-window:]))
                h = _rms(x, w[layer + "post_attention_layernorm.weight"])
                x = x + product("mlp.down_proj", F.silu(product("mlp.gate_proj", h)) * product("mlp.up_proj", h))
            out.append(w["model.embed_tokens.weight"] @ _rms(x, w["model.norm.weight"]))
        return torch.stack(out)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean() + 1e-5) * weight


def _rotated(heads: Tensor, position: int) -> Tensor:
    dim = heads.shape[-1]
    angle = position * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = torch.cat([angle.cos()] * 2), torch.cat([angle.sin()] * 2)
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def _attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    k, v = torch.stack(keys), torch.stack(values)
    repeat = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("hd,thd->ht", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v).reshape(-1)
