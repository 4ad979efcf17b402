"""Which graph covers a step, and that padding a step changes nothing about it (the graphs: tests/gpu)."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.toy import Driver, Toy
from vllm.step.inputs import StepInputs
from vllm.worker.input_builder import Laid
from vllm.worker.mixed_graphs import CONTEXTS, REQUESTS, TOKENS, bucket, made_up, step_sizes
from vllm.worker.model_runner import ModelRunner

LONGEST_SHORT_QUERY = 16  # tokens: what one tile of the attention kernel for short queries holds


@given(tokens=st.integers(1, 3000), requests=st.integers(1, 200), longest=st.integers(1, 20_000))
def test_a_bucket_covers_its_step_and_launches_both_kernels_of_attention(
    tokens: int, requests: int, longest: int
) -> None:
    found = bucket(tokens, requests, longest, 16384)
    fits = tokens <= TOKENS[-1] and requests < REQUESTS[-1] and longest <= CONTEXTS[-1]
    assert (found is not None) == fits
    if found is not None:
        size, rows, context = found
        assert size >= tokens and rows > requests and context >= longest
        assert size - (rows - 1) > LONGEST_SHORT_QUERY
        assert size - tokens <= context


def test_padding_must_fit_into_a_row_of_the_block_table() -> None:
    assert bucket(1100, 9, 200, 256, room=272) is None
    assert bucket(1100, 9, 200, 256) == (2048, 32, 1024)
    assert bucket(900, 9, 200, 256, room=272) == (1024, 32, 1024)


def test_large_models_have_graphs_of_small_steps_only() -> None:
    assert step_sizes(600_000_000)[-1] == 2048
    assert step_sizes(8_000_000_000)[-1] == 512
    assert bucket(600, 1, 600, 16384, step_sizes(8_000_000_000)) is None


def test_sequences_beyond_the_limit_are_not_covered() -> None:
    assert bucket(20, 1, 500, 500) == (32, 2, 1024)
    assert bucket(20, 1, 501, 500) is None


@pytest.mark.parametrize("room", [48, 528, 1024])
@pytest.mark.parametrize("longest", [40, 512, 1024])
def test_made_up_steps_fill_a_graph_and_reach_past_no_row(room: int, longest: int) -> None:
    """A row of the block table has columns for `room` tokens: a longer sequence would read what is behind it."""
    longest = min(longest, room)
    for tokens, requests in itertools.product(TOKENS, REQUESTS):
        laid = made_up((tokens, requests, CONTEXTS[0]), room, longest, 2)
        fits = tokens <= room + (requests - 1) * longest
        assert (laid is not None) == fits
        if laid is None:
            continue
        padded = laid.padded(tokens, requests)
        assert padded.starts[-1] == len(padded.positions) == tokens
        assert padded.starts.tolist() == [0, *np.cumsum(padded.lens)]
        assert padded.lens[: len(laid.lens)].max() <= longest and padded.lens[-1] <= room
        assert all((padded.positions[a:b] == np.arange(b - a)).all() for a, b in pairwise(laid.starts))
        assert not any(mapping.any() for mapping in padded.mappings), "all keys go to the null block"
        assert bucket(len(laid.positions), len(laid.slots), int(laid.lens.max()), 4096, TOKENS, room) is not None


class Padded:
    """What a graph computes, without one."""

    handles: frozenset[str] = frozenset()

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.steps = 0

    def forward(self, laid: Laid) -> tuple[StepInputs, Tensor] | None:
        key = bucket(len(laid.positions), len(laid.slots), int(laid.lens.max()), 300)
        if key is None:
            return None
        padded = laid.padded(key[0], key[1])
        device = [torch.from_numpy(array) for array in padded.arrays]
        step = self._runner.builder.inputs(padded, device, int(padded.lens.max()))
        self.steps += 1
        return step, self._runner.model(step, self._runner.kv_caches)


@pytest.mark.parametrize("chunk", [3, 11, 1000])
def test_padded_steps_give_the_dense_models_tokens(chunk: int) -> None:
    model = Toy()
    driver = Driver(model)
    driver.runner.mixed_steps = padded = Padded(driver.runner)
    first, second = [5, 3, 8] * 9, list(range(40))
    driver.add("a", first)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for i in range(30):
        if i == 3:
            driver.add("b", second)
        for name, token in driver.step({"a": chunk, "b": chunk}).items():
            tokens[name] += [token] if token >= 0 else []
    assert padded.steps == 30
    for name, prompt in (("a", first), ("b", second)):
        assert tokens[name] == model.greedy(prompt, len(tokens[name])) and len(tokens[name]) > 10
