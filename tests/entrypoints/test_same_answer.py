"""The same request gives the same tokens in six ways, and greedily with two ranks.

Together, alone, in chunks, on a warm prefix cache, preempted, after a storm of aborts. `make soak` asks 500 prompts.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_llama import assert_idle
from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams

Prompts = list[dict[str, list[int]]]
Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=[100, pytest.param(500, marks=pytest.mark.soak)])
def work(request: pytest.FixtureRequest) -> tuple[Prompts, list[SamplingParams]]:
    """Prompts of mixed lengths, some with a common beginning, each of them asked greedily and then with a seed."""
    rng = random.Random(7)
    common = [rng.randrange(5, 320) for _ in range(40)]
    prompts: Prompts = []
    params: list[SamplingParams] = []
    for i in range(request.param):
        head = common[: rng.randrange(41)] if i % 3 == 0 else []
        prompt = head + [rng.randrange(5, 320) for _ in range(rng.randrange(1, 50))]
        extra = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 0.5}, {}][i % 5]
        for choice in ({"temperature": 0.0}, {"temperature": 0.9, "seed": i, **extra}):
            prompts.append({"prompt_token_ids": prompt})
            params.append(SamplingParams(max_tokens=24, ignore_eos=True, **choice))
    return prompts, params


def generate(llm: LLM, prompts: Any, params: Any) -> Answers:
    return [tuple(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def make(folder: Path, **kwargs: Any) -> LLM:
    return LLM(model=str(folder), dtype="float32", max_model_len=128, **{"num_gpu_blocks_override": 4000, **kwargs})


@pytest.fixture(scope="module")
def reference(folder: Path, work: Any) -> Iterator[Answers]:
    """All together, no prefix cache."""
    llm = make(folder, enable_prefix_caching=False)
    yield generate(llm, *work)
    del llm
    gc.collect()


def check(way: str, got: Answers, reference: Answers) -> None:
    """Fail if an answer differs, with the places of those that do."""
    different = [i for i, (a, b) in enumerate(zip(got, reference, strict=True)) if a != b]
    print(f"T42: {way}: {len(different)} of {len(reference):,} differ")
    assert not different


def test_alone(folder: Path, work: Any, reference: Answers) -> None:
    llm = make(folder, enable_prefix_caching=False)
    check("alone", [generate(llm, [p], [q])[0] for p, q in zip(*work, strict=True)], reference)


def test_together_again(folder: Path, work: Any, reference: Answers) -> None:
    """In another engine, in the opposite order and with fewer at a time than the reference."""
    prompts, params = work
    llm = make(folder, enable_prefix_caching=False, max_num_seqs=48)
    check("together", generate(llm, prompts[::-1], params[::-1])[::-1], reference)


def test_chunks_of_sixteen_tokens(folder: Path, work: Any, reference: Answers) -> None:
    llm = make(folder, enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=16)
    check("in chunks", generate(llm, *work), reference)


def test_warm_prefix_cache(folder: Path, work: Any, reference: Answers) -> None:
    llm = make(folder, enable_prefix_caching=True)
    generate(llm, *work)
    outputs = llm.generate(*work, use_tqdm=False)
    assert sum(o.num_cached_tokens or 0 for o in outputs) > 16 * len(outputs) / 2
    check("cached", [tuple(o.outputs[0].token_ids) for o in outputs], reference)


def test_forced_preemption(folder: Path, work: Any, reference: Answers) -> None:
    llm = make(folder, enable_prefix_caching=False, num_gpu_blocks_override=24, block_size=8, max_num_seqs=64)
    check("preempted", generate(llm, *work), reference)
    assert llm.llm_engine.core.stats().num_preemptions >= 100


def storm(llm: LLM, prompts: Prompts, params: list[SamplingParams]) -> int:
    """Ask everything, 12 requests a step, and abort at random: waiting, amid prompt or answer. Returns how many."""
    rng = random.Random(11)
    engine = llm.llm_engine
    alive: dict[str, None] = {}
    aborted = asked = 0
    while asked < len(prompts) or alive:
        for i in range(asked, min(asked + 12, len(prompts))):
            engine.add_request(f"storm-{i}", prompts[i], params[i])
            alive[f"storm-{i}"] = None
        asked += 12
        for output in engine.step():
            if output.finished:
                del alive[output.request_id]
        gone = [name for name in alive if rng.random() < 0.06]
        engine.abort_request(gone)
        for name in gone:
            del alive[name]
        aborted += len(gone)
    return aborted


def test_after_a_storm_of_aborts(folder: Path, work: Any, reference: Answers) -> None:
    """With a prefix cache that keeps blocks of what was aborted, and so little room that most requests have to wait."""
    few = {"num_gpu_blocks_override": 100, "block_size": 8, "max_num_batched_tokens": 128, "max_num_seqs": 64}
    llm = make(folder, enable_prefix_caching=True, **few)
    aborted = storm(llm, *work)
    assert_idle(llm)
    assert aborted > 0.7 * len(reference)
    check(f"after {aborted} of {len(reference):,} requests were aborted", generate(llm, *work), reference)


def test_two_ranks_greedy(folder: Path, work: Any, reference: Answers) -> None:
    prompts, params = work
    llm = make(folder, tensor_parallel_size=2)
    check("on two ranks", generate(llm, prompts[::2], params[::2]), reference[::2])
    del llm
    gc.collect()
