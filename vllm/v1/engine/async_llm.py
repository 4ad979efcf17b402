"""`AsyncLLM`, the newer name of `AsyncLLMEngine`, with the few methods that differ."""

from __future__ import annotations

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine

__all__ = ["AsyncEngineArgs", "AsyncLLM"]


class AsyncLLM(AsyncLLMEngine):
    """`AsyncLLMEngine` whose `shutdown` ends the engine at once instead of letting running requests finish."""

    def shutdown(self, timeout: float | None = None) -> None:  # type: ignore[override]
        """End the core's process; requests in flight fail. Nothing waits, so that `timeout` is always kept."""
        self.shutdown_background_loop()

    async def remove_lora(self, lora_id: int) -> bool:
        raise _no_lora(lora_id)

    async def list_loras(self) -> set[int]:
        """The ids of the loaded adapters: none, since LoRA is not enabled."""
        return set()

    async def pin_lora(self, lora_id: int) -> bool:
        raise _no_lora(lora_id)


def _no_lora(lora_id: int) -> ValueError:
    return ValueError(f"Got LoRA id {lora_id} but LoRA is not enabled!")
