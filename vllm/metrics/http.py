"""Counts of HTTP requests: how many, how large, how long, by route, method and kind of status.

Routes that operators poll all the time are left out. Nothing a client sends can add a series: paths without a route
share the handler "none", unusual methods the name "OTHER".
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from vllm.metrics.registry import Histogram

if TYPE_CHECKING:
    from prometheus_client.registry import Metric

UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"})
DURATION_BUCKETS = (0.1, 0.5, 1.0)
FINE_DURATION_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class HttpMetrics:
    """The counts; a `prometheus_client` collector. Durations in seconds, sizes in bytes as the headers state them."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}  # by handler, status, method
        self._durations: dict[tuple[str, str], Histogram] = {}  # by handler, method
        self._fine_durations = Histogram(FINE_DURATION_BUCKETS)
        self._request_sizes: dict[str, list[int]] = {}  # by handler: count and sum
        self._response_sizes: dict[str, list[int]] = {}

    def on_request(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count one request that was answered, or whose client left before (status 499)."""
        method = method if method in METHODS else "OTHER"
        key = (handler, f"{status // 100}xx", method)
        self._requests[key] = self._requests.get(key, 0) + 1
        histogram = self._durations.get((handler, method))
        if histogram is None:
            histogram = self._durations[handler, method] = Histogram(DURATION_BUCKETS)
        histogram.observe(seconds)
        self._fine_durations.observe(seconds)
        for sizes, value in ((self._request_sizes, request_bytes), (self._response_sizes, response_bytes)):
            entry = sizes.setdefault(handler, [0, 0])
            entry[0] += 1
            entry[1] += value

    def collect(self) -> Iterator[Metric]:
        """All families, for `prometheus_client`'s registry."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, SummaryMetricFamily

        requests = CounterMetricFamily(
            "http_requests",
            "Total number of requests by method, status and handler.",
            labels=["handler", "status", "method"],
        )
        for key, count in self._requests.items():
            requests.add_metric(key, count)
        yield requests
        for name, text, sizes in (
            ("http_request_size_bytes", "Content length of incoming requests by handler.", self._request_sizes),
            ("http_response_size_bytes", "Content length of outgoing responses by handler.", self._response_sizes),
        ):
            summary = SummaryMetricFamily(name, text, labels=["handler"])
            for handler, (count, total) in sizes.items():
                summary.add_metric([handler], count, total)
            yield summary
        fine = HistogramMetricFamily("http_request_duration_highr_seconds", "Latency of all requests, in fine buckets.")
        fine.add_metric([], self._fine_durations.cumulative(), self._fine_durations.total)
        yield fine
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "Latency of requests by handler and method.", labels=["handler", "method"]
        )
        for labels, histogram in self._durations.items():
            durations.add_metric(labels, histogram.cumulative(), histogram.total)
        yield durations


class HttpMetricsMiddleware:
    """The outermost layer: what is refused further in is counted, too.

    application: the one within, of which this has all that it has itself not: `state`, `include_router`, `middleware`.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], metrics: HttpMetrics, application: Any = None) -> None:
        self._application = application
        self._app = app
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        if name == "_application":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._application, name)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status, response_bytes = 499, 0

        async def watched(message: Message) -> None:
            nonlocal status, response_bytes
            if message["type"] == "http.response.start":
                status, response_bytes = message["status"], content_length(message.get("headers", ()))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            if handler not in UNCOUNTED:
                seconds = time.perf_counter() - started
                size = content_length(scope["headers"])
                self._metrics.on_request(handler, scope["method"], status, seconds, size, response_bytes)


def content_length(headers: Any) -> int:
    """What a Content-Length header says; 0 without one, or if it is no number."""
    for name, value in headers:
        if name.lower() == b"content-length":
            return int(value) if value.isdigit() and len(value) < 19 else 0
    return 0
