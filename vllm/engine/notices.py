"""What an engine says once when it starts."""

from __future__ import annotations

from functools import lru_cache

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)


@lru_cache(maxsize=1)
def name_variables_without_effect() -> None:
    """One log line about environment variables that are set and change nothing here."""
    ignored = envs.set_without_effect()
    if ignored:
        names = "; ".join(f"{name} ({why})" for name, why in ignored.items())
        logger.warning("These environment variables have no effect: %s", names)
