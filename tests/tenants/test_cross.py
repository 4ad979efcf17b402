"""Cross attention through the real engine: requests with encoders of unlike lengths, and without, in one batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.executor.configs import config_for
from tests.tenants.checkpoint import _attention, _rms, _rotated
from tests.tenants.drive import core_of, greedy, run
from vllm.model_executor.models import ModelRegistry
from vllm.step.kv_policy import KVKind

VOCAB, HIDDEN, HEADS, DIM, LONGEST, COUNT = 97, 24, 4, 6, 33, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.manual_seed(4)
    w = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "model.norm.weight": 1 + torch.rand(HIDDEN)}
    sizes = {"q": HEADS * DIM, "k": 2 * DIM, "v": 2 * DIM}
    for i in range(3):
        layer = f"model.layers.{i}."
        w[layer + "input_layernorm.weight"] = 1 + torch.rand(HIDDEN)
        if i == 1:
            w |= {layer + f"cross.{n}.weight": torch.randn(2 * DIM, HIDDEN) * 0.5 for n in "qkv"}
            w[layer + "cross.o.weight"] = torch.randn(HIDDEN, 2 * DIM)
            w[layer + "cross.table"] = torch.randn(LONGEST, HIDDEN)
            continue
        w[layer + "post_attention_layernorm.weight"] = 1 + torch.rand(HIDDEN)
        w |= {layer + f"self_attn.{n}_proj.weight": torch.randn(s, HIDDEN) * 0.3 for n, s in sizes.items()}
        w[layer + "self_attn.o_proj.weight"] = torch.randn(HIDDEN, HEADS * DIM) * 0.3
        for name, shape in {"gate": (37, HIDDEN), "up": (37, HIDDEN), "down": (HIDDEN, 37)}.items():
            w[layer + f"mlp.{name}_proj.weight"] = torch.randn(shape) * 0.3
    folder = tmp_path_factory.mktemp("quay")
    save_file(w, folder / "model.safetensors")
    config = {
        "architectures": ["QuayForCausalLM"], "model_type": "quay", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_hidden_layers": 3, "num_attention_heads": HEADS, "head_dim": DIM, "max_position_embeddings": 96,
        "torch_dtype": "float32", "encoder_length": LONGEST,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    before = dict(ModelRegistry._families)
    ModelRegistry.register_family("QuayForCausalLM", "tests.tenants.quay:QUAY")
    yield folder
    ModelRegistry._families = before


def said(folder: Path, prompt: list[int], encoder: int) -> list[int]:
    """Greedy tokens, by a loop over tokens."""
    w = load_file(folder / "model.safetensors")
    keys: dict[int, list[torch.Tensor]] = {0: [], 2: []}
    values: dict[int, list[torch.Tensor]] = {0: [], 2: []}
    tokens, position = list(prompt), 0
    while len(tokens) < len(prompt) + COUNT:
        x = w["model.embed_tokens.weight"][tokens[position]]
        for i in range(3):
            layer = f"model.layers.{i}."
            h = _rms(x, w[layer + "input_layernorm.weight"])
            if i == 1:
                f = w[layer + "cross.table"][:encoder]
                q, k, v = ((w[layer + f"cross.{n}.weight"] @ t.T).T for n, t in (("q", h[None]), ("k", f), ("v", f)))
                if encoder:
                    per_head = (t.view(-1, 2, DIM).transpose(0, 1) for t in (q, k, v))
                    out = F.scaled_dot_product_attention(*per_head).transpose(0, 1).reshape(-1)
                    x = x + w[layer + "cross.o.weight"] @ out
                continue
            q, k, v = ((w[layer + f"self_attn.{n}_proj.weight"] @ h).view(-1, DIM) for n in "qkv")
            keys[i].append(_rotated(k, position))
            values[i].append(v)
            out = _attention(_rotated(q, position), keys[i], values[i])
            x = x + w[layer + "self_attn.o_proj.weight"] @ out
            h = _rms(x, w[layer + "post_attention_layernorm.weight"])
            gate, up = (w[layer + f"mlp.{n}_proj.weight"] @ h for n in ("gate", "up"))
            x = x + w[layer + "mlp.down_proj.weight"] @ (F.silu(gate) * up)
        position += 1
        if position == len(tokens):
            logits = w["model.embed_tokens.weight"] @ _rms(x, w["model.norm.weight"])
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 7}, {"num_gpu_blocks_override": 44, "max_num_seqs": 4}],
    ids=["batched", "chunked", "preempted"],
)
def test_tokens_are_those_of_the_loop(folder: Path, settings: dict[str, Any]) -> None:
    usual = {"block_size": 4, "num_gpu_blocks_override": 200, "max_num_seqs": 6, "max_model_len": 64}
    engine = core_of(config_for(folder, **{**usual, **settings}, skip_tokenizer_init=True))
    policy = engine.executor.kv_layout.policy
    assert [g.kind for g in policy.groups] == [
        KVKind.FULL, KVKind.FULL, KVKind.CROSS,
    ]  # fmt: skip
    assert policy.max_encoder_tokens == LONGEST
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (20, 5, 31, 1)]
    # the same text under other encoders, which must not be taken for one another
    wanted = {
        f"{i}/{n}": greedy(f"{i}/{n}", text, COUNT, encoder_tokens=n, encoder_key=bytes([n]))
        for i, text in enumerate(texts)
        for n in (0, 3, LONGEST)
    }
    preempted = 0
    for _ in range(2):
        found = run(engine, list(wanted.values()))
        for name, request in wanted.items():
            assert found.tokens[name] == said(folder, request.prompt_token_ids, request.encoder_tokens), name
        preempted += found.preemptions
    assert (preempted > 0) == ("num_gpu_blocks_override" in settings)
    assert "num_gpu_blocks_override" in settings or found.cached["2/3"] == 28
    engine.shutdown()
