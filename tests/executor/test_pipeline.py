"""Pipeline stages in processes of their own: the same answers as one, as many steps in flight, no stage outlives."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.distributed.workload import answers, differences, engine, preemptions
from tests.executor.configs import config_for, generate
from tests.executor.test_multiproc import is_running
from tests.models.harness import save_random_hf_model
from tests.models.own_models import NewLlamaForCausalLM
from tests.models.test_against_hugging_face import CASES
from tests.tiny_models import save_llama
from vllm.distributed import parallel_state
from vllm.exceptions import EngineDeadError
from vllm.executor import create_executor
from vllm.executor.multiproc import MultiprocExecutor
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.step.known import KnownTokens
from vllm.step.plan import SlotInit, StepPlan
from vllm.step.result import StepResult

LAYERS = {"llama": 7, "gpt2": 3, "gemma2": 7, "mixtral": 4}


def save(family: str, folder: Path, layers: int | None = None) -> Path:
    """Write a random model of a family, which two ranks can share."""
    config: Any = CASES[family]()
    config.num_hidden_layers = LAYERS[family] if layers is None else layers
    if family == "llama":
        config.num_key_value_heads = 2
    if family == "gemma2":
        config.layer_types = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
    setattr(config, "n_inner" if family == "gpt2" else "intermediate_size", 76)  # which two ranks can share
    if family == "gpt2":
        config.bos_token_id, config.eos_token_id = 0, 1
    save_random_hf_model(config, folder)
    return folder


def compare(family: str, folder: Path, tp: int, pp: int, count: int) -> None:
    save(family, folder)
    blocks = {"num_gpu_blocks_override": 40 if family == "gemma2" else 24}
    single = engine(folder, **blocks)
    expected = answers(single, count)
    assert preemptions(single) > 0
    del single
    divided = engine(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, **blocks)
    try:
        assert differences(answers(divided, count), expected) == []
    finally:
        divided.llm_engine.model_executor.shutdown()


@pytest.mark.parametrize(("family", "tp", "pp"), [("gemma2", 1, 3), ("gpt2", 2, 2)])
def test_stages_give_the_answers_of_one_process(family: str, tp: int, pp: int, tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    compare(family, tmp_path, tp, pp, 16)


def test_a_pipeline_works_on_several_steps_and_ends_with_a_stage(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, num_hidden_layers=3)
    config = config_for(folder, pipeline_parallel_size=2)
    executor = create_executor(config)
    assert isinstance(executor, MultiprocExecutor) and executor.max_in_flight == 2
    assert executor.collective_rpc("count_blocks", timeout=30) == [executor.num_blocks] * 2
    pid = executor._ranks[0].process.pid
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"Rank 1 \(pid {pid}\) was killed by signal 9"):
        generate(executor, config, [[5, 6, 7]], [SamplingParams(temperature=0.0, max_tokens=4)])
    assert time.monotonic() - started < 5
    executor.shutdown()
    assert not is_running(pid)


def test_of_several_ranks_that_end_the_one_that_was_killed_is_named(tmp_path: Path) -> None:
    """The rank that shares its layers fails, too, and may be heard first."""
    config = config_for(save_llama(tmp_path, num_hidden_layers=2, intermediate_size=76), max_num_batched_tokens=64,
                        tensor_parallel_size=2, pipeline_parallel_size=2)  # fmt: skip
    executor = create_executor(config)
    assert isinstance(executor, MultiprocExecutor)
    pid = executor._ranks[-1].pid
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with pytest.raises(EngineDeadError, match=rf"Rank 3 \(pid {pid}\) was killed by signal 9"):
        while True:
            generate(executor, config, [[5, 6, 7]] * 8, [params] * 8)
    killer.join()
    executor.shutdown()


def test_a_prompt_that_is_too_long_for_one_rank_fits_into_several(tmp_path: Path) -> None:
    """Each of four ranks keeps a quarter of a token's keys and values, and so four times as many tokens."""
    folder = save_llama(tmp_path, num_hidden_layers=2, intermediate_size=76, num_key_value_heads=2)
    prompt = {"prompt_token_ids": [3 + i % 90 for i in range(300)]}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    sizes = {"max_model_len": 360, "max_num_batched_tokens": 64, "num_gpu_blocks_override": None}
    single = engine(folder, **sizes)
    expected = single.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    per_token = single.llm_engine.model_executor.kv_layout.bytes_per_block // 4
    del single
    memory = {**sizes, "kv_cache_memory_bytes": per_token * 120}
    with pytest.raises(ValueError, match="max_model_len|max seq len"):
        engine(folder, **memory)
    divided = engine(folder, tensor_parallel_size=2, pipeline_parallel_size=2, **memory)
    try:
        assert divided.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == expected
    finally:
        divided.llm_engine.model_executor.shutdown()


def groups(worker: Any) -> list[Any]:
    state = parallel_state
    world, stage, copy, experts = (
        state.get_world_group(),
        state.get_pp_group(),
        state.get_dp_group(),
        state.get_ep_group(),
    )
    assert isinstance(state.get_tp_group(), state.GroupCoordinator) and state.model_parallel_is_initialized()
    ends = [stage.is_first_rank, stage.is_last_rank]
    return [world.rank, world.world_size, stage.rank_in_group, *ends, copy.rank, copy.world_size, experts.world_size]


def test_functions_that_are_called_learn_their_stage_and_copy(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, num_hidden_layers=2)
    config = config_for(folder, pipeline_parallel_size=2, data_parallel_size=3, data_parallel_rank=1)
    executor = create_executor(config)
    found = executor.collective_rpc(groups)
    executor.shutdown()
    assert found == [[2, 6, 1, False, True, 1, 3, 1], [3, 6, 0, True, False, 1, 3, 1]]
    assert parallel_state.get_pp_group().is_first_rank and parallel_state.get_pp_group().is_last_rank
    assert not parallel_state.model_parallel_is_initialized()


def test_calls_wait_for_the_steps_in_flight(tmp_path: Path) -> None:
    """Two steps are under way, of which the last stage has begun with none, while its other rank waits for it."""
    folder = save_llama(tmp_path, num_hidden_layers=2, intermediate_size=76)
    config = config_for(folder, pipeline_parallel_size=2, tensor_parallel_size=2)
    executor = create_executor(config)
    blocks = tuple([1] for _ in executor.kv_layout.groups)
    for step in range(2):
        init = SlotInit(str(step), step, [5, 6, 7], 3, 0, blocks, SamplingParams(temperature=0.0), 0, ())
        executor.submit(_plan(step, [step], [3], [0], new=(init,)))
    assert executor.collective_rpc("check_health", timeout=30) == [None] * 4
    results = [executor.collect() for _ in range(2)]
    assert [result.step_id for result in results] == [0, 1] and results[0].token_ids == results[1].token_ids
    executor.shutdown()


def test_the_ranks_of_the_last_stage_begin_together(tmp_path: Path) -> None:
    """What is left in flight makes none of them wait, and none is sent more than it reads."""
    folder = save_llama(tmp_path, num_hidden_layers=2, intermediate_size=76, max_position_embeddings=4096)
    llm = engine(
        folder, tensor_parallel_size=2, pipeline_parallel_size=2, distributed_timeout_seconds=3, max_model_len=2100,
        num_gpu_blocks_override=3000, max_num_seqs=128, max_num_batched_tokens=2100, enable_prefix_caching=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    prefix = [3 + i % 90 for i in range(2040)]
    core = llm.llm_engine
    try:
        core.add_request("left", {"prompt_token_ids": prefix}, params)
        while not any(output.outputs[0].token_ids for output in core.step()):
            pass
        core.abort_request("left")
        time.sleep(4)  # longer than a rank waits for another
        prompts = [{"prompt_token_ids": [*prefix, 5 + i % 80, i]} for i in range(120)]  # a plan of a quarter of a MB
        few = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, few, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [2] * 120
    finally:
        core.model_executor.shutdown()


def test_a_rank_that_reads_nothing_is_given_up(tmp_path: Path) -> None:
    config = config_for(save_llama(tmp_path, num_hidden_layers=2), pipeline_parallel_size=2)
    executor = create_executor(config)
    assert isinstance(executor, MultiprocExecutor)
    executor._unread_s = 0.5
    os.kill(executor._ranks[0].pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"Rank 1 .* has read nothing for 0.5 s: it hangs"):
        executor.collective_rpc("check_health", args=("x" * 5_000_000,))
    executor.shutdown()


def test_a_users_own_class_cannot_be_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_llama(tmp_path)
    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": NewLlamaForCausalLM})
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be divided into pipeline stages"):
        create_executor(config_for(folder, pipeline_parallel_size=2))


def _plan(
    step: int, slots: list[int], tokens: list[int], computed: list[int], new: tuple[SlotInit, ...] = ()
) -> StepPlan:
    return StepPlan(
        step, (), new, (), np.array(slots, np.int32), np.array(tokens, np.int32), np.array(computed, np.int32),
        np.ones(len(slots), bool),
    )  # fmt: skip


def _with_drafts(plan: StepPlan, *drafts: int) -> StepPlan:
    return replace(plan, drafts=np.array(drafts, np.int32))


def test_what_steps_in_flight_sample_is_taken_in_for_the_plan_that_goes_on_from_it() -> None:
    known = KnownTokens()

    def planned(step: int, slots: list[int], *new: int) -> int:
        inits = tuple(SlotInit(str(slot), slot, [1], 1, 0, ([],), SamplingParams(), 0, ()) for slot in new)
        return known.planned(_plan(step, slots, [1] * len(slots), [0] * len(slots), inits))

    def sampled(step: int, slots: list[int]) -> None:
        count = len(slots)
        known.sampled(_plan(step, slots, [1] * count, [0] * count), StepResult(step, [7] * count, {}, {}, {}, 0.0))

    assert [planned(0, [0, 1], 0, 1), planned(1, [2], 2)] == [0, 0]
    assert planned(2, [0, 1]) == 1, "not that of step 1, which is for nobody here"
    assert planned(3, [1], 1) == 0, "who enters a slot waits for no token of who was there"
    assert planned(4, [2]) == 1 and planned(5, [1]) == 2
    for step, slots in enumerate([[0, 1], [2], [0, 1], [1], [2], [1]]):
        sampled(step, slots)
    assert planned(6, [3], 3) == 2, "what has ended waits for nobody's need"
    assert known.take() is None and known.planned(_with_drafts(_plan(7, [3], [2], [1]), 1)) == 1


def test_tokens_of_requests_that_left_their_slot_are_not_told() -> None:
    known = KnownTokens()
    first = _with_drafts(_plan(0, [0, 1, 2], [4, 1, 7], [0, 5, 0]), 0, 0, 0)
    second = _with_drafts(_plan(1, [1], [3], [0]), 0)
    known.planned(first)
    init = SlotInit("new", 1, [1, 2, 3], 3, 0, ([],), SamplingParams(), 0, ())
    known.planned(_plan(1, [1], [3], [0], new=(init,)))
    known.sampled(first, StepResult(0, [11, 12], {}, {}, {}, 0.0, counts=[1, 1, 0]))
    known.sampled(second, StepResult(1, [13], {}, {}, {}, 0.0, counts=[1]))
    found = known.take()
    assert found is not None and known.take() is None
    assert [found.slots.tolist(), found.positions.tolist(), found.token_ids.tolist()] == [[0, 1], [4, 3], [11, 13]]


def test_accepted_drafts_are_told_one_behind_the_other() -> None:
    known = KnownTokens()
    plan = replace(_plan(0, [3, 4], [4, 3], [10, 20]), drafts=np.array([3, 2], np.int32))
    known.planned(plan)
    known.sampled(plan, StepResult(0, [7, 8, 9, 5], {}, {}, {}, 0.0, counts=[3, 1]))
    found = known.take()
    assert found is not None
    assert [found.slots.tolist(), found.positions.tolist(), found.token_ids.tolist()] == [
        [3, 3, 3, 4], [11, 12, 13, 21], [7, 8, 9, 5]
    ]  # fmt: skip
