"""A server under clients that each keep one stream open: tokens per second, times to first tokens, gaps, and processor
time of front end and core.

    python -m benchmarks.h200.served --model /tmp/models/qwen3-0.6b --levels 1:8,32:6,256:4 --out served.json

streams:requests of each. Clients are processes of their own (8 at most); prompts are random token ids, weights random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 240.0
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass(frozen=True)
class Load:
    """What every client asks of the server at `port`."""

    port: int
    model: str
    vocab: int
    tokens_in: int
    tokens_out: int


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A word-level tokenizer of the model's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 32768}))


async def _stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, load: Load, rng: random.Random
) -> dict[str, Any]:
    """One streamed completion over an open connection."""
    body = json.dumps(
        {
            "model": load.model,
            "prompt": [rng.randrange(100, load.vocab - 600) for _ in range(load.tokens_in)],
            "max_tokens": load.tokens_out,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    begin = last = time.perf_counter()
    writer.write(head % len(body) + body)
    first, gaps, events, end = 0.0, [], 0, b""
    while b"data: [DONE]" not in end or not end.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            raise RuntimeError(f"The server closed the connection: {end[-300:]!r}")
        now = time.perf_counter()
        found = data.count(b"data: {")
        if found:
            events += found
            if first:
                gaps.append(now - last)
            first, last = first or now - begin, now
        end = (end + data)[-4096:]
    usage = _USAGE.search(end)
    if usage is None:
        raise RuntimeError(f"No usage came: {end[-300:]!r}")
    return {"ttft": first, "gaps": gaps, "events": events, "tokens": int(usage[1]), "s": time.perf_counter() - begin}


def _client(load: Load, streams: int, each: int, seed: int, start: Any, queue: Any) -> None:
    async def one(rng: random.Random) -> list[dict[str, Any]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
        rows = [await _stream(reader, writer, load, rng) for _ in range(each)]
        writer.close()
        return rows

    async def work() -> list[dict[str, Any]]:
        ends = await asyncio.gather(*(one(random.Random(seed * 1000 + i)) for i in range(streams)))
        return [row for rows in ends for row in rows]

    start.wait()
    queue.put(asyncio.run(work()))


def cpu_seconds(pid: int) -> dict[str, float]:
    """Processor time so far of a server's front ends and of the processes below it."""

    def used(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    children = [child for own in Path(f"/proc/{pid}/task").glob("*/children") for child in own.read_text().split()]
    found = {"front_end": used(pid), "core": 0.0}
    for child in children:
        named = b"openai.front_end" in Path(f"/proc/{child}/cmdline").read_bytes()
        found["front_end" if named else "core"] += used(int(child))
    return found


def level(load: Load, pid: int, streams: int, each: int) -> dict[str, Any]:
    """The figures of so many streams, each with so many requests one after the other."""
    context = multiprocessing.get_context("fork")
    queue, start = context.Queue(), context.Event()
    count = min(8, streams)
    shares = [streams // count + (i < streams % count) for i in range(count)]
    clients = [
        context.Process(target=_client, args=(load, share, each, streams * 100 + i, start, queue))
        for i, share in enumerate(shares)
    ]
    for client in clients:
        client.start()
    time.sleep(0.5)
    used, begin = cpu_seconds(pid), time.perf_counter()
    start.set()
    rows = [row for _ in clients for row in queue.get(timeout=280)]
    seconds, now = time.perf_counter() - begin, cpu_seconds(pid)
    for client in clients:
        client.join()
    in_order = [round(row["ttft"] * 1e3, 1) for row in rows]
    first = sorted(in_order)
    gaps = sorted(gap * 1e3 for row in rows for gap in row["gaps"]) or [0.0]
    tokens = sum(row["tokens"] for row in rows)

    def at(values: list[float], share: float) -> float:
        return round(values[min(len(values) - 1, int(share * len(values)))], 2)

    return {
        "streams": streams,
        "requests": len(rows),
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens_per_event": round(tokens / sum(row["events"] for row in rows), 2),
        "ttft_ms": {"p50": at(first, 0.5), "p99": at(first, 0.99), "first": in_order[:8] if streams == 1 else []},
        "gap_ms": {"p50": at(gaps, 0.5), "p99": at(gaps, 0.99), "max": round(gaps[-1], 1)},
        "cpu_us_per_token": {who: round((now[who] - used[who]) / tokens * 1e6, 2) for who in now},
        "cpu_share": {who: round((now[who] - used[who]) / seconds, 2) for who in now},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--levels", default="1:8,32:6,256:4")
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--idle", type=float, default=0.0, help="seconds between /health and the first request")
    parser.add_argument("--serve-args", default="")
    args = parser.parse_args()
    folder = Path(args.model)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    write_tokenizer(folder, vocab)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", args.model, "--load-format", "dummy"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "4096", "--disable-uvicorn-access-log"]
    begin = time.perf_counter()
    server = subprocess.Popen([*command, *args.serve_args.split()], start_new_session=True)
    result: dict[str, Any] = {"model": folder.name, "serve_args": args.serve_args, "levels": []}
    load = Load(port, args.model, vocab, args.input, args.output)
    try:
        while True:
            if server.poll() is not None or time.perf_counter() - begin > START_SECONDS:
                raise SystemExit("The server did not start.")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.02)
        result["start_s"] = round(time.perf_counter() - begin, 2)
        time.sleep(args.idle)
        for item in ["1:4", *args.levels.split(",")]:
            streams, each = map(int, item.split(":"))
            row = level(load, server.pid, streams, each)
            result["levels"].append(row)
            print("[served]", folder.name, json.dumps(row), flush=True)
            Path(args.out).write_text(json.dumps(result, indent=1))
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
