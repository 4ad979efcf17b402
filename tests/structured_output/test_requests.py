"""Requests whose masks take long share half of the time while others are there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm.core.request import Request
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreRequest
from vllm.structured_output import requests as module
from vllm.structured_output.compiler import Compiled
from vllm.structured_output.excess import EXCESS_SECONDS, MASK_SECONDS
from vllm.structured_output.grammar import Filled
from vllm.structured_output.positions import MaskTable, Places
from vllm.structured_output.requests import COMPANY_SECONDS, MIN_MASK_SECONDS, QUICK_SECONDS, GrammarRequests
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.vocabulary import Vocabulary


class Slow:
    """A back end, its only grammar and all of its matchers: any token may follow, and each mask takes `cost`."""

    nbytes = 0
    places_decide = False

    def __init__(self) -> None:
        self.cost = self.now = 0.0
        self.num_masks = 0

    def start(self) -> Slow:
        return self

    def fill_all(self, matchers: Sequence[Any], tokens: Sequence[int], bits: np.ndarray) -> Filled:
        self.now += self.cost * len(matchers)
        self.num_masks += len(matchers)
        bits[:] = 0xFFFFFFFF
        return Filled([], [], {})


class Served:
    """Requests with that grammar, and how the core asks for their masks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow = slow = Slow()
        vocabulary = Vocabulary((b"a",) * 31 + (None,), (31,), lambda text: [])
        done: Future[Compiled] = Future()
        done.set_result(Compiled(slow, slow))  # type: ignore[arg-type]
        compiler = SimpleNamespace(vocabulary=vocabulary, compile=lambda spec: done, give_up=lambda spec: None)
        monkeypatch.setattr(
            module, "time", SimpleNamespace(thread_time=lambda: slow.now, perf_counter=lambda: slow.now)
        )
        self.grammars = GrammarRequests(compiler, clock=lambda: slow.now)  # type: ignore[arg-type]
        self.running: list[Request] = []

    def add(self, count: int) -> None:
        for i in range(count):
            request = Request(CoreRequest(f"r{i}", [1], SamplingParams(max_tokens=10_000), 0), 20_000, 1, i)
            assert self.grammars.add(request, GrammarSpec("grammar", "", "slow"))
            self.running.append(request)

    def step(self, seconds: float = 0.001, others: int = 1) -> list[str]:
        """Give all that are not paused their next token, beside so many others. Returns who got one."""
        paused = self.grammars.paused(self.running, len(self.running) + others)
        chosen = [request for request in self.running if request.id not in paused]
        self.slow.now += seconds
        for request in chosen:
            request.tokens.append(1)
        errors = self.grammars.masks(chosen, range(len(chosen))).errors
        self.grammars.forget(errors)
        self.running = [request for request in self.running if request.id not in errors]
        return [request.id for request in chosen]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_slow_masks_take_half_of_the_time_in_small_parts(served: Served, count: int) -> None:
    served.add(count)
    served.slow.cost = 0.5 * MASK_SECONDS if count == 1 else MIN_MASK_SECONDS
    for _ in range(100):  # those whose masks were computed first are timed by then, too
        served.step()
    counts: dict[str, int] = {}
    begun, masks, longest = served.slow.now, served.slow.num_masks, 0.0
    while served.slow.now < begun + 20.0:
        before = served.slow.now
        for name in served.step():
            counts[name] = counts.get(name, 0) + 1
        longest = max(longest, served.slow.now - before)
    share = (served.slow.num_masks - masks) * served.slow.cost / (served.slow.now - begun)
    assert 0.4 < share < 0.52
    assert longest < 0.001 + MASK_SECONDS + served.slow.cost
    assert len(counts) == len(served.running) == count  # nobody fails
    assert max(counts.values()) - min(counts.values()) <= 0.1 * max(counts.values()) + 1


def test_first_masks_are_computed_one_by_one_and_at_one_place_once(served: Served) -> None:
    vocabulary = served.grammars.compiler.vocabulary
    spec = GrammarSpec("json", '{"type": "object"}', "slow")
    places = Places.of(spec, vocabulary.tokens, MaskTable(vocabulary.words))
    done: Future[Compiled] = Future()
    done.set_result(Compiled(served.slow, served.slow, places))  # type: ignore[arg-type]
    served.grammars.compiler.compile = lambda spec: done  # type: ignore[method-assign]
    served.slow.cost = 0.2
    served.add(40)
    masks = served.grammars.masks(served.running, range(40))
    assert served.slow.num_masks == 1 and served.slow.now == 0.2
    assert not masks.errors and masks.bits.tolist() == [[0xFFFFFFFF]] * 40


def test_alone_they_have_all_of_the_time(served: Served) -> None:
    served.add(5)
    served.slow.cost = MIN_MASK_SECONDS
    for _ in range(20):
        assert len(served.step(others=0)) == 5
    while len(served.step(others=1)) == 5:
        pass
    served.slow.now += COMPANY_SECONDS / 2
    assert len(served.step(others=0)) == 5  # paused for less than that
    assert not served.step(others=0)  # the others may come back
    served.slow.now += COMPANY_SECONDS
    served.step(others=0)
    assert len(served.step(others=0)) == 5


def test_quick_masks_are_not_paused(served: Served) -> None:
    served.add(40)
    served.slow.cost = QUICK_SECONDS / 2
    for _ in range(100):
        assert len(served.step()) == 40
    served.slow.cost = MIN_MASK_SECONDS
    while served.step():
        pass
    served.slow.cost = QUICK_SECONDS / 2
    for _ in range(2000):
        served.step()
    assert len(served.step()) == 40


def test_one_whose_token_is_in_flight_waits_for_its_mask(served: Served) -> None:
    served.add(1)
    served.slow.cost = MASK_SECONDS
    while served.step():
        pass
    served.slow.now += 1.0
    served.running[0].num_pending = 1
    assert served.grammars.paused(served.running, 2) == ["r0"]
    served.running[0].num_pending = 0
    assert served.grammars.paused(served.running, 2) == []


def test_one_that_does_not_run_keeps_none_waiting(served: Served) -> None:
    served.add(2)
    served.slow.cost = MASK_SECONDS
    while len(served.step()) == 2:
        pass
    served.slow.now += 1.0
    assert len(served.grammars.paused(served.running, 3)) == 1
    assert [served.grammars.paused([request], 3) for request in served.running] == [[], []]


@pytest.mark.parametrize("count", [1, 30])
def test_masks_that_take_ever_longer_end_their_requests(served: Served, count: int) -> None:
    served.add(count)
    spent = 0.0
    while served.running:
        masks = served.slow.num_masks
        served.step()
        spent += (served.slow.num_masks - masks) * served.slow.cost
        served.slow.cost = 0.001 * served.slow.num_masks / count
    assert served.slow.cost < 4 * MASK_SECONDS
    assert spent < 4 * EXCESS_SECONDS
