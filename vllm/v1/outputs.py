"""`PoolerOutput` under its newer path."""

from vllm.sequence import PoolerOutput

__all__ = ["PoolerOutput"]
