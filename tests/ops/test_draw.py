"""The draw: its distribution, its edges, and that its paths agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.sample import oracle
from vllm.ops import draw as module
from vllm.ops.draw import DrawParams, draw
from vllm.step.rng import stream_start, uniform


def draw_params(
    rows: int, numbers: Tensor, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> DrawParams:
    k, p = np.full(rows, top_k, np.int32), np.full(rows, top_p, np.float32)
    return DrawParams(
        torch.full((rows,), temperature),
        torch.full((rows,), min_p),
        torch.from_numpy(k),
        torch.from_numpy(p),
        numbers,
        k,
        p,
    )


def whole_rows(x: Tensor, p: DrawParams) -> Tensor:
    """The draw by the path that serves a nucleus of any size."""
    return torch.stack(
        [
            module._draw_from_row(row, int(p.host_top_k[i]), float(p.host_top_p[i]), p.min_p[i], p.uniform[i : i + 1])
            for i, row in enumerate(x)
        ]
    )


def chi_square_limit(freedom: int) -> float:
    """What a chi-square variable exceeds once in 10,000 times (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [
        (1.0, 0.0, 0, 1.0),
        (0.6, 0.0, 0, 1.0),
        (1.7, 0.05, 0, 1.0),
        (1.0, 0.0, 7, 1.0),
        (1.3, 0.0, 0, 0.8),
        (1.5, 0.02, 20, 0.9),
    ],
)
def test_drawn_tokens_follow_the_distribution(temperature: float, min_p: float, top_k: int, top_p: float) -> None:
    vocab, draws = 40, 20000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    # half of the numbers are one request's positions, half are one position of many requests
    numbers = np.concatenate(
        [
            uniform(stream_start(np.full(draws // 2, 99, np.uint64)), np.arange(draws // 2)),
            uniform(stream_start(np.arange(draws // 2, dtype=np.uint64)), np.full(draws // 2, 17)),
        ]
    )
    params = draw_params(draws, torch.from_numpy(numbers), temperature, min_p, top_k, top_p)
    counts = torch.bincount(draw(logits.expand(draws, -1), params), minlength=vocab)
    weights = torch.tensor(
        oracle.distribution([np.float32(v) for v in logits.tolist()], temperature, min_p, top_k, top_p),
        dtype=torch.float64,
    )
    expected = weights / weights.sum() * draws
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert statistic < chi_square_limit(int(kept.sum()) - 1)


def test_the_ends_of_the_unit_interval() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0, -math.inf]]).repeat(2, 1)
    numbers = torch.tensor([0.0, 1 - 2**-24])
    for extra in ({}, {"top_p": 0.9999}, {"top_k": 3}):
        assert draw(logits, draw_params(2, numbers, **extra)).tolist() == [1, 3]


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 2.0]]).repeat(64, 1)
    numbers = torch.arange(64) / 64
    drawn = {
        name: sorted(set(draw(logits, draw_params(64, numbers, **extra)).tolist()))
        for name, extra in {
            "top_k=1": {"top_k": 1},
            "top_k=2": {"top_k": 2},
            "top_k=4": {"top_k": 4},
            "top_p small": {"top_p": 1e-6},
            "top_p two": {"top_p": 0.4},
        }.items()
    }
    assert drawn == {
        "top_k=1": [1],
        "top_k=2": [1, 2],
        "top_k=4": [1, 2, 4, 5],
        "top_p small": [1],
        "top_p two": [1, 2],
    }


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, -5.0]])
    params = draw_params(1, torch.tensor([0.9]), top_k=1)
    assert draw(logits, params).tolist() == [0]
    assert whole_rows(logits, params).tolist() == [0]


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.5), (0, 0.97), (3, 1.0), (1023, 1.0), (1024, 0.9), (1025, 1.0), (2000, 0.99)]
)
def test_candidates_and_whole_rows_agree(spread: float, top_k: int, top_p: float) -> None:
    rows, vocab = 6, 3001
    generator = torch.Generator().manual_seed(top_k)
    # coarse values give many ties, also where the candidates end
    logits = (torch.randn(rows, vocab, generator=generator) * spread * 8).round() / 8
    params = draw_params(rows, torch.rand(rows, generator=generator), 0.9, 0.001, top_k, top_p)
    assert torch.equal(draw(logits, params), whole_rows(logits / 0.9, params))


def test_very_large_and_very_small_logits() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 3e38], [-3e38, -3e38, -3e38, -2.9e38], [1e-40, 0.0, -1e-40, -1.0]])
    for extra in ({}, {"top_k": 2}, {"top_p": 0.9}):
        drawn = draw(logits, draw_params(3, torch.tensor([0.9, 0.9, 0.0]), **extra)).tolist()
        assert drawn == [3, 3, 0]
