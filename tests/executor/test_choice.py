"""Which executor a config gets."""

from __future__ import annotations

import pytest

import vllm
from vllm.config import ParallelConfig
from vllm.executor import create_executor


class Config:
    """As much of a VllmConfig as the choice looks at."""

    def __init__(self, backend: str, size: int) -> None:
        self.parallel_config = ParallelConfig(tensor_parallel_size=1, distributed_executor_backend=backend)
        object.__setattr__(self.parallel_config, "tensor_parallel_size", size)


@pytest.mark.parametrize("backend", ["ray", "external_launcher"])
def test_what_does_not_exist_yet_is_refused(backend: str) -> None:
    with pytest.raises(
        ValueError, match=f"distributed_executor_backend='{backend}' is not available.*Use 'mp' or 'uni'"
    ):
        create_executor(Config(backend, 2))  # type: ignore[arg-type]


def test_uni_runs_one_rank() -> None:
    with pytest.raises(ValueError, match="'uni' runs one rank, but 2 are asked for"):
        create_executor(Config("uni", 2))  # type: ignore[arg-type]


def test_the_ray_function_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match="use distributed_executor_backend='mp'"):
        vllm.initialize_ray_cluster(ParallelConfig())
