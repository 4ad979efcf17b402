"""Public path of `OpenAIServingChat`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import OpenAIServingChat

__all__ = [
    "OpenAIServingChat",
]
