"""Doors to the readers of Hugging Face files, under the names of other versions."""
