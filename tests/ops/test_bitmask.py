"""Masks of allowed tokens against a loop over bits; the kernel in the Triton interpreter (test_native: the CPU's)."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm.ops.bitmask import apply_bitmask


def _kernel(kind: str) -> Callable[..., None]:
    if kind == "reference":
        return apply_bitmask.reference
    module = importlib.import_module(f"vllm.ops.{kind}.bitmask")
    return module.apply_bitmask


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 4097])
@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_forbidden_tokens_become_impossible_and_nothing_else_changes(vocab: int, kind: str) -> None:
    apply = _kernel(kind)
    random = np.random.default_rng(vocab)
    logits = torch.from_numpy(random.normal(size=(7, vocab)).astype(np.float32))
    bits = random.integers(0, 2**32, (3, -(-vocab // 32)), dtype=np.uint32)
    bits[1] = 2**32 - 1
    rows = [5, 0, 2]
    want = logits.clone()
    for row, words in zip(rows, bits.tolist(), strict=True):
        for t in range(vocab):
            if not words[t // 32] >> t % 32 & 1:
                want[row, t] = -torch.inf
    apply(logits, torch.tensor(rows), torch.from_numpy(bits.view(np.int32)))
    assert torch.equal(logits, want)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_logits_may_be_a_slice_of_wider_rows(kind: str) -> None:
    apply = _kernel(kind)
    wide = torch.zeros(2, 50)
    apply(wide[:, :40], torch.tensor([1]), torch.zeros(1, 2, dtype=torch.int32))
    assert torch.isneginf(wide[1, :40]).all() and not wide[0].any() and not wide[1, 40:].any()
