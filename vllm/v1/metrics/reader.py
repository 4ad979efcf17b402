"""The metrics of an engine as plain objects: what `LLM.get_metrics` returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from vllm.metrics.registry import EngineMetrics


@dataclass
class Metric:
    """One metric of one engine. `labels` tell model and engine, and what else the metric is divided by."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Vector(Metric):
    """Counters in a row, one per position. None of the present metrics is one; programs ask for the type."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """How observations are distributed. `buckets`: upper bound -> observations that are at most that large."""

    count: int
    sum: float
    buckets: dict[str, int]


def snapshot(metrics: EngineMetrics) -> list[Metric]:
    """Every metric as it is now, by the names that Prometheus shows without the ending of a counter."""
    return [metric for family in metrics.collect() for metric in _of_family(family)]


def _of_family(family: Family) -> Iterable[Metric]:
    if family.type == "histogram":
        yield _histogram(family)
        return
    for sample in family.samples:
        if family.type == "counter":
            yield Counter(family.name, dict(sample.labels), int(sample.value))
        else:
            yield Gauge(family.name, dict(sample.labels), sample.value)


def _histogram(family: Family) -> Histogram:
    buckets = {s.labels["le"]: int(s.value) for s in family.samples if s.name.endswith("_bucket")}
    total = next(s for s in family.samples if s.name.endswith("_sum"))
    return Histogram(family.name, dict(total.labels), buckets["+Inf"], total.value, buckets)
