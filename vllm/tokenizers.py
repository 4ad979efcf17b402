"""`get_tokenizer` under its newer path."""

from __future__ import annotations

from vllm.transformers_utils.tokenizer import get_tokenizer

__all__ = ["get_tokenizer"]
