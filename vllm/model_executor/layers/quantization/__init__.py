"""Formats of quantized weights; the interface they fill in is `layers/linear_method.py`."""

from __future__ import annotations

from vllm.model_executor.layers.linear_method import QuantizationConfig

__all__ = ["QuantizationConfig"]
