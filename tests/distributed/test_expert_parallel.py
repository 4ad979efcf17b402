"""Whole experts dealt out to ranks: the same answers as one rank, and each rank loads its own."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.workload import answers, differences, engine
from tests.models.harness import PagedDriver, load, on_ranks, relative_error, save_random_hf_model
from tests.models.test_against_hugging_face import CASES
from tests.quantization import writers
from tests.quantization.harness import plain_model, quantize_folder
from tests.quantization.test_formats import GPTQ, every
from vllm.config import ParallelConfig
from vllm.model_executor.layers.quantization.method import DealtQuantizedExpertMethod
from vllm.model_executor.layers.sharding import ShardedParameter, ShardSpec, load_weight, share, whole
from vllm.ops import moe as ops
from vllm.ops.quantized import pack_experts
from vllm.ops.triton import moe as kernels
from vllm.worker.expert_balance import balance, owners, swaps_for

EP = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp", enable_expert_parallel=True)
# Five experts for two ranks; shared ones, their gates, layers without experts, experts stored in one piece.
FAMILIES = ["mixtral", "qwen2_moe-mixed", "qwen3_moe", "dbrx", "granitemoe"]


def save(case: str, folder: Path, length: int = 64) -> None:
    """length: of the longest sequence."""
    config: Any = CASES[case]()
    config.max_position_embeddings = length
    config.intermediate_size = 76  # what is not an expert must be shared evenly by two ranks
    if hasattr(config, "shared_expert_intermediate_size"):
        config.shared_expert_intermediate_size = 38
    save_random_hf_model(config, folder)


@pytest.mark.parametrize("case", FAMILIES)
def test_two_ranks_compute_what_one_does(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    prompts = [torch.randint(0, 131, (n,)) for n in (23, 1, 9)]
    expected = PagedDriver(load(tmp_path), requests=3).run(prompts, [5, 1, 8])
    found = on_ranks(
        2, lambda tp: PagedDriver(load(tmp_path, tp=tp, parallel_config=EP), requests=3).run(prompts, [5, 1, 8])
    )
    for rank in found:
        assert max(relative_error(a, b) for a, b in zip(rank, expected, strict=True)) < 1e-4


def test_each_rank_has_its_own_experts(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    whole_model = load(tmp_path)
    ranks = on_ranks(2, lambda tp: load(tmp_path, tp=tp, parallel_config=EP))
    parts = [rank.blocks[0].ffn.experts.down for rank in ranks]
    assert [len(part) for part in parts] == [3, 2]
    assert torch.equal(torch.cat(list(parts)), whole_model.blocks[0].ffn.experts.down)
    with pytest.raises(ValueError, match="5 experts cannot be dealt out to 6 ranks"):
        on_ranks(6, lambda tp: load(tmp_path, tp=tp, parallel_config=EP))


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_quantized_experts_are_dealt_out_as_they_are_stored(at_once: bool, tmp_path: Path) -> None:
    """Four experts for three ranks. at_once: on a device that multiplies all experts together."""
    reference, state = plain_model(tmp_path, "mixtral", num_attention_heads=3, num_key_value_heads=3, hidden_size=192)
    quantize_folder(tmp_path, reference, state, every(writers.gptq, group=64), {**GPTQ, "group_size": 64})
    prompts = [torch.randint(0, 100, (n,)) for n in (23, 1, 9)]
    one = load(tmp_path)
    expected = PagedDriver(one, requests=3).run(prompts, [5, 1, 8])
    if at_once:
        pack_experts.register("cpu", lambda weights, device, dtype: pack_experts.reference(weights, device, dtype))
    try:
        ranks = on_ranks(3, lambda tp: load(tmp_path, tp=tp, parallel_config=replace(EP, tensor_parallel_size=3)))
    finally:
        if at_once:
            pack_experts.unregister("cpu")
    methods = [rank.blocks[0].ffn.experts.method for rank in ranks]
    assert [method.mine for method in methods] == [range(2), range(2, 3), range(3, 4)]
    for method in methods:
        assert isinstance(method, DealtQuantizedExpertMethod) and (method.stacks is not None) == at_once
        if not at_once:
            parts = zip(method._parts, [one.blocks[0].ffn.experts.method._parts[n] for n in method.mine], strict=True)
            assert all(mine[1].weight.num_bytes == whole[1].weight.num_bytes for mine, whole in parts)
    found = on_ranks(3, lambda tp: PagedDriver(ranks[tp.rank], requests=3).run(prompts, [5, 1, 8]))
    for rank in found:
        assert max(relative_error(a, b) for a, b in zip(rank, expected, strict=True)) < 1e-4


def test_experts_that_may_change_places_are_numbers(tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path, "mixtral")
    quantize_folder(tmp_path, reference, state, every(writers.gptq), GPTQ)
    prompts = [torch.randint(0, 100, (n,)) for n in (23, 9)]
    expected = PagedDriver(load(tmp_path), requests=2).run(prompts, [5, 8])
    moving = replace(EP, enable_eplb=True)
    for rank in on_ranks(
        2, lambda tp: PagedDriver(load(tmp_path, tp=tp, parallel_config=moving), requests=2).run(prompts, [5, 8])
    ):
        assert max(relative_error(a, b) for a, b in zip(rank, expected, strict=True)) < 1e-4


def test_things_are_dealt_out_evenly() -> None:
    for count in (1, 5, 8, 60):
        for world in (1, 2, 3, 8):
            shares = [share(count, rank, world) for rank in range(world)]
            assert [i for part in shares for i in part] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_experts_are_filled_one_by_one_or_all_at_once() -> None:
    spec = ShardSpec(1, (whole(3, "gate"), whole(3, "up")), stack=1, dealt=True)
    full = torch.randn(5, 6, 4)
    for rank in range(2):
        at_once, singly = (ShardedParameter.empty((5, 6, 4), spec, rank, 2, torch.float32) for _ in range(2))
        load_weight(at_once, full)
        for expert in range(5):
            load_weight(singly, full[expert, :3], "gate", expert)
            load_weight(singly, full[expert, 3:], "up", expert)
        mine = share(5, rank, 2)
        assert torch.equal(at_once, full[mine.start : mine.stop]) and torch.equal(singly, at_once)


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_choices_of_other_ranks_add_nothing(tokens: int) -> None:
    x, gate_up, down = (torch.randn(*shape) for shape in ((tokens, 32), (5, 42, 32), (5, 32, 21)))
    weights, chosen = ops.route.reference(torch.randn(tokens, 5), 2, True)
    expected = ops.expert_mlp.reference(x, weights, chosen, gate_up, down, "silu")
    for compute in (ops.expert_mlp.reference, kernels.expert_mlp):
        total = torch.zeros_like(x)
        for rank in range(2):
            mine = share(5, rank, 2)
            foreign = (chosen < mine.start) | (chosen >= mine.stop)
            local = (chosen - mine.start).masked_fill(foreign, len(mine))
            part = slice(mine.start, mine.stop)
            total += compute(x, weights.masked_fill(foreign, 0.0), local, gate_up[part], down[part], "silu")
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_the_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    expected = answers(engine(tmp_path), 10)
    dealt = engine(tmp_path, tensor_parallel_size=2, enable_expert_parallel=True)
    try:
        assert differences(answers(dealt, 10), expected) == []
    finally:
        dealt.llm_engine.model_executor.shutdown()


def test_a_model_without_experts_says_that_dealing_them_out_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("llama-tied-biased", tmp_path)
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        engine(tmp_path, tensor_parallel_size=2, enable_expert_parallel=True).llm_engine.model_executor.shutdown()
    finally:
        logger.removeHandler(caplog.handler)
    said = "enable_expert_parallel changes nothing: this model's layers have no experts to deal out."
    assert [r.getMessage() for r in caplog.records].count(said) == 1


def test_the_engine_gives_the_same_tokens_with_experts_of_eight_bits(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    expected = answers(engine(tmp_path, quantization="experts_int8"), 10)
    dealt = engine(tmp_path, quantization="experts_int8", tensor_parallel_size=2, enable_expert_parallel=True)
    try:
        assert differences(answers(dealt, 10), expected) == []
    finally:
        dealt.llm_engine.model_executor.shutdown()


def places(worker: Any) -> list[list[int]]:
    """The slot of each expert, by layer, as the device has it; what the host thinks is the same."""
    found = [method.places[:-1].tolist() for _, method in worker._balancer._layers]
    assert found == [place.tolist() for place in worker._balancer.places]
    return found


def weights(model: Any) -> list[float]:
    """One number for each expert of this rank."""
    return [float(expert.double().sum()) for block in model.blocks for expert in block.ffn.experts.down]


def test_experts_that_change_places_change_no_token(tmp_path: Path) -> None:
    """Here between any two steps; and they come back when somebody wants to see the model."""
    save("qwen3_moe", tmp_path)
    expected = answers(engine(tmp_path), 10)
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    still = engine(tmp_path, **settings)
    try:
        dealt = still.apply_model(weights)
    finally:
        still.llm_engine.model_executor.shutdown()
    moving = engine(tmp_path, **settings, enable_eplb=True, eplb_step_interval=3, eplb_window_size=2)
    try:
        assert differences(answers(moving, 10), expected) == []
        first, second = moving.collective_rpc(places)
        assert first == second and any(layer != sorted(layer) for layer in first)
        assert moving.apply_model(weights) == dealt
        assert all(layer == sorted(layer) for layer in moving.collective_rpc(places)[0])
        assert differences(answers(moving, 10), expected) == []
    finally:
        moving.llm_engine.model_executor.shutdown()


@given(
    load=st.lists(st.integers(0, 1000), min_size=2, max_size=24),
    world=st.integers(2, 6),
    seed=st.integers(0, 1000),
)
def test_swaps_even_out_the_load(load: list[int], world: int, seed: int) -> None:
    world = min(world, len(load))
    counts = np.array(load, np.float64)
    before = np.random.default_rng(seed).permutation(len(load))
    after = before.copy()
    for a, b in swaps_for(counts, before, world):
        after[[a, b]] = after[[b, a]]
    assert sorted(after) == list(range(len(load)))
    assert balance(counts, after, world) >= balance(counts, before, world)
    if world == 2:  # no single swap would help more than a little
        totals = [counts[owners(len(load), 2)[after] == rank].sum() for rank in range(2)]
        gap, busy = abs(totals[0] - totals[1]), owners(len(load), 2)[after] == int(totals[1] > totals[0])
        moves = (counts[busy][:, None] - counts[~busy]).ravel()
        assert np.minimum(moves, gap - moves).max() <= 0.01 * np.mean(totals) + 1e-9


def test_a_rank_with_all_popular_experts_gives_half_of_them_away() -> None:
    load, places = np.array([90, 80, 70, 60, 3, 2, 1, 0.0]), np.arange(8)
    assert balance(load, places, 2) == pytest.approx(153 / 300)
    for a, b in swaps_for(load, places, 2):
        places[[a, b]] = places[[b, a]]
    assert balance(load, places, 2) > 0.99
    assert swaps_for(np.zeros(8), places, 2) == [] and balance(np.zeros(8), places, 2) == 1.0
