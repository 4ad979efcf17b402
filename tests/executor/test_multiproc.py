"""Two ranks: the same tokens as one, and no rank outlives the others or its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.executor.configs import Masked, config_for, generate
from tests.models.own_models import NewLlamaForCausalLM
from tests.tiny_models import save_llama
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group, parallel_state
from vllm.exceptions import EngineDeadError
from vllm.executor import create_executor
from vllm.executor.multiproc import MultiprocExecutor, collective_timeout
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams

PROMPTS = [np.random.default_rng(i).integers(5, 300, 1 + 9 * i).tolist() for i in range(5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), intermediate_size=76)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[MultiprocExecutor]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    executor = create_executor(config_for(folder, tensor_parallel_size=2))
    assert isinstance(executor, MultiprocExecutor)
    yield executor
    executor.shutdown()


def is_running(pid: int) -> bool:
    """Whether the process exists and is not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_two_ranks_give_the_tokens_of_one(pair: MultiprocExecutor, folder: Path) -> None:
    only_even = SamplingParams(
        temperature=0.0, max_tokens=12, logits_processors=[lambda output, x: (x[1::2].fill_(-99), x)[1]]
    )
    params = [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12), GREEDY, only_even,
              SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=2, max_tokens=12)]  # fmt: skip
    config = config_for(folder)
    single = create_executor(config)
    expected = generate(single, config, PROMPTS, params)
    single.shutdown()
    assert generate(pair, config, PROMPTS, params) == expected
    assert all(token % 2 == 0 for token in expected[3])
    assert generate(pair, config, PROMPTS[::-1], params[::-1]) != expected  # other seeds: not a constant


def test_two_ranks_take_masks_that_come_late(pair: MultiprocExecutor, folder: Path) -> None:
    config = config_for(folder)
    vocab = config.model_config.logits_width
    in_plan, late = (generate(Masked(pair, vocab, late), config, PROMPTS, [GREEDY] * 5) for late in (False, True))
    assert in_plan == late and sum(all(token % 3 == 0 for token in tokens) for tokens in late) >= 2


def rank_and(worker: Any, function: Callable[[int], int], value: int) -> list[int]:
    return [worker.rank, function(value)]


def count_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def ranks_as_functions_say(worker: Any) -> list[int]:
    world = parallel_state.get_world_group()
    return [world.rank, world.world_size, world.local_rank, get_tensor_model_parallel_rank(), get_tp_group().world]


def test_functions_that_are_called_learn_their_rank(pair: MultiprocExecutor) -> None:
    assert pair.collective_rpc(ranks_as_functions_say) == [[0, 2, 0, 0, 2], [1, 2, 1, 1, 2]]
    assert parallel_state.get_world_group().world_size == get_tp_group().world == 1  # outside of it


def test_calls_reach_every_rank(pair: MultiprocExecutor) -> None:
    assert pair.collective_rpc("check_health") == [None, None]
    assert pair.collective_rpc("count_blocks", timeout=30) == [pair.num_blocks] * 2
    assert pair.collective_rpc(rank_and, args=(abs,), kwargs={"value": -3}) == [[0, 3], [1, 3]]
    counts = pair.collective_rpc("apply_model", args=(count_parameters,))
    assert counts[0] == counts[1] > 0
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        pair.collective_rpc(lambda worker: None)
    with pytest.raises(ValueError, match="has no public method 'nothing'"):
        pair.collective_rpc("nothing")
    with pytest.raises(RuntimeError, match="Profiler is not enabled"):
        pair.collective_rpc("start_profile")
    os.kill(pair._ranks[0].process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match="Rank 1 has not answered in time"):
            pair.collective_rpc("check_health", timeout=0.5)
    finally:
        os.kill(pair._ranks[0].process.pid, signal.SIGCONT)
    assert pair.collective_rpc("check_health") == [None, None]  # the late answer is not taken for this one's


class Other:
    """Nothing that could be sent."""


def kinds(worker: Any, *args: Any, **kwargs: Any) -> Any:
    return [str(type(value)) for value in (*args, *kwargs.values())], args[:2], torch.full((2,), worker.rank)


def unsendable(worker: Any) -> Any:
    return Other()


def test_arguments_and_results_are_alike_on_all_ranks(pair: MultiprocExecutor) -> None:
    weights, shape = torch.randn(3).to(torch.bfloat16), torch.Size([3, 1])
    first, second = pair.collective_rpc(
        kinds, args=(weights, shape, {1}, [np.zeros(2)], GREEDY, (1, GREEDY)), kwargs={"a": np.ones(2), "b": np.int8(1)}
    )
    assert first[0] == second[0]
    assert first[0][0] == str(torch.Tensor) and first[0][1] == str(tuple) and first[0][4] == str(SamplingParams)
    for rank, (_, given, own) in enumerate((first, second)):
        assert torch.equal(given[0], weights) and given[1] == (3, 1) and own.tolist() == [rank] * 2
    with pytest.raises(TypeError, match="A Other cannot be sent to another process"):
        pair.collective_rpc(unsendable)
    with pytest.raises(TypeError, match="A Other cannot be sent to another process"):
        pair.collective_rpc(kinds, args=(Other(),))


def wait_on_the_first(worker: Any) -> int:
    if worker.rank == 0:
        released.wait(60)
    return int(worker.rank)


released = threading.Event()


def test_a_call_that_takes_too_long_is_given_up_whichever_rank_is_late(pair: MultiprocExecutor) -> None:
    try:
        with pytest.raises(TimeoutError):
            pair.collective_rpc(wait_on_the_first, timeout=0.1)
    finally:
        released.set()
    assert pair.collective_rpc(wait_on_the_first) == [0, 1]


def test_a_second_group_in_one_process_is_refused(pair: MultiprocExecutor, folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is in use in this process already"):
        create_executor(config_for(folder, tensor_parallel_size=2))
    pair.check_health()


def test_listeners_are_on_the_loopback_interface_only(pair: MultiprocExecutor) -> None:
    inodes = set()
    for pid in (os.getpid(), pair._ranks[0].process.pid):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd) if fd.exists() or fd.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1].partition(":")[0])
    assert listening
    assert set(listening) <= {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}


def test_a_killed_rank_is_noticed_at_once_and_nothing_is_left(pair: MultiprocExecutor, folder: Path) -> None:
    # The last test of the shared pair: it does not survive.
    pid = pair._ranks[0].process.pid
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"Rank 1 \(pid {pid}\) was killed by signal 9"):
        generate(pair, config_for(folder), PROMPTS, [GREEDY] * 5)
    assert time.monotonic() - started < 3
    with pytest.raises(EngineDeadError, match="was killed by signal 9"):
        pair.check_health()
    pair.shutdown()
    assert not is_running(pid)
    assert not torch.distributed.is_initialized()


class _Stuck:
    """A step that never ends."""

    def wait(self, seconds: float) -> bool:
        time.sleep(0.01)
        return False


def test_a_step_that_does_not_end_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "1")
    executor = create_executor(config_for(folder, tensor_parallel_size=2))
    assert isinstance(executor, MultiprocExecutor)
    pid = executor._ranks[0].process.pid
    monkeypatch.setattr(executor.worker, "execute", lambda plan: _Stuck())
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="has not come to an end within 1 s: a rank or its device hangs"):
        generate(executor, config_for(folder), PROMPTS[:1], [GREEDY])
    assert time.monotonic() - started < 10
    wait_until_gone(pid, 5)
    executor.shutdown()


def test_a_rank_that_hangs_on_a_cpu_fails_the_step_that_waits_for_it(folder: Path) -> None:
    """There the step itself waits, inside of a collective operation."""
    executor = create_executor(config_for(folder, tensor_parallel_size=2, distributed_timeout_seconds=2))
    assert isinstance(executor, MultiprocExecutor)
    pid = executor._ranks[0].process.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="Timed out"):
        generate(executor, config_for(folder), PROMPTS[:1], [GREEDY])
    wait_until_gone(pid, 5)
    executor.shutdown()


def test_a_collective_operation_lasts_no_longer_than_a_step_may(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(**settings: Any) -> int:
        return collective_timeout(config_for(folder, tensor_parallel_size=2, max_num_batched_tokens=512, **settings))

    assert seconds() == 60 + 6  # 10 ms for each token
    assert seconds(distributed_timeout_seconds=7) == 7
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "300")
    assert seconds() == 306
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "1")
    assert seconds() == 60


ORPHAN = """
import sys, time
from pathlib import Path
from tests.executor.configs import config_for
from vllm.executor import create_executor
executor = create_executor(config_for(Path(sys.argv[1]), tensor_parallel_size=2))
print("pid", executor._ranks[0].process.pid, flush=True)
time.sleep(60)
"""


def test_ranks_end_with_a_parent_that_is_killed(folder: Path, tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(folder)], stdout=subprocess.PIPE, text=True, env=env
    ) as parent:
        assert parent.stdout is not None
        line = next(line for line in parent.stdout if line.startswith("pid "))
        pid = int(line.split()[1])
        assert is_running(pid)
        parent.kill()
        wait_until_gone(pid, 2)
    assert list(tmp_path.iterdir()) == []  # no sockets, no stores


def test_the_users_own_model_runs_on_every_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(folder, tensor_parallel_size=2)
    single = create_executor(config_for(folder))
    expected = generate(single, config, PROMPTS, [GREEDY] * 5)
    single.shutdown()
    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": NewLlamaForCausalLM})
    executor = create_executor(config)
    assert isinstance(executor, MultiprocExecutor) and "NewLlama" in repr(executor.worker.model)
    assert generate(executor, config, PROMPTS, [GREEDY] * 5) == expected
    executor.shutdown()


def test_an_error_while_loading_ends_all_ranks(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "odd", intermediate_size=77)
    with pytest.raises(ValueError, match="2 tensor-parallel ranks cannot share evenly"):
        create_executor(config_for(folder, tensor_parallel_size=2))
