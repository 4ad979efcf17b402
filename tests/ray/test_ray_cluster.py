"""Ranks on the nodes of a Ray cluster: the same answers, next to no work when idle, and a clean end, however it comes.

`make test-ray` runs these; they take a minute.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.workload import SMALL, answers, differences, engine
from tests.tiny_models import save_llama
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.exceptions import EngineDeadError, EngineGenerateError, GenerationError
from vllm.executor.ray_utils import initialize_ray_cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, detokenize=False)
PROMPT = {"prompt_token_ids": [5, 6, 7]}


def free_cpus(count: int, seconds: float = 15.0) -> bool:
    """Whether so many processors of the cluster become free in time."""
    import ray

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ray.available_resources().get("CPU", 0) == count:
            return True
        time.sleep(0.1)
    return False


def groups_left() -> int:
    import ray

    return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_nodes_give_the_answers_of_one_process(cluster: Any, folder: Path, tp: int, pp: int) -> None:
    single = engine(folder)
    expected = answers(single, 12)
    del single
    llm = engine(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, distributed_executor_backend="ray")
    assert differences(answers(llm, 12), expected) == []
    executor: Any = llm.llm_engine.model_executor
    rank = psutil.Process(executor._ranks[0].pid)
    before = sum(rank.cpu_times()[:2])
    time.sleep(4)
    assert sum(rank.cpu_times()[:2]) - before < 0.04  # a hundredth of a core
    executor.shutdown()
    assert free_cpus(2) and groups_left() == 0 and not rank.is_running()


def test_a_rank_that_is_killed_ends_the_engine(cluster: Any, folder: Path) -> None:
    llm = engine(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    executor: Any = llm.llm_engine.model_executor
    pid = executor._ranks[0].pid
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(GenerationError, match=rf"Rank 1 on .* \(pid {pid}\) was killed by signal 9"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="was killed by signal 9"):
        executor.check_health()
    assert time.monotonic() - started < 10
    assert free_cpus(2) and groups_left() == 0


async def test_a_node_that_fails_in_mid_stream_ends_requests_within_seconds(cluster: Any, tmp_path: Path) -> None:
    """The core is a process of its own, which connects to the cluster by itself."""
    settings = {**SMALL, "max_model_len": 512, "num_gpu_blocks_override": 300}
    model = save_llama(tmp_path, intermediate_size=76)
    args = AsyncEngineArgs(
        str(model), tensor_parallel_size=2, distributed_executor_backend="ray", disable_log_requests=True, **settings
    )
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        serving = AsyncLLMEngine.from_engine_args(args)
        node = next(node for node in cluster.worker_nodes)
        seen = 0
        started = 0.0
        with pytest.raises((EngineDeadError, EngineGenerateError), match="the node may have failed"):
            long = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True, detokenize=False)
            while True:
                async for _ in serving.generate(PROMPT, long, f"r{seen}"):
                    seen += 1
                    if seen == 20:
                        await asyncio.to_thread(cluster.remove_node, node, False)
                        started = time.monotonic()
        assert seen >= 20 and time.monotonic() - started < 10
        with pytest.raises(EngineDeadError):
            while time.monotonic() - started < 15:
                await serving.check_health()
                await asyncio.sleep(0.1)
        await serving.shutdown(0)
        assert await asyncio.to_thread(free_cpus, 1)
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        assert await asyncio.to_thread(free_cpus, 2)
        again = AsyncLLMEngine.from_engine_args(args)
        outputs = [output async for output in again.generate(PROMPT, GREEDY, "again")]
        assert len(outputs[-1].outputs[0].token_ids) == 50
        await again.shutdown(0)
    finally:
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


async def test_copies_of_the_engine_on_two_nodes(cluster: Any, folder: Path) -> None:
    """They answer as one does, one that dies is started again, and one whose node fails leaves the other alone."""
    assert free_cpus(2)
    single = engine(folder)
    expected = single.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    del single
    args = AsyncEngineArgs(
        str(folder), data_parallel_size=2, data_parallel_backend="ray", disable_log_requests=True, **SMALL
    )
    serving = await asyncio.to_thread(AsyncLLMEngine.from_engine_args, args)
    fleet: Any = serving._core
    assert await asyncio.to_thread(free_cpus, 0)

    async def tokens(name: str) -> list[int]:
        outputs = [output async for output in serving.generate(PROMPT, GREEDY, name)]
        return list(outputs[-1].outputs[0].token_ids)

    assert await asyncio.gather(*(tokens(f"a{i}") for i in range(6))) == [expected] * 6
    os.kill(fleet._replicas[0].client.pid, signal.SIGKILL)
    while fleet._replicas[0].alive:
        await asyncio.sleep(0.05)
    assert await tokens("b") == expected
    while not fleet._replicas[0].alive:
        await asyncio.sleep(0.05)
    assert await asyncio.gather(*(tokens(f"c{i}") for i in range(6))) == [expected] * 6
    await asyncio.to_thread(cluster.remove_node, next(node for node in cluster.worker_nodes), False)
    started = time.monotonic()
    while all(replica.alive for replica in fleet._replicas):
        await asyncio.sleep(0.05)
    assert time.monotonic() - started < 10
    assert await tokens("d") == expected
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    while not all(replica.alive for replica in fleet._replicas):
        await asyncio.sleep(0.05)
    assert await asyncio.gather(*(tokens(f"e{i}") for i in range(6))) == [expected] * 6
    await serving.shutdown(0)
    assert await asyncio.to_thread(free_cpus, 2) and groups_left() == 0


async def test_copies_that_have_no_place_are_refused(cluster: Any, folder: Path) -> None:
    args = AsyncEngineArgs(str(folder), data_parallel_size=3, data_parallel_backend="ray", **SMALL)
    with pytest.raises(ValueError, match="data_parallel_size=3 needs as many places of 1 CPUs on one node"):
        await asyncio.to_thread(AsyncLLMEngine.from_engine_args, args)
    with pytest.raises(ValueError, match="places each copy of the engine on one node"):
        AsyncEngineArgs(
            str(folder), data_parallel_size=2, data_parallel_backend="ray", distributed_executor_backend="ray"
        ).create_engine_config()


def test_too_few_devices_are_counted_out(cluster: Any, folder: Path) -> None:
    assert free_cpus(2)
    words = r"pipeline_parallel_size=4 needs 4 CPUs, but the Ray cluster has 2 \(.*: 1, .*: 1"
    with pytest.raises(ValueError, match=words):
        engine(folder, pipeline_parallel_size=4, distributed_executor_backend="ray")
    assert groups_left() == 0


def test_the_public_function_reserves_places(cluster: Any) -> None:
    import ray

    from vllm.config import ParallelConfig

    config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="ray")
    group = initialize_ray_cluster(config)
    assert len(group.bundle_specs) == 2 and groups_left() == 1
    ray.util.remove_placement_group(group)
    assert free_cpus(2)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_twenty_starts_leave_nothing(cluster: Any, folder: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    for _ in range(20):
        llm = engine(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
        executor: Any = llm.llm_engine.model_executor
        pid = executor._ranks[0].pid
        assert len(llm.generate(PROMPT, GREEDY, use_tqdm=False)) == 1
        executor.shutdown()
        assert free_cpus(2) and groups_left() == 0 and not psutil.pid_exists(pid)
    assert {name for name in os.listdir("/dev/shm") if "vllm" in name} <= shared


def test_batch_inference_with_ray_data(cluster: Any, folder: Path) -> None:
    """The example, with a model of the tests' own, in a process that starts a cluster of its own."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "examples/offline_inference_distributed.py", "--model", folder, "--skip-tokenizer",
         "--copies", "1", "--rows", "6", "--max-tokens", "4"],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(root), "RAY_ADDRESS": "local"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "6 answers" in done.stdout
