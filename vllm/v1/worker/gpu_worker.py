"""Public path of `Worker`; it lives in `vllm.worker.worker`."""

from vllm.worker.worker import Worker

__all__ = ["Worker"]
