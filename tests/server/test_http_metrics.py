"""/metrics of a running server against what was sent to it, name by name."""

from __future__ import annotations

import socket
import time

from prometheus_client.parser import text_string_to_metric_families

from tests.server.http_server import MAX_MODEL_LEN, MODEL, Server, sse_events

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
ENGINE = {"engine": "0", "model_name": MODEL}

# Upper bounds as the guide and later versions of the original have them; the guide's are a subset.
GUIDE_BUCKETS = {
    "time_to_first_token_seconds": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                                    7.5, 10.0),
    "time_per_output_token_seconds": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    "e2e_request_latency_seconds": (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    "request_prompt_tokens": (1, 2, 5, 10, 20, 50, 100, 200, 500),
    "request_generation_tokens": (1, 2, 5, 10, 20, 50, 100, 200, 500),
    "request_params_best_of": (1, 2, 5, 10, 20),
    "request_params_n": (1, 2, 5, 10, 20),
}  # fmt: skip
GUIDE_GAUGES = (
    "num_requests_running", "num_requests_waiting", "num_requests_swapped", "gpu_cache_usage_perc",
    "cpu_cache_usage_perc", "cpu_prefix_cache_hit_rate", "gpu_prefix_cache_hit_rate",
    "spec_decode_draft_acceptance_rate", "spec_decode_efficiency", "avg_prompt_throughput_toks_per_s",
    "avg_generation_throughput_toks_per_s",
)  # fmt: skip
GUIDE_COUNTERS = (
    "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
    "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_emitted_tokens_total",
)  # fmt: skip
ALIASES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries_total": "prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total": "prefix_cache_hits_total",
    "time_per_output_token_seconds_count": "inter_token_latency_seconds_count",
}


def scrape(server: Server) -> Samples:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def test_names_types_labels_and_buckets_are_the_guides(server: Server) -> None:
    server.canary()
    families = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}
    for name in GUIDE_GAUGES:
        family = families[f"vllm:{name}"]
        assert family.type == "gauge"
        assert [sample.labels for sample in family.samples] == [ENGINE]
    for name in GUIDE_COUNTERS:
        family = families[f"vllm:{name.removesuffix('_total')}"]
        assert family.type == "counter"
        labels = [{k: v for k, v in sample.labels.items() if k != "finished_reason"} for sample in family.samples]
        assert all(found == ENGINE for found in labels) and labels
    for name, bounds in GUIDE_BUCKETS.items():
        family = families[f"vllm:{name}"]
        assert family.type == "histogram"
        found = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
        assert set(bounds) <= set(found) and found == sorted(found) and found[-1] == float("inf")
    success = {sample.labels["finished_reason"] for sample in families["vllm:request_success"].samples}
    assert success >= {"stop", "length", "abort"}
    samples = scrape(server)
    for old, new in ALIASES.items():
        assert value(samples, f"vllm:{old}", **ENGINE) == value(samples, f"vllm:{new}", **ENGINE)
    lengths = [k for k, _ in samples.items() if k[0] == "vllm:request_prompt_tokens_bucket"]
    assert max(float(dict(labels)["le"]) for _, labels in lengths if dict(labels)["le"] != "+Inf") <= MAX_MODEL_LEN


def test_counts_are_those_of_the_answers(steady: Server) -> None:
    before = scrape(steady)
    prompt = generated = longest = choices = 0
    for i in range(6):
        n = 1 + i % 2
        body = {"prompt": "x" * (i + 1), "max_tokens": 4 + i, "ignore_eos": True, "n": n, "temperature": 1.0}
        usage = steady.post("/v1/completions", body).json["usage"]
        prompt += usage["prompt_tokens"]
        generated += usage["completion_tokens"]
        longest += 4 + i
        choices += n
    streamed = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7, "ignore_eos": True, "stream": True}
    usage = sse_events(
        steady.post("/v1/chat/completions", {**streamed, "stream_options": {"include_usage": True}}).text
    )[-1]["usage"]
    prompt += usage["prompt_tokens"]
    generated += usage["completion_tokens"]
    longest += 7
    choices += 1
    steady.post("/v1/completions", {"prompt": "x", "temperature": -1})
    after = scrape(steady)

    def change(name: str, **labels: str) -> float:
        labels = labels or ENGINE
        return value(after, name, **labels) - value(before, name, **labels)

    assert change("vllm:generation_tokens_total") == generated
    assert change("vllm:request_generation_tokens_sum") == generated
    assert change("vllm:request_prompt_tokens_sum") == prompt
    assert change("vllm:prompt_tokens_total") >= prompt - change("vllm:prefix_cache_hits_total")
    assert change("vllm:request_success_total", **ENGINE, finished_reason="length") == 7
    assert change("vllm:request_max_num_generation_tokens_sum") == longest
    assert change("vllm:request_params_max_tokens_sum") == longest
    assert change("vllm:request_params_n_sum") == change("vllm:request_params_best_of_sum") == choices
    for name in ("e2e_request_latency", "request_queue_time", "request_inference_time", "request_prefill_time",
                 "request_decode_time", "request_time_per_output_token"):  # fmt: skip
        assert change(f"vllm:{name}_seconds_count") == 7
    assert change("vllm:time_per_output_token_seconds_count") == generated - choices
    whole = change("vllm:e2e_request_latency_seconds_sum")
    parts = [change(f"vllm:request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode")]
    assert abs(whole - sum(parts)) < 1e-6 * 7 + 1e-9 * whole
    completions = {"handler": "/v1/completions", "method": "POST"}
    assert change("http_requests_total", **completions, status="2xx") == 6
    assert change("http_requests_total", **completions, status="4xx") == 1
    assert change("http_request_duration_seconds_count", **completions) == 7
    assert change("http_requests_total", handler="/v1/chat/completions", method="POST", status="2xx") == 1
    assert change("http_response_size_bytes_sum", handler="/v1/completions") > 6 * 100
    for gauge in ("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc"):
        assert value(after, f"vllm:{gauge}", **ENGINE) == 0


def test_a_client_that_leaves_is_counted_as_aborted(steady: Server) -> None:
    aborted = {**ENGINE, "finished_reason": "abort"}
    before = value(scrape(steady), "vllm:request_success_total", **aborted)
    body = b'{"prompt": "x", "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 8, "temperature": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", steady.port), timeout=30) as connection:
        connection.sendall(head % len(body) + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    for _ in range(200):
        after = scrape(steady)
        found = (
            value(after, "vllm:request_success_total", **aborted),
            value(after, "vllm:num_requests_running", **ENGINE),
        )
        if found == (before + 1, 0):
            break
        time.sleep(0.02)
    assert found == (before + 1, 0)


def test_no_client_can_add_series(steady: Server) -> None:
    for i in range(3):
        steady.request("PROPFIND", f"/made-up/{i}")
        steady.get(f"/v1/models/made-up-{i}")
        steady.post("/v1/completions", {"prompt": "x", "model": f"made-up-{i}"})
    names = {labels for name, labels in scrape(steady) if name == "http_requests_total"}
    assert {("handler", "none"), ("method", "OTHER"), ("status", "4xx")} <= {
        pair for labels in names for pair in labels
    }
    assert "made-up" not in steady.get("/metrics").text
    assert "PROPFIND" not in steady.get("/metrics").text
    assert not any(dict(labels)["handler"] in ("/metrics", "/health") for labels in names)


def test_metrics_tell_of_the_process_and_the_swap_space(server: Server) -> None:
    text = server.get("/metrics").text
    of_process = ("process_resident_memory_bytes", "process_cpu_seconds_total")
    for name in (*of_process, "python_info", "python_gc_collections_total"):
        assert f"\n{name}" in text, name
    assert 'swap_space_bytes="' in text
