"""Engines over several processes, started and stopped twenty times: nothing of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.executor.configs import config_for, generate
from tests.executor.test_pipeline import save
from tests.server.engines import final, greedy, running
from tests.tiny_models import save_llama
from vllm.executor import create_executor
from vllm.executor.uniproc import UniprocExecutor
from vllm.sampling_params import SamplingParams

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
CYCLES = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), intermediate_size=76)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For temporary files, also of child processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def things() -> tuple[set[int], set[str], set[str], int]:
    """Processes, shared memory and temporary files there are, and how many files this process has open."""
    me = psutil.Process()
    children = {child.pid for child in me.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}
    shared = {name for name in os.listdir("/dev/shm") if "vllm" in name or "torch" in name}
    return children, shared, set(os.listdir(tempfile.gettempdir())), me.num_fds()


class OwnExecutor(UniprocExecutor):
    """A user's own."""


SIZES: dict[str, dict[str, Any]] = {
    "uni": {},
    "own": {"distributed_executor_backend": "tests.soak.test_parallel_cycles:OwnExecutor"},
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "eplb_step_interval": 2},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_ranks_of_one_host(folder: Path, experts: Path, sizes: dict[str, Any]) -> None:
    config = config_for(experts if sizes.get("enable_expert_parallel") else folder, **sizes)
    found = []
    for _ in range(CYCLES):
        executor = create_executor(config)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        assert len(generate(executor, config, [[5, 6, 7]], [params])[0]) == 4
        executor.shutdown()
        found.append(things())
    assert all(now[:3] == found[0][:3] for now in found)
    assert found[-1][3] <= found[1][3]  # the first ones load libraries


LAUNCHED = """
import os, sys, tempfile
import psutil
from tests.distributed.workload import engine
from tests.soak.test_parallel_cycles import CYCLES, things
from vllm import SamplingParams
found = []
for _ in range(CYCLES):
    llm = engine(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    outputs = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 4
    llm.llm_engine.shutdown()
    found.append(things())
assert all(now[:3] == found[0][:3] for now in found), found
assert found[-1][3] <= found[1][3], [now[3] for now in found]
"""


def test_processes_of_torchrun(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LAUNCHED)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
         "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-backend", "c10d", program, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


async def test_copies_of_the_engine(folder: Path) -> None:
    found = []
    for cycle in range(CYCLES):
        async with running(folder, data_parallel_size=2) as engine:  # which looks for what is left
            assert len((await final(engine, "Hello", greedy(4), str(cycle))).outputs[0].token_ids) == 4
        found.append(things())
    assert found[-1][3] <= found[1][3]
