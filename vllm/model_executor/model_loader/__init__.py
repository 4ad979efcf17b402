"""From a model folder to a model with its weights on a device."""

from __future__ import annotations

from vllm.model_executor.model_loader.loader import get_model, load_model

__all__ = ["get_model", "load_model"]
