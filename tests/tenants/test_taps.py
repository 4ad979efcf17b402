"""Somebody who reads what layers in the middle of a model give for every token, as a drafter does, through the real
engine: chunks, cached prefixes and preemption included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.executor.configs import config_for
from tests.tenants.drive import core_of, greedy, run
from tests.tenants.workers import TappedWorker
from vllm.engine.core import EngineCore

COUNT, LAYERS = 9, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(2)
    config = Gemma2Config(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=7, max_position_embeddings=96,
        initializer_range=0.3, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    hf = Gemma2ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("gemma2")
    hf.save_pretrained(folder)
    return folder, hf


def core(folder: Path, **settings: Any) -> EngineCore:
    usual = {"block_size": 4, "num_gpu_blocks_override": 200, "max_num_seqs": 4, "skip_tokenizer_init": True}
    return core_of(config_for(folder, **{**usual, **settings}, worker_cls="tests.tenants.workers.TappedWorker"))


@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 1}, {}, {"max_num_batched_tokens": 7}, {"num_gpu_blocks_override": 34, "max_model_len": 64}],
    ids=["alone", "batched", "chunked", "preempted"],
)
def test_every_layer_but_the_last_says_what_it_gives_for_every_token(
    model: tuple[Path, Any], settings: dict[str, Any]
) -> None:
    folder, hf = model
    engine = core(folder, **settings)
    worker = engine.executor.worker  # type: ignore[attr-defined]
    assert isinstance(worker, TappedWorker) and worker.model.traits.taps == tuple(range(LAYERS - 1))
    generator = torch.Generator().manual_seed(5)
    texts = {str(i): torch.randint(2, 101, (n,), generator=generator).tolist() for i, n in enumerate((1, 5, 30, 13))}
    preempted = 0
    for again in (False, True):
        worker.tapped.clear()
        found = run(engine, [greedy(name, text, COUNT) for name, text in texts.items()])
        preempted += found.preemptions
        for name, text in texts.items():
            tokens = text + found.tokens[name]
            with torch.inference_mode():
                out = hf(torch.tensor([tokens[:-1]]), output_hidden_states=True)
            assert out.logits[0, len(text) - 1 :].argmax(-1).tolist() == found.tokens[name]
            seen = computed(worker.tapped, tokens[:-1])
            assert len(seen) == len(tokens) - 1 or again
            assert min(seen) >= (found.cached[name] if again and not found.preemptions else 0)
            for position, layers in seen.items():
                for layer, state in layers.items():
                    want = out.hidden_states[layer + 1][0, position]
                    torch.testing.assert_close(state, want, rtol=1e-4, atol=1e-4)
    assert (preempted > 0) == ("num_gpu_blocks_override" in settings)
    engine.shutdown()


def computed(tapped: dict[tuple[int, ...], dict[int, Tensor]], tokens: list[int]) -> dict[int, dict[int, Tensor]]:
    """By position, what layers gave for the tokens of one text; texts are told apart by all that is in front."""
    prefixes = {tuple(tokens[: i + 1]): i for i in range(len(tokens))}
    return {prefixes[key]: layers for key, layers in tapped.items() if key in prefixes}


def test_a_layer_that_cannot_be_read_is_named(model: tuple[Path, Any]) -> None:
    engine = core(model[0])
    engine.executor.worker.layers = (0, LAYERS - 1)  # type: ignore[attr-defined]
    engine.add_requests([greedy("a", [5, 6], 2)])
    ends = []
    while engine.has_unfinished():
        ends += engine.step()
    assert "layers [3] is not to be had, only that of [0, 1, 2]" in ends[-1].error
    engine.shutdown()
