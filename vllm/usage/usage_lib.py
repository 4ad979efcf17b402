"""`UsageContext`, which says through which door the engine was entered. No usage statistics exist: nothing is sent."""

from __future__ import annotations

from enum import Enum


class UsageContext(str, Enum):
    """The door through which an engine is used."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def is_usage_stats_enabled() -> bool:
    """Always False."""
    return False
