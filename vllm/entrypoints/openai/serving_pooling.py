"""Public path of `OpenAIServingPooling`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import OpenAIServingPooling

__all__ = ["OpenAIServingPooling"]
