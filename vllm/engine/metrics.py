"""Loggers of a user's own: what they derive from, what they hear after each step, and who calls them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from vllm.ipc.functions import named
from vllm.logger import init_logger
from vllm.metrics.registry import EngineMetrics, Histogram, NotingHistogram, one_two_five_buckets
from vllm.plugins import STAT_LOGGER_GROUP, plugins_of
from vllm.step.messages import CoreStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class SupportsMetricsInfo(Protocol):
    """What `StatLoggerBase.info` is told of."""

    def metrics_info(self) -> dict[str, str]:
        """Facts by name."""
        ...


def build_1_2_5_buckets(max_value: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `max_value`."""
    return list(one_two_five_buckets(max_value))


class Stats(CoreStats):
    """What a step has brought, under the names that loggers of vLLM 0.9.2 read; what `CoreStats` has is there, too.

    `_sys`: the state after the step.   `_iter`: of the step; lists have one entry for each event, in seconds.
    `_requests`: one entry for each request that has finished.
    """

    now: float = 0.0
    num_running_sys: int = 0
    num_waiting_sys: int = 0
    num_swapped_sys: int = 0
    gpu_cache_usage_sys: float = 0.0
    cpu_cache_usage_sys: float = 0.0
    gpu_prefix_cache_hit_rate: float = 0.0
    cpu_prefix_cache_hit_rate: float = 0.0
    num_prompt_tokens_iter: int = 0
    num_generation_tokens_iter: int = 0
    num_tokens_iter: int = 0
    num_preemption_iter: int = 0
    time_to_first_tokens_iter: list[float] = []
    time_per_output_tokens_iter: list[float] = []
    time_e2e_requests: list[float] = []
    time_queue_requests: list[float] = []
    time_inference_requests: list[float] = []
    time_prefill_requests: list[float] = []
    time_decode_requests: list[float] = []
    finished_reason_requests: list[str] = []
    num_prompt_tokens_requests: list[int] = []
    num_generation_tokens_requests: list[int] = []
    max_num_generation_tokens_requests: list[int] = []
    n_requests: list[int] = []
    max_tokens_requests: list[int] = []


# Lists of `Stats` -> histograms of `EngineMetrics`.
_TIMES = {
    "time_to_first_tokens_iter": "time_to_first_token",
    "time_per_output_tokens_iter": "time_per_output_token",
    "time_e2e_requests": "e2e_latency",
    "time_queue_requests": "queue_time",
    "time_inference_requests": "inference_time",
    "time_prefill_requests": "prefill_time",
    "time_decode_requests": "decode_time",
}
_COUNTS = {
    "num_prompt_tokens_requests": "request_prompt_tokens",
    "num_generation_tokens_requests": "request_generation_tokens",
    "max_num_generation_tokens_requests": "request_max_generation_tokens",
    "n_requests": "params_n",
    "max_tokens_requests": "params_max_tokens",
}


class StatLoggerBase(ABC):
    """Hears of every step. Give objects of it to an engine as `stat_loggers` or with `add_logger`.

    local_interval: seconds between two lines, for those that write lines.
    """

    def __init__(self, local_interval: float = 10.0, vllm_config: VllmConfig | None = None) -> None:
        self.local_interval = local_interval
        self.vllm_config = vllm_config

    @abstractmethod
    def log(self, stats: Stats) -> None:
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


class StatLoggers:
    """The loggers of one engine, by name, and what they have to be told."""

    def __init__(
        self, given: Mapping[str, Any] | Sequence[Any] | None, config: VllmConfig, metrics: EngineMetrics
    ) -> None:
        self.by_name: dict[str, Any] = {}
        self._metrics = metrics
        self._listens = False
        self._preemptions = 0
        self._finished: dict[str, int] = {}
        for name, stat_logger in stat_loggers_of(given, config).items():
            self.add(name, stat_logger)

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def add(self, name: str, stat_logger: Any) -> None:
        """Raises KeyError if the name is in use."""
        if name in self.by_name:
            raise KeyError(f"Logger with name {name} already exists.")
        self.by_name[name] = stat_logger
        if isinstance(stat_logger, StatLoggerBase):
            stat_logger.info("metrics", self._metrics)
        if not self._listens:
            self._listen(True)

    def remove(self, name: str) -> None:
        """Raises KeyError for an unknown name."""
        if name not in self.by_name:
            raise KeyError(f"Logger with name {name} does not exist.")
        del self.by_name[name]
        if not self.by_name:
            self._listen(False)

    def log(self, core: CoreStats) -> None:
        """Tell every logger what has come since the last time. core: of the newest step."""
        if not self.by_name:
            return
        metrics = self._metrics
        noted: dict[str, Any] = {}
        for names, kind in ((_TIMES, float), (_COUNTS, int)):
            noted |= {name: list(map(kind, getattr(metrics, source).take())) for name, source in names.items()}
        preemptions, reasons = metrics.stats.num_preemptions, dict(metrics.finished)
        stats = Stats(
            **msgspec.structs.asdict(core),
            now=time.time(),
            num_running_sys=metrics.stats.num_running,
            num_waiting_sys=metrics.stats.num_waiting,
            gpu_cache_usage_sys=metrics.cache_usage,
            gpu_prefix_cache_hit_rate=metrics.hit_rate,
            num_prompt_tokens_iter=core.prompt_tokens,
            num_generation_tokens_iter=core.generation_tokens,
            num_tokens_iter=core.prompt_tokens + core.generation_tokens,
            num_preemption_iter=preemptions - self._preemptions,
            finished_reason_requests=[r for r, n in reasons.items() for _ in range(n - self._finished.get(r, 0))],
            **noted,
        )
        self._preemptions, self._finished = preemptions, reasons
        for stat_logger in self.by_name.values():
            stat_logger.log(stats)

    def _listen(self, listens: bool) -> None:
        """From now on, keep what is observed, or no longer: nobody would take it."""
        self._listens = listens
        for name in (*_TIMES.values(), *_COUNTS.values()):
            before = getattr(self._metrics, name)
            after = (NotingHistogram if listens else Histogram)(before.bounds)
            after.counts, after.total = before.counts, before.total
            setattr(self._metrics, name, after)


class LoggingStatLogger(StatLoggerBase):
    """Writes requests running and waiting and the use of the cache to the log, once per `local_interval` seconds."""

    _last = 0.0

    def log(self, stats: Stats) -> None:
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
