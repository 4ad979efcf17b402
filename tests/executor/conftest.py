"""Fixtures: a tiny model on disk."""

from tests.tiny_llama import model_folder

__all__ = ["model_folder"]
