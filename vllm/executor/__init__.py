"""Runs plans on one or several workers; the core sees one `Executor`, whatever is behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.executor.base import Executor
from vllm.utils.trace_calls import begin_if_asked

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Executor", "create_executor"]


def create_executor(config: VllmConfig) -> Executor:
    """Start the workers that `config` asks for; returns when they are ready for plans."""
    begin_if_asked()
    parallel = config.parallel_config
    backend = parallel.distributed_executor_backend or ("mp" if parallel.world_size > 1 else "uni")
    if backend == "uni" and parallel.world_size == 1:
        from vllm.executor.uniproc import UniprocExecutor

        return UniprocExecutor(config)
    if backend == "mp":
        from vllm.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config)
    if backend == "uni":
        raise ValueError(
            f"distributed_executor_backend='uni' runs one rank, but {parallel.world_size} are asked for. Use 'mp', or "
            "tensor_parallel_size=1."
        )
    raise ValueError(f"distributed_executor_backend={backend!r} is not available in this version. Use 'mp' or 'uni'.")
