"""A lower tier in host memory: a prefix that was evicted from the cache comes back, with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.configs import config_for
from tests.tenants.drive import core_of, greedy, run
from tests.tiny_llama import save_tiny_llama
from vllm.config.cache import GIB
from vllm.engine.core import EngineCore

COUNT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 90, (count, length), generator=generator).tolist()


def core(folder: Path, places: int, **settings: Any) -> EngineCore:
    usual: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 20, "max_model_len": 96, "max_num_seqs": 2}
    plain = config_for(folder, **usual, **settings)
    if not places:
        return core_of(plain)
    probe = core_of(plain)
    size = probe.executor.kv_layout.bytes_per_block
    probe.shutdown()
    engine = core_of(config_for(folder, **usual, kv_offloading_size=(places * size + size / 2) / GIB, **settings))
    assert engine.scheduler.kv.tier is not None
    assert engine.scheduler.kv.tier.places.num_blocks == places + 1
    return engine


@pytest.mark.parametrize("chunk", [16, 128])
def test_an_evicted_prefix_comes_back(folder: Path, chunk: int) -> None:
    wanted, others = prompts(3, 51, seed=1), prompts(9, 60, seed=2)
    plain, engine = (core(folder, places, max_num_batched_tokens=chunk) for places in (0, 100))
    cached: list[list[int]] = []
    said: list[dict[str, list[int]]] = []
    for each in (plain, engine):
        first = run(each, [greedy(f"first {i}", p, COUNT) for i, p in enumerate(wanted)])
        run(each, [greedy(f"other {i}", p, COUNT) for i, p in enumerate(others)])
        # two at once, beside one that has nothing to wait for
        again = run(each, [*(greedy(str(i), p, COUNT) for i, p in enumerate(wanted[:2])), greedy("new", [7] * 9, 9)])
        longer = run(each, [greedy("longer", wanted[2] + others[1][:20], COUNT)])
        assert all(again.tokens[str(i)] == first.tokens[f"first {i}"] for i in range(2))
        cached.append([again.cached["0"], again.cached["1"], longer.cached["longer"]])
        said.append(again.tokens | longer.tokens)
    assert cached == [[0] * 3, [48] * 3], "six blocks of each prompt, and none of them without a tier"
    assert said[0] == said[1]
    plain.shutdown()
    engine.shutdown()


def test_a_tier_that_is_full_forgets_what_was_used_longest_ago(folder: Path) -> None:
    engine = core(folder, 30)
    wanted, others = prompts(1, 51, seed=1), prompts(12, 60, seed=2)
    first = run(engine, [greedy("first", wanted[0], COUNT)])
    run(engine, [greedy(f"other {i}", p, COUNT) for i, p in enumerate(others)])
    again = run(engine, [greedy("again", wanted[0], COUNT), greedy("last", others[-3], COUNT)])
    assert again.cached == {"again": 0, "last": 56} and again.tokens["again"] == first.tokens["first"]
    engine.shutdown()


def test_requests_that_are_preempted_find_their_blocks(folder: Path) -> None:
    texts = prompts(4, 40, seed=3)
    plain, engine = core(folder, 0), core(folder, 100)
    want, found = (run(each, [greedy(str(i), p, 50) for i, p in enumerate(texts)]) for each in (plain, engine))
    assert want.preemptions > 0 and found.tokens == want.tokens
    plain.shutdown()
    engine.shutdown()


def test_without_prefix_caching_nothing_could_come_back(folder: Path) -> None:
    with pytest.raises(ValueError, match="kv_offloading_size keeps blocks for later requests"):
        config_for(folder, kv_offloading_size=1.0, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="kv_offloading_size must be non-negative"):
        config_for(folder, kv_offloading_size=-1.0)
