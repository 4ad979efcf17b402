"""The sampler on a GPU: the oracle's tokens, independent of the batch, logprobs of the raw logits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.sample.rows import Row, params, sample
from tests.worker.sample.test_sampler import OPTIONS, check, random_rows
from vllm.ops.logprobs import to_messages
from vllm.worker.device import CudaContext


@pytest.fixture(scope="module")
def context() -> CudaContext:
    return CudaContext(torch.device("cuda", 0))


@pytest.mark.parametrize("name", OPTIONS)
def test_each_parameter_alone(name: str, context: CudaContext) -> None:
    check(random_rows(40, 1, **OPTIONS[name]), context)


def test_all_pairs_of_parameters_in_one_batch(context: CudaContext) -> None:
    rows: list[Row] = []
    for i, (a, b) in enumerate(itertools.combinations(OPTIONS, 2)):
        rows += random_rows(8, 100 + i, **{**OPTIONS[a], **OPTIONS[b]})
    check(rows, context)


def test_a_row_does_not_depend_on_the_rest_of_the_batch(context: CudaContext) -> None:
    generator = torch.Generator().manual_seed(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9},
        {"temperature": 1.3, "top_p": 0.9, "logprobs": 3},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        {"temperature": 2.5, "top_p": 0.999, "logprobs": 5},
        {"temperature": 1.0, "min_p": 0.01, "repetition_penalty": 1.1},
        {"logprobs": 0},
        {"presence_penalty": 0.5, "logprobs": 2},
    ]
    rows = [
        Row(torch.randn(32001, generator=generator) * 2, params(**kinds[i % 7]), [1, 2, i], [i, 5], seed=i)
        for i in range(70)
    ]
    together = sample(rows, context)
    found = {int(r): [t[i].cpu() for t in g.tensors] for g in together.logprobs for i, r in enumerate(g.rows)}
    for i, row in enumerate(rows):
        alone = sample([row], context)
        assert alone.token_ids.tolist() == [int(together.token_ids[i])], row.params
        for group in alone.logprobs:
            assert all(torch.equal(mine[0].cpu(), its) for mine, its in zip(group.tensors, found[i], strict=True))


def test_logprobs_of_raw_logits(context: CudaContext) -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(2)) * 3
    counts = [0, 1, 5, 20, -1, 5]
    rows = [Row(x, params(logprobs=k, logit_bias={7: 99.0})) for x, k in zip(logits, counts, strict=True)]
    result = sample(rows, context)
    assert result.token_ids.tolist() == [7] * 6
    for group in result.logprobs:
        messages = to_messages(*(t.cpu().numpy() for t in group.tensors))
        for row, message in zip(group.rows, messages, strict=True):
            expected = logits[row].double().log_softmax(-1)
            order = expected.argsort(descending=True).tolist()
            assert message.token_ids == [7, *order[: counts[row] if counts[row] >= 0 else None]]
            assert message.rank == 1 + order.index(7)
            np.testing.assert_allclose(message.logprobs, expected[message.token_ids], atol=1e-5)


@pytest.mark.parametrize("vocab", [100, 8193, 151936])
def test_ids_stay_below_the_vocabulary(vocab: int, context: CudaContext) -> None:
    flat, nan, tail = torch.zeros(vocab), torch.full((vocab,), float("nan")), torch.full((vocab,), -1e30)
    tail[-1] = 0.0
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 3},
        {},
    ]
    rows = [Row(x, params(**kind), seed=7) for x in (flat, nan, tail) for kind in kinds]
    result = sample(rows, context)
    assert ((result.token_ids >= 0) & (result.token_ids < vocab)).all()
    assert result.finite.tolist() == [x is not nan for x in (flat, nan, tail) for _ in kinds]
    assert result.token_ids[8:].tolist() == [vocab - 1] * 4
