"""Public path of `LLMEngine`; it lives in `vllm.engine.llm_engine`."""

from vllm.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
