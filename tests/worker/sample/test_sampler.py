"""The vectorised sampler against a brute-force one in 64-bit floats, row by row."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.sample import oracle
from tests.worker.sample.rows import Row, lengths, make_sampler, params, sample
from vllm.step.plan import RowMasks
from vllm.step.rng import stream_start, uniform
from vllm.worker.device import DeviceContext
from vllm.worker.sample.constraints import MANY_WORDS
from vllm.worker.slot_table import SlotTable

VOCAB = 50
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.6},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {3: 4.0, 7: -2.5, 49: 1.0}},
    "allowed": {"allowed_token_ids": [1, 3, 3, 7, 20, 21, 22, 48]},
    "bad_words": {"bad_words_token_ids": [[5], [7, 3], [9, 7, 21], [20], [3, 7, 3, 20]]},
    "min_tokens": {"min_tokens": 4},
}


def random_rows(count: int, seed: int, **kwargs: Any) -> list[Row]:
    """Rows with ties (logits are multiples of 1/4), varied history and some repeated tokens."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        logits = torch.from_numpy(np.round(random.normal(0, 3, VOCAB) * 4).astype(np.float32) / 4)
        output = random.choice([3, 7, 9, 20, 21, 40], random.integers(0, 9)).tolist()
        prompt = random.integers(0, VOCAB, random.integers(1, 6)).tolist()
        rows.append(Row(logits, params(**kwargs), prompt, output, seed=seed * 1000 + i, stop=(2, 7, 30)))
    return rows


def check(rows: list[Row], context: DeviceContext | None = None) -> None:
    """Every row's token is one that the oracle allows."""
    result = sample(rows, context)
    assert result.finite.all() and (result.possible is None or result.possible.all()) and not result.errors
    numbers = uniform(stream_start(np.array([r.seed for r in rows], np.uint64)), lengths(rows))
    for row, token, number in zip(rows, result.token_ids.tolist(), numbers.tolist(), strict=True):
        x = oracle.changed_logits(row.logits.tolist(), row.params, row.prompt, row.output, row.stop)
        assert token in oracle.choices(x, row.params, number), row


def random_masks(rows: list[int], random: np.random.Generator) -> tuple[RowMasks, dict[int, list[int]]]:
    """Masks that leave a few tokens each, and which these are."""
    bits: np.ndarray = np.zeros((len(rows), -(-VOCAB // 32)), np.uint32)
    allowed = {row: sorted(random.choice(VOCAB, random.integers(1, 30), replace=False).tolist()) for row in rows}
    for i, row in enumerate(rows):
        for token in allowed[row]:
            bits[i, token // 32] |= np.uint32(1 << token % 32)
    return RowMasks(np.array(rows, np.int32), bits), allowed


@pytest.mark.parametrize("seed", range(6))
def test_masks_of_some_rows_among_all_parameters(seed: int) -> None:
    """As the oracle with the mask's ids as the row's allowed ids; rows without a mask give what they give alone."""
    random = np.random.default_rng(seed)
    names = [n for n in OPTIONS if n != "allowed"] if seed else ["temperature"]
    rows = [random_rows(1, 10 * seed + i, **OPTIONS[random.choice(names)], logprobs=2)[0] for i in range(24)]
    rows += [random_rows(1, 10 * seed + 30 + i)[0] for i in range(6)]  # plain greedy ones
    masked = sorted(random.choice(len(rows), len(rows) // 2, replace=False).tolist())
    masks, allowed = random_masks(masked, random)
    sampler, slots = make_sampler(rows)
    free = sample(rows)
    result = sampler.sample(torch.stack([r.logits for r in rows]), slots, lengths(rows), masks)
    numbers = uniform(stream_start(np.array([r.seed for r in rows], np.uint64)), lengths(rows))
    for i, (row, token) in enumerate(zip(rows, result.token_ids.tolist(), strict=True)):
        if i not in allowed:
            assert token == int(free.token_ids[i])
            continue
        limited = copy.copy(row.params)
        limited.allowed_token_ids = allowed[i]
        x = oracle.changed_logits(row.logits.tolist(), limited, row.prompt, row.output, row.stop)
        if all(v == oracle.NEVER for v in x):
            assert not result.possible[i]
        else:
            assert token in allowed[i] and token in oracle.choices(x, row.params, float(numbers[i]))
            assert result.possible[i]
    assert result.finite.all()
    for group in result.logprobs:
        for i, found in zip(group.rows.tolist(), group.tensors[1].tolist(), strict=True):
            raw = torch.log_softmax(rows[i].logits, -1)
            assert found[0] == pytest.approx(float(raw[result.token_ids[i]]), abs=1e-5)


def test_a_mask_that_forbids_everything_is_reported_for_its_row_alone() -> None:
    rows = random_rows(3, 5, temperature=0.7)
    sampler, slots = make_sampler(rows)
    masks = RowMasks(np.array([1], np.int32), np.zeros((1, -(-VOCAB // 32)), np.uint32))
    result = sampler.sample(torch.stack([r.logits for r in rows]), slots, lengths(rows), masks)
    assert result.possible.tolist() == [True, False, True] and result.finite.all()


def test_a_mask_of_the_wrong_width_is_refused() -> None:
    rows = random_rows(1, 5)
    sampler, slots = make_sampler(rows)
    masks = RowMasks(np.array([0], np.int32), np.zeros((1, 99), np.uint32))
    with pytest.raises(ValueError, match="expected"):
        sampler.sample(torch.stack([r.logits for r in rows]), slots, lengths(rows), masks)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_parameter_alone(name: str) -> None:
    check(random_rows(40, 1, **OPTIONS[name]))


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(OPTIONS, 2)))
def test_parameters_in_pairs(first: str, second: str) -> None:
    check(random_rows(8, 2, **{**OPTIONS[first], **OPTIONS[second]}))


def test_rows_with_different_parameters_in_one_batch() -> None:
    rows = []
    for i, (a, b) in enumerate(itertools.combinations(OPTIONS, 2)):
        rows += random_rows(1, 100 + i, **{**OPTIONS[a], **OPTIONS[b]})
    check(rows)


bounded = st.floats(-8, 8, width=32)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_logits_and_parameters(data: st.DataObject) -> None:
    rows = []
    vocab = data.draw(st.integers(2, 40))
    ids = st.integers(0, vocab - 1)
    for _ in range(data.draw(st.integers(1, 5))):
        logits = torch.tensor(data.draw(st.lists(bounded, min_size=vocab, max_size=vocab)), dtype=torch.float32)
        made = params(
            temperature=data.draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0])),
            top_k=data.draw(st.sampled_from([-1, 1, 2, 7, vocab, vocab + 5])),
            top_p=data.draw(st.sampled_from([1.0, 1e-6, 0.1, 0.5, 0.95])),
            min_p=data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0])),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.5, -1.0])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.2, 0.5])),
            logit_bias=data.draw(st.none() | st.dictionaries(ids, st.floats(-5, 5, width=32), max_size=3)),
        )
        history = st.lists(ids, max_size=6)
        rows.append(
            Row(
                logits,
                made,
                [data.draw(ids), *data.draw(history)],
                data.draw(history),
                data.draw(st.integers(0, 2**64 - 1)),
            )
        )
    check(rows)


def test_a_row_does_not_depend_on_the_rest_of_the_batch_nor_on_threads() -> None:
    generator = torch.Generator().manual_seed(5)
    kinds = [
        {"temperature": 0.9},
        {"temperature": 1.3, "top_p": 0.9, "logprobs": 3},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        {"temperature": 2.5, "top_p": 0.999, "logprobs": 5},
        {"temperature": 1.0, "min_p": 0.01, "repetition_penalty": 1.1},
        {"logprobs": 0},
        {"temperature": 1.0, "top_k": 1500},
        {"presence_penalty": 0.5, "logprobs": 2},
    ]
    vocab = 8193
    rows = [
        Row(torch.randn(vocab, generator=generator) * 2, params(**kinds[i % 8]), [1, 2, i], [i, 5], seed=i)
        for i in range(64)
    ]
    together = sample(rows)
    by_row = {int(r): [t[i] for t in g.tensors] for g in together.logprobs for i, r in enumerate(g.rows)}
    threads = torch.get_num_threads()
    for i, row in enumerate(rows):
        torch.set_num_threads(1 + i % 2)
        alone = sample([row])
        assert alone.token_ids.tolist() == [int(together.token_ids[i])], row.params
        for group in alone.logprobs:
            for mine, its in zip(group.tensors, by_row[i], strict=True):
                assert torch.equal(mine[0], its)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("vocab", [100, 8193, 10000, 151936])
def test_ids_stay_below_the_vocabulary(vocab: int) -> None:
    flat, nan, tail = torch.zeros(vocab), torch.full((vocab,), float("nan")), torch.full((vocab,), -1e30)
    tail[-1] = 0.0
    inf = torch.zeros(vocab)
    inf[vocab // 2] = float("inf")
    kinds = [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 3}, {}]
    rows = [Row(x, params(logprobs=1, **kind), seed=7) for x in (flat, nan, tail, inf) for kind in kinds]
    result = sample(rows)
    assert ((result.token_ids >= 0) & (result.token_ids < vocab)).all()
    assert result.finite.tolist() == [x is flat or x is tail for x in (flat, nan, tail, inf) for _ in kinds]
    assert result.token_ids[8:12].tolist() == [vocab - 1] * 4


@pytest.mark.parametrize("least", [float("-inf"), torch.finfo(torch.float32).min])
def test_tokens_that_a_model_bars_are_no_damage(least: float) -> None:
    logits = torch.full((VOCAB,), least)
    logits[[3, 7]] = torch.tensor([1.0, 2.0])
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.99},
    ]
    result = sample([Row(logits, params(**kind), seed=i) for i, kind in enumerate(kinds)])
    assert result.finite.all()
    assert set(result.token_ids.tolist()) <= {3, 7}
    assert int(result.token_ids[0]) == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_sets_a_token_to_infinity_picks_it(temperature: float) -> None:
    def force(output: list[int], row: torch.Tensor) -> torch.Tensor:
        row[5] = float("inf")
        return row

    result = sample([Row(torch.randn(VOCAB), params(temperature=temperature, logits_processors=[force]), seed=1)])
    assert result.token_ids.tolist() == [5]
    assert result.finite.all() and (result.possible is None or result.possible.all())
    assert not result.errors


@pytest.mark.parametrize("seed", range(3))
def test_very_many_bad_words_are_as_few(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside rows with few, which are then looked at in the same way."""
    random = np.random.default_rng(seed)
    words = [random.choice([3, 7, 9, 20, 21, 40], random.integers(2, 6)).tolist() for _ in range(MANY_WORDS)]
    rows = random_rows(20, seed, bad_words_token_ids=words) + random_rows(20, seed + 1, **OPTIONS["bad_words"])
    compared: list[int] = []
    monkeypatch.setattr(SlotTable, "read_tokens", _counted(SlotTable.read_tokens, compared))
    check(rows)
    assert sum(compared) <= len(rows) * 5  # tokens, however many words there are


def _counted(read: Callable[[SlotTable, torch.Tensor], torch.Tensor], found: list[int]) -> Callable[..., torch.Tensor]:
    def counted(table: SlotTable, index: torch.Tensor) -> torch.Tensor:
        found.append(len(index))
        return read(table, index)

    return counted


def test_nothing_left_to_sample_is_reported_for_that_row() -> None:
    logits = torch.zeros(VOCAB)
    rows = [
        Row(logits, params(allowed_token_ids=[4], bad_words_token_ids=[[4]])),
        Row(logits, params(allowed_token_ids=[4], temperature=1.0)),
    ]
    result = sample(rows)
    assert result.possible is not None and result.possible.tolist() == [False, True]
    assert result.token_ids[1] == 4


def test_ids_beyond_the_vocabulary_do_not_reach_the_next_row() -> None:
    odd = params(logit_bias={VOCAB + 3: 50.0}, allowed_token_ids=[1, VOCAB + 4], bad_words_token_ids=[[VOCAB + 5]])
    logits = torch.arange(VOCAB, dtype=torch.float32)
    assert sample([Row(logits, odd), Row(logits, params()), Row(logits, odd)]).token_ids.tolist() == [1, VOCAB - 1, 1]


def test_counts_follow_the_output_and_die_with_the_slot() -> None:
    logits = torch.zeros(VOCAB)
    row = Row(logits, params(frequency_penalty=1.0), [1], [])
    sampler, slots = make_sampler([row])
    seen = []
    for step in range(5):  # each token is followed by the next: the lowest id that occurs least
        token = sampler.sample(logits[None].clone(), slots, np.array([1 + step], np.int32)).token_ids
        sampler._table.tokens[int(slots[0]), 1 + step] = token[0]
        seen.append(int(token))
    assert seen == [0, 1, 2, 3, 4]
    sampler.leave([int(slots[0])])
    other, _ = make_sampler([row], slots=[int(slots[0])])
    assert int(other.sample(logits[None].clone(), slots, np.array([1], np.int32)).token_ids) == 0


def test_sampling_a_seeded_request_again_gives_the_same_tokens() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    rows = [Row(logits, params(temperature=1.0), seed=seed) for seed in (1, 1, 2)]
    first, second, third = (
        [int(sample([Row(r.logits, r.params, r.prompt, [0] * n, r.seed)]).token_ids) for n in range(20)] for r in rows
    )
    assert first == second != third
    assert len(set(first)) > 5
