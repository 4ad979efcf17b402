"""The native draw, every build of it, against a brute-force sort in float64 and against the torch reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops.test_native import DTYPES, threads
from vllm.ops.draw import DrawParams, draw

# What rounding may move: a share of the row's mass. exp is right to 1e-7, and each token's mass is rounded by 1e-12.
EPS = 1e-6

quick = settings(
    max_examples=min(40, settings().max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def draw_params(rows):
    """rows: (temperature, min_p, top_k, top_p, uniform) of each."""
    temperature, min_p, top_k, top_p, uniform = (list(column) for column in zip(*rows, strict=True))
    k, p = np.array(top_k, np.int32), np.array(top_p, np.float32)
    return DrawParams(
        torch.tensor(temperature), torch.tensor(min_p), torch.from_numpy(k), torch.from_numpy(p), torch.tensor(uniform),
        k, p,
    )  # fmt: skip


def right_tokens(logits, temperature, min_p, top_k, top_p, uniform):
    """Ids that are right: one, or those between which a sum within EPS of a threshold decides. logits: [vocab]."""
    y = (logits.float() / torch.tensor(temperature)).numpy()
    weight = np.exp(y.astype(np.float64) - float(y.max()))
    order = np.lexsort((np.arange(len(y)), -y))
    first = order[: top_k if top_k > 0 else None]
    right = set()
    for least in {float(np.float32(min_p)) * (1 + nudge) for nudge in (-EPS, 0.0, EPS)}:
        mass = np.zeros(len(y))
        mass[first] = np.where(weight[first] >= least, weight[first], 0.0)
        sums = mass[first].cumsum()
        for share in {float(np.float32(top_p)) + shift for shift in (-EPS, 0.0, EPS)} if top_p < 1 else {2.0}:
            kept = mass.copy()
            kept[first[np.searchsorted(sums, share * sums[-1]) + 1 :]] = 0.0
            cdf = kept.cumsum()
            low, high = (
                np.searchsorted(cdf, np.clip(uniform + shift, 0.0, 1 - 1e-12) * cdf[-1], side="right")
                for shift in (-EPS, EPS)
            )
            right |= {i for i in range(low, min(high, len(y) - 1) + 1) if kept[i] > 0}
    return right


def logits_of(kind, vocab, spread, seed):
    """[vocab] of the given kind: fine or coarse values, all equal, or all but a few impossible."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(vocab, generator=generator) * spread
    if kind == "ties":
        return (x * 4).round() / 4
    if kind == "equal":
        return torch.full((vocab,), spread)
    if kind == "masked":
        possible = torch.randint(0, vocab, (5,), generator=generator)
        masked = torch.full((vocab,), -math.inf)
        masked[possible] = x[possible]
        return masked
    return x


@st.composite
def requests(draw_from, vocab):
    return (
        draw_from(st.sampled_from([0.05, 0.8, 1.0, 1.7])),
        draw_from(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        draw_from(st.sampled_from([0, 0, 1, 2, 50, 400, vocab - 1, vocab, vocab + 5])),
        draw_from(st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-9, 0.999])),
        draw_from(st.one_of(st.sampled_from([0.0, 1 - 2**-24]), st.integers(0, 2**24 - 1).map(lambda n: n * 2.0**-24))),
    )


@quick
@given(data=st.data())
def test_tokens_are_those_of_a_brute_force_sort(native, data):
    vocab = data.draw(st.one_of(st.integers(1, 600), st.sampled_from([4095, 4096, 4097, 20000, 151936])))
    kinds = st.tuples(
        st.sampled_from(["fine", "ties", "equal", "masked"]),
        st.sampled_from([0.01, 1.0, 4.0, 20.0]),
        st.integers(0, 99),
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    rows = data.draw(st.lists(st.tuples(kinds, requests(vocab)), min_size=1, max_size=3))
    logits = torch.stack([logits_of(*kind[:1], vocab, *kind[1:]) for kind, _ in rows]).to(dtype)
    drawn = native.draw(logits, draw_params([asked for _, asked in rows])).tolist()
    for row, (_, asked), token in zip(logits, rows, drawn, strict=True):
        assert token in right_tokens(row, *asked)


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(0, 0, 1), (0, 50, 1), (0, 50, 0.95), (0, 0, 0.9), (0, 30, 0.2), (0, 3000, 0.99), (0.1, 0, 1), (0, 1, 1)],
)
def test_tokens_are_those_of_the_reference(native, spread, min_p, top_k, top_p):
    count, vocab = 100, 12000
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(7)) * spread
    params = draw_params([(0.8, float(min_p), top_k, float(top_p), i / count) for i in range(count)])
    got, want = native.draw(logits, params), draw.reference(logits, params)
    assert (got != want).sum() <= 1  # exp may differ in its last bit: a neighbouring token is then as good, and rare


def test_a_row_gives_the_same_token_in_any_batch_and_with_any_threads(native):
    vocab, settings_ = 40000, [(0.0, 0, 1.0), (0.0, 50, 0.9), (0.0, 0, 0.97), (0.02, 0, 1.0), (0.0, 9000, 0.99)]
    rows = [(0.9, *settings_[i % len(settings_)], i / 20) for i in range(20)]
    wide = torch.randn(len(rows), vocab + 7, generator=torch.Generator().manual_seed(1)) * 2
    logits = wide[:, :vocab]  # rows with a gap, as those of a padded head
    together = native.draw(logits, draw_params(rows)).tolist()
    assert [int(native.draw(logits[i : i + 1], draw_params(rows[i : i + 1]))) for i in range(len(rows))] == together
    with threads(2 if torch.get_num_threads() == 1 else 1):
        assert native.draw(logits, draw_params(rows)).tolist() == together
        assert native.draw(logits[::2], draw_params(rows[::2])).tolist() == together[::2]


def test_the_first_k_and_a_tiny_nucleus_prefer_lower_ids(native):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 2.0]]).repeat(64, 1)
    for top_k, top_p, expected in (
        (1, 1.0, [1]),
        (2, 1.0, [1, 2]),
        (4, 1.0, [1, 2, 4, 5]),
        (0, 1e-6, [1]),
        (0, 0.4, [1, 2]),
    ):
        params = draw_params([(1.0, 0.0, top_k, top_p, i / 64) for i in range(64)])
        assert sorted(set(native.draw(logits, params).tolist())) == expected


def test_zeros_of_both_signs_are_equal(native):
    for logits in (torch.tensor([[-0.0, 0.0, -0.0, -5.0]]), torch.tensor([[-0.0] + [0.0] * 300])):
        assert native.draw(logits, draw_params([(1.0, 0.0, 1, 1.0, 0.9)])).tolist() == [0]


def test_very_large_and_very_small_logits(native):
    logits = torch.tensor([[3e38, -3e38, 0.0, 3e38], [-3e38, -3e38, -3e38, -2.9e38], [1e-40, 0.0, -1e-40, -1.0]])
    for top_k, top_p in ((0, 1.0), (2, 1.0), (0, 0.9)):
        rows = [(1.0, 0.0, top_k, top_p, u) for u in (0.9, 0.9, 0.0)]
        assert native.draw(logits, draw_params(rows)).tolist() == [3, 3, 0]


@pytest.mark.parametrize("vocab", [1, 130, 20000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_no_numbers_still_give_an_id_and_harm_nobody(native, vocab, bad):
    good = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    one = good.clone()
    one[vocab // 2] = bad
    logits = torch.stack([good, torch.full((vocab,), bad), one, good])
    for top_k, top_p in ((0, 1.0), (5, 0.9), (0, 0.9), (vocab - 1, 0.99), (0, 0.0)):
        asked = (0.7, 0.0, top_k, top_p, 0.6)
        drawn = native.draw(logits, draw_params([asked] * 4)).tolist()
        assert all(0 <= token < vocab for token in drawn)
        assert drawn[0] == drawn[3] and drawn[0] in right_tokens(good, *asked)


def test_rows_are_checked_on_the_way(native):
    asked = (0.7, 0.0, 20, 0.9, 0.6)
    for vocab in (1, 130, 9000):
        for place in (0, vocab // 2, vocab - 1):
            logits = torch.randn(4, vocab)
            logits[1, place], logits[2, place] = math.nan, -math.inf
            ids, finite = native.draw_and_finite(logits, draw_params([asked] * 4))
            assert finite.tolist() == [True, False, vocab > 1, True], "a barred token is no damage"
            assert torch.equal(ids, native.draw(logits, draw_params([asked] * 4)))


def test_what_the_kernel_does_not_cover_goes_to_the_reference(native):
    rows = [(0.8, 0.0, 20, 0.9, 0.3)] * 3
    logits = torch.randn(500, 3, dtype=torch.float32).T
    assert torch.equal(native.draw(logits, draw_params(rows)), draw.reference(logits, draw_params(rows)))
    assert native.draw(
        torch.empty(0, 50), draw_params([(1.0, 0.0, 0, 1.0, 0.0)]).take(np.zeros(0, np.int64))
    ).shape == (0,)
