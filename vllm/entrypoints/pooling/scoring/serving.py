"""Public path of `ServingScores`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import ServingScores

__all__ = [
    "ServingScores",
]
