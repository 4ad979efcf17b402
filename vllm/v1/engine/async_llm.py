"""Public path of `AsyncLLM`, the newer name of `AsyncLLMEngine`."""

from vllm.engine.async_llm_engine import AsyncLLMEngine as AsyncLLM

__all__ = ["AsyncLLM"]
