"""Public path of `OpenAIServingEmbedding` under its newer name; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import OpenAIServingEmbedding as ServingEmbedding

__all__ = [
    "ServingEmbedding",
]
