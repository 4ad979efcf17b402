"""The models: specs, the builder that turns them into modules, families, and models from outside the tree."""

from __future__ import annotations

from vllm.model_executor.models import architecture_modules
from vllm.model_executor.models.registry import ModelRegistry

architecture_modules.install()

__all__ = ["ModelRegistry"]
