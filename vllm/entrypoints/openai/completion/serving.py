"""Public path of `OpenAIServingCompletion`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import OpenAIServingCompletion

__all__ = [
    "OpenAIServingCompletion",
]
