"""Several tokens a step: rows with drafts give the tokens, logprobs and errors that they give without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.worker.toy import VOCAB, Ahead, Driver, Toy
from vllm.step.plan import TokenWrite
from vllm.step.result import Logprobs, StepResult
from vllm.worker.device import CpuContext

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.9},
    "counts": {"presence_penalty": 0.8, "frequency_penalty": 0.7},
    "drawn counts": {"temperature": 1.2, "frequency_penalty": 1.5, "logprobs": 3},
    "repetition": {"repetition_penalty": 1.5, "logprobs": 1},
    "words": {"bad_words_token_ids": [[5], [40, 41], [7, 8, 9]], "temperature": 1.5},
    "minimum": {"min_tokens": 9, "stop": (3, 4, 5, 6, 10, 11, 12, 13), "temperature": 1.0},
    "allowed": {"allowed_token_ids": list(range(20)), "logit_bias": {3: 2.0}},
}


class Drafting(Driver):
    """A driver whose decode rows bring drafts: some right, some wrong, of lengths that differ."""

    def __init__(
        self, model: Toy, truth: dict[str, list[int]], most: int, seed: int, context: CpuContext | None = None
    ) -> None:
        super().__init__(model, context=context)
        self.truth, self.most, self.random = truth, most, np.random.default_rng(seed)
        self.found: dict[str, list[int]] = {name: [] for name in truth}
        self.logprobs: dict[str, list[Any]] = {name: [] for name in truth}
        self.accepted = self.drafted = 0

    def draft(self, name: str) -> list[int]:
        known = len(self.found[name])
        right = self.truth[name][known : known + int(self.random.integers(0, self.most + 1))]
        return [t if self.random.random() < 0.7 else int(self.random.integers(0, VOCAB)) for t in right]

    def drafted_step(self) -> StepResult:
        names = list(self.slot)
        drafts: dict[str, list[int]] = {}
        for name in names:
            if self.total[name] - self.computed[name] == 1:
                drafts[name] = self.draft(name)
                self.total[name] += len(drafts[name])  # as if they were tokens: blocks and counts follow
        writes = tuple(
            TokenWrite(self.slot[n], self.total[n] - len(d), d) for n, d in drafts.items() if d
        )  # fmt: skip
        plan = replace(self.plan(), writes=writes, drafts=np.array([len(drafts.get(n, ())) for n in names], np.int32))
        result = self.runner.execute(plan).result()
        assert result.counts is not None and not result.errors and not result.logprobs
        tokens = iter(result.token_ids)
        entries = {n.row: n.entries for n in result.news if isinstance(n, Logprobs)}
        for i, (name, count) in enumerate(zip(names, result.counts, strict=True)):
            new = [next(tokens) for _ in range(count)]
            proposed = len(drafts.get(name, ()))
            self.found[name] += new
            self.drafted += proposed
            self.accepted += max(0, count - 1)
            self.total[name] -= proposed + 1 - count if count else proposed
            self.computed[name] = self.total[name] - 1 if count else self.computed[name]
            if i in entries:
                assert len(entries[i]) == count
                self.logprobs[name] += entries[i]
        assert next(tokens, None) is None
        return result


def run_plainly(model: Toy, steps: int) -> tuple[dict[str, list[int]], dict[str, list[Any]]]:
    driver = Driver(model)
    enter(driver)
    found: dict[str, list[int]] = {name: [] for name in REQUESTS}
    logprobs: dict[str, list[Any]] = {name: [] for name in REQUESTS}
    for _ in range(steps):
        for i, (name, token) in enumerate(driver.step().items()):
            found[name].append(token)
            if i in driver.result.logprobs:
                logprobs[name].append(driver.result.logprobs[i])
    return found, logprobs


def enter(driver: Driver) -> None:
    random = np.random.default_rng(11)
    for i, (name, params) in enumerate(REQUESTS.items()):
        prompt = random.integers(0, VOCAB, random.integers(3, 30)).tolist()
        driver.add(name, prompt, seed=100 + i, **params)


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("context", [CpuContext(), Ahead()])
def test_tokens_and_logprobs_do_not_depend_on_drafts(most: int, context: CpuContext) -> None:
    model = Toy()
    truth, logprobs = run_plainly(model, 30)
    driver = Drafting(model, truth, most, most, context)
    enter(driver)
    while min(map(len, driver.found.values())) < 24:
        driver.drafted_step()
    for name, tokens in driver.found.items():
        assert tokens[:24] == truth[name][:24], name
        for got, want in zip(driver.logprobs[name][:24], logprobs[name], strict=False):
            assert got.token_ids == want.token_ids and got.rank == want.rank
            np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
        length = int(driver.runner.table.known_lengths(np.array([driver.slot[name]]))[0])
        assert length == driver.total[name]
    assert 0 < driver.accepted < driver.drafted


@pytest.mark.parametrize("context", [CpuContext(), Ahead()])
def test_a_row_that_is_not_exact_goes_on_where_the_device_says(context: CpuContext) -> None:
    """The plan believes that every draft held: what follows does not depend on it."""
    model = Toy()
    truth, _ = run_plainly(model, 30)
    driver = Drafting(model, truth, 3, 5, context)
    enter(driver)
    names = list(driver.slot)
    for step in range(40):
        driver.drafted_step()
        if step % 2:
            continue
        upper = driver.random.integers(0, 3, len(names)).astype(np.int32)
        plan = driver.plan()
        exact = upper == 0
        plan = replace(plan, num_computed=plan.num_computed + upper, exact=exact)
        result = driver.runner.execute(plan).result()
        for name, token in zip(names, result.token_ids, strict=True):
            driver.found[name].append(token)
        if min(map(len, driver.found.values())) >= 24:
            break
    for name, tokens in driver.found.items():
        assert tokens[:24] == truth[name][:24], name


def test_a_row_further_than_planned_is_refused() -> None:
    driver = Driver(Toy())
    driver.add("a", [1, 2, 3])
    driver.step()
    plan = driver.plan()
    with pytest.raises(ValueError, match="further than the plan"):
        driver.runner.execute(replace(plan, num_computed=plan.num_computed - 1, exact=np.array([False])))


def test_not_a_number_behind_a_wrong_draft_harms_nobody() -> None:
    model = Toy()
    truth = model.greedy([1, 2, 3], 8)
    poison = next(t for t in range(VOCAB) if t not in truth and t > 3)
    driver = Driver(model)
    driver.add("a", [1, 2, 3])
    driver.add("b", [1, 2, 3])
    driver.step()
    model.poison.add(poison)
    driver.total = {name: total + 2 for name, total in driver.total.items()}
    plan = driver.plan()
    writes = (TokenWrite(plan.slots[0], 4, [truth[1], poison]), TokenWrite(plan.slots[1], 4, [truth[1], truth[2]]))
    result = driver.runner.execute(replace(plan, writes=writes, drafts=np.array([2, 2], np.int32))).result()
    assert not result.errors and result.counts == [2, 3]
    assert result.token_ids == [*truth[1:3], *truth[1:4]]


def test_written_tokens_count_as_output() -> None:
    """What the host writes without asking for a sample is penalised like what was sampled."""
    model = Toy()
    settings = {"frequency_penalty": 1.9, "presence_penalty": 1.0}
    prompt, output = [4, 5, 6], [7, 7, 8, 9]
    expected = Driver(model)
    expected.add("a", prompt + output, prompt=3, **settings)
    want = expected.generate(6)["a"]
    driver = Driver(model)
    driver.add("a", prompt, **settings)
    plan = driver.plan()
    driver.computed["a"], driver.total["a"] = 0, len(prompt + output)
    follow = driver.plan()
    plan = replace(
        follow, new=plan.new, blocks=plan.blocks + follow.blocks, writes=(TokenWrite(int(plan.slots[0]), 3, output),)
    )
    found = driver.runner.execute(plan).result().token_ids + driver.generate(5)["a"]
    assert found == want
