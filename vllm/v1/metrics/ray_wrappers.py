"""Shows an engine's metrics at Ray's own endpoint: `stat_loggers=[RayPrometheusStatLogger]`, in an actor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.engine.metrics import StatLoggerBase
from vllm.executor.ray_utils import import_ray

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.metrics.registry import EngineMetrics
    from vllm.step.messages import CoreStats

_INTERVAL_S = 1.0


class RayPrometheusStatLogger(StatLoggerBase):
    """Writes counters and gauges under their names, with "_" for ":" ("vllm_num_requests_running", to which Ray adds
    "ray_"). Of a histogram it writes the sum and the count, whose quotient is the mean: Ray's histograms take single
    observations only.
    """

    def __init__(self, vllm_config: VllmConfig | None = None, local_interval: float = _INTERVAL_S) -> None:
        """Raises ValueError without Ray."""
        super().__init__(local_interval, vllm_config)
        import_ray()
        self._source: EngineMetrics | None = None
        self._made: dict[str, Any] = {}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}  # what counters stand at
        self._last = 0.0

    def info(self, type: str, obj: Any) -> None:
        if type == "metrics":
            self._source = obj

    def log(self, stats: CoreStats) -> None:
        now = time.monotonic()
        if self._source is None or now - self._last < self.local_interval:
            return
        self._last = now
        self.publish()

    def publish(self) -> None:
        """Write what has changed since the last time."""
        if self._source is None:
            return
        from vllm.v1.metrics.reader import Counter, Gauge, Histogram, snapshot

        for metric in snapshot(self._source):
            if isinstance(metric, Histogram):
                self._count(f"{metric.name}_sum", metric.labels, metric.sum)
                self._count(f"{metric.name}_count", metric.labels, metric.count)
            elif isinstance(metric, Counter):
                self._count(f"{metric.name}_total", metric.labels, metric.value)
            elif isinstance(metric, Gauge):
                self._of("Gauge", metric.name, metric.labels).set(metric.value, tags=_tags(metric.labels))

    def _count(self, name: str, labels: dict[str, str], value: float) -> None:
        """Bring a counter to `value`."""
        key = name, tuple(labels.values())
        more = value - self._told.get(key, 0)
        if more > 0:
            self._of("Counter", name, labels).inc(more, tags=_tags(labels))
            self._told[key] = value

    def _of(self, kind: str, name: str, labels: dict[str, str]) -> Any:
        made = self._made.get(name)
        if made is None:
            from ray.util import metrics

            made = self._made[name] = getattr(metrics, kind)(
                name.replace(":", "_"), description=name, tag_keys=tuple(labels)
            )
        return made


def _tags(labels: dict[str, str]) -> dict[str, str]:
    return {key: str(value) for key, value in labels.items()}
