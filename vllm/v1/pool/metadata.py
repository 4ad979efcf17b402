"""`PoolingMetadata` under its newer path."""

from vllm.model_executor.pooling_metadata import PoolingCursor, PoolingMetadata

__all__ = ["PoolingCursor", "PoolingMetadata"]
