"""Every metric of one engine, counted in plain attributes and turned into Prometheus families only when scraped.

Counting costs an addition (a bisection for histograms); old and new names of the same figure share one count. Labels
are fixed at start (model name, engine index), so nothing a client sends can add a series; only the names of adapters,
which the operator gives, are labels that change.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.step.messages import CoreStats

if TYPE_CHECKING:
    from prometheus_client.registry import Metric

FINISH_REASONS = ("stop", "length", "abort", "error")

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COUNT_BUCKETS = (1, 2, 5, 10, 20)


def one_two_five_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    bounds: list[int] = []
    decade = 1
    while True:
        for factor in (1, 2, 5):
            if factor * decade > largest:
                return tuple(bounds)
            bounds.append(factor * decade)
        decade *= 10


class Histogram:
    """Counts per bucket and a sum; `bounds` are upper bounds, +Inf is implied."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(b) for b in bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += times * value

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs (upper bound as text, observations at most that large), as Prometheus wants them."""
        running = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), running))
        return rows


class NotingHistogram(Histogram):
    """One that also keeps each observation, until it is taken."""

    __slots__ = ("noted",)

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self.noted: list[float] = []

    def observe(self, value: float, times: int = 1) -> None:
        super().observe(value, times)
        self.noted += [value] * times

    def take(self) -> list[float]:
        """The observations since the last time."""
        noted, self.noted = self.noted, []
        return noted


class _EngineCounts:
    """What one engine core has reported."""

    __slots__ = ("generation_tokens", "prompt_tokens", "stats")

    def __init__(self) -> None:
        self.stats = CoreStats()
        self.prompt_tokens = self.generation_tokens = 0


def _sum(stats: Sequence[CoreStats]) -> CoreStats:
    """All cores as if they were one."""
    names = (
        "num_running", "num_waiting", "kv_blocks_total", "kv_blocks_free", "prefix_cache_queries", "prefix_cache_hits",
        "num_preemptions",
    )  # fmt: skip
    return CoreStats(**{name: sum(getattr(s, name) for s in stats) for name in names})


def _usage(stats: CoreStats) -> float:
    return 1 - stats.kv_blocks_free / stats.kv_blocks_total if stats.kv_blocks_total else 0.0


def _hit_rate(stats: CoreStats) -> float:
    return stats.prefix_cache_hits / stats.prefix_cache_queries if stats.prefix_cache_queries else 0.0


class EngineMetrics:
    """The counts of one engine; a `prometheus_client` collector.

    The front end calls `on_step`, `on_first_token`, `on_token` and `on_finished`; times are in seconds.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        cache_info: dict[str, Any],
        engine: int = 0,
        *,
        max_loras: int = 0,
        adapter_names: Mapping[int, str] | None = None,
    ) -> None:
        """max_loras: 0 if adapters are not served.   adapter_names: by number, as they are when somebody scrapes."""
        self._model_name, self._first = model_name, engine
        self._max_loras, self._adapter_names = max_loras, {} if adapter_names is None else adapter_names
        self._engines: dict[int, _EngineCounts] = {0: _EngineCounts()}
        self._cache_info = {key: str(value) for key, value in cache_info.items()}
        self.stats = CoreStats()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        lengths = one_two_five_buckets(max_model_len)
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.time_per_output_token = Histogram(TPOT_BUCKETS)
        self.mean_time_per_output_token = Histogram(TPOT_BUCKETS)
        self.iteration_tokens = Histogram(ITERATION_BUCKETS)
        self.e2e_latency = Histogram(LATENCY_BUCKETS)
        self.queue_time = Histogram(LATENCY_BUCKETS)
        self.inference_time = Histogram(LATENCY_BUCKETS)
        self.prefill_time = Histogram(LATENCY_BUCKETS)
        self.decode_time = Histogram(LATENCY_BUCKETS)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.request_max_generation_tokens = Histogram(lengths)
        self.params_max_tokens = Histogram(lengths)
        self.params_n = Histogram(COUNT_BUCKETS)
        self.params_best_of = Histogram(COUNT_BUCKETS)
        self.prompt_throughput = 0.0
        self.generation_throughput = 0.0

    def on_step(self, stats: CoreStats) -> None:
        """Take in the core's snapshot after a step."""
        counts = self._engines.get(stats.engine)
        if counts is None:
            counts = self._engines[stats.engine] = _EngineCounts()
        counts.stats = stats
        self.stats = stats if len(self._engines) == 1 else _sum([c.stats for c in self._engines.values()])
        tokens = stats.prompt_tokens + stats.generation_tokens
        if tokens:
            self.prompt_tokens += stats.prompt_tokens
            self.generation_tokens += stats.generation_tokens
            counts.prompt_tokens += stats.prompt_tokens
            counts.generation_tokens += stats.generation_tokens
            self.iteration_tokens.observe(tokens / stats.steps, stats.steps)

    def on_finished(
        self,
        reason: str,
        *,
        prompt_tokens: int,
        generation_tokens: int,
        longest_generation: int,
        n: int,
        best_of: int,
        max_tokens: int | None,
        arrival: float,
        first_scheduled: float | None,
        first_token: float | None,
        finished: float,
    ) -> None:
        """Count one finished user request (all its sequences together). Times are absolute, None where it never got
        there.
        """
        self.finished[reason if reason in self.finished else "abort"] += 1
        self.request_prompt_tokens.observe(prompt_tokens)
        self.request_generation_tokens.observe(generation_tokens)
        self.request_max_generation_tokens.observe(longest_generation)
        self.params_n.observe(n)
        self.params_best_of.observe(best_of)
        if max_tokens is not None:
            self.params_max_tokens.observe(max_tokens)
        self.e2e_latency.observe(finished - arrival)
        if first_scheduled is not None:
            self.queue_time.observe(first_scheduled - arrival)
            self.inference_time.observe(finished - first_scheduled)
            if first_token is not None:
                self.prefill_time.observe(first_token - first_scheduled)
                self.decode_time.observe(finished - first_token)
                if longest_generation > 1:
                    self.mean_time_per_output_token.observe((finished - first_token) / (longest_generation - 1))

    @property
    def cache_usage(self) -> float:
        """Share of KV blocks that requests hold, 0 to 1."""
        return _usage(self.stats)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, 0 to 1."""
        return _hit_rate(self.stats)

    @property
    def tokens(self) -> int:
        """All that the core has reported, prompts and answers."""
        return self.prompt_tokens + self.generation_tokens

    def core_families(self) -> set[str]:
        """Names of what the core reports, which each of several front ends hears."""
        own = self._engines[0]
        found = {name for name, *_ in (*self._gauges(own.stats, True), *self._counters(own))}
        return found | {"vllm:iteration_tokens_total", "vllm:cache_config_info", "vllm:lora_requests_info"}

    # -- Prometheus ----------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """All families, for `prometheus_client`'s registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names = ["model_name", "engine"]
        values = [self._model_name, str(self._first)]
        tables = [
            ([self._model_name, str(self._first + index)], *self._of_engine(index, counts))
            for index, counts in sorted(self._engines.items())
        ]
        for kind, which in ((GaugeMetricFamily, 1), (CounterMetricFamily, 2)):
            families: dict[str, Metric] = {}
            for labels, *rows in tables:
                for name, text, value in rows[which - 1]:
                    family = families.setdefault(name, kind(name, text, labels=names))
                    family.add_metric(labels, value)  # type: ignore[attr-defined]
            yield from families.values()
        success = CounterMetricFamily(
            "vllm:request_success", "Count of successfully processed requests.", labels=[*names, "finished_reason"]
        )
        for reason, count in self.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        for name, text, histogram in self._histograms():
            family = HistogramMetricFamily(name, text, labels=names)
            family.add_metric(values, histogram.cumulative(), histogram.total)
            yield family
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=[*names, *self._cache_info]
        )
        for labels, *_ in tables:
            info.add_metric([*labels, *self._cache_info.values()], 1)
        yield info
        if self._max_loras:
            yield self._adapters(names)

    def _adapters(self, names: Sequence[str]) -> Metric:
        """Which adapters run and wait, in labels; the value is the time of the scrape, as clients expect it."""
        from prometheus_client.core import GaugeMetricFamily

        labels = [*names, "max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "Running stats on lora requests.", labels=labels)
        for index, counts in sorted(self._engines.items()):
            found = [
                ",".join(self._adapter_names.get(number, str(number)) for number in numbers)
                for numbers in (counts.stats.waiting_adapters, counts.stats.running_adapters)
            ]
            family.add_metric([self._model_name, str(self._first + index), str(self._max_loras), *found], time.time())
        return family

    def _of_engine(
        self, index: int, counts: _EngineCounts
    ) -> tuple[list[tuple[str, str, float]], list[tuple[str, str, float]]]:
        """Gauges and counters of one engine core; what only the front end knows is the first one's."""
        return list(self._gauges(counts.stats, index == 0)), list(self._counters(counts))

    def _gauges(self, stats: CoreStats, first: bool) -> Iterable[tuple[str, str, float]]:
        yield (
            "vllm:engine_alive",
            "1 while this copy of the engine serves; 0 while it gives no sign of life, or is started again.",
            stats.alive,
        )
        yield "vllm:num_requests_running", "Number of requests in model execution batches.", stats.num_running
        yield "vllm:num_requests_waiting", "Number of requests waiting to be processed.", stats.num_waiting
        yield "vllm:num_requests_swapped", "Number of requests swapped to CPU.", 0
        usage = _usage(stats)
        yield "vllm:gpu_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage
        yield "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage
        yield "vllm:cpu_cache_usage_perc", "Swap space usage. 1 means 100 percent usage.", 0
        yield "vllm:gpu_prefix_cache_hit_rate", "Prefix cache hit rate over prompt tokens.", _hit_rate(stats)
        yield "vllm:cpu_prefix_cache_hit_rate", "Swap space prefix cache hit rate.", 0
        if not first:
            return
        text = "Average {} throughput in tokens/s over the last logging interval."
        yield "vllm:avg_prompt_throughput_toks_per_s", text.format("prefill"), self.prompt_throughput
        yield "vllm:avg_generation_throughput_toks_per_s", text.format("generation"), self.generation_throughput
        yield "vllm:spec_decode_draft_acceptance_rate", "Speculative token acceptance rate.", 0
        yield "vllm:spec_decode_efficiency", "Speculative decoding system efficiency.", 0

    def _counters(self, counts: _EngineCounts) -> Iterable[tuple[str, str, float]]:
        stats = counts.stats
        yield "vllm:num_preemptions", "Cumulative number of preemptions.", stats.num_preemptions
        yield "vllm:prompt_tokens", "Number of prefill tokens processed.", counts.prompt_tokens
        yield "vllm:generation_tokens", "Number of generation tokens processed.", counts.generation_tokens
        for prefix in ("gpu_", ""):
            yield f"vllm:{prefix}prefix_cache_queries", "Prefix cache queries, in tokens.", stats.prefix_cache_queries
            yield f"vllm:{prefix}prefix_cache_hits", "Prefix cache hits, in tokens.", stats.prefix_cache_hits
        for what in ("accepted", "draft", "emitted"):
            yield f"vllm:spec_decode_num_{what}_tokens", f"Number of {what} tokens.", 0

    def _histograms(self) -> Iterable[tuple[str, str, Histogram]]:
        yield "vllm:time_to_first_token_seconds", "Time to first token in seconds.", self.time_to_first_token
        for name in ("time_per_output_token_seconds", "inter_token_latency_seconds"):
            yield f"vllm:{name}", "Time between output tokens in seconds.", self.time_per_output_token
        yield (
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token after the first, one observation per request, in seconds.",
            self.mean_time_per_output_token,
        )
        yield "vllm:iteration_tokens_total", "Tokens per engine step.", self.iteration_tokens
        yield "vllm:e2e_request_latency_seconds", "End to end request latency in seconds.", self.e2e_latency
        yield "vllm:request_queue_time_seconds", "Time spent in WAITING phase.", self.queue_time
        yield "vllm:request_inference_time_seconds", "Time spent in RUNNING phase.", self.inference_time
        yield "vllm:request_prefill_time_seconds", "Time from start to first token.", self.prefill_time
        yield "vllm:request_decode_time_seconds", "Time from first to last token.", self.decode_time
        yield "vllm:request_prompt_tokens", "Number of prefill tokens per request.", self.request_prompt_tokens
        yield "vllm:request_generation_tokens", "Generation tokens per request.", self.request_generation_tokens
        yield (
            "vllm:request_max_num_generation_tokens",
            "Longest sequence of a request, in generated tokens.",
            self.request_max_generation_tokens,
        )
        yield "vllm:request_params_n", "The n request parameter.", self.params_n
        yield "vllm:request_params_best_of", "The best_of request parameter.", self.params_best_of
        yield "vllm:request_params_max_tokens", "The max_tokens request parameter.", self.params_max_tokens


def of_this_process() -> list[Any]:
    """Collectors of the process (memory, processor time, open files) and of its interpreter."""
    from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR

    return [PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR]


def render(collectors: Iterable[Any]) -> bytes:
    """The text exposition format of these collectors, and of those of the process and its interpreter."""
    from prometheus_client import (
        CollectorRegistry,
        generate_latest,
    )

    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def snapshot(engine: EngineMetrics, others: Iterable[Any]) -> dict[str, Any]:
    """What one of several front ends has counted, as plain data: `core` is what the core has told it, of which `tokens`
    says how much that is; `own` is what happened in this process.
    """
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    for collector in (engine, *others):
        registry.register(collector)
    names = engine.core_families()
    found: dict[str, Any] = {"tokens": engine.tokens, "core": [], "own": []}
    for family in registry.collect():
        samples = [[sample.name, sample.labels, float(sample.value)] for sample in family.samples]
        part = found["core" if family.name in names else "own"]
        part.append([family.name, family.documentation, family.type, samples])
    return found


# Of several processes not added up: the least, or the first one's.
_LEAST = frozenset({"process_start_time_seconds"})
_FIRST = frozenset({"python_info", "process_max_fds"})
_OF_FIRST_LOG = "vllm:avg_"  # counted where the log line is written


def render_all(snapshots: Sequence[dict[str, Any]]) -> bytes:
    """The text exposition format of several front ends of one core, the first one's first: what the core reports from
    the one that has heard most of it, all else added up.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.metrics_core import Metric

    newest = max(snapshots, key=lambda found: found["tokens"])
    logged = [family for family in snapshots[0]["core"] if family[0].startswith(_OF_FIRST_LOG)]
    parts = [logged, [family for family in newest["core"] if not family[0].startswith(_OF_FIRST_LOG)]]
    sums: dict[str, tuple[str, str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
    for name, text, kind, samples in (family for part in parts for family in part):
        sums[name] = (text, kind, {(of, tuple(labels.items())): value for of, labels, value in samples})
    for found in snapshots:
        for name, text, kind, samples in found["own"]:
            total = sums.setdefault(name, (text, kind, {}))[2]
            for of, labels, value in samples:
                key = of, tuple(labels.items())
                before = total.get(key)
                if before is None or name in _FIRST:
                    total.setdefault(key, value)
                else:
                    total[key] = min(before, value) if name in _LEAST else before + value
    families = []
    for name, (text, kind, values) in sums.items():
        family = Metric(name, text, kind)
        for (of, labels), value in values.items():
            family.add_sample(of, dict(labels), value)
        families.append(family)

    class All:
        def collect(self) -> Iterator[Metric]:
            yield from families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(All())  # type: ignore[arg-type]
    return generate_latest(registry)
