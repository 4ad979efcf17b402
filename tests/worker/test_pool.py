"""Pooled requests beside generating ones: their vectors are those of the whole prompt at once, however it is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.worker.toy import BLOCK, DIM, HEADS, VOCAB, Driver, Toy
from vllm.pooling_params import PoolingParams
from vllm.step.plan import SlotInit
from vllm.step.result import Pooled, StepResult
from vllm.worker.pool import PooledChunk, Pooler, PoolingKind

WIDTH = HEADS * DIM
TAG = 3  # ends a step


def states(model: Toy, prompt: list[int]) -> Tensor:
    """The toy's hidden states at every position, from its logits without a cache."""
    head, model.head = model.head, torch.eye(WIDTH)
    found = model.dense(prompt)
    model.head = head
    return found


def pooled_driver(pooler: Pooler | None, prompts: dict[str, list[int]], dimensions: int | None = None) -> Driver:
    driver = Driver(Toy(), pooler=pooler)
    for name, prompt in prompts.items():
        driver.add(name, prompt)
        if name.startswith("pooled"):
            driver.new[-1] = driver.new[-1]._replace(params=PoolingParams(dimensions=dimensions))
    return driver


def step(driver: Driver, chunks: dict[str, int]) -> tuple[list[str], StepResult]:
    names = list(driver.slot)
    plan = driver.plan(chunks)
    pooled = np.array([name.startswith("pooled") for name in names])
    result = driver.runner.execute(replace(plan, pooled=pooled, sample=plan.sample & ~pooled)).result()
    for name in [name for i, name in enumerate(names) if any(n.row == i for n in result.news)]:
        driver.remove(name)
    return names, result


def random_prompts(seed: int) -> dict[str, list[int]]:
    random = np.random.default_rng(seed)
    kinds = ["pooled a", "free b", "pooled c", "free d", "pooled e"]
    return {name: random.integers(0, VOCAB, random.integers(1, 40)).tolist() for name in kinds}


def expected(kind: PoolingKind, x: Tensor, prompt: list[int]) -> Tensor:
    tagged = x[[token == TAG for token in prompt]]
    by_kind = {PoolingKind.LAST: x[-1], PoolingKind.CLS: x[0], PoolingKind.MEAN: x.mean(0), PoolingKind.ALL: x}
    return by_kind.get(kind, tagged)


@pytest.mark.parametrize("kind", PoolingKind)
@pytest.mark.parametrize("chunk", [1 << 30, 7, 1])
def test_vectors_of_prompts_in_chunks_among_rows_that_sample(kind: PoolingKind, chunk: int) -> None:
    prompts = random_prompts(chunk % 100)
    driver = pooled_driver(Pooler(kind, step_tag=TAG), prompts)
    alone = pooled_driver(None, {n: p for n, p in prompts.items() if not n.startswith("pooled")})
    want = alone.generate(5)
    found: dict[str, Tensor] = {}
    generated: dict[str, list[int]] = {name: [] for name in want}
    while len(found) < 3 or min(map(len, generated.values())) < 5:
        names, result = step(driver, dict.fromkeys(prompts, chunk))
        assert not result.errors
        for news in result.news:
            assert isinstance(news, Pooled) and result.token_ids[news.row] == -1
            array = np.frombuffer(news.data, news.dtype).reshape(news.shape)
            found[names[news.row]] = torch.from_numpy(array.copy())
        for name, token in zip(names, result.token_ids, strict=True):
            if token >= 0:
                generated[name].append(token)
    for name, vector in found.items():
        torch.testing.assert_close(
            vector, expected(kind, states(driver.runner.model, prompts[name]), prompts[name]), atol=1e-4, rtol=0
        )
    assert {name: tokens[:5] for name, tokens in generated.items()} == want


def test_head_dimensions_and_activations() -> None:
    prompts = {"pooled a": [1, 2, 3]}
    weight = torch.randn(WIDTH, 12)
    last = states(Toy(), [1, 2, 3])[-1]
    cases = {
        "normalize": (Pooler(PoolingKind.LAST, normalize=True), last[:4] / last[:4].norm()),
        "head": (Pooler(PoolingKind.LAST, head=lambda x: x @ weight), (last @ weight)[:4]),
        "softmax": (Pooler(PoolingKind.LAST, activation="softmax"), last[:4].softmax(-1)),
    }
    for pooler, want in cases.values():
        _, result = step(pooled_driver(pooler, prompts, dimensions=4), {})
        (news,) = result.news
        torch.testing.assert_close(torch.from_numpy(np.frombuffer(news.data, np.float32).copy()), want)


def test_each_request_has_its_own_wishes() -> None:
    prompts = {"pooled a": [1, 2, 3], "pooled b": [5, 7], "pooled c": [9]}
    driver = pooled_driver(Pooler(PoolingKind.MEAN, normalize=True), prompts)
    wishes = [PoolingParams(dimensions=3), PoolingParams(use_activation=False), PoolingParams()]
    driver.new = [init._replace(params=wish) for init, wish in zip(driver.new, wishes, strict=True)]
    _, result = step(driver, {})
    a, b, c = (states(Toy(), prompt).mean(0) for prompt in prompts.values())
    for news, want in zip(result.news, [a[:3] / a[:3].norm(), b, c / c.norm()], strict=True):
        torch.testing.assert_close(torch.from_numpy(np.frombuffer(news.data, np.float32).copy()), want)


def test_states_that_are_no_numbers_fail_their_request_alone() -> None:
    driver = pooled_driver(Pooler(PoolingKind.MEAN), {"pooled a": [1, 2, 3], "pooled b": [1, 4]})
    driver.runner.model.poison.add(2)
    _, result = step(driver, {})
    assert list(result.errors) == [0] and "hidden states are not finite" in result.errors[0]
    assert [news.row for news in result.news] == [1]


def test_a_model_that_does_not_pool_refuses() -> None:
    with pytest.raises(NotImplementedError, match="does not pool"):
        step(pooled_driver(None, {"pooled a": [1]}), {})


def test_every_token_is_needed_from_the_first_on() -> None:
    init = SlotInit("r", 0, [1] * BLOCK, BLOCK, 2, ([1],), PoolingParams(), 0, ())
    for kind in (PoolingKind.MEAN, PoolingKind.ALL, PoolingKind.CLS):
        with pytest.raises(ValueError, match="behind a prefix"):
            Pooler(kind).enter([init])
    pooler = Pooler(PoolingKind.MEAN)
    pooler.enter([init._replace(num_computed=0)])
    with pytest.raises(ValueError, match="where 0 was due"):
        pooler.pool(torch.zeros(1, 3), [PooledChunk(0, 0, 0, 1, 1, 2, BLOCK)])
    with pytest.raises(ValueError, match="no request that is pooled"):
        pooler.pool(torch.zeros(1, 3), [PooledChunk(0, 1, 0, 2, 0, 2, BLOCK)])
