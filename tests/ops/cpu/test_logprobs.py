"""The native logprobs, every build of them, against the torch reference and a sum in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops.cpu.test_draw import logits_of
from tests.ops.test_native import threads
from vllm.ops.logprobs import top_logprobs

quick = settings(
    max_examples=min(25, settings().max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@quick
@given(data=st.data())
def test_logprobs_are_those_of_a_sum_in_float64(native, data):
    vocab = data.draw(st.one_of(st.integers(1, 600), st.sampled_from([4096, 4097, 20000])))
    kinds = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["fine", "ties", "equal", "masked"]), st.sampled_from([0.1, 3.0, 20.0])),
            min_size=1,
            max_size=3,
        )
    )
    logits = torch.stack([logits_of(kind, vocab, spread, i) for i, (kind, spread) in enumerate(kinds)])
    token_ids = torch.tensor([data.draw(st.integers(0, vocab - 1)) for _ in kinds])
    count = data.draw(st.sampled_from([0, 1, 5, 20, 300, -1]))
    ids, logprobs, ranks = native.top_logprobs(logits, token_ids, count)
    shown = vocab if count < 0 else min(count, vocab)
    assert ids.shape == logprobs.shape == (len(kinds), 1 + shown)
    exact = logits.double().log_softmax(-1)
    for row, token in enumerate(token_ids.tolist()):
        values = logits[row].tolist()
        order = sorted(range(vocab), key=lambda i: (-values[i], i))[:shown]
        assert ids[row].tolist() == [token, *order]
        assert int(ranks[row]) == 1 + sum(v > values[token] for v in values)
        torch.testing.assert_close(logprobs[row].double(), exact[row][ids[row]], rtol=1e-6, atol=2e-6)


def test_logprobs_are_those_of_the_reference_and_do_not_depend_on_batch_or_threads(native):
    wide = torch.randn(12, 30007, generator=torch.Generator().manual_seed(0)) * 3
    logits, token_ids = wide[:, :30000], torch.arange(12) * 100  # rows with a gap
    got, want = native.top_logprobs(logits, token_ids, 7), top_logprobs.reference(logits, token_ids, 7)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=2e-6)
    for i in range(12):
        alone = native.top_logprobs(logits[i : i + 1], token_ids[i : i + 1], 7)
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, got, strict=True))
    with threads(2 if torch.get_num_threads() == 1 else 1):
        assert all(torch.equal(a, b) for a, b in zip(native.top_logprobs(logits, token_ids, 7), got, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_no_numbers_gives_ids_and_leaves_others_alone(native, bad):
    logits = torch.randn(3, 1000)
    logits[1] = bad
    token_ids = torch.tensor([3, 4, 5])
    ids, logprobs, _ = native.top_logprobs(logits, token_ids, 9)
    assert ids.min() >= 0 and ids.max() < 1000
    alone = native.top_logprobs(logits[::2].contiguous(), token_ids[::2], 9)
    assert torch.equal(ids[::2], alone[0]) and torch.equal(logprobs[::2], alone[1])
