"""A block kind with a recurrent state, layers of unlike heads in one group, a window, and a layer that reads another's
keys, through the real engine: the tokens are those of a loop that keeps everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.configs import config_for
from tests.models.harness import PagedDriver, load, relative_error
from tests.tenants.checkpoint import ARCHITECTURE, FAMILY, VOCAB, Oracle, save
from tests.tenants.drive import core_of, greedy, run
from vllm.engine.core import EngineCore
from vllm.model_executor.models import ModelRegistry
from vllm.step.kv_policy import KVKind
from vllm.step.plan import StepPlan, TransferKind

COUNT = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = dict(ModelRegistry._families)
    ModelRegistry.register_family(ARCHITECTURE, FAMILY)
    yield save(tmp_path_factory.mktemp("weir"))
    ModelRegistry._families = before


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def core(folder: Path, **settings: Any) -> EngineCore:
    usual = {"block_size": 4, "num_gpu_blocks_override": 200, "max_num_seqs": 4, "skip_tokenizer_init": True}
    return core_of(config_for(folder, **{**usual, **settings}))


PROMPTS = prompts(1, 5, 30, 13, 41, 22)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    oracle = Oracle(folder)
    return [oracle.greedy(prompt, COUNT) for prompt in PROMPTS]


def test_logits_are_those_of_the_loop_however_the_prompt_is_cut(folder: Path) -> None:
    oracle, texts = Oracle(folder), prompts(29, 17, 3)
    for chunks in ([64], [5, 1, 7], [2, 3]):
        found = PagedDriver(load(folder), requests=3).run([torch.tensor(text) for text in texts], chunks)
        for text, logits in zip(texts, found, strict=True):
            assert relative_error(logits, oracle.logits(text)) < 1e-5


def test_the_cache_has_a_group_of_unlike_layers_one_with_longer_blocks_and_states(folder: Path) -> None:
    engine = core(folder)
    layout = engine.executor.kv_layout
    assert [(g.kind, g.layers, g.units) for g in layout.groups] == [
        (KVKind.FULL, (1, 3), 1),
        (KVKind.SLIDING, (4, 5), 2),
        (KVKind.RECURRENT, (0, 2), 1),
    ]
    assert len(layout.state_bytes) == 2 and layout.policy.num_states(4) == 1 + 4 + 4
    engine.shutdown()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {},
        {"max_num_batched_tokens": 7},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 26, "max_model_len": 64},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 200},
    ],
    ids=["alone", "batched", "chunked", "uncached", "preempted", "unchunked"],
)
def test_tokens_are_those_of_the_loop(folder: Path, expected: list[list[int]], settings: dict[str, Any]) -> None:
    engine = core(folder, **settings)
    requests = [greedy(str(i), prompt, COUNT) for i, prompt in enumerate(PROMPTS)]
    again = [greedy(f"again {i}", prompt, COUNT) for i, prompt in enumerate(PROMPTS)]
    found, second = run(engine, requests), run(engine, again)
    for i, tokens in enumerate(expected):
        assert found.tokens[str(i)] == tokens and second.tokens[f"again {i}"] == tokens
    if settings.get("num_gpu_blocks_override"):
        assert found.preemptions + second.preemptions > 0, "nobody was preempted: the test has lost its point"
    engine.shutdown()


def test_a_cached_prefix_is_continued_from_a_snapshot(folder: Path) -> None:
    """Also one that two requests start from at once, and one that a longer prompt shares."""
    engine, oracle = core(folder), Oracle(folder)
    (base,) = prompts(37, seed=5)
    longer = [base + tail for tail in prompts(6, 9, seed=6)]
    plans: list[StepPlan] = []
    submit = engine.executor.submit

    def watch(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    engine.executor.submit = watch  # type: ignore[method-assign]
    first = run(engine, [greedy("a", base, COUNT)])
    assert first.cached["a"] == 0 and first.tokens["a"] == oracle.greedy(base, COUNT)
    plans.clear()
    second = run(engine, [greedy("b", base, COUNT), *(greedy(str(i), p, COUNT) for i, p in enumerate(longer))])
    assert [second.cached[name] for name in ("b", "0", "1")] == [32] * 3
    copies = [t for plan in plans for t in plan.transfers if t.pool == 1 and t.kind is TransferKind.COPY]
    assert len({t.src for t in copies if sum(c.src == t.src for c in copies) == 3}) == 1, "one snapshot starts three"
    assert second.tokens["b"] == first.tokens["a"]
    for i, prompt in enumerate(longer):
        assert second.tokens[str(i)] == oracle.greedy(prompt, COUNT)
    engine.shutdown()


def test_sequences_of_one_prompt_fork(folder: Path) -> None:
    engine, oracle = core(folder), Oracle(folder)
    (prompt,) = prompts(23, seed=7)
    found = run(engine, [greedy("0", prompt, COUNT), *(greedy(str(i), prompt, COUNT, fork_of="0") for i in (1, 2, 3))])
    assert all(tokens == oracle.greedy(prompt, COUNT) for tokens in found.tokens.values()) and len(found.tokens) == 4
    assert sorted(found.cached.values()) == [0, 16, 16, 16]
    engine.shutdown()
