"""Fixtures: a tiny model on disk, Hugging Face's and ours."""

from tests.tiny_llama import hf_model, llm, model_folder

__all__ = ["hf_model", "llm", "model_folder"]
