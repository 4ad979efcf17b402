"""`AsyncLLM`, the newer name of `AsyncLLMEngine`, with the one method that differs."""

from __future__ import annotations

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine

__all__ = ["AsyncEngineArgs", "AsyncLLM"]


class AsyncLLM(AsyncLLMEngine):
    """`AsyncLLMEngine` whose `shutdown` ends the engine at once instead of letting running requests finish."""

    def shutdown(self, timeout: float | None = None) -> None:  # type: ignore[override]
        """End the core's process; requests in flight fail. Nothing waits, so that `timeout` is always kept."""
        self.shutdown_background_loop()
