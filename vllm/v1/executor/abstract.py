"""Public path of `Executor`; it lives in `vllm.executor.base`."""

from vllm.executor.base import Executor

__all__ = ["Executor"]
