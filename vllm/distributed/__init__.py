"""Ranks that work on one model together, and what they say to each other."""

from __future__ import annotations

from vllm.distributed.parallel_state import (
    TensorParallel,
    cleanup_dist_env_and_memory,
    current_tensor_parallel,
    destroy_distributed_environment,
    destroy_model_parallel,
    divide,
    get_dp_group,
    get_ep_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    use_tensor_parallel,
)

__all__ = [
    "TensorParallel",
    "cleanup_dist_env_and_memory",
    "current_tensor_parallel",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "divide",
    "get_dp_group",
    "get_ep_group",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
    "use_tensor_parallel",
]
