"""Decode steps of pipeline stages as graphs, on the host's memory: the tokens of one stage, however padded."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.toy import BLOCK, DIM, HEADS, VOCAB, Driver, Recording, Toy, attend_as_recorded
from vllm.distributed.pipeline import Pipeline
from vllm.model_executor.models.kv_groups import layout_of
from vllm.ops.attention import AttentionParams, write_kv
from vllm.step.inputs import StepInputs
from vllm.step.known import KnownTokens
from vllm.step.plan import StepPlan, TokenWrite
from vllm.worker.cuda_graphs import DecodeGraphs
from vllm.worker.input_builder import Laid
from vllm.worker.model_runner import ModelRunner
from vllm.worker.stage_graphs import StageGraphs, uniform
from vllm.worker.stage_runner import StageRunner, StageTokens

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is not chosen", allow_module_level=True)


class Half(Toy):
    """One of the two layers of a toy."""

    def __init__(self, layer: int) -> None:
        super().__init__(attend=attend_as_recorded)
        self.layer = layer
        self.traits = replace(self.traits, layers=range(layer, layer + 1), splits=True)

    def forward(self, step: StepInputs, kv_caches: list[Tensor], stream: Tensor | None = None) -> Tensor:
        assert (stream is None) == (self.layer == 0)
        x = self.embed[step.token_ids] + self.place[step.positions] if stream is None else stream
        q, k, v = (x @ self.qkv[self.layer]).view(len(x), 3, HEADS, DIM).unbind(1)
        group = step.groups[self.layer]
        write_kv(k, v, kv_caches[0], group.slot_mapping)
        params = AttentionParams(scale=DIM**-0.5, window=self.windows[self.layer])
        x = x + self.attend(q, kv_caches[0], params, step, group).flatten(1)
        return x if self.layer == 0 else step.wanted(x)


class Queue:
    """A link from a stage to the next one of this process. What is sent must not change before it has arrived."""

    def __init__(self) -> None:
        self.sent: deque[tuple[Tensor, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        self.sent.append((x, x.clone()))

    def receive(self, x: Tensor) -> Tensor:
        sent, copy = self.sent.popleft()
        assert torch.equal(sent, copy) and sent.shape == x.shape
        return x.copy_(sent)


class Staged:
    """A driver whose runner is the last of two stages; plans go to both, tokens to the first with the next plan, which
    the last stage sends, unless there are drafts.
    """

    def __init__(self, sizes: tuple[list[int], list[int]]) -> None:
        self.driver, link, tokens = Driver(Toy()), Queue(), Queue()
        self.contexts = Recording(), Recording()
        models = Half(0), Half(1)
        places = Pipeline(0, 2, None, link, tokens), Pipeline(1, 2, link, None, tokens)  # type: ignore[arg-type]
        caches = [[torch.zeros(256, 2, HEADS, BLOCK, DIM)] for _ in models]
        first, last = (layout_of(model.traits, BLOCK) for model in models)
        common: dict[str, Any] = {"num_slots": 8, "max_model_len": 300}
        self.first = StageRunner(models[0], first, caches[0], self.contexts[0], places[0], **common)
        self.last = self.driver.runner = ModelRunner(
            models[1], last, caches[1], self.contexts[1], vocab_size=VOCAB, pipeline=places[1], **common
        )
        self.first.decode_steps = StageGraphs(self.first, self.contexts[0], sizes[0], 300)
        self.last.decode_steps = DecodeGraphs(self.last, self.contexts[1], sizes[1], 300)
        self.known = KnownTokens()
        self.tokens = StageTokens(self.last.table, self.contexts[1], tokens)  # type: ignore[arg-type]

    def run(self, plan: StepPlan) -> Any:
        known = self.known.take()
        self.first.execute(plan, known, self.known.planned(plan))
        self.driver.result = result = self.last.execute(plan).result()
        self.tokens.send(plan)
        self.known.sampled(plan, result)
        return result


def add(drivers: list[Driver], count: int) -> None:
    rng = np.random.default_rng(5)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"presence_penalty": 0.7},
        {"temperature": 1.2, "top_k": 9},
    ]
    for i in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 20)).tolist()
        for driver in drivers:
            driver.add(f"r{i}", prompt, seed=i, **kinds[i % len(kinds)])


@pytest.mark.parametrize("sizes", [([1, 3, 5], [2, 8]), ([8], [1, 2, 4, 8])])
def test_two_stages_give_the_tokens_of_one(sizes: tuple[list[int], list[int]]) -> None:
    """While requests come and go; each stage pads steps to sizes of its own, and a size may lack on one of them."""
    plain, staged = Driver(Toy()), Staged(sizes)
    drivers = [plain, staged.driver]
    add(drivers, 4)
    for step in range(16):
        for driver in drivers:
            if step == 5:
                driver.remove("r2")
            if step in (7, 8):
                driver.add(f"late{step}", [5, 6, 7], seed=9, temperature=0.7)
            if step == 11:
                driver.add("more", [8, 9], seed=3)
        want = plain.runner.execute(plain.plan()).result()
        assert staged.run(staged.driver.plan()).token_ids == want.token_ids, step
    assert all(context.recorded >= 1 and context.replayed > 2 for context in staged.contexts)


def test_a_long_pipeline_has_more_steps_in_flight_than_a_ring_of_eight() -> None:
    """Each step's tokens are read when as many more have been queued as there are stages."""

    def tokens(world: int, in_flight: int) -> list[list[int]]:
        context = Recording()
        driver = Driver(Toy(attend=attend_as_recorded), context=context)
        driver.runner.pipeline = AloneOf(world=world)
        driver.runner.decode_steps = DecodeGraphs(driver.runner, context, [2], 300)
        for i in range(2):
            driver.add(f"r{i}", [5 + i, 6, 7], seed=i, temperature=0.9)
        handles, found = deque[Any](), []
        for _ in range(30):
            handles.append(driver.runner.execute(driver.plan()))
            if len(handles) >= in_flight:
                found.append(handles.popleft().result().token_ids)
        return found + [handle.result().token_ids for handle in handles]

    assert tokens(11, in_flight=12) == tokens(1, in_flight=1)


class AloneOf(Pipeline):
    """A pipeline of which one rank has all layers."""

    is_first = is_last = True  # type: ignore[assignment]


def test_stages_prepare_steps_each_by_itself() -> None:
    """Then no step captures anything, and nothing of what was made up is left."""
    plain, staged = Driver(Toy()), Staged(([2, 8], [1, 4, 8]))
    with torch.inference_mode():
        for runner in (staged.first, staged.last):
            while runner.decode_steps.prepare():  # type: ignore[union-attr]
                pass
    recorded = [context.recorded for context in staged.contexts]
    assert recorded == [2, 6], "the last stage's are greedy and drawn"
    drivers = [plain, staged.driver]
    add(drivers, 3)
    for _ in range(6):
        want = plain.runner.execute(plain.plan()).result()
        assert staged.run(staged.driver.plan()).token_ids == want.token_ids
    for context, before in zip(staged.contexts, recorded, strict=True):
        shared = context.recorded - before  # what ends with hidden states is captured when it comes
        assert shared <= 1 and context.replayed > 0


def test_a_token_for_a_slot_that_is_filled_again_is_nobodys() -> None:
    """It arrives after the new request's tokens, and stands at one of their positions."""
    staged, link = Staged(([1], [1])), Queue()
    (first, last), context = (staged.first.table, staged.last.table), staged.contexts[0]
    sender, receiver = (StageTokens(table, context, link) for table in (last, first))  # type: ignore[arg-type]
    driver = staged.driver
    add([driver], 2)
    plan = driver.plan()
    for init in plan.new:
        last.tokens[init.slot, len(init.token_ids)] = 90 + init.slot
    receiver.expect(plan)
    slot, where = plan.new[1].slot, len(plan.new[1].token_ids)
    refilled = plan.new[1]._replace(token_ids=list(range(where + 3)))
    empty = plan.slots[:0]
    receiver.expect(msgspec.structs.replace(
        plan, step_id=plan.step_id + 1, new=(refilled,), slots=empty, num_tokens=empty, num_computed=empty,
        sample=plan.sample[:0],
    ))  # fmt: skip
    first.enter([refilled])
    sender.send(plan)
    receiver.receive(1)
    kept = plan.new[0]
    assert first.tokens[kept.slot, len(kept.token_ids)] == 90 + kept.slot
    assert first.tokens[slot, : where + 3].tolist() == list(range(where + 3)) and not link.sent
    with pytest.raises(NotImplementedError, match="Masks"):
        sender.send(msgspec.structs.replace(plan, late=np.ones(len(plan.slots), bool)))


class Rounded:
    """Mixed steps none of which is a graph, rounded to a multiple."""

    handles = frozenset[str]()

    def __init__(self, unit: int) -> None:
        self.unit, self.sizes = unit, list[tuple[int, int]]()

    def forward(self, laid: Laid, adapters: Any = None) -> None:
        return None

    def rounded(self, laid: Laid) -> Laid:
        tokens = len(laid.positions)
        self.sizes.append((tokens, -(-tokens // self.unit) * self.unit))
        return laid.followed(self.sizes[-1][1])


def test_each_stage_pads_large_steps_as_it_likes() -> None:
    plain, staged = Driver(Toy()), Staged(([1], [1]))
    rounded = staged.first.mixed_steps, staged.last.mixed_steps = Rounded(8), Rounded(5)
    drivers = [plain, staged.driver]
    add(drivers, 4)
    for step in range(4):
        if step == 2:
            for driver in drivers:
                driver.add("late", list(range(13)), seed=9, temperature=0.7)
        want = plain.runner.execute(plain.plan()).result()
        assert staged.run(staged.driver.plan()).token_ids == want.token_ids
    assert all(any(size > tokens for tokens, size in one.sizes) for one in rounded)
    assert [tokens for tokens, _ in rounded[0].sizes] == [tokens for tokens, _ in rounded[1].sizes]


def test_drafts_that_are_as_many_for_each_row_go_through_graphs_and_others_past_them() -> None:
    plain, staged = Driver(Toy()), Staged(([4, 12], [3, 16]))
    add([plain, staged.driver], 3)
    truth = plain.generate(40)
    driver, random = staged.driver, np.random.default_rng(0)
    found = {name: [token] for name, token in zip(driver.slot, staged.run(driver.plan()).token_ids, strict=True)}
    names, accepted, drafted, used = list(driver.slot), 0, 0, set()
    while min(map(len, found.values())) < 30:
        even = bool(random.integers(2))
        drafts = {}
        for i, name in enumerate(names):
            right = truth[name][len(found[name]) :][: 2 if even else 1 + i % 2]
            drafts[name] = [token if random.random() < 0.7 else int(random.integers(VOCAB)) for token in right]
            driver.total[name] += len(drafts[name])
        writes = tuple(TokenWrite(driver.slot[n], driver.total[n] - len(d), d) for n, d in drafts.items())
        numbers = np.array([len(drafts[n]) for n in names], np.int32)
        plan = msgspec.structs.replace(driver.plan(), writes=writes, drafts=numbers)
        assert uniform(plan) == (3 if even else 0)
        used.add(even)
        result = staged.run(plan)
        tokens = iter(result.token_ids)
        for name, count in zip(names, result.counts, strict=True):
            found[name] += [next(tokens) for _ in range(count)]
            accepted, drafted = accepted + count - 1, drafted + len(drafts[name])
            driver.total[name] -= len(drafts[name]) + 1 - count
            driver.computed[name] = driver.total[name] - 1
    for name, tokens in found.items():
        assert tokens[:30] == truth[name][:30], name
    assert 0 < accepted < drafted and used == {True, False}
    assert staged.contexts[0].replayed > 0


def test_a_step_with_a_prompt_in_it_is_not_uniform() -> None:
    driver = Driver(Toy())
    driver.add("a", [1, 2, 3])
    assert uniform(driver.plan()) == 0
    assert uniform(driver.plan()) == 1
    driver.add("b", [4])
    assert uniform(driver.plan()) == 1, "a prompt of one token is a decode step"
