"""Prompt adapters (soft prompts)."""
