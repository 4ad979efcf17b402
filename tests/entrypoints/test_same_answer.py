"""The same request gives the same tokens alone, in a batch, chunked, on a warm cache, preempted, and with two ranks."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams

COUNT = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def work() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """200 requests, half greedy and half seeded; prompts of mixed lengths, some with a common beginning."""
    rng = random.Random(7)
    common = [rng.randrange(5, 320) for _ in range(40)]
    prompts, params = [], []
    for i in range(COUNT):
        head = common[: rng.randrange(41)] if i % 3 == 0 else []
        prompts.append({"prompt_token_ids": head + [rng.randrange(5, 320) for _ in range(rng.randrange(1, 50))]})
        if i % 2:
            extra = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 0.5}, {}][i % 5]
            params.append(SamplingParams(temperature=0.9, seed=i, max_tokens=24, ignore_eos=True, **extra))
        else:
            params.append(SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    return prompts, params


def generate(llm: LLM, prompts: Any, params: Any) -> list[tuple[int, ...]]:
    return [tuple(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def make(folder: Path, **kwargs: Any) -> LLM:
    return LLM(model=str(folder), dtype="float32", max_model_len=128, **{"num_gpu_blocks_override": 4000, **kwargs})


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[list[tuple[int, ...]]]:
    """All together, no prefix cache."""
    llm = make(folder, enable_prefix_caching=False)
    yield generate(llm, *work())
    del llm
    gc.collect()


def test_alone(folder: Path, reference: list[tuple[int, ...]]) -> None:
    llm = make(folder, enable_prefix_caching=False)
    prompts, params = work()
    alone = [generate(llm, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    assert alone == reference


def test_chunks_of_sixteen_tokens(folder: Path, reference: list[tuple[int, ...]]) -> None:
    llm = make(folder, enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=16)
    assert generate(llm, *work()) == reference


def test_warm_prefix_cache(folder: Path, reference: list[tuple[int, ...]]) -> None:
    llm = make(folder, enable_prefix_caching=True)
    generate(llm, *work())
    outputs = llm.generate(*work(), use_tqdm=False)
    assert sum(o.num_cached_tokens or 0 for o in outputs) > 16 * COUNT / 2
    assert [tuple(o.outputs[0].token_ids) for o in outputs] == reference


def test_forced_preemption(folder: Path, reference: list[tuple[int, ...]]) -> None:
    llm = make(folder, enable_prefix_caching=False, num_gpu_blocks_override=24, block_size=8, max_num_seqs=64)
    assert generate(llm, *work()) == reference
    assert llm.llm_engine.core.stats().num_preemptions >= 100


def test_two_ranks_greedy(folder: Path, reference: list[tuple[int, ...]]) -> None:
    prompts, params = work()
    llm = make(folder, tensor_parallel_size=2)
    assert generate(llm, prompts[::2], params[::2]) == reference[::2]
    del llm
    gc.collect()
