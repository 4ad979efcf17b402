"""`StatLoggerBase`, from which loggers of a user's own derive, and one that writes a line every few seconds."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.ipc.functions import named
from vllm.logger import init_logger
from vllm.plugins import STAT_LOGGER_GROUP, plugins_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.step.messages import CoreStats

logger = init_logger(__name__)


class StatLoggerBase(ABC):
    """Hears of every step. Give objects of it to an engine as `stat_loggers` or with `add_logger`.

    local_interval: seconds between two lines, for those that write lines.
    """

    def __init__(self, local_interval: float = 10.0, vllm_config: VllmConfig | None = None) -> None:
        self.local_interval = local_interval
        self.vllm_config = vllm_config

    @abstractmethod
    def log(self, stats: CoreStats) -> None:
        """Called after each step."""

    def info(self, type: str, obj: Any) -> None:  # noqa: B027 - most loggers have no use for it
        """Facts that do not change, such as the cache's configuration; with "metrics" the engine's `EngineMetrics`."""


def stat_loggers_of(given: Mapping[str, Any] | Sequence[Any] | None, config: VllmConfig) -> dict[str, Any]:
    """The loggers that a caller gives: objects, classes or their paths, by name, or in a list, and then their classes'
    names are theirs; and those of installed plug-ins.

    Raises ValueError for one that has no method `log`.
    """
    if given is not None and not isinstance(given, Mapping):
        given = {f"{_name(logger)}-{i}" if i else _name(logger): logger for i, logger in enumerate(given)}
    made = {}
    for name, found in {**plugins_of(STAT_LOGGER_GROUP), **(given or {})}.items():
        found = named(found) if isinstance(found, str) else found
        made[name] = found(vllm_config=config) if isinstance(found, type) else found
        if not callable(getattr(made[name], "log", None)):
            raise ValueError(f"The stat logger {name!r} has no method log(stats), see vllm.engine.metrics.")
    return made


def _name(logger: Any) -> str:
    """Of a logger that was given without one: its class's."""
    if isinstance(logger, str):
        return logger
    return str(getattr(logger, "__name__", type(logger).__name__))


class LoggingStatLogger(StatLoggerBase):
    """Writes requests running and waiting and the use of the cache to the log, once per `local_interval` seconds."""

    _last = 0.0

    def log(self, stats: CoreStats) -> None:
        now = time.monotonic()
        if now - self._last < self.local_interval:
            return
        self._last = now
        total = max(1, stats.kv_blocks_total)
        logger.info(
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, preemptions: %d",
            stats.num_running,
            stats.num_waiting,
            100 * (total - stats.kv_blocks_free) / total,
            stats.num_preemptions,
        )
