"""The statistics line: what the engine did since the last one, every few seconds while there is something to say."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.logger import init_logger
from vllm.metrics.registry import EngineMetrics

logger = init_logger(__name__)


class StatsLog:
    """Writes at most one line per `interval` seconds; silent while nothing runs, waits or was computed."""

    def __init__(
        self,
        metrics: EngineMetrics,
        cache_name: str,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._cache_name = cache_name  # "GPU" or "CPU"
        self._interval = interval
        self._clock = clock
        self._since = clock()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._preemptions = 0

    def tick(self, force: bool = False) -> None:
        """Write the line if it is due, or now if `force`."""
        now = self._clock()
        elapsed = now - self._since
        if elapsed < self._interval and not force:
            return
        metrics, stats = self._metrics, self._metrics.stats
        elapsed = max(elapsed, 1e-3)
        metrics.prompt_throughput = (metrics.prompt_tokens - self._prompt_tokens) / elapsed
        metrics.generation_throughput = (metrics.generation_tokens - self._generation_tokens) / elapsed
        active = stats.num_running or stats.num_waiting or metrics.prompt_tokens > self._prompt_tokens
        self._since = now
        self._prompt_tokens, self._generation_tokens = metrics.prompt_tokens, metrics.generation_tokens
        if stats.num_preemptions > self._preemptions:
            logger.warning(
                "%d times in the last %.0f s a sequence was preempted, and is computed again: there is not enough KV "
                "cache space for all that run, or others came for their share. More cache (gpu_memory_utilization, "
                "VLLM_CPU_KVCACHE_SPACE, tensor_parallel_size) or a smaller max_num_seqs helps. "
                "total_cumulative_preemption_cnt=%d",
                stats.num_preemptions - self._preemptions,
                elapsed,
                stats.num_preemptions,
            )
            self._preemptions = stats.num_preemptions
        if active or force:
            logger.info(
                "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
                "Waiting: %d reqs, %s KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
                metrics.prompt_throughput,
                metrics.generation_throughput,
                stats.num_running,
                stats.num_waiting,
                self._cache_name,
                100 * metrics.cache_usage,
                100 * metrics.hit_rate,
            )
