"""Captured decode steps that end with masks, with drafts, or where the device says: the tokens are those of steps that
are launched one by one.
"""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.worker import toy
from tests.worker.toy import Driver
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.kv_groups import layout_of
from vllm.model_executor.models.spec import Attn, Block, Decoder, Mlp, Norm, Rope
from vllm.step.plan import RowMasks, TokenWrite
from vllm.worker import decode_program, kv_memory
from vllm.worker.cuda_graphs import DecodeGraphs
from vllm.worker.device import CudaContext
from vllm.worker.model_runner import ModelRunner

DEVICE, VOCAB, BLOCK = torch.device("cuda"), 1003, 16
SETTINGS = [{}, {"temperature": 0.9}, {"temperature": 1.1, "top_p": 0.8, "top_k": 20}]


def build(dtype):
    """Random weights, of which logits do not jump at a rounding; the second layer has a window."""
    blocks = [
        Block(Attn(8, 4, 64, Rope(64), window=window), Mlp("silu", 512), Norm("rms", 1e-6)) for window in (None, 40)
    ]
    spec = Decoder(VOCAB, 256, tuple(blocks), Norm("rms", 1e-6), tied=False)
    generator = torch.Generator(DEVICE).manual_seed(0)
    with DEVICE:
        model = DecoderModel(spec, dtype=dtype, max_positions=2048, device=DEVICE)
        for name, p in model.named_parameters():
            scale = 1.0 if "norm" in name else p.shape[-1] ** -0.5
            p.data.copy_(torch.ones_like(p) if "norm" in name else torch.randn(p.shape, generator=generator) * scale)
    return model


def driver_of(model, monkeypatch, sizes):
    """One with captured steps, unless `sizes` is None; 7 requests of unlike lengths have entered."""
    monkeypatch.setattr(toy, "BLOCK", BLOCK)
    driver, context = Driver(toy.Toy()), CudaContext(DEVICE)
    layout = layout_of(model.traits, BLOCK)
    assert len(layout.groups) == 2
    memory = kv_memory.allocate(layout, 256, 0, model.traits.dtype, DEVICE)
    driver.runner = ModelRunner(
        model, layout, memory.tensors, context, num_slots=8, max_model_len=300, vocab_size=VOCAB, pools=memory.pools
    )
    if sizes is not None:
        driver.runner.decode_steps = DecodeGraphs(driver.runner, context, sizes, 300)
    rng = np.random.default_rng(1)
    for i in range(7):
        driver.add(f"r{i}", rng.integers(0, VOCAB, rng.integers(2, 90)).tolist(), seed=i, **SETTINGS[i % len(SETTINGS)])
    return driver


def names_of(driver):
    """How the captured steps ended, and how many tokens a row had."""
    entries = driver.runner.decode_steps._graphs
    return {(key.ending, key.query) for key, entry in entries.items() if entry.graph is not None}


@pytest.mark.parametrize("late", [False, True])
def test_masked_rows_keep_the_graph_and_do_not_change_free_ones(late, monkeypatch):
    model = build(torch.float32)
    plain, driver = driver_of(model, monkeypatch, None), driver_of(model, monkeypatch, [1, 8])
    rng = np.random.default_rng(2)
    for d in (plain, driver):
        d.step()
    for step in range(12):
        bits = rng.integers(0, 2**32, (3, -(-VOCAB // 32)), dtype=np.uint32)
        if step == 11:
            bits[1] = 0
        masks = RowMasks(np.array([0, 3, 4], np.int32), bits)
        want = plain.runner.execute(replace(plain.plan(), masks=masks)).result()
        plan = driver.plan()
        if late:
            handle = driver.runner.execute(replace(plan, late=np.isin(np.arange(7), masks.rows)))
            driver.runner.complete(plan.step_id, masks)
        else:
            handle = driver.runner.execute(replace(plan, masks=masks))
        found = handle.result()
        assert found.token_ids == want.token_ids and found.errors == want.errors, step
    assert list(found.errors) == [3]
    assert names_of(driver) == {("hidden", 1), ("masked", 1)}


def test_masks_hold_behind_the_fused_step(monkeypatch):
    """Each masked row may say one token only, another in every step."""
    driver = driver_of(build(torch.bfloat16), monkeypatch, [1, 8])
    assert driver.runner.decode_steps._weights is not None
    driver.step()
    for step in range(10):
        allowed = [(step * 37 + row * 101) % VOCAB for row in range(7)]
        rows = [row for row in range(7) if (row + step) % 2]
        bits = np.zeros((len(rows), -(-VOCAB // 32)), np.uint32)
        for i, row in enumerate(rows):
            bits[i, allowed[row] // 32] = 1 << allowed[row] % 32
        plan = driver.plan()
        handle = driver.runner.execute(replace(plan, late=np.isin(np.arange(7), rows)))
        driver.runner.complete(plan.step_id, RowMasks(np.array(rows, np.int32), bits))
        result = handle.result()
        assert not result.errors
        assert [result.token_ids[row] for row in rows] == [allowed[row] for row in rows]


@pytest.mark.parametrize("settings", [SETTINGS[:1], SETTINGS], ids=["greedy", "drawn"])
@pytest.mark.parametrize("walk", ["few", "many"])
def test_free_rows_say_beside_masked_ones_what_they_say_in_a_plain_step(walk, settings, monkeypatch):
    """Of the fused step in bf16, where other kernels would round otherwise."""
    monkeypatch.setitem(globals(), "SETTINGS", settings)
    if walk == "many":
        monkeypatch.setattr(decode_program, "MAX_ROWS", 0)
    model = build(torch.bfloat16)
    plain, driver = driver_of(model, monkeypatch, [1, 8]), driver_of(model, monkeypatch, [1, 8])
    for d in (plain, driver):
        d.step()
    rng, free = np.random.default_rng(2), [1, 2, 5, 6]
    for step in range(12):
        bits = rng.integers(0, 2**32, (3, -(-VOCAB // 32)), dtype=np.uint32)
        masks = RowMasks(np.array([0, 3, 4], np.int32), bits)
        want = plain.runner.execute(plain.plan()).result().token_ids
        found = driver.runner.execute(replace(driver.plan(), masks=masks)).result().token_ids
        assert [found[row] for row in free] == [want[row] for row in free], step
        for i, row in enumerate(masks.rows.tolist()):
            assert (int(bits[i, found[row] // 32]) >> found[row] % 32) & 1, step
    assert names_of(plain) == {("plain", 1)} and names_of(driver) == {("hidden", 1), ("masked", 1)}


@pytest.mark.parametrize("most", [1, 3])
def test_drafts_are_verified_in_the_graph(most, monkeypatch):
    """Also where a later step is queued before the host knows how many held."""
    model = build(torch.float32)
    plain = driver_of(model, monkeypatch, None)
    truth = plain.generate(40)
    driver = driver_of(model, monkeypatch, [1, 8, 64])
    rng, names = np.random.default_rng(3), list(driver.slot)
    found = {name: [token] for name, token in driver.step().items()}
    accepted = drafted = 0
    while min(map(len, found.values())) < 30:
        drafts = {}
        for name in names:
            known = len(found[name])
            right = truth[name][known : known + int(rng.integers(0, most + 1))]
            drafts[name] = [t if rng.random() < 0.7 else int(rng.integers(0, VOCAB)) for t in right]
        drafts[names[0]] = drafts[names[0]] or [5]
        for name in names:
            driver.total[name] += len(drafts[name])
        writes = tuple(TokenWrite(driver.slot[n], driver.total[n] - len(d), d) for n, d in drafts.items() if d)
        numbers = np.array([len(drafts[n]) for n in names], np.int32)
        first = driver.runner.execute(replace(driver.plan(), writes=writes, drafts=numbers))
        plan = driver.plan()  # as if all held
        second = driver.runner.execute(replace(plan, exact=numbers == 0))
        result = first.result()
        tokens = iter(result.token_ids)
        for name, count, last in zip(names, result.counts, second.result().token_ids, strict=True):
            found[name] += [next(tokens) for _ in range(count)] + [last]
            proposed = len(drafts[name])
            accepted, drafted = accepted + count - 1, drafted + proposed
            driver.total[name] -= proposed + 1 - count
            driver.computed[name] = driver.total[name] - 1
    for name, tokens in found.items():
        assert tokens[:30] == truth[name][:30], name
    assert 0 < accepted < drafted
    captured = names_of(driver)
    assert ("verified", most + 1) in captured and ("plain", 1) in captured
