"""The interface of quantization formats under the path that out-of-tree models import."""

from __future__ import annotations

from vllm.model_executor.layers.linear_method import LinearMethod, QuantizationConfig

__all__ = ["LinearMethod", "QuantizationConfig"]
