"""Which graph covers a step, and that padding a step changes nothing about it (the graphs: tests/gpu)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.toy import Driver, Toy
from vllm.step.inputs import StepInputs
from vllm.worker.input_builder import Laid
from vllm.worker.mixed_graphs import CONTEXTS, REQUESTS, TOKENS, bucket, step_sizes
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


class Padded:
    """What a graph computes, without one."""

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
