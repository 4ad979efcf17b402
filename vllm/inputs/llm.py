"""Kinds of prompts, under the newer path of these names."""

from __future__ import annotations

from vllm.inputs import MultiModalDataDict, TextPrompt, TokensPrompt

__all__ = ["MultiModalDataDict", "TextPrompt", "TokensPrompt"]
