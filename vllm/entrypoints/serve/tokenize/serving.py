"""Public path of `OpenAIServingTokenization` under its newer name; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import OpenAIServingTokenization as ServingTokenization

__all__ = [
    "ServingTokenization",
]
