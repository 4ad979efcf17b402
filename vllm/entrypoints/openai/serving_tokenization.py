"""Public path of `OpenAIServingTokenization`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import OpenAIServingTokenization

__all__ = ["OpenAIServingTokenization"]
