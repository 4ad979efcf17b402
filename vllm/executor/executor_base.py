"""`ExecutorBase`: what the engine expects of a class that runs its steps, under the name that integrations import."""

from __future__ import annotations

from vllm.executor.base import Executor as ExecutorBase

__all__ = ["ExecutorBase"]
