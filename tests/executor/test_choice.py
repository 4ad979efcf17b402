"""Which executor a config gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm
from tests.executor.configs import config_for
from tests.tiny_models import save_llama
from vllm.config import ParallelConfig
from vllm.executor import create_executor
from vllm.executor.uniproc import UniprocExecutor


class Config:
    """As much of a VllmConfig as the choice looks at."""

    def __init__(self, backend: str, size: int) -> None:
        self.parallel_config = ParallelConfig(tensor_parallel_size=1, distributed_executor_backend=backend)
        object.__setattr__(self.parallel_config, "tensor_parallel_size", size)


class OwnExecutor(UniprocExecutor):
    """A user's own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield save_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def test_uni_runs_one_rank() -> None:
    with pytest.raises(ValueError, match="'uni' runs one rank, but tensor_parallel_size=2 asks for 2"):
        create_executor(Config("uni", 2))  # type: ignore[arg-type]


def test_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"needs Ray on every node: pip install 'vllm\[ray\]'"):
        vllm.initialize_ray_cluster(ParallelConfig())


@pytest.mark.parametrize("given", [OwnExecutor, "tests.executor.test_choice:OwnExecutor"])
def test_a_class_of_the_users_own_runs_the_steps(given: Any, folder: Path) -> None:
    config = config_for(folder, distributed_executor_backend=given)
    assert config.parallel_config.distributed_executor_backend == "tests.executor.test_choice:OwnExecutor"
    executor = create_executor(config)
    assert type(executor) is OwnExecutor
    executor.shutdown()


def test_the_external_launcher_must_have_launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    config = config_for(folder, distributed_executor_backend="external_launcher", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment"):
        create_executor(config)
    config = config_for(folder, distributed_executor_backend="external_launcher", pipeline_parallel_size=1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="needs WORLD_SIZE"):
        create_executor(config)


def test_who_asks_for_ray_and_something_else_is_told(folder: Path) -> None:
    assert config_for(folder, worker_use_ray=True).parallel_config.distributed_executor_backend == "ray"
    with pytest.raises(ValueError, match="worker_use_ray asks for Ray, distributed_executor_backend='mp'"):
        config_for(folder, worker_use_ray=True, distributed_executor_backend="mp")
