"""Cost of the front end: microseconds of its process per streamed token, with a core that costs nothing.

python -m benchmarks.frontend --json benchmarks/results/frontend.json

`engine` is `AsyncLLMEngine` alone: socket, decoding, detokenizing, waking the consumer. `http` is the whole server, as
read by a client in another process: the same, and the JSON of every event, and writing it to its connection. Processor
time of the front end's process is counted, not the client's and not the core's.

With `step_ms` 20 every token comes by itself, as from a model that needs 20 ms per step. With 0 the core never waits:
consumers fall behind, and tokens that are there together travel together (`tokens_per_output`); this is the most that
the front end can pass on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.engine.core_client import CoreProcess
from vllm.sampling_params import RequestOutputKind
from vllm.utils.event_loop import run_event_loop

TOKENS = 100
REPEATS = 3


def make_engine(step_ms: float) -> AsyncLLMEngine:
    args = AsyncEngineArgs(model="demo", disable_log_requests=True, max_num_seqs=1024, max_model_len=512)
    config = args.create_engine_config()
    core = CoreProcess({"step_seconds": step_ms / 1000}, 60.0, "benchmarks.free_core")
    return AsyncLLMEngine(config, log_requests=False, log_stats=False, core=core)


async def run_engine(engine: AsyncLLMEngine, streams: int, tag: str) -> dict[str, float]:
    """Stream `streams` requests at once through the engine alone."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    params.output_kind = RequestOutputKind.DELTA

    async def one(i: int) -> tuple[int, int]:
        tokens = outputs = 0
        async for output in engine.generate({"prompt_token_ids": [7, 8, 9]}, params, f"{tag}-{i}"):
            tokens += len(output.outputs[0].token_ids)
            outputs += 1
        return tokens, outputs

    wall, used = time.perf_counter(), time.process_time()
    ends = await asyncio.gather(*(one(i) for i in range(streams)))
    used, wall = time.process_time() - used, time.perf_counter() - wall
    tokens = sum(t for t, _ in ends)
    assert tokens == streams * TOKENS, "tokens were lost"
    return figures(streams, tokens, sum(o for _, o in ends), used, wall)


def figures(streams: int, tokens: int, outputs: int, used: float, wall: float) -> dict[str, float]:
    return {
        "streams": streams,
        "us_per_token": round(used / tokens * 1e6, 2),
        "us_per_output": round(used / outputs * 1e6, 2),
        "tokens_per_output": round(tokens / outputs, 2),
        "tokens_per_second": round(tokens / wall),
    }


async def measure_engine(counts: list[int], step_ms: float) -> list[dict[str, Any]]:
    engine = make_engine(step_ms)
    rows: list[dict[str, Any]] = []
    for streams in counts:
        runs = [await run_engine(engine, streams, f"{streams}-{r}") for r in range(REPEATS + 1)][1:]
        rows.append({"what": "engine", "step_ms": step_ms, **min(runs, key=lambda run: run["us_per_token"])})
        print(rows[-1], flush=True)
    await engine.shutdown(5)
    return rows


async def measure_http(counts: list[int], step_ms: float) -> list[dict[str, Any]]:
    """The server in this process, its client in another one."""
    import uvicorn

    from vllm.entrypoints.openai.api_server import bind, build_app, uvicorn_config
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", "demo", "--host", "127.0.0.1", "--port", "0", "--max-model-len", "512", "--disable-log-requests",
         "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]
    )  # fmt: skip
    engine = make_engine(step_ms)
    await engine.check_health()
    listener = bind(args)
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn_config(build_app(args, engine), args))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    rows: list[dict[str, Any]] = []
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.frontend", "--client", str(port),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdin is not None and client.stdout is not None
    for streams in counts:
        runs = []
        for _ in range(REPEATS + 1):
            await asyncio.sleep(0.2)
            used = time.process_time()
            client.stdin.write(b"%d\n" % streams)
            events = json.loads(await client.stdout.readline())
            used = time.process_time() - used
            runs.append(figures(streams, streams * TOKENS, events["events"], used, events["seconds"]))
        rows.append({"what": "http", "step_ms": step_ms, **min(runs[1:], key=lambda run: run["us_per_token"])})
        print(rows[-1], flush=True)
    client.stdin.close()
    await client.wait()
    server.should_exit = True
    await serving
    await engine.shutdown(5)
    return rows


async def read_streams(port: int, streams: int) -> dict[str, float]:
    """Read `streams` streams at once with as little work as can be; how many events came, in how many seconds."""
    body = json.dumps(
        {"model": "demo", "prompt": [7, 8, 9], "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        received = bytearray()
        while data := await reader.read(1 << 16):
            received += data
        writer.close()
        assert b"[DONE]" in received, received[:500]
        return received.count(b"data: {")

    start = time.perf_counter()
    events = await asyncio.gather(*(one() for _ in range(streams)))
    return {"events": sum(events), "seconds": time.perf_counter() - start}


def client(port: int) -> None:
    """Each line of standard input is a number of streams to read; the answer is a line of JSON."""
    for line in sys.stdin:
        print(json.dumps(run_event_loop(read_streams(port, int(line)))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        client(args.client)
        return
    rows: list[dict[str, Any]] = []
    for step_ms in (20.0, 0.0):
        rows += run_event_loop(measure_engine(args.streams, step_ms))
        rows += run_event_loop(measure_http(args.streams, step_ms))
    if args.json:
        machine = {"cpus": os.cpu_count(), "python": sys.version.split()[0]}
        args.json.write_text(
            json.dumps({"machine": machine, "tokens_per_stream": TOKENS, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
