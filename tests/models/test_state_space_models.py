"""Mamba, Falcon-Mamba, Mamba 2 and Jamba through the whole engine: greedy tokens are Hugging Face's, whatever happens
to the requests on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.executor.configs import config_for
from tests.models.harness import save_random_hf_model
from tests.models.test_against_hugging_face import CASES
from tests.tenants.drive import core_of, greedy, run

NEW_TOKENS = 32
SMALL = {"skip_tokenizer_init": True, "block_size": 4, "num_gpu_blocks_override": 300, "max_model_len": 80}
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 64},
    "in stages": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 32},
    "uncached": {"enable_prefix_caching": False, "max_num_batched_tokens": 24},
}
PAIRS = [
    *(("jamba", way) for way in WAYS), ("mamba", "batched"), ("mamba", "chunked"), ("falcon_mamba", "chunked"),
    ("mamba2", "chunked"),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, nn.Module]]:
    found = {}
    for case in ("mamba", "falcon_mamba", "mamba2", "jamba"):
        config, folder = CASES[case](), tmp_path_factory.mktemp(case)
        config.max_position_embeddings = 128
        found[case] = folder, save_random_hf_model(config, folder)
    return found


def check(reference: nn.Module, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the likeliest one behind those before it."""
    assert len(tokens) == NEW_TOKENS
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize(("case", "way"), PAIRS)
def test_the_engine_generates_the_same_tokens(case: str, way: str, models: dict[str, tuple[Path, nn.Module]]) -> None:
    folder, reference = models[case]
    engine = core_of(config_for(folder, **SMALL | WAYS[way]))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 131, (n,), generator=generator).tolist() for n in (1, 2, 5, 14, 37, 23, 30, 9)]
    first = run(engine, [greedy(str(i), prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)])
    again = [*prompts[3:6], prompts[4] + prompts[2]]
    second = run(engine, [greedy(str(i), prompt, NEW_TOKENS) for i, prompt in enumerate(again)])
    for found, texts in ((first, prompts), (second, again)):
        for i, prompt in enumerate(texts):
            check(reference, prompt, found.tokens[str(i)])
    if way not in ("preempted", "in stages"):
        hits = [0] * 4 if way == "uncached" else [12, 36, 20, 36]
        assert [second.cached[str(i)] for i in range(4)] == hits
    assert (first.preemptions > 0) == (way == "preempted")
    engine.shutdown()
