"""Graphs of decode steps, on the host's memory: which steps they take, and that these bring what they bring without
(on a device: tests/gpu).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import fields, replace

from tests.worker.test_drafts import Drafting, enter, run_plainly
from tests.worker.toy import VOCAB, Ahead, Driver, Recording, Toy, attend_as_recorded
from vllm.step.inputs import StepFeatures, StepInputs
from vllm.step.kv_policy import KVGroup, KVKind, KVPolicy
from vllm.step.plan import Column, RowMasks, StepPlan
from vllm.worker.adapters import ROWS_WITH_ADAPTERS
from vllm.worker.cuda_graphs import _ENDINGS, DecodeGraphs
from vllm.worker.model_runner import KNOWN
from vllm.worker.sample.params import Needs
from vllm.worker.static_steps import graphs_know
from vllm.worker.step_kind import _BEFORE, StepKind

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is not chosen")
SIZES = [1, 3, 5, 12, 20]


class Counted(DecodeGraphs):
    """Remembers which graphs were used."""

    def _use(self, key: Any) -> Any:
        self.used = [*getattr(self, "used", []), key]
        return super()._use(key)


def recordable() -> Toy:
    """Whose steps can be done again with other numbers at the same places."""
    return Toy(attend=attend_as_recorded)


def with_graphs(driver: Driver, sizes: list[int] = SIZES, longest: int = 300) -> Counted:
    context: Any = driver.runner.context
    assert isinstance(context, Recording)
    graphs = driver.runner.decode_steps = Counted(driver.runner, context, sizes, longest)
    return graphs


class Compiling:
    """Kernels under way."""

    def __init__(self) -> None:
        self.finished = False

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_go_another_way_while_kernels_are_compiled_unless_ranks_must_agree(ranks: int) -> None:
    graphs: Any = object.__new__(DecodeGraphs)
    compiling = graphs._compiling = Compiling()
    graphs._runner = SimpleNamespace(tp=SimpleNamespace(world=ranks))
    assert graphs._still_compiling() == (ranks == 1)
    assert compiling.finished == (ranks == 2), "only the first rank knows of it: it waits, and the others for it"
    compiling.finished = True
    assert not graphs._still_compiling()
    assert graphs._compiling is None


# -- which steps -------------------------------------------------------------------------------------------------------


def endings(kind: StepKind, ranks: int = 1) -> list[str]:
    return [e.name for e in _ENDINGS if e.covers(kind, ranks)]


def test_a_step_with_a_feature_or_a_need_that_no_graph_names_takes_the_general_path() -> None:
    """Whatever is added to plans, steps and sampling is refused until a graph says that it handles it."""
    assert endings(StepKind(1, 0, frozenset()))[0] == "plain"
    handled = {"exact", "drafts", "masks", "late", "rows with adapters"}
    names = {f.name for f in fields(StepPlan)} | set(StepFeatures.__struct_fields__) | {"prompt_logprobs"}
    for name in [*names, "a field to come"]:
        found = endings(StepKind(1, 0, frozenset({name})))
        assert bool(found) == (name in handled), name
    assert endings(StepKind(1, 0, frozenset({"drafts", "masks"}))) == []
    assert endings(StepKind(2, 0, frozenset({"masks"}))) == []
    for need in (value for name, value in vars(Needs).items() if name.isupper()):
        found = endings(StepKind(1, need, frozenset()))
        assert found[0] == ("plain" if need == Needs.DRAW else "hidden")
    assert endings(StepKind(3, Needs.DRAW | Needs.COUNTS, frozenset({"drafts"}))) == []
    assert endings(StepKind(1, 0, frozenset({"late"})), ranks=2) == ["hidden"], "masks come to the first rank"
    assert endings(StepKind(0, 0, frozenset())) == [], "prompts"
    assert _BEFORE < KNOWN


@pytest.mark.parametrize(
    ("groups", "states", "known"),
    [
        ([KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.SLIDING, (1,), 9)], 1, True),
        ([KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.RECURRENT, (1,))], 1, True),
        ([KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.RECURRENT, (1,))], 3, False),
        ([KVGroup(KVKind.FULL, (0,), units=2), KVGroup(KVKind.FULL, (1,))], 1, False),
        ([KVGroup(KVKind.FULL, (0,)), KVGroup(KVKind.CROSS, (1,))], 1, False),
    ],
)
def test_graphs_are_for_caches_whose_tables_they_can_read(groups: list[KVGroup], states: int, known: bool) -> None:
    policy = KVPolicy(tuple(groups), 4, states_per_slot=states, max_encoder_tokens=8)
    layout: Any = SimpleNamespace(groups=policy.groups, policy=policy)
    assert graphs_know(layout) == known


# -- what they bring ---------------------------------------------------------------------------------------------------

PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_p": 0.8, "top_k": 20},
    {"min_p": 0.1},
]
MORE: list[dict[str, Any]] = [{"presence_penalty": 0.7}, {"logprobs": 2}]


def requests(driver: Driver, settings: list[dict[str, Any]], count: int) -> None:
    random = np.random.default_rng(5)
    for i in range(count):
        prompt = random.integers(0, VOCAB, random.integers(2, 20)).tolist()
        driver.add(f"r{i}", prompt, seed=i, **settings[i % len(settings)])


@interpreted
@pytest.mark.parametrize("settings", [PLAIN[:1], PLAIN, PLAIN[:2] + MORE], ids=["greedy", "drawn", "more"])
def test_tokens_are_those_of_steps_without_graphs(settings: list[dict[str, Any]]) -> None:
    """While requests come and go, so that what the device has is right in some steps and uploaded in others."""
    context = Recording()
    plain, driver = Driver(Toy()), Driver(recordable(), context=context)
    graphs = with_graphs(driver)
    for d in (plain, driver):
        requests(d, settings, 4)
    for step in range(14):
        if step == 5:
            for d in (plain, driver):
                d.remove("r2")
        if step == 7:
            for d in (plain, driver):
                d.add("late", [5, 6, 7], seed=9, temperature=0.7)
        want = plain.step()
        assert driver.step() == want, step
        assert driver.result.logprobs.keys() == plain.result.logprobs.keys()
    assert context.recorded >= 1 and context.replayed > 3
    assert {key.ending for key in graphs.used} == ({"hidden"} if "logprobs" in settings[-1] else {"plain"})


@interpreted
def test_the_last_kernel_leaves_every_slots_length_on_the_device() -> None:
    driver = Driver(recordable(), context=Recording())
    with_graphs(driver)
    requests(driver, PLAIN, 3)
    for _ in range(5):
        driver.step()
    for name, slot in driver.slot.items():
        assert int(driver.runner.table.device_lengths[slot]) == driver.total[name]


class ToyAdapters:
    """Adapters that a Toy does not heed; who looks is told what each row has."""

    column = Column("adapter", "int32", -1)

    def features(self, plan: StepPlan) -> frozenset[str]:
        return frozenset({ROWS_WITH_ADAPTERS})

    def load(self, loads: object) -> None:
        return


@interpreted
def test_a_captured_step_looks_up_the_adapters_of_its_rows_itself() -> None:
    driver = Driver(recordable(), context=Recording(), columns=(ToyAdapters.column,))
    graphs = with_graphs(driver)
    driver.runner.adapters = ToyAdapters()  # type: ignore[assignment]
    seen: list[tuple[list[int], list[int]]] = []
    model: Any = driver.runner.model
    forward = model.forward

    def looks(step: StepInputs, caches: Any) -> Any:
        if step.features is not None and step.features.adapters is not None:
            tokens, rows = step.features.adapters
            assert tokens is rows is not None and not tokens.segments
            seen.append((tokens.adapters.tolist(), graphs._inputs[0, : len(tokens.adapters)].tolist()))
        return forward(step, caches)

    model.forward = looks
    model.logits = lambda hidden, view=None: type(model).logits(model, hidden)
    requests(driver, PLAIN[:1], 4)
    column = driver.runner.table.columns["adapter"]
    values = [2, -1, 0, 2, 5, 1, 3, -1]
    driver.runner.adapters = None
    driver.step()  # the prompts
    driver.runner.adapters = ToyAdapters()  # type: ignore[assignment]
    column.device[:] = torch.tensor(values[: len(column.device)])
    for _ in range(6):
        driver.step()
    assert len(seen) == 6 and {key.adapted for key in graphs.used} == {True}
    for adapters, slots in seen:
        assert adapters == [values[slot] if slot >= 0 else -1 for slot in slots]


@interpreted
@pytest.mark.parametrize("most", [1, 3])
def test_drafts_are_verified_in_the_graph(most: int) -> None:
    """Tokens do not depend on drafts, and rows of unlike numbers of drafts go together."""
    model = Toy()
    names = ("greedy", "seeded")
    truth, _ = run_plainly(model, 30)
    context = Recording()
    driver = Drafting(recordable(), truth, most, most, context)
    graphs = with_graphs(driver)
    enter(driver)
    for name in [n for n in driver.slot if n not in names]:  # whose penalties want the sampler
        driver.remove(name)
        del driver.found[name]
    count = 6 + 3 * most
    while min(len(driver.found[n]) for n in names) < count:
        driver.drafted_step()
    for name in names:
        assert driver.found[name][:count] == truth[name][:count], name
        assert int(driver.runner.table.device_lengths[driver.slot[name]]) == driver.total[name]
    assert 0 < driver.accepted < driver.drafted
    assert {key.ending for key in graphs.used} >= {"verified"} and context.replayed > 0


@interpreted
def test_rows_that_are_not_exact_read_their_length_on_the_device_and_nobody_waits() -> None:
    """The plan believes that every draft held, and goes on before the results are there."""
    model = Toy()
    truth, _ = run_plainly(model, 40)
    driver = Drafting(recordable(), truth, 3, 1, Recording())
    graphs = with_graphs(driver)
    enter(driver)
    for name in [n for n in driver.slot if n not in ("greedy", "seeded")]:
        driver.remove(name)
        del driver.found[name]
    table: Any = driver.runner.table

    def no_waiting(slots: np.ndarray) -> np.ndarray:
        raise AssertionError("the host waits for lengths")

    names, checked = list(driver.slot), 0
    for step in range(7):
        driver.drafted_step()
        if step == 0:
            continue
        upper = driver.random.integers(0, 3, len(names)).astype(np.int32)
        plan = driver.plan()
        plan = replace(plan, num_computed=plan.num_computed + upper, exact=upper == 0)
        table.known_lengths = no_waiting
        result = driver.runner.execute(plan).result()
        del table.known_lengths
        checked += int((upper > 0).sum())
        for name, token in zip(names, result.token_ids, strict=True):
            driver.found[name].append(token)
        assert table.lengths[plan.slots].tolist() == [
            -1 if up else driver.total[name] for name, up in zip(names, upper, strict=True)
        ]
    for name, tokens in driver.found.items():
        assert tokens == truth[name][: len(tokens)], name
    assert checked > 2 and {key.ending for key in graphs.used} == {"plain", "verified"}


@interpreted
@pytest.mark.parametrize("late", [False, True])
def test_masked_rows_keep_the_graph_and_do_not_change_free_ones(late: bool) -> None:
    """Half of the rows masked, in the plan or afterwards; one mask forbids everything."""
    context = Recording()
    plain, driver = Driver(Toy(), context=Ahead()), Driver(recordable(), context=context)
    graphs = with_graphs(driver)
    for d in (plain, driver):
        requests(d, PLAIN, 5)
        d.step()
    random = np.random.default_rng(2)
    for step in range(7):
        bits = random.integers(0, 2**32, (3, -(-VOCAB // 32)), dtype=np.uint32)
        if step == 6:
            bits[1] = 0
        masks = RowMasks(np.array([0, 3, 4], np.int32), bits)
        want = plain.runner.execute(replace(plain.plan(), masks=masks)).result()
        plan = driver.plan()
        if late:
            flags = np.isin(np.arange(5), masks.rows)
            handle = driver.runner.execute(replace(plan, late=flags))
            with pytest.raises(RuntimeError, match="waits for its masks"):
                driver.runner.execute(plan)
            driver.runner.complete(plan.step_id, masks)
        else:
            handle = driver.runner.execute(replace(plan, masks=masks))
        found = handle.result()
        assert found.token_ids == want.token_ids and found.errors == want.errors, step
    assert list(found.errors) == [3] and found.token_ids[3] == -1
    endings = [key.ending for key in graphs.used]
    assert set(endings) == {"hidden", "masked"} and endings.count("masked") == 7
    assert context.recorded == 2, "a forward graph and a finish graph"


@interpreted
def test_a_row_whose_logits_are_no_numbers_fails_alone() -> None:
    model = recordable()
    driver = Driver(model, context=Recording())
    with_graphs(driver)
    driver.add("a", [1, 2, 3])
    driver.add("b", [4, 5, 6])
    tokens = driver.step()
    model.poison.add(tokens["a"])
    driver.step()
    if tokens["a"] != tokens["b"]:
        assert list(driver.result.errors) == [0] and "not finite" in driver.result.errors[0]
        assert driver.result.token_ids[0] == -1 and driver.result.token_ids[1] >= 0


@interpreted
def test_steps_are_prepared_over_padding_alone() -> None:
    context = Recording()
    driver = Driver(recordable(), context=context)
    graphs = with_graphs(driver, [1, 2])
    before = [cache.clone() for cache in driver.runner.kv_caches]
    rounds = 0
    with torch.inference_mode():
        while graphs.prepare():
            rounds += 1
    assert context.recorded == 4 and rounds == 8  # greedy and drawn, run and recorded
    for cache, was in zip(driver.runner.kv_caches, before, strict=True):
        assert torch.equal(cache[1:], was[1:])
