"""Public names of multimodal inputs: what a model class registers. No built-in model takes such inputs yet."""

from vllm.multimodal.base import (
    BatchedTensorInputs,
    MultiModalDataBuiltins,
    MultiModalDataDict,
    MultiModalInputs,
    MultiModalPlugin,
    NestedTensors,
)
from vllm.multimodal.registry import MultiModalRegistry

# The registry that model classes use.
MULTIMODAL_REGISTRY = MultiModalRegistry()

__all__ = [
    "MULTIMODAL_REGISTRY",
    "BatchedTensorInputs",
    "MultiModalDataBuiltins",
    "MultiModalDataDict",
    "MultiModalInputs",
    "MultiModalPlugin",
    "MultiModalRegistry",
    "NestedTensors",
]
