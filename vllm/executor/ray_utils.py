"""Ray's place: the name that callers import, and a clear answer until there is a Ray executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def initialize_ray_cluster(parallel_config: ParallelConfig, ray_address: str | None = None) -> None:
    """Connect to the Ray cluster at `ray_address`. Raises NotImplementedError: there is no Ray executor yet."""
    raise NotImplementedError(
        f"The Ray executor is not supported by this version (world size {parallel_config.world_size}, address "
        f"{ray_address!r}). Ranks on one host need no Ray: use distributed_executor_backend='mp'."
    )
