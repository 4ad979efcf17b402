"""The most likely token, by every path."""

from __future__ import annotations

import pytest
import torch

from vllm.ops.greedy import greedy


@pytest.mark.parametrize("vocab", [1, 127, 512, 513, 640, 1000, 4096, 4097])
def test_lowest_index_of_the_maximum(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    coarse = torch.randint(0, 3, (20, vocab), generator=generator).float()
    fine = torch.randn(20, vocab, generator=generator)
    last = torch.full((1, vocab), -1.0)
    last[0, -1] = 0.0
    for logits in (coarse, fine, last, torch.zeros(2, vocab), torch.full((1, vocab), float("-inf"))):
        expected = [row.tolist().index(max(row.tolist())) for row in logits]
        assert greedy(logits).tolist() == expected


def test_rows_of_a_larger_tensor() -> None:
    logits = torch.randn(4, 2, 2000, generator=torch.Generator().manual_seed(0))[:, 1]
    assert greedy(logits).tolist() == logits.argmax(-1).tolist()
