"""Public path of `ServingClassification`; it lives in `serving.py`."""

from vllm.entrypoints.openai.serving import ServingClassification

__all__ = ["ServingClassification"]
