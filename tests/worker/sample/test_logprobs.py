"""Logprobs against a 64-bit log-softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.sample.rows import Row, params, sample
from vllm.ops import logprobs as module
from vllm.ops.logprobs import to_messages, top_logprobs


@pytest.mark.parametrize("vocab", [5, 33, 1000])
@pytest.mark.parametrize("count", [0, 1, 4, -1])
def test_values_ids_and_ranks(vocab: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK", 3 * vocab)  # several chunks
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(8, vocab, generator=generator) * 6).round() / 2
    tokens = torch.randint(0, vocab, (8,), generator=generator)
    messages = to_messages(*(t.numpy() for t in top_logprobs(logits, tokens, count)))
    expected = logits.double().log_softmax(-1)
    for row, token, message, raw in zip(expected, tokens.tolist(), messages, logits, strict=True):
        order = sorted(range(vocab), key=lambda i: (-raw[i].item(), i))
        assert message.token_ids == [token, *order[: vocab if count < 0 else count]]
        np.testing.assert_allclose(message.logprobs, row[message.token_ids], atol=2e-6, rtol=1e-6)
        assert message.rank == 1 + int((raw > raw[token]).sum())


def test_they_are_of_the_raw_logits() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 0.0])
    rows = [
        Row(logits, params(logprobs=2, logit_bias={0: 50.0})),
        Row(logits, params(logprobs=2, temperature=0.1, allowed_token_ids=[3])),
        Row(logits, params(logprobs=1, logits_processors=[lambda output, x: x.fill_(0.0)])),
        Row(logits, params(logit_bias={1: 50.0})),
    ]
    result = sample(rows)
    assert result.token_ids.tolist() == [0, 3, 0, 1]
    expected = logits.double().log_softmax(-1)
    found = {
        int(r): m
        for g in result.logprobs
        for r, m in zip(g.rows, to_messages(*(t.numpy() for t in g.tensors)), strict=True)
    }
    assert sorted(found) == [0, 1, 2]
    assert found[0].token_ids == [0, 2, 1] and found[0].rank == 3
    assert found[1].token_ids == [3, 2, 1] and found[1].rank == 4
    assert found[2].token_ids == [0, 2]
    for message in found.values():
        np.testing.assert_allclose(message.logprobs, expected[message.token_ids], atol=1e-6)


def test_the_greedy_token_comes_first_among_ties() -> None:
    logits = torch.zeros(300)
    logits[[17, 40, 41, 250]] = 2.0
    result = sample([Row(logits, params(logprobs=3))])
    assert result.logprobs[0].tensors[0].tolist() == [[17, 17, 40, 41]]
    assert result.logprobs[0].tensors[2].tolist() == [1]
