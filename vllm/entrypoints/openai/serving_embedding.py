"""Public path of `OpenAIServingEmbedding`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import OpenAIServingEmbedding

__all__ = ["OpenAIServingEmbedding"]
