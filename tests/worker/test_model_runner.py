"""The runner against a dense computation of the same model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import NODEFAULT
from msgspec.structs import fields, replace

from tests.worker.toy import BLOCK, VOCAB, Ahead, Driver, Toy
from vllm.step.plan import RowMasks, StepPlan, Transfer, TransferKind
from vllm.worker import model_runner, slot_table
from vllm.worker.device import rounded_rows


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, random.integers(1, 40)).tolist() for _ in range(count)]


def test_requests_of_mixed_lengths_together_give_the_dense_models_tokens() -> None:
    model = Toy()
    driver = Driver(model)
    given = prompts(8)
    for i, prompt in enumerate(given):
        driver.add(str(i), prompt)
    found = driver.generate(20)
    for i, prompt in enumerate(given):
        assert found[str(i)] == model.greedy(prompt, 20)


def test_prompts_in_chunks_beside_decoding_requests() -> None:
    model = Toy()
    driver = Driver(model)
    first, second = prompts(2, 3)[0] * 2, list(range(50))
    driver.add("a", first)
    tokens = {"a": [], "b": []}
    for i in range(30):
        if i == 3:
            driver.add("b", second)
        for name, token in driver.step({"a": 7, "b": 5}).items():
            tokens[name] += [token] if token >= 0 else []
    assert tokens["a"] == model.greedy(first, len(tokens["a"])) and len(tokens["a"]) > 10
    assert tokens["b"] == model.greedy(second, len(tokens["b"])) and len(tokens["b"]) > 10


def test_products_are_of_few_sizes() -> None:
    sizes = [rounded_rows(rows) for rows in range(1025)]
    assert all(rows <= size <= rows + max(7, rows / 8) for rows, size in enumerate(sizes))
    assert sizes == sorted(sizes) and sizes[1024] == 1024 and len(set(sizes)) < 55


class Rounding(Ahead):
    """The host's memory, taken for a device whose products come in few sizes."""

    def product_rows(self, rows: int) -> int:
        return rounded_rows(rows)


@pytest.mark.parametrize("chunk", [3, 40])
def test_rows_beyond_those_that_sample_change_nothing(chunk: int) -> None:
    """Where a step has more tokens than it samples, its last products are of one of few sizes."""
    model, plain = Toy(), Driver(Toy())
    driver = Driver(model, context=Rounding())
    sizes: list[tuple[int, int, int]] = []
    forward, logits = model.forward, model.logits

    def seen(step, caches):
        hidden = forward(step, caches)
        sizes.append((len(step.positions), len(hidden), 0))
        return hidden

    def head(hidden):
        sizes[-1] = *sizes[-1][:2], sizes[-1][2] or len(hidden)  # those of a prompt's logprobs follow
        return logits(hidden)

    model.forward, model.logits = seen, head  # type: ignore[method-assign]
    tokens: list[list[dict[str, int]]] = [[], []]
    for which, one in enumerate((driver, plain)):
        for i, prompt in enumerate(prompts(8, seed=3)):
            one.add(str(i), prompt, logprobs=2 if i == 5 else None, prompt_logprobs=1 if i == 6 else None)
            tokens[which].append(one.step({name: 1 + (i + int(name)) % chunk for name in one.slot}))
        for _ in range(12):
            tokens[which].append(one.step(dict.fromkeys(one.slot, chunk)))
    assert tokens[0] == tokens[1]
    assert all(count in (rounded_rows(count), rows) for rows, count, _ in sizes)
    assert all(count in (rounded_rows(count), wanted) for _, wanted, count in sizes)
    assert any(wanted != rows for rows, wanted, _ in sizes)


def test_next_step_is_planned_before_the_last_ones_token_is_known() -> None:
    model = Toy()
    driver = Driver(model)
    prompt = prompts(1)[0]
    driver.add("a", prompt)
    handles = [driver.runner.execute(driver.plan()) for _ in range(6)]
    assert [h.result().token_ids[0] for h in handles] == model.greedy(prompt, 6)


def test_a_request_that_returns_after_preemption_goes_on_with_the_same_tokens() -> None:
    model = Toy()
    driver = Driver(model)
    prompt, other = prompts(2, 5)
    driver.add("a", prompt)
    before = driver.generate(5)["a"]
    driver.remove("a")
    driver.add("b", other)
    driver.step()
    driver.add("a", prompt + before, prompt=len(prompt))
    after = driver.generate(5)["a"]
    assert before + after == model.greedy(prompt, 10)


def test_a_slot_used_again_shows_nothing_of_its_last_request() -> None:
    model = Toy()
    driver = Driver(model, num_slots=1)
    driver.add("long", list(range(60)))
    driver.generate(3)
    driver.remove("long")
    driver.add("short", [1, 2, 3])
    assert driver.generate(4)["short"] == model.greedy([1, 2, 3], 4)
    blocks = len(driver.blocks["short"][0])
    assert not driver.runner.table.host_tables[0][0, blocks:].any()


def test_copied_blocks_are_private() -> None:
    model = Toy()
    driver = Driver(model)
    prompt = prompts(1, 7)[0][:3] + [5, 6, 7]
    driver.add("a", prompt)
    first = driver.step()["a"]
    # b shares a's computed prompt but writes into a copy of its last block.
    driver.add("b", [*prompt, 11])
    driver.computed["b"] = len(prompt)
    copies = tuple(
        Transfer(TransferKind.COPY, 0, src, dst)
        for g in range(2)
        for src, dst in zip(driver.blocks["a"][g], driver.blocks["b"][g], strict=False)
    )
    tokens = driver.runner.execute(driver.plan(transfers=copies)).result().token_ids
    assert tokens[0] == int(model.dense([*prompt, first])[-1].argmax())
    assert tokens[1] == int(model.dense([*prompt, 11])[-1].argmax())
    assert len(prompt) > BLOCK


def test_rows_outgrow_the_first_width_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_table, "_FIRST_WIDTH", 8)
    model = Toy()
    driver = Driver(model, num_slots=2, max_model_len=300)
    assert driver.runner.table.tokens.shape == (2, 8)
    driver.add("a", [3, 1, 4])
    driver.add("b", [1, 5, 9, 2, 6])
    found = driver.generate(30)
    assert found["a"] == model.greedy([3, 1, 4], 30)
    assert found["b"] == model.greedy([1, 5, 9, 2, 6], 30)
    assert driver.runner.table.width == 64
    with pytest.raises(ValueError, match="exceeds the slot table's limit of 301"):
        driver.runner.table.require_width(302)


def test_nan_in_one_row_fails_that_row_alone() -> None:
    model = Toy()
    model.poison = {13}
    driver = Driver(model)
    driver.add("bad", [1, 2, 13], logprobs=1)
    driver.add("good", [1, 2, 3], logprobs=1)
    driver.add("drawn", [4, 13], temperature=1.0, top_p=0.5)
    tokens = driver.step()
    assert tokens["bad"] == -1 and tokens["drawn"] == -1
    assert tokens["good"] == model.greedy([1, 2, 3], 1)[0]
    assert set(driver.result.errors) == {0, 2}
    assert driver.result.errors[0].startswith("The model's logits are not finite")
    assert set(driver.result.logprobs) == {1}


def test_prompt_logprobs_in_chunks_equal_those_of_the_dense_model() -> None:
    model = Toy()
    driver = Driver(model)
    prompt = list(np.random.default_rng(1).integers(0, VOCAB, 23))
    prompt = [int(t) for t in prompt]
    driver.add("a", prompt, prompt_logprobs=3)
    driver.add("b", prompt)
    seen = []
    for chunk in (5, 1, 9, 100):
        before = driver.computed["a"]
        driver.step({"a": chunk})
        part = driver.result.prompt_logprobs.get(0, [])
        assert 1 not in driver.result.prompt_logprobs
        assert len(part) == min(before + chunk, len(prompt) - 1) - before
        seen += part
    expected = model.dense(prompt).log_softmax(-1)
    assert len(seen) == len(prompt) - 1
    for i, entry in enumerate(seen):
        row, token = expected[i], prompt[i + 1]
        assert entry.token_ids[0] == token
        assert entry.token_ids[1:] == row.topk(3).indices.tolist()
        assert entry.rank == int((row > row[token]).sum()) + 1
        np.testing.assert_allclose(entry.logprobs, row[entry.token_ids].numpy(), atol=1e-5)
    driver.step()
    assert not driver.result.prompt_logprobs


@pytest.mark.parametrize("field", [f.name for f in fields(StepPlan) if f.default is not NODEFAULT])
def test_what_a_worker_cannot_run_is_refused_by_name(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "KNOWN", model_runner.KNOWN - {field})
    driver = Driver(Toy())
    driver.add("a", [1])
    plan = driver.plan()
    value = (1,) if getattr(plan, field) == () else np.ones(1, bool)
    with pytest.raises(NotImplementedError, match=f"cannot run a plan with '{field}'"):
        driver.runner.execute(replace(plan, **{field: value}))


def test_transfers_read_what_was_there_before_the_plan() -> None:
    driver = Driver(Toy())
    driver.add("a", [1])
    cache = driver.runner.kv_caches[0]
    cache[20:24] = torch.randn_like(cache[20:24])
    before = cache.clone()
    moves = [(TransferKind.COPY, 21, 30), (TransferKind.ZERO, 0, 20), (TransferKind.COPY, 20, 31),
             (TransferKind.COPY, 30, 32), (TransferKind.COPY, 20, 21)]  # fmt: skip
    transfers = tuple(Transfer(kind, 0, src, dst) for kind, src, dst in moves)
    driver.runner.execute(replace(driver.plan(), transfers=transfers))
    assert torch.equal(cache[32], before[30]) and torch.equal(cache[30], before[21])
    assert torch.equal(cache[31], before[20]) and torch.equal(cache[21], before[20]) and not cache[20].any()


@pytest.mark.parametrize("transfer", [Transfer(TransferKind.SAVE, 0, 1, 2), Transfer(TransferKind.COPY, 1, 1, 2)])
def test_transfers_that_the_worker_cannot_make_are_refused(transfer: Transfer) -> None:
    driver = Driver(Toy())
    driver.add("a", [1])
    with pytest.raises(NotImplementedError, match="Transfer"):
        driver.runner.execute(replace(driver.plan(), transfers=(transfer,)))


def test_masked_rows_say_what_they_may_and_the_others_what_they_would() -> None:
    """Among chunks of prompts, which stand before and between the rows that sample."""
    model = Toy()
    driver, free = Driver(model), Driver(model)
    for i, prompt in enumerate(prompts(6, seed=3)):
        for d in (driver, free):
            d.add(str(i), prompt + [1, 2, 3])
    chunks = {"0": 1, "3": 2}
    plan = driver.plan(chunks)
    assert plan.sample.tolist() == [False, True, True, False, True, True]
    bits = np.zeros((2, -(-VOCAB // 32)), np.uint32)
    bits[0, 1], bits[1, 0] = 1 << 5, 1 << 9
    result = driver.runner.execute(replace(plan, masks=RowMasks(np.array([2, 5], np.int32), bits))).result()
    want = list(free.step(chunks).values())
    assert result.token_ids == [-1, want[1], 37, -1, want[4], 9] and not result.errors
    with pytest.raises(ValueError, match="does not sample"):
        free.runner.execute(replace(free.plan({"0": 1}), masks=RowMasks(np.array([0, 1], np.int32), bits)))


def test_step_inputs_are_what_the_plan_says() -> None:
    model = Toy()
    driver = Driver(model)
    seen = []

    class Watched:
        logits, traits = staticmethod(model.logits), model.traits

        def __call__(self, step, caches):
            seen.append(step)
            return model(step, caches)

    driver.runner.model = Watched()
    driver.add("a", list(range(10)))
    driver.add("b", list(range(20, 23)))
    driver.step({"a": 6})
    (step,) = seen
    assert step.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 20, 21, 22]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert step.query_starts.tolist() == [0, 6, 9] == step.host_query_starts.tolist()
    assert step.seq_lens.tolist() == [6, 3] == step.host_seq_lens.tolist()
    assert (step.max_query_len, step.max_seq_len) == (6, 6)
    assert step.logits_rows.tolist() == [8]
    for g in range(2):
        a, b = driver.blocks["a"][g], driver.blocks["b"][g]
        places = [a[p // BLOCK] * BLOCK + p % BLOCK for p in range(6)] + [b[0] * BLOCK + p for p in range(3)]
        assert step.groups[g].slot_mapping.tolist() == places
        assert step.groups[g].block_table.tolist() == [a[:2], [b[0], 0]]
        assert step.groups[g].slot_mapping.dtype == torch.int64 and step.groups[g].block_table.dtype == torch.int32
