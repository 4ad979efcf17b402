"""Structured output: the types that ask for it."""
