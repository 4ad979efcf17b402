"""The collectives under the path that out-of-tree models import."""

from __future__ import annotations

from vllm.distributed.parallel_state import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

__all__ = ["tensor_model_parallel_all_gather", "tensor_model_parallel_all_reduce"]
