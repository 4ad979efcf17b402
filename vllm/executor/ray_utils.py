"""Public path of `initialize_ray_cluster`. Distributed execution through Ray is not part of this version."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def initialize_ray_cluster(parallel_config: ParallelConfig, ray_address: str | None = None) -> NoReturn:
    """Always raises NotImplementedError."""
    raise NotImplementedError(
        "Ray is not supported by this version; use distributed_executor_backend='mp', which starts one process per GPU."
    )
