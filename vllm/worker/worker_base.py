"""`WorkerBase`: the class that workers of a user's own derive from; it is the worker itself."""

from vllm.worker.worker import Worker as WorkerBase

__all__ = ["WorkerBase"]
