"""Metrics: names, buckets and values as a Prometheus client reads them."""

from __future__ import annotations

import logging
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm.metrics.log_line import StatsLog
from vllm.metrics.registry import EngineMetrics, one_two_five_buckets, render
from vllm.step.messages import CoreStats

GUIDE = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "gpu_cache_usage_perc",
    "cpu_cache_usage_perc",
    "cpu_prefix_cache_hit_rate",
    "gpu_prefix_cache_hit_rate",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_bucket",
    "time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_best_of_bucket",
    "request_params_n_bucket",
    "request_success_total",
    "spec_decode_draft_acceptance_rate",
    "spec_decode_efficiency",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_emitted_tokens_total",
    "avg_prompt_throughput_toks_per_s",
    "avg_generation_throughput_toks_per_s",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total",
    "request_max_num_generation_tokens_bucket",
    "request_params_max_tokens_bucket",
    "iteration_tokens_total_bucket",
    "request_queue_time_seconds_bucket",
    "cache_config_info",
    "request_inference_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
]


def make() -> EngineMetrics:
    return EngineMetrics("m", 1000, {"block_size": 16})


def samples(metrics: EngineMetrics) -> dict[tuple[str, str], float]:
    out = {}
    for family in text_string_to_metric_families(render([metrics]).decode()):
        for s in family.samples:
            assert s.labels["model_name"] == "m" and s.labels["engine"] == "0"
            out[(s.name, s.labels.get("le", s.labels.get("finished_reason", "")))] = s.value
    return out


def finish(metrics: EngineMetrics, reason: str = "stop") -> None:
    metrics.on_finished(
        reason, prompt_tokens=7, generation_tokens=30, longest_generation=20, n=2, best_of=3, max_tokens=40,
        arrival=100.0, first_scheduled=100.5, first_token=101.0, finished=103.0,
    )  # fmt: skip


def test_every_name_of_the_guide_is_exported() -> None:
    names = {name for name, _ in samples(make())}
    assert [n for n in GUIDE if f"vllm:{n}" not in names] == []


def test_counts_and_histograms() -> None:
    metrics = make()
    metrics.on_step(CoreStats(2, 1, 100, 75, 50, 20, 3, prompt_tokens=30, generation_tokens=2))
    metrics.on_step(CoreStats(2, 0, 100, 50, 50, 20, 3, prompt_tokens=0, generation_tokens=2))
    metrics.on_step(CoreStats(2, 0, 100, 50, 50, 20, 3, generation_tokens=30, steps=3))
    finish(metrics)
    finish(metrics, "length")
    got = samples(metrics)
    assert got["vllm:prompt_tokens_total", ""] == 30 and got["vllm:generation_tokens_total", ""] == 34
    assert got["vllm:gpu_cache_usage_perc", ""] == got["vllm:kv_cache_usage_perc", ""] == 0.5
    assert got["vllm:gpu_prefix_cache_hit_rate", ""] == 0.4
    assert got["vllm:request_success_total", "stop"] == got["vllm:request_success_total", "length"] == 1
    assert got["vllm:e2e_request_latency_seconds_bucket", "2.5"] == 0
    assert got["vllm:e2e_request_latency_seconds_bucket", "5.0"] == 2
    assert got["vllm:e2e_request_latency_seconds_sum", ""] == 6
    assert got["vllm:request_generation_tokens_bucket", "50.0"] == 2
    assert got["vllm:request_params_best_of_bucket", "2.0"] == 0
    assert got["vllm:iteration_tokens_total_count", ""] == 5
    assert got["vllm:iteration_tokens_total_sum", ""] == 64
    assert got["vllm:iteration_tokens_total_bucket", "8.0"] == 1
    assert got["vllm:iteration_tokens_total_bucket", "16.0"] == 4


def test_series_count_does_not_depend_on_traffic() -> None:
    metrics = make()
    before = set(samples(metrics))
    for i in range(50):
        finish(metrics, f"whatever-{i}")
    assert set(samples(metrics)) == before


def test_buckets() -> None:
    assert one_two_five_buckets(100) == (1, 2, 5, 10, 20, 50, 100)


def test_log_line_when_due_and_only_when_active(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    metrics = make()
    log = StatsLog(metrics, "CPU", 10.0, clock=lambda: now[0])
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, logger="vllm"):
        now[0] = 11.0
        log.tick()
        assert not caplog.records
        metrics.on_step(CoreStats(1, 0, 100, 75, prompt_tokens=100, generation_tokens=10))
        now[0] = 21.0
        log.tick()
    assert "Avg prompt throughput: 10.0 tokens/s" in caplog.text and "CPU KV cache usage: 25.0%" in caplog.text


def test_preemptions_are_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    metrics = make()
    log = StatsLog(metrics, "CPU", 10.0, clock=lambda: now[0])
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm"):
        for moment, count in ((5.0, 3), (11.0, 3), (22.0, 3), (33.0, 8)):
            now[0] = moment
            metrics.on_step(CoreStats(1, 0, 100, 75, num_preemptions=count))
            log.tick()
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" in the last")[0] for text in told] == ["3 times", "5 times"]
    assert "total_cumulative_preemption_cnt=8" in told[1]


def test_adapters_that_run_and_wait_are_labels() -> None:
    names = {1: "sql", 2: "chat"}
    metrics = EngineMetrics("m", 1000, {}, max_loras=4, adapter_names=names)
    metrics.on_step(CoreStats(running_adapters=[1, 2], waiting_adapters=[2, 77]))
    families = {f.name: f for f in text_string_to_metric_families(render([metrics]).decode())}
    (sample,) = families["vllm:lora_requests_info"].samples
    assert sample.labels == {
        "model_name": "m",
        "engine": "0",
        "max_lora": "4",
        "running_lora_adapters": "sql,chat",
        "waiting_lora_adapters": "chat,77",
    }
    assert sample.value == pytest.approx(time.time(), abs=60)
    assert "lora" not in render([make()]).decode()
