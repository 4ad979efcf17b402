"""Public path of `OpenAIServing`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import BaseModelPath, OpenAIServing

__all__ = ["BaseModelPath", "OpenAIServing"]
