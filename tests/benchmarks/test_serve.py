"""`vllm bench serve`: figures against numpy, failures against servers that misbehave, the whole against a real one."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.server.http_server import Server
from vllm.benchmarks import serve
from vllm.benchmarks.datasets import Sample
from vllm.benchmarks.http_stream import Client, Target
from vllm.benchmarks.serve import Load, Record, main, percentile, report, run, send, summarize

SAMPLE = Sample("hello", 3, 5)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def load_for(port: int, **changes) -> Load:
    values = {
        "target": Target("127.0.0.1", port, False, ""),
        "endpoint": "/v1/completions",
        "model": "m",
        "headers": {},
        "rate": math.inf,
        "burstiness": 1.0,
        "concurrency": None,
        "ignore_eos": True,
        "extra": {},
        "seed": 0,
    }
    return Load(**{**values, **changes})


async def send_one(load: Load) -> Record:
    return await send(Client(load.target), load, SAMPLE)


@asynccontextmanager
async def fake_server(answer: bytes, pause: float = 0.0) -> AsyncIterator[tuple[int, list[int]]]:
    """Answers every request with the same bytes after `pause`; yields its port and how many were open, as they came."""
    open_now = 0
    seen: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        seen.append(open_now)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
        await reader.readexactly(length)
        await asyncio.sleep(pause)
        open_now -= 1
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()


def sse(*events: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(e)}\n\n" for e in events] + (["data: [DONE]\n\n"] if done else [])
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + "".join(lines).encode()


def token(text: str, finish: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 2}}


# -- figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(count):
    values = np.random.default_rng(count).exponential(size=count)
    for q in (0, 1, 25, 50, 90, 99, 99.9, 100):
        assert percentile(list(values), q) == pytest.approx(np.percentile(values, q), rel=1e-12)


def make_records(count: int) -> list[Record]:
    rng = np.random.default_rng(5)
    records = []
    for i in range(count):
        gaps = list(rng.exponential(0.01, size=i % 7))
        record = Record(Sample("x", 10 + i, 8), ok=True, start=float(i), output_tokens=1 + len(gaps), gaps=gaps)
        record.first_token = record.start + rng.exponential(0.1)
        record.end = record.first_token + sum(gaps)
        records.append(record)
    return records


def test_the_summary_is_what_numpy_says():
    records = make_records(40)
    broken = Record(SAMPLE, ok=False, error="no", output_tokens=1000)
    result = summarize([*records, broken], 8.0, (25.0, 99.0), {})
    assert (result["completed"], result["failed"]) == (40, 1)
    assert result["total_input_tokens"] == sum(10 + i for i in range(40))
    outputs = sum(1 + i % 7 for i in range(40))
    assert result["total_output_tokens"] == outputs
    assert result["output_throughput"] == pytest.approx(outputs / 8)
    assert result["request_throughput"] == pytest.approx(5)
    expected = {
        "ttft": [r.first_token - r.start for r in records],
        "tpot": [sum(r.gaps) / len(r.gaps) for r in records if r.gaps],
        "itl": [g for r in records for g in r.gaps],
        "e2el": [r.end - r.start for r in records],
    }
    for name, seconds in expected.items():
        ms = np.array(seconds) * 1000
        assert result[f"mean_{name}_ms"] == pytest.approx(ms.mean())
        assert result[f"median_{name}_ms"] == pytest.approx(np.median(ms))
        assert result[f"std_{name}_ms"] == pytest.approx(ms.std())
        for q in (25, 99):
            assert result[f"p{q}_{name}_ms"] == pytest.approx(np.percentile(ms, q))


def test_goodput_counts_requests_that_keep_every_limit():
    def record(ttft: float, tpot: float) -> Record:
        return Record(SAMPLE, ok=True, start=1.0, first_token=1.0 + ttft, end=1.0 + ttft + 4 * tpot, output_tokens=5)

    records = [record(0.1, 0.01), record(0.3, 0.01), record(0.1, 0.05), record(0.05, 0.001)]
    assert summarize(records, 2.0, (), {"ttft": 200.0})["request_goodput"] == pytest.approx(3 / 2)
    assert summarize(records, 2.0, (), {"ttft": 200.0, "tpot": 20.0})["request_goodput"] == pytest.approx(2 / 2)
    assert summarize(records, 2.0, (), {"e2el": 60.0})["request_goodput"] == pytest.approx(1 / 2)
    assert "request_goodput" not in summarize(records, 2.0, (), {})


def test_a_run_without_success_still_gives_a_report():
    result = summarize([Record(SAMPLE, error="refused")], 1.0, (99.0,), {})
    assert result["completed"] == 0 and result["mean_ttft_ms"] == 0.0
    assert "Failed requests:" in report(result, ("ttft", "itl"), (99.0,))


# -- arrivals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
async def test_gaps_between_requests_are_gamma_distributed(monkeypatch, burstiness):
    now = 0.0
    arrivals: list[float] = []

    async def instantly(client: Client, load: Load, sample: Sample) -> Record:
        return Record(sample, ok=True)

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        arrivals.append(now)

    class Clock:
        perf_counter = staticmethod(lambda: now)

    class Asyncio:
        Semaphore, ensure_future, gather = asyncio.Semaphore, asyncio.ensure_future, asyncio.gather

    Asyncio.sleep = staticmethod(sleep)
    monkeypatch.setattr(serve, "time", Clock)
    monkeypatch.setattr(serve, "asyncio", Asyncio)
    monkeypatch.setattr(serve, "send", instantly)
    await run(load_for(1, rate=20.0, burstiness=burstiness, seed=3), [SAMPLE] * 6000)
    gaps = np.diff(arrivals)
    # A gamma distribution of shape k and mean m has a standard deviation of m / sqrt(k).
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 20 / math.sqrt(burstiness), rel=0.08)


async def test_the_rate_is_kept_on_a_real_clock():
    async with fake_server(sse(token("a"), USAGE)) as (port, _):
        start = time.perf_counter()
        records, seconds = await run(load_for(port, rate=100.0, burstiness=50.0), [SAMPLE] * 40)
        assert 0.3 < time.perf_counter() - start < 5
    assert all(r.ok for r in records) and seconds > 0.3


async def test_concurrency_is_never_exceeded():
    async with fake_server(sse(token("a"), USAGE), pause=0.01) as (port, seen):
        records, _ = await run(load_for(port, concurrency=3), [SAMPLE] * 20)
    assert all(r.ok for r in records)
    assert max(seen) == 3


# -- one request -------------------------------------------------------------------------------------------------------


async def test_a_stream_is_timed_token_by_token():
    events = [token("a"), token(""), token("b"), token("", "length"), USAGE]
    async with fake_server(sse(*events)) as (port, _):
        record = await send_one(load_for(port))
    assert record.ok and record.text == "ab" and record.output_tokens == 2
    assert record.start < record.first_token <= record.end
    assert len(record.gaps) == 2  # the second text and the finish; an event without anything is no token


async def test_chunks_may_split_events_anywhere():
    body = sse(token("x"), token("y", "stop"), USAGE).split(b"\r\n\r\n", 1)[1]
    pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
    chunked = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    async with fake_server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked) as (port, _):
        record = await send_one(load_for(port))
    assert record.ok and record.text == "xy"


def chunked(body: bytes, *headers: bytes) -> bytes:
    head = b"\r\n".join([b"HTTP/1.1 200 OK", b"transfer-encoding: chunked", *headers])
    return head + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[int]:
    """A server that has `handle` deal with each connection; yields its port. At the end, all connections have ended."""
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await handle(reader, writer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("headers", "closes", "connections"),
    [((), False, 1), ((b"Connection: Close",), False, 4), ((), True, 4)],
    ids=["kept", "not to be kept", "closed by the server in between"],
)
async def test_connections_are_used_again(headers, closes, connections):
    answer = chunked(sse(token("x", "stop"), USAGE).split(b"\r\n\r\n", 1)[1], *headers)
    count = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        while head := await reader.read(1 << 16):
            assert head.startswith(b"POST /v1/completions")
            writer.write(answer)
            if closes:
                break

    async with serving(handle) as port:
        records, _ = await run(load_for(port, concurrency=1), [SAMPLE] * 4)
    assert [r.error for r in records] == [""] * 4
    assert count == connections


async def test_a_kept_connection_that_breaks_within_an_answer_is_a_failure():
    good = chunked(sse(token("x", "stop"), USAGE).split(b"\r\n\r\n", 1)[1])
    answers = [good, b"HTTP/1.1 2"]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while answers:
            await reader.read(1 << 16)
            writer.write(answers.pop(0))

    async with serving(handle) as port:
        records, _ = await run(load_for(port, concurrency=1), [SAMPLE] * 2)
    assert [r.ok for r in records] == [True, False]
    assert "connection broke" in records[1].error


async def test_chat_reads_deltas_and_sends_messages():
    events = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    events += [{"choices": [{"index": 0, "delta": {"content": c}}]} for c in "hi"]
    load = load_for(0, endpoint="/v1/chat/completions", extra={"top_k": 3})
    body = json.loads(serve.body_of(load, SAMPLE))
    assert body["messages"] == [{"role": "user", "content": "hello"}] and body["top_k"] == 3
    async with fake_server(sse(*events, USAGE)) as (port, _):
        record = await send_one(load_for(port, endpoint="/v1/chat/completions"))
    assert record.ok and record.text == "hi"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\n{}", "status 503"),
        (b"HTTP/1.1 400 Bad\r\n\r\n" + b'{"message": "no such model"}', "no such model"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP/1.1 answer"),
        (b"", "connection broke"),
        (sse(token("a"), done=False), "ended before"),
        (sse(), "held no token"),
        (sse(token("a"), {"error": {"message": "the engine died"}}), "the engine died"),
        (sse({"error": "plain words"}), "plain words"),
        (sse([1, 2]), "not in OpenAI's format"),
        (sse({"choices": [{}]}), "not in OpenAI's format"),
        (sse().replace(b"[DONE]", b"{oops"), "not in OpenAI's format"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "ended early"),
    ],
)
async def test_every_kind_of_failure_is_a_record_with_a_reason(answer, message):
    async with fake_server(answer) as (port, _):
        record = await send_one(load_for(port))
    assert not record.ok and message in record.error


async def test_nobody_listening_is_a_failure(unused_tcp_port: int):
    record = await send_one(load_for(unused_tcp_port))
    assert not record.ok and "cannot connect" in record.error


async def test_missing_usage_is_counted_with_the_tokenizer():
    class Words:
        def encode(self, text: str, special: bool = True) -> list[int]:
            return [0] * (len(text.split()) + special)

    async with fake_server(sse(token("one two"), token(" three", "stop"))) as (port, _):
        record = await send_one(load_for(port))
    serve.count_missing([record], Words())  # type: ignore[arg-type]
    assert record.output_tokens == 3


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_server() -> Iterator[Server]:
    with Server(Path("demo"), "--max-model-len", "512") as running:
        yield running


def bench(server: Server, *flags: str) -> int:
    common = ("--base-url", server.url, "--ignore-eos", "--random-input-len", "24", "--random-output-len", "6")
    return main([*common, *flags])


def test_a_run_against_a_real_server_writes_its_figures(demo_server, tmp_path, capsys):
    flags = (
        "--num-prompts",
        "12",
        "--max-concurrency",
        "4",
        "--goodput",
        "e2el:60000",
        "--metric-percentiles",
        "50,95",
    )
    status = bench(demo_server, *flags, "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    assert status == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["total_input_tokens"] == 12 * 24
    assert result["total_output_tokens"] == 12 * 6
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert 0 < result["median_ttft_ms"] <= result["p95_ttft_ms"] <= result["p95_e2el_ms"]
    assert (result["max_concurrency"], result["request_rate"], result["num_prompts"]) == (4, "inf", 12)
    out = capsys.readouterr().out
    assert "Successful requests:" in out and "P95 E2EL (ms):" in out


def test_several_rates_make_a_list(demo_server, tmp_path, capsys):
    flags = ("--num-prompts", "6", "--request-rate", "50", "100", "--save-result", "--result-dir", str(tmp_path))
    assert bench(demo_server, *flags) == 0
    results = json.loads(next(tmp_path.glob("vllm-*.json")).read_text())
    assert [r["request_rate"] for r in results] == [50.0, 100.0]
    assert all(r["completed"] == 6 for r in results)


def test_latency_against_rate_is_drawn(tmp_path):
    records = make_records(20)
    results = [{**summarize(records, 8.0, (99.0,), {}), "request_rate": rate} for rate in (1.0, 2.0, "inf")]
    serve._plot(tmp_path / "plot.png", results)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_sent(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        main(["--plot", "x.png"])
    assert stop.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_chat_with_random_texts(demo_server, capsys):
    assert bench(demo_server, "--backend", "openai-chat", "--num-prompts", "3", "--num-warmups", "0") == 0
    assert "Successful requests:                             3" in capsys.readouterr().out


def test_a_refused_request_ends_the_run_with_the_servers_words(demo_server, capsys):
    with pytest.raises(SystemExit) as stop:
        bench(demo_server, "--num-prompts", "1", "--random-input-len", "4000")
    assert stop.value.code == 1
    assert "the first request failed: status 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--metric-percentiles", "fifty"], "--metric-percentiles takes numbers"),
        (["--metric-percentiles", "101"], "from 0 to 100"),
        (["--percentile-metrics", "ttft,speed"], "unknown metrics ['speed']"),
        (["--request-rate", "0"], "must be positive"),
        (["--burstiness", "nan"], "must be positive"),
        (["--num-prompts", "0"], "1 or more"),
        (["--max-concurrency", "0"], "1 or more"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--goodput", "itl:5"], "--goodput takes"),
        (["--goodput", "ttft:fast"], "milliseconds"),
        (["--save-result", "--result-dir", f"{__file__}/figures"], "cannot be made: Not a directory"),
        (["--plot", "/nowhere/rates.png"], "--plot: there is no folder /nowhere"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_sent(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere.jsonl"], "There is no file"),
        (["--random-range-ratio", "1"], "range ratio"),
    ],
)
def test_a_bad_dataset_is_one_line_on_stderr(demo_server, flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench(demo_server, *flags)
    assert stop.value.code == 1
    assert message in capsys.readouterr().err


def test_no_server_is_one_line_on_stderr(unused_tcp_port: int, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--port", str(unused_tcp_port)])
    assert stop.value.code == 1
    assert "no server answers" in capsys.readouterr().err


def test_the_servers_profiler_runs_with_what_is_measured(demo_server: Server, tmp_path: Path, capsys) -> None:
    few = ["--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "2", "--profile"]
    traces = tmp_path / "traces"
    environment = {"VLLM_TORCH_PROFILER_DIR": str(traces)}
    with Server(Path("demo"), "--max-model-len", "512", env=environment) as server:
        assert main(["--base-url", server.url, "--model", "tiny", "--tokenizer", "demo", *few]) == 0
        assert any(file.stat().st_size for file in traces.rglob("*") if file.is_file())
    with pytest.raises(SystemExit):
        main(["--base-url", demo_server.url, "--model", "tiny", "--tokenizer", "demo", *few])
    assert "--profile: the server cannot start its profiler" in capsys.readouterr().err
