"""Models, the layers they are made of, and how their weights are loaded."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`SamplingMetadata`, under the path that models from outside the tree import; read when it is asked for."""
    if name == "SamplingMetadata":
        from vllm.model_executor.sampling_metadata import SamplingMetadata

        return SamplingMetadata
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
