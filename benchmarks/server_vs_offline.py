"""The server's throughput against the offline engine's, on the same work at the same concurrency, interleaved.

    python benchmarks/server_vs_offline.py --json benchmarks/results/server_vs_offline.json

Work: random prompts, a fixed number of greedy tokens each. A "client" is a request in progress that is replaced as soon
as it is done, offline by `LLMEngine.add_request`, online by a streamed completion of `vllm bench serve`'s client. Every
round measures each number of clients offline, on the server, and offline again, one right after the other: the server
is compared with the mean of the two, so that a machine that gets slower or faster meanwhile favours neither. A figure
is the median of the rounds.
The server, its core and the client share the cores of this machine, which the offline engine has for itself. Processor
time per output token of each process says where the time goes, also on a machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.benchmarks.datasets import Sample, random_samples
from vllm.benchmarks.http_stream import Target
from vllm.benchmarks.serve import Load, run, summarize
from vllm.sampling_params import RequestOutputKind
from vllm.utils.event_loop import run_event_loop

START_SECONDS = 120.0


@contextmanager
def server(model: str, threads: int) -> Iterator[tuple[str, int]]:
    """A server process on a free port; yields its address and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(port)]
    quiet = ["--disable-uvicorn-access-log", "--disable-log-requests", "--uvicorn-log-level", "warning"]
    process = subprocess.Popen([*command, *quiet], env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(process, url)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _await_health(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("The server did not start.")


def cpu_seconds(server_pid: int) -> dict[str, float]:
    """Processor time so far: of this process (client or offline engine), of the server's front end, of its core."""

    def used(process: psutil.Process) -> float:
        times = process.cpu_times()
        return times.user + times.system

    front = psutil.Process(server_pid)
    core = sum(used(child) for child in front.children(recursive=True))
    return {"this": used(psutil.Process()), "front_end": used(front), "core": core}


def offline(engine: LLMEngine, samples: list[Sample], clients: int) -> float:
    """Output tokens per second of the engine alone with `clients` requests in progress."""
    engine.reset_prefix_cache()
    waiting = list(enumerate(samples))[::-1]
    start = time.perf_counter()
    tokens = 0
    running = 0
    while waiting or running:
        while waiting and running < clients:
            number, sample = waiting.pop()
            params = SamplingParams(
                temperature=0.0,
                max_tokens=sample.output_tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"r{number}-{start}", {"prompt_token_ids": sample.prompt}, params)  # type: ignore[arg-type, typeddict-item]
            running += 1
        for output in engine.step():
            if output.finished:
                running -= 1
                tokens += len(output.outputs[0].token_ids)
    return tokens / (time.perf_counter() - start)


def online(url: str, samples: list[Sample], clients: int) -> dict[str, Any]:
    """The client's figures with `clients` streams in progress."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST"), timeout=30).close()
    load = Load(Target.from_url(url), "/v1/completions", "demo", {}, float("inf"), 1.0, clients, True, {}, 0)
    records, seconds = run_event_loop(run(load, samples))
    failed = [r.error for r in records if not r.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return summarize(records, seconds, (99.0,), {})


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of clients."""
    engine = LLMEngine.from_engine_args(EngineArgs(model=args.model, disable_log_stats=True))
    plain: dict[int, list[dict[str, Any]]] = {c: [] for c in args.clients}
    served: dict[int, list[dict[str, Any]]] = {c: [] for c in args.clients}
    with server(args.model, args.threads) as (url, pid):
        for number in range(args.rounds + 1):  # the first round warms up
            for clients in args.clients:
                count = max(args.min_requests, 4 * clients)
                samples = random_samples(
                    engine.tokenizer, count, args.input_len, args.output_len, 0.0, 0, 1000 * number + clients
                )
                tokens = sum(sample.output_tokens for sample in samples)
                marks = [cpu_seconds(pid)]
                alone = {"output_throughput": offline(engine, samples, clients)}
                marks.append(cpu_seconds(pid))
                streamed = online(url, samples, clients)
                marks.append(cpu_seconds(pid))
                again = offline(engine, samples, clients)
                alone["output_throughput"] = 2 / (1 / alone["output_throughput"] + 1 / again)  # mean of the times
                spent = [{k: 1e6 * (b[k] - a[k]) / tokens for k in a} for a, b in itertools.pairwise(marks)]
                alone["cpu_us_per_token"] = spent[0]["this"]
                streamed.update({f"{who}_cpu_us_per_token": us for who, us in spent[1].items()})
                if number:
                    plain[clients].append(alone)
                    served[clients].append(streamed)
    return [_row(clients, plain[clients], served[clients]) for clients in args.clients]


def _row(clients: int, plain: list[dict[str, Any]], served: list[dict[str, Any]]) -> dict[str, Any]:
    alone = [r["output_throughput"] for r in plain]
    rates = [r["output_throughput"] for r in served]
    row = {
        "clients": clients,
        "offline_tokens_per_s": statistics.median(alone),
        "server_tokens_per_s": statistics.median(rates),
        "ratio": statistics.median(s / p for s, p in zip(rates, alone, strict=True)),
        "offline_rounds": alone,
        "server_rounds": rates,
        "cpu_us_per_token": {
            "offline": statistics.median(r["cpu_us_per_token"] for r in plain),
            "core": statistics.median(r["core_cpu_us_per_token"] for r in served),
            "front_end": statistics.median(r["front_end_cpu_us_per_token"] for r in served),
            "client": statistics.median(r["this_cpu_us_per_token"] for r in served),
        },
    }
    for name in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms"):
        row[name] = statistics.median(r[name] for r in served)
    return row


def _conditions(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "?: ?")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": cpu.split(":", 1)[1].strip(),
        "cores": os.cpu_count(),
        "load_average_at_the_end": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {
            p: metadata.version(p) for p in ("torch", "uvicorn", "fastapi", "starlette", "msgspec", "pydantic")
        },
        "uvloop": _version("uvloop"),
        "httptools": _version("httptools"),
        "model": args.model,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "threads_of_the_engine": args.threads,
        "rounds": args.rounds,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of the engine on both sides.")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    rows = measure(args)
    print(
        f"{'clients':>8} {'offline tok/s':>14} {'server tok/s':>13} {'ratio':>6} {'TTFT ms':>8} {'TPOT ms':>8}  CPU us"
    )
    for r in rows:
        spent = " ".join(f"{who}={us:.0f}" for who, us in r["cpu_us_per_token"].items())
        rates = f"{r['offline_tokens_per_s']:>14.0f} {r['server_tokens_per_s']:>13.0f} {r['ratio']:>6.2f}"
        print(f"{r['clients']:>8} {rates} {r['median_ttft_ms']:>8.1f} {r['median_tpot_ms']:>8.2f}  {spent}")
    if args.json is not None:
        args.json.write_text(json.dumps({**_conditions(args), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
