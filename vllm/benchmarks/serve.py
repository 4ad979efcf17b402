"""`vllm bench serve`: requests at a given rate to any OpenAI-compatible server; latencies and throughput out."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import random
import re
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.benchmarks.datasets import Sample, jsonl_samples, random_samples, sharegpt_samples
from vllm.benchmarks.http_stream import Client, HTTPFailure, Target
from vllm.utils.event_loop import run_event_loop

if TYPE_CHECKING:
    from vllm.engine.tokenizer import Tokenizer

PROFILE_SECONDS = 300.0  # writing a trace may take long
METRICS = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(slots=True)
class Record:
    """What one request experienced. Times in seconds."""

    sample: Sample
    ok: bool = False
    error: str = ""
    start: float = 0.0
    first_token: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    output_tokens: int = 0
    text: str = ""

    @property
    def ttft(self) -> float:
        return self.first_token - self.start

    @property
    def e2el(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        return (self.end - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent."""

    target: Target
    endpoint: str
    model: str
    headers: dict[str, str]
    rate: float  # requests per second; inf: all at once
    burstiness: float
    concurrency: int | None
    ignore_eos: bool
    extra: dict[str, Any]
    seed: int

    @property
    def chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")


def body_of(load: Load, sample: Sample) -> bytes:
    """The JSON body of one request."""
    body: dict[str, Any] = {
        "model": load.model,
        "max_tokens": sample.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": load.ignore_eos,
        **load.extra,
    }
    if load.chat:
        if not isinstance(sample.prompt, str):
            raise ValueError("Chat needs texts; this dataset has token ids. Use --endpoint /v1/completions.")
        body["messages"] = [{"role": "user", "content": sample.prompt}]
    else:
        body["prompt"] = sample.prompt
    return json.dumps(body).encode()


async def send(client: Client, load: Load, sample: Sample) -> Record:
    """Send one request and follow its stream to the end."""
    record = Record(sample)
    body = body_of(load, sample)
    record.start = last = time.perf_counter()
    pieces: list[str] = []
    done = False
    try:
        async for payload in client.post_events(load.endpoint, body, load.headers):
            if done or payload == b"[DONE]":
                done = True
                continue
            event = msgspec.json.decode(payload)
            if "error" in event:
                error = event["error"]
                raise HTTPFailure(str(error.get("message", error) if isinstance(error, dict) else error))
            usage = event.get("usage")
            if usage and not event["choices"]:
                record.output_tokens = usage["completion_tokens"]
            for choice in event["choices"]:
                text = choice["delta"].get("content") if load.chat else choice["text"]
                if not text and choice.get("finish_reason") is None:
                    continue
                now = time.perf_counter()
                if not record.first_token:
                    record.first_token = now
                else:
                    record.gaps.append(now - last)
                last = now
                pieces.append(text or "")
        record.end = last
        if not record.first_token:
            record.error = "the stream held no token"
        elif not done:
            record.error = "the stream ended before [DONE]"
        record.ok = not record.error
    except HTTPFailure as failure:
        record.error = str(failure)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        record.error = f"an event that is not in OpenAI's format: {problem!r}"
    record.text = "".join(pieces)
    return record


async def run(load: Load, samples: Sequence[Sample]) -> tuple[list[Record], float]:
    """Send all samples as `load` says; returns the records and the duration."""
    rng = random.Random(load.seed)
    gate = asyncio.Semaphore(load.concurrency) if load.concurrency else None
    client = Client(load.target)

    async def one(sample: Sample) -> Record:
        if gate is None:
            return await send(client, load, sample)
        async with gate:
            return await send(client, load, sample)

    started = time.perf_counter()
    due = started
    tasks = []
    for sample in samples:
        tasks.append(asyncio.ensure_future(one(sample)))
        if not math.isinf(load.rate):
            # Gamma-distributed gaps of mean 1 / rate; burstiness 1 is a Poisson process.
            due += rng.gammavariate(load.burstiness, 1.0 / (load.rate * load.burstiness))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    records = list(await asyncio.gather(*tasks))
    seconds = time.perf_counter() - started
    client.close()
    return records, seconds


def count_missing(records: Sequence[Record], tokenizer: Tokenizer) -> None:
    """Count the tokens of answers whose server reported no usage."""
    for record in records:
        if record.ok and not record.output_tokens:
            record.output_tokens = len(tokenizer.encode(record.text, False))


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(
    records: Sequence[Record], seconds: float, percentiles: Sequence[float], goodput: dict[str, float]
) -> dict[str, Any]:
    """The figures of a run; latencies in milliseconds."""
    good = [r for r in records if r.ok]
    outputs = sum(r.output_tokens for r in good)
    inputs = sum(r.sample.prompt_tokens for r in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    values: dict[str, list[float]] = {
        "ttft": [r.ttft for r in good],
        "tpot": [t for r in good if (t := r.tpot) is not None],
        "itl": [gap for r in good for gap in r.gaps],
        "e2el": [r.e2el for r in good],
    }
    for name, seconds_list in values.items():
        ms = [1000 * v for v in seconds_list] or [0.0]
        result[f"mean_{name}_ms"] = statistics.fmean(ms)
        result[f"median_{name}_ms"] = statistics.median(ms)
        result[f"std_{name}_ms"] = statistics.pstdev(ms)
        for q in percentiles:
            result[f"p{q:g}_{name}_ms"] = percentile(ms, q)
    if goodput:
        kept = sum(1 for r in good if all(_value(r, name) * 1000 <= limit for name, limit in goodput.items()))
        result["request_goodput"] = kept / result["duration"]
    return result


def _value(record: Record, name: str) -> float:
    if name == "tpot":
        return record.tpot or 0.0
    return record.ttft if name == "ttft" else record.e2el


def report(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures as a table to read."""
    rows: list[tuple[str, str]] = [
        ("Successful requests:", f"{result['completed']}"),
        ("Failed requests:", f"{result['failed']}"),
        ("Benchmark duration (s):", f"{result['duration']:.2f}"),
        ("Total input tokens:", f"{result['total_input_tokens']}"),
        ("Total generated tokens:", f"{result['total_output_tokens']}"),
        ("Request throughput (req/s):", f"{result['request_throughput']:.2f}"),
        ("Output token throughput (tok/s):", f"{result['output_throughput']:.2f}"),
        ("Total token throughput (tok/s):", f"{result['total_token_throughput']:.2f}"),
    ]
    if "request_goodput" in result:
        rows.append(("Request goodput (req/s):", f"{result['request_goodput']:.2f}"))
    lines = [f"{' Serving Benchmark Result ':=^50}", *(f"{name:<40}{value:>10}" for name, value in rows)]
    for metric in metrics:
        lines.append(f"{TITLES[metric]:-^50}")
        for kind in ("mean", "median", *(f"p{q:g}" for q in percentiles)):
            label = f"{kind[0].upper()}{kind[1:]} {metric.upper()} (ms):"
            lines.append(f"{label:<40}{result[f'{kind}_{metric}_ms']:>10.2f}")
    return "\n".join([*lines, "=" * 50])


# -- command line ------------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Flags, named as vLLM's benchmark_serving.py names them."""
    parser = argparse.ArgumentParser(prog="vllm bench serve", description="Measure a running OpenAI-compatible server.")
    add = parser.add_argument
    add(
        "--backend",
        choices=("vllm", "openai", "openai-chat"),
        default="vllm",
        help="openai-chat uses chat completions.",
    )
    add("--base-url", default=None, help="Address of the server; default http://HOST:PORT.")
    add("--host", default="127.0.0.1", help="Host of the server (default: %(default)s).")
    add("--port", type=int, default=8000, help="Port of the server (default: %(default)s).")
    add("--endpoint", default=None, help="Default /v1/completions, or /v1/chat/completions for openai-chat.")
    add("--model", default=None, help="Model to ask; default: the server's first.")
    add("--tokenizer", default=None, help="Tokenizer to count and make prompts with; default: the model's.")
    add(
        "--dataset-name",
        choices=("random", "sharegpt", "custom"),
        default="random",
        help="Where requests come from: random tokens, conversations in ShareGPT's format, or lines of JSON such as "
        '{"prompt": "...", "output_tokens": 64} (default: %(default)s).',
    )
    add("--dataset-path", type=Path, default=None, help="File of the sharegpt or custom (JSONL) dataset.")
    add("--num-prompts", type=int, default=1000, help="Requests to send, per rate (default: %(default)s).")
    add("--num-warmups", type=int, default=1, help="Requests sent before the clock starts (default: %(default)s).")
    add(
        "--request-rate",
        type=float,
        nargs="+",
        default=[math.inf],
        help="Requests per second; several make a sweep (default: inf, all at once).",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="Gaps between requests: 1 is Poisson, below is burstier, above more even (default: %(default)s).",
    )
    add("--max-concurrency", type=int, default=None, help="Most requests in progress at a time (default: no limit).")
    add("--random-input-len", type=int, default=1024, help="Tokens of a random prompt (default: %(default)s).")
    add("--random-output-len", type=int, default=128, help="Tokens asked for each (default: %(default)s).")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="By which part, from 0 to below 1, random lengths vary around those two (default: %(default)s).",
    )
    add(
        "--random-prefix-len",
        type=int,
        default=0,
        help="Further tokens that all random prompts begin with (default: %(default)s).",
    )
    add(
        "--sharegpt-output-len",
        type=int,
        default=None,
        help="Tokens asked for each conversation (default: as many as its answer has).",
    )
    add(
        "--custom-output-len",
        type=int,
        default=256,
        help="Tokens asked for each line that does not say (default: %(default)s).",
    )
    add("--ignore-eos", action="store_true", help="Let every answer have all tokens that were asked for.")
    add("--extra-body", type=json.loads, default={}, help="JSON object merged into every request.")
    add("--seed", type=int, default=0, help="Seed of random prompts and arrivals (default: %(default)s).")
    add("--percentile-metrics", default="ttft,tpot,itl,e2el", help="What is reported (default: %(default)s).")
    add("--metric-percentiles", default="50,90,99", help="Percentiles that are reported (default: %(default)s).")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="Limits that a good request keeps, such as ttft:200.",
    )
    add(
        "--profile",
        action="store_true",
        help="Have the server profile the measured requests, into its VLLM_TORCH_PROFILER_DIR.",
    )
    add("--save-result", action="store_true", help="Write the figures as JSON.")
    add("--result-dir", type=Path, default=Path("."), help="Folder of that file (default: the current one).")
    add("--result-filename", default=None, help="Name of that file (default: back end and time).")
    add("--plot", type=Path, default=None, help="PNG of all latencies against the rate (needs matplotlib).")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the benchmark once per request rate; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(list(argv))
    plan = _check(parser, args)
    try:
        return _measure(args, plan)
    except (OSError, ValueError) as error:
        parser.exit(1, f"vllm bench serve: {error}\n")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the flags say about measuring, checked."""

    metrics: list[str]
    percentiles: list[float]
    goodput: dict[str, float]


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Plan:
    try:
        percentiles = [float(q) for q in args.metric_percentiles.split(",")]
    except ValueError:
        parser.error(f"--metric-percentiles takes numbers such as 50,90,99, got {args.metric_percentiles!r}")
    if not all(0 <= q <= 100 for q in percentiles):
        parser.error(f"--metric-percentiles must be from 0 to 100, got {args.metric_percentiles!r}")
    metrics = [m.strip() for m in args.percentile_metrics.split(",")]
    if unknown := [m for m in metrics if m not in METRICS]:
        parser.error(f"unknown metrics {unknown}; known are {', '.join(METRICS)}")
    if not args.burstiness > 0 or not all(rate > 0 for rate in args.request_rate):
        parser.error("--burstiness and --request-rate must be positive")
    if args.num_prompts < 1 or (args.max_concurrency is not None and args.max_concurrency < 1):
        parser.error("--num-prompts and --max-concurrency must be 1 or more")
    if not isinstance(args.extra_body, dict):
        parser.error("--extra-body takes a JSON object")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    _check_places(parser, args)
    return Plan(metrics, percentiles, _goodput(parser, args.goodput))


def _check_places(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Make the folder of the figures, so that a long measurement cannot end without a place for them."""
    if args.plot is not None and not args.plot.parent.is_dir():
        parser.error(f"--plot: there is no folder {args.plot.parent}")
    if args.save_result:
        try:
            args.result_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--result-dir {args.result_dir} cannot be made: {error.strerror}")


def _measure(args: argparse.Namespace, plan: Plan) -> int:
    from vllm.config.model_source import resolve
    from vllm.engine.tokenizer_files import load_tokenizer

    base = args.base_url or f"http://{args.host}:{args.port}"
    target = Target.from_url(base)
    headers = {"authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    card = _first_model(base, headers)
    model = args.model or card["id"]
    endpoint = args.endpoint or ("/v1/chat/completions" if args.backend == "openai-chat" else "/v1/completions")
    tokenizer = load_tokenizer(resolve(args.tokenizer or args.model or card.get("root") or card["id"]))
    samples = _samples(args, tokenizer, as_text=endpoint.endswith("/chat/completions"))
    results = []
    for rate in args.request_rate:
        load = Load(
            target, endpoint, model, headers, rate, args.burstiness, args.max_concurrency, args.ignore_eos,
            args.extra_body, args.seed,
        )  # fmt: skip
        warmups, _ = run_event_loop(run(load, samples[: args.num_warmups]))
        if warmups and not warmups[0].ok:
            raise ValueError(f"the first request failed: {warmups[0].error}")
        if args.profile:
            _profile(base, headers, "start")
        try:
            records, seconds = run_event_loop(run(load, samples))
        finally:
            if args.profile:
                _profile(base, headers, "stop")
        count_missing(records, tokenizer)
        result = summarize(records, seconds, plan.percentiles, plan.goodput)
        print(report(result, plan.metrics, plan.percentiles))
        for text in sorted({r.error for r in records if r.error})[:5]:
            print(f"failed: {text}")
        result.update(_conditions(args, model, rate))
        results.append(result)
    if args.save_result:
        _save(args, results)
    if args.plot is not None:
        _plot(args.plot, results)
    return 0 if all(r["completed"] for r in results) else 1


def _profile(base: str, headers: dict[str, str], what: str) -> None:
    """Start or stop the server's profiler. Raises ValueError with what the server says if it cannot."""
    request = urllib.request.Request(f"{base}/{what}_profile", data=b"", headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=PROFILE_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise ValueError(f"--profile: the server cannot {what} its profiler ({error.code}): {said:.500}") from None


def _goodput(parser: argparse.ArgumentParser, items: Sequence[str]) -> dict[str, float]:
    limits = {}
    for item in items:
        name, _, value = item.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not value:
            parser.error(f"--goodput takes ttft:MS, tpot:MS or e2el:MS, got {item!r}")
        try:
            limits[name] = float(value)
        except ValueError:
            parser.error(f"--goodput takes milliseconds after the colon, got {item!r}")
    return limits


def _first_model(base: str, headers: dict[str, str]) -> dict[str, Any]:
    request = urllib.request.Request(f"{base.rstrip('/')}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            card: dict[str, Any] = json.load(response)["data"][0]
    except urllib.error.HTTPError as error:
        hint = " Set OPENAI_API_KEY to the server's key." if error.code == 401 else ""
        raise ValueError(f"{base}/v1/models answered {error.code} {error.reason}.{hint}") from error
    except OSError as error:
        raise ValueError(f"no server answers at {base}: {error}. Start one with `vllm serve`.") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{base}/v1/models does not list models in OpenAI's format.") from error
    return card


def _samples(args: argparse.Namespace, tokenizer: Tokenizer, as_text: bool) -> list[Sample]:
    if args.dataset_name == "random":
        return random_samples(
            tokenizer, args.num_prompts, args.random_input_len, args.random_output_len, args.random_range_ratio,
            args.random_prefix_len, args.seed, as_text,
        )  # fmt: skip
    if args.dataset_path is None:
        raise ValueError(f"--dataset-name {args.dataset_name} needs --dataset-path.")
    if args.dataset_name == "sharegpt":
        return sharegpt_samples(tokenizer, args.dataset_path, args.num_prompts, args.sharegpt_output_len, args.seed)
    return jsonl_samples(tokenizer, args.dataset_path, args.num_prompts, args.custom_output_len)


def _conditions(args: argparse.Namespace, model: str, rate: float) -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "backend": args.backend,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "dataset": args.dataset_name,
    }


def _save(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    name = args.result_filename or f"{args.backend}-{datetime.now().strftime('%Y%m%d-%H%M%S')}.json"
    path = args.result_dir / name
    path.write_text(json.dumps(results[0] if len(results) == 1 else results, indent=1))
    print(f"Results are in {path}")


def _percentile_of(key: str) -> float:
    return float(key[1:].partition("_")[0])


def _plot(path: Path, results: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = [r["request_throughput"] if r["request_rate"] == "inf" else r["request_rate"] for r in results]
    highest = max(
        (key for key in results[0] if re.fullmatch(r"p[\d.]+_ttft_ms", key)), key=_percentile_of, default=None
    )
    kinds = ["mean", "median"] + ([] if highest is None else [highest.partition("_")[0]])
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 8))
    for axis, metric in zip(axes.flat, METRICS, strict=True):
        for kind in kinds:
            axis.plot(rates, [r[f"{kind}_{metric}_ms"] for r in results], marker="o", label=kind)
        axis.set_title(TITLES[metric])
        axis.set_xlabel("requests per second")
        axis.set_ylabel(f"{metric.upper()} (ms)")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"Plot is in {path}")
