"""Public path of `OpenAIServingModels`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import BaseModelPath, OpenAIServingModels

__all__ = [
    "BaseModelPath",
    "OpenAIServingModels",
]
