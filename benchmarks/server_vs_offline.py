"""The server's throughput against the offline engine's, on the same work at the same concurrency, interleaved.

    python -m benchmarks.server_vs_offline --json benchmarks/results/server_vs_offline.json

Work: random prompts, a fixed number of greedy tokens each. A "client" is a request in progress that is replaced as soon
as it is done, offline by `LLMEngine.add_request`, online by a streamed completion of `vllm bench serve`'s client. Every
round measures each number of clients in pieces of a few requests per client: offline, server, offline, server, ...,
offline. A piece on the server is compared with the mean of the offline ones just before and after it, so that a machine
that gets slower or faster meanwhile favours neither: on a virtual machine one and the same loop takes 30 % more time
for some seconds. The ratio is of the sums of all pieces; its spread over the pieces is given as quartiles.
The server, its core and the client share the cores of this machine, which the offline engine has for itself. Processor
time per output token of each process says where the time goes, also on a machine that others use at the same time.
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass
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
LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms")


@contextmanager
def server(model: str, threads: int) -> Iterator[tuple[str, int]]:
    """A server process on a free port; yields its address and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(port)]
    quiet = ["--disable-uvicorn-access-log", "--disable-log-requests", "--uvicorn-log-level", "warning"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_SERVER_DEV_MODE": "1"}  # /reset_prefix_cache
    process = subprocess.Popen([*command, *quiet], env=environment)
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


@dataclass(frozen=True)
class Piece:
    """The same requests offline (mean of before and after) and on the server."""

    tokens: int
    offline_seconds: float
    offline_cpu: float  # seconds of processor time of the offline engine
    server_seconds: float
    server_cpu: dict[str, float]  # seconds of processor time by process
    latencies: dict[str, float]  # milliseconds

    @property
    def ratio(self) -> float:
        return self.offline_seconds / self.server_seconds


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of clients."""
    engine = LLMEngine.from_engine_args(EngineArgs(model=args.model, disable_log_stats=True))
    rounds: dict[int, list[list[Piece]]] = {clients: [] for clients in args.clients}
    with server(args.model, args.threads) as (url, pid):
        for number in range(args.rounds + 1):  # the first round warms up
            for clients in args.clients:
                requests = args.requests_per_client * clients
                pieces = max(1, args.min_requests // requests) if number else 1
                samples = [
                    random_samples(
                        engine.own_tokenizer,
                        requests,
                        args.input_len,
                        args.output_len,
                        0.0,
                        0,
                        100_000 * number + 1000 * piece + clients,
                    )
                    for piece in range(pieces)
                ]
                measured = list(_alternate(engine, url, pid, samples, clients))
                if number:
                    rounds[clients].append(measured)
    return [_row(clients, rounds[clients]) for clients in args.clients]


def _alternate(engine: LLMEngine, url: str, pid: int, pieces: list[list[Sample]], clients: int) -> Iterator[Piece]:
    """Each piece on the server, between two offline."""

    def alone(samples: list[Sample]) -> tuple[float, float]:
        """Seconds per token, and of processor time per token."""
        begin = cpu_seconds(pid)["this"]
        rate = offline(engine, samples, clients)
        tokens = sum(sample.output_tokens for sample in samples)
        return 1 / rate, (cpu_seconds(pid)["this"] - begin) / tokens

    before = alone(pieces[0])
    for samples in pieces:
        tokens = sum(sample.output_tokens for sample in samples)
        begin = cpu_seconds(pid)
        figures = online(url, samples, clients)
        end = cpu_seconds(pid)
        after = alone(samples)
        yield Piece(
            tokens=tokens,
            offline_seconds=tokens * (before[0] + after[0]) / 2,
            offline_cpu=tokens * (before[1] + after[1]) / 2,
            server_seconds=tokens / figures["output_throughput"],
            server_cpu={who: end[who] - begin[who] for who in end},
            latencies={name: figures[name] for name in LATENCIES},
        )
        before = after


def _row(clients: int, rounds: list[list[Piece]]) -> dict[str, Any]:
    pieces = [piece for measured in rounds for piece in measured]
    tokens = sum(piece.tokens for piece in pieces)
    alone = sum(piece.offline_seconds for piece in pieces)
    served = sum(piece.server_seconds for piece in pieces)
    ratios = sorted(piece.ratio for piece in pieces)
    row = {
        "clients": clients,
        "offline_tokens_per_s": tokens / alone,
        "server_tokens_per_s": tokens / served,
        "ratio": alone / served,
        "pieces": len(pieces),
        "ratio_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
        "ratio_of_each_round": [
            sum(piece.offline_seconds for piece in measured) / sum(piece.server_seconds for piece in measured)
            for measured in rounds
        ],
        "cpu_us_per_token": {
            "offline": 1e6 * sum(piece.offline_cpu for piece in pieces) / tokens,
            "core": 1e6 * sum(piece.server_cpu["core"] for piece in pieces) / tokens,
            "front_end": 1e6 * sum(piece.server_cpu["front_end"] for piece in pieces) / tokens,
            "client": 1e6 * sum(piece.server_cpu["this"] for piece in pieces) / tokens,
        },
    }
    for name in LATENCIES:
        row[name] = statistics.median(piece.latencies[name] for piece in pieces)
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
    parser.add_argument(
        "--min-requests", type=int, default=32, help="Requests of a round: at least this, and those of a piece."
    )
    parser.add_argument("--requests-per-client", type=int, default=4, help="In a piece.")
    parser.add_argument("--rounds", type=int, default=5)
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
