"""Which graph covers a step, and that padding a step changes nothing about it (the graphs: tests/gpu)."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.toy import Driver, Recording, Toy, attend_as_recorded
from vllm.step.inputs import RowView, StepFeatures, StepInputs
from vllm.step.plan import Column, StepPlan
from vllm.worker.adapters import ROWS_WITH_ADAPTERS
from vllm.worker.input_builder import Laid
from vllm.worker.mixed_graphs import CONTEXTS, REQUESTS, TOKENS, MixedGraphs, bucket, made_up, step_sizes
from vllm.worker.model_runner import ModelRunner

LONGEST_SHORT_QUERY = 16  # tokens: what one tile of the attention kernel for short queries holds


@given(tokens=st.integers(1, 5000), requests=st.integers(1, 200), longest=st.integers(1, 20_000))
def test_a_bucket_covers_its_step_and_launches_both_kernels_of_attention(
    tokens: int, requests: int, longest: int
) -> None:
    found = bucket(tokens, requests, longest, 16384)
    fits = tokens <= TOKENS[-1] and requests < REQUESTS[-1] and longest <= CONTEXTS[-1 if tokens <= 2048 else 0]
    assert (found is not None) == fits
    if found is not None:
        size, rows, context = found
        assert size >= tokens and rows > requests and context >= longest
        assert size - (rows - 1) > LONGEST_SHORT_QUERY
        assert size - tokens <= context


def test_padding_must_fit_into_a_row_of_the_block_table() -> None:
    assert bucket(1600, 9, 200, 256, room=272) is None
    assert bucket(1600, 9, 200, 256) == (2048, 32, 1024)
    assert bucket(900, 9, 200, 256, room=272) == (1024, 32, 1024)


def test_large_models_have_graphs_of_small_steps_only() -> None:
    assert step_sizes(600_000_000) == (32, 64, 128, 256, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)
    assert step_sizes(8_000_000_000) == (32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
    assert bucket(1100, 1, 600, 16384, step_sizes(8_000_000_000)) is None


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

    def forward(self, laid: Laid, adapters: np.ndarray | None = None) -> tuple[StepInputs, Tensor] | None:
        key = bucket(len(laid.positions), len(laid.slots), int(laid.lens.max()), 300)
        if key is None:
            return None
        padded = laid.padded(key[0], key[1])
        device = [torch.from_numpy(array) for array in padded.arrays]
        step = self._runner.builder.inputs(padded, device, int(padded.lens.max()))
        self.steps += 1
        return step, self._runner.model(step, self._runner.kv_caches)

    def rounded(self, laid: Laid) -> Laid:
        return laid


class Rounded:
    """No graphs; tokens of nobody behind those of every step."""

    handles: frozenset[str] = frozenset()
    steps = 0

    def forward(self, laid: Laid, adapters: np.ndarray | None = None) -> None:
        return None

    def rounded(self, laid: Laid) -> Laid:
        self.steps += 1
        return laid.followed(-(-len(laid.positions) // 32) * 32)


@pytest.mark.parametrize("kind", [Padded, lambda runner: Rounded()])
@pytest.mark.parametrize("chunk", [3, 11, 1000])
def test_padded_steps_give_the_dense_models_tokens(chunk: int, kind: Any) -> None:
    model = Toy()
    driver = Driver(model)
    driver.runner.mixed_steps = padded = kind(driver.runner)
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


class ToyAdapters:
    """Of requests in slots 1, 4, 7, ..., which a Toy does not heed; who looks is told what each row has."""

    column = Column("adapter", "int32", -1)
    by_slot = np.array([-1, 2, -1, 0, 5, -1, 1, 3], np.int32)

    def features(self, plan: StepPlan) -> frozenset[str]:
        return frozenset({ROWS_WITH_ADAPTERS} if (self.by_slot[plan.slots] >= 0).any() else ())

    def of_tokens(self, plan: StepPlan) -> np.ndarray:
        found: np.ndarray = np.repeat(self.by_slot[plan.slots], plan.num_tokens)
        return found

    def views(self, plan: StepPlan, laid: Laid) -> StepFeatures:
        found = self.of_tokens(plan)
        tokens, rows = (RowView(torch.from_numpy(x), ()) for x in (found, found[laid.logits_rows]))
        return StepFeatures(adapters=(tokens, rows))

    def view_of_slots(self, slots: np.ndarray) -> RowView:
        return RowView(torch.from_numpy(self.by_slot[slots]), ())

    def load(self, loads: object) -> None:
        return


class Capturing(Recording):
    """Runs what it records once, as capturing does, so that there are results to refer to."""

    def record(self, run: Any, pool: Any) -> Any:
        run()
        return super().record(run, pool)


def test_a_captured_step_has_each_tokens_adapter_and_none_for_padding() -> None:
    """Steps of the same size with and without adapters are graphs of their own."""
    model, context = Toy(attend=attend_as_recorded), Capturing()
    driver = Driver(model, num_blocks=800, context=context, columns=(ToyAdapters.column,))
    runner: Any = driver.runner
    runner.adapters = ToyAdapters()
    graphs = runner.mixed_steps = MixedGraphs(runner, context, 300, 4096)  # type: ignore[arg-type]
    seen: list[StepInputs] = []
    forward, logits = model.forward, model.logits
    model.forward = lambda step, caches: [seen.append(step), forward(step, caches)][1]  # type: ignore
    model.logits = lambda hidden, view=None: logits(hidden)  # type: ignore
    prompts = {name: [(7 * i + j) % 50 for j in range(250)] for i, name in enumerate("abcde")}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
        for _ in range(4):
            own = {n: [driver.slot[n]] for n in tokens if n in driver.slot}
            before = len(seen)
            for n, token in driver.step(dict.fromkeys(own, 11)).items():
                tokens[n] += [token] if token >= 0 else []
            (step,) = seen[before : before + 1]
            wanted = [ToyAdapters.by_slot[slot] for (slot,) in own.values()]
            if max(wanted) < 0:
                assert step.features is None
                continue
            assert step.features is not None and step.features.adapters is not None
            of_tokens, of_logits = step.features.adapters
            assert of_tokens is not None and of_logits is not None and step.logits_rows is not None
            starts = step.query_starts.tolist()
            for row, adapter in enumerate(wanted):
                assert of_tokens.adapters[starts[row] : starts[row + 1]].tolist() == [adapter] * (
                    starts[row + 1] - starts[row]
                )
            assert (of_tokens.adapters[starts[len(wanted)] :] == -1).all()
            assert of_logits.adapters.tolist() == of_tokens.adapters[step.logits_rows].tolist()
    assert context.replayed > 5 and {key.adapted for key in graphs._entries} == {False, True}
    for name, prompt in prompts.items():
        assert tokens[name] == model.greedy(prompt, len(tokens[name]))
