"""Public path of `OpenAIServingTranscription`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import OpenAIServingTranscription

__all__ = ["OpenAIServingTranscription"]
