"""The attention layer of models from outside the tree, and what they may import beside it."""

from __future__ import annotations

from vllm.attention.layer import Attention, AttentionMetadata, AttentionType

__all__ = ["Attention", "AttentionMetadata", "AttentionType"]
