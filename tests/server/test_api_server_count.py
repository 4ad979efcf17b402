"""`--api-server-count`: several processes at one port look like one server, and begin and end together."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import vllm
from tests.server.http_server import Server
from vllm.engine.admission import COLUMNS, Account, Admission
from vllm.engine.tally import Tally, shared_file
from vllm.entrypoints.openai import api_server, front_ends, routes
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.front_ends import Further, Link, check_front_ends, plain_flags
from vllm.entrypoints.openai.paced import Paced
from vllm.exceptions import QueueOverflowError
from vllm.metrics.registry import EngineMetrics, render_all, snapshot
from vllm.step.messages import CoreStats
from vllm.utils.argparse import FlexibleArgumentParser

ASSETS = Path(vllm.__file__).parent / "assets"
COUNT = 3


def parsed(*words: str) -> argparse.Namespace:
    return make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "demo", *words])


def below(server: Server) -> list[psutil.Process]:
    """The further front ends."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "vllm.entrypoints.openai.front_end" in child.cmdline()]


@contextlib.contextmanager
def several(*args: str) -> Iterator[Server]:
    flags = ("--api-server-count", str(COUNT), "--max-model-len", "512", "--host", "127.0.0.1", *args)
    with Server(ASSETS / "demo", *flags) as running:
        everybody = psutil.Process(running.process.pid).children(recursive=True)  # type: ignore[union-attr]
        yield running
    gone, left = psutil.wait_procs(everybody, timeout=10)
    assert not left


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with several(
        "--enable-lora", "--lora-modules", f"pirate={ASSETS / 'demo-pirate'}", "--enable-server-load-tracking",
        "--max-num-seqs", "2", "--max-num-queued-reqs", "8",
    ) as running:  # fmt: skip
        yield running


def stream(server: Server, tokens: int) -> socket.socket:
    """A connection over which an answer of so many tokens has begun."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
    return connection


def test_all_take_part_and_answer_alike_also_with_an_adapter(shared: Server) -> None:
    assert len(below(shared)) == COUNT - 1
    first = {model: answer(shared, model) for model in ("tiny", "pirate")}
    assert first["tiny"] != first["pirate"]
    before = [process.cpu_times().user for process in below(shared)]
    done = shared.metric("vllm:generation_tokens_total")
    for _ in range(24):
        for model, text in first.items():
            assert answer(shared, model) == text
    assert all(p.cpu_times().user > t for p, t in zip(below(shared), before, strict=True)), "connections are divided"
    assert {shared.metric("vllm:generation_tokens_total") for _ in range(6)} == {done + 48 * 8}


def answer(server: Server, model: str) -> str:
    """From a connection of its own."""
    body = {"model": model, "prompt": "The sea", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    found = server.post("/v1/completions", body)
    assert found.status == 200, found.text
    return str(found.json["choices"][0]["text"])


def test_figures_are_those_of_all_whoever_is_asked(shared: Server) -> None:
    def figures() -> dict[str, float]:
        families = text_string_to_metric_families(shared.get("/metrics").text)
        return {
            sample.name: sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("finished_reason", "length") == "length"
            and sample.labels.get("handler", "/v1/completions") == "/v1/completions"
        }

    before = figures()
    for _ in range(12):
        answer(shared, "tiny")
    for _ in range(6):
        after = figures()
        for name, more in (
            ("vllm:request_success_total", 12), ("vllm:generation_tokens_total", 96), ("http_requests_total", 12),
            ("vllm:time_to_first_token_seconds_count", 12), ("vllm:request_params_n_count", 12),
        ):  # fmt: skip
            assert after[name] == before[name] + more, name
        assert after["process_start_time_seconds"] == before["process_start_time_seconds"]
        assert after["process_cpu_seconds_total"] >= before["process_cpu_seconds_total"]


def test_the_queue_is_common_and_so_is_the_load(shared: Server) -> None:
    running = [stream(shared, 480) for _ in range(2)]
    for connection in running:
        connection.recv(1)  # it has a slot
    waiting = [stream(shared, 2) for _ in range(8)]
    deadline = time.monotonic() + 10
    while shared.get("/load").json["server_load"] < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    refused = [shared.post("/v1/completions", {"model": "tiny", "prompt": "Hi", "max_tokens": 1}) for _ in range(8)]
    ends = [read(connection) for connection in (*running, *waiting)]
    assert all(b"data: [DONE]" in end for end in ends)
    assert {found.status for found in refused} <= {200, 503} and 503 in {found.status for found in refused[:2]}


def read(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_answers_in_progress_are_finished_before_the_server_ends() -> None:
    with several("--shutdown-timeout", "30") as server, ThreadPoolExecutor(9) as pool:
        connections = [stream(server, 300) for _ in range(9)]
        for connection in connections:
            connection.recv(1)
        ends = [pool.submit(read, connection) for connection in connections]
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        assert all(b"data: [DONE]" in end.result(30) for end in ends)
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("which", ["further", "first", "core"])
def test_whichever_process_is_killed_all_end(which: str) -> None:
    with several() as server:
        assert server.process is not None
        children = psutil.Process(server.process.pid).children()
        (core,) = [child for child in children if "vllm.engine.core_process" in child.cmdline()]
        victim = {"further": below(server)[0], "first": psutil.Process(server.process.pid), "core": core}[which]
        victim.send_signal(signal.SIGKILL)
        assert server.process.wait(20) == (-signal.SIGKILL if which == "first" else 1)
        said = {"further": "Front end 1 of 3 has ended with status -9", "core": "The engine has died", "first": ""}
        assert said[which] in server.log


@pytest.mark.parametrize(
    ("words", "variable", "said"),
    [
        (["--disable-frontend-multiprocessing"], "", "--disable-frontend-multiprocessing"),
        (["--data-parallel-size", "2"], "", "--data-parallel-size"),
        ([], "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ([], "VLLM_ENABLE_RESPONSES_API_STORE", "VLLM_ENABLE_RESPONSES_API_STORE"),
    ],
)
def test_what_only_one_front_end_can_do_is_refused_by_name(
    words: list[str], variable: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    check_front_ends(parsed(*words))
    with pytest.raises(ValueError, match=f"--api-server-count 2 does not go with {said}"):
        check_front_ends(parsed("--api-server-count", "2", *words))


def test_a_number_below_one_is_refused_and_so_is_a_server_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        check_front_ends(parsed("-asc", "0"))
    monkeypatch.setattr(api_server, "bind_all", lambda args: pytest.fail("too late"))
    with pytest.raises(ValueError, match="has one front end"):
        asyncio.run(api_server.run_server(parsed("-asc", "2"), lambda args, engine: pytest.fail("too late")))


def test_a_taken_port_is_known_at_once() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ("--host", "127.0.0.1", "--port", str(taken.getsockname()[1]), "-asc", "2")
        with pytest.raises(ValueError, match="Cannot listen"):
            api_server.bind_all(parsed(*words))


def test_the_sockets_of_a_server_share_one_port() -> None:
    found = api_server.bind_all(parsed("--host", "127.0.0.1", "--port", "0", "-asc", "3"))
    assert len({listener.getsockname() for listener in found}) == 1 and len(found) == 3
    for listener in found:
        listener.close()


def test_flags_travel_as_plain_data() -> None:
    args = parsed("-asc", "2", "--api-key", "k", "--allowed-origins", '["a"]')
    flags = plain_flags(args)
    assert json.loads(json.dumps(flags)) == flags
    assert set(vars(args)) - set(flags) == {"compilation_config"}


def admissions(count: int) -> list[Admission]:
    config = SimpleNamespace(max_num_seqs=4, max_num_queued_reqs=5, max_num_queued_tokens=100)
    found = []
    with shared_file(count, COLUMNS) as numbers:
        for row in range(count):
            copy = os.fdopen(os.dup(numbers.fileno()), "r+b", buffering=0)
            with copy:
                admission = Admission(config)  # type: ignore[arg-type]
                admission.count_with(Tally(copy, row, COLUMNS))
                found.append(admission)
    return found


def asked(name: str, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, prompt_token_ids=[1] * tokens)


def test_what_waits_at_one_front_end_counts_at_all() -> None:
    first, second = admissions(2)
    first.enter([asked(f"r{i}", 10) for i in range(4)])  # type: ignore[misc]
    second.check(2, 60)
    first.hold_back(Account(), "large")
    second.check(1, 60)
    with pytest.raises(QueueOverflowError, match="4 sequences wait, this request has 2, and at most 5 may"):
        second.check(2)
    with pytest.raises(QueueOverflowError, match="have 40 prompt tokens"):
        second.check(1, 61)
    with second.arriving(), pytest.raises(QueueOverflowError):
        first.check(1)
    first.check(1)
    first.leave("r0")
    second.check(2)
    first.clear()
    second.check(50, 1000)


def test_figures_of_the_core_are_the_newest_and_others_are_added_up() -> None:
    snapshots = []
    for i in range(3):
        metrics = EngineMetrics("m", 100, {"block_size": 16})
        metrics.on_step(CoreStats(num_running=i, prompt_tokens=10 * (1 + i % 2), steps=1, kv_blocks_total=4))
        metrics.time_to_first_token.observe(0.5 + i)
        metrics.prompt_throughput = 7.0 - i
        snapshots.append(json.loads(json.dumps(snapshot(metrics, []))))
    families = {family.name: family for family in text_string_to_metric_families(render_all(snapshots).decode())}
    value = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert value["vllm:num_requests_running"] == 1 and value["vllm:prompt_tokens_total"] == 20
    assert value["vllm:time_to_first_token_seconds_count"] == 3 and value["vllm:time_to_first_token_seconds_sum"] == 4.5
    assert value["vllm:avg_prompt_throughput_toks_per_s"] == 7.0
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"


async def test_questions_go_both_ways_and_end_with_the_other_end() -> None:
    ours, theirs = socket.socketpair()

    async def double(x: int) -> int:
        return 2 * x

    async def fail() -> None:
        raise ValueError("no")

    async def never() -> None:
        await asyncio.Event().wait()

    first = await Link.over(ours, {"double": double, "never": never})
    second = await Link.over(theirs, {"fail": fail})
    assert await asyncio.gather(*(second.ask("double", i) for i in range(5))) == [0, 2, 4, 6, 8]
    with pytest.raises(RuntimeError, match="ValueError: no"):
        await first.ask("fail")
    with pytest.raises(RuntimeError, match="nothing called 'what'"):
        await second.ask("what")
    waiting = asyncio.ensure_future(second.ask("never"))
    await asyncio.sleep(0.01)
    first._transport.abort()  # type: ignore[union-attr]
    with pytest.raises(ConnectionError):
        await waiting
    await second.lost
    with pytest.raises(ConnectionError):
        await second.ask("double", 1)


@pytest.mark.parametrize("route", [routes.metrics, routes.load])
async def test_a_front_end_that_hangs_is_named_instead_of_left_out_of_sums(route, monkeypatch) -> None:
    monkeypatch.setattr(front_ends, "ANSWER_SECONDS", 0.01)
    ours, theirs = socket.socketpair()
    further = Further(ours, 2)
    await further.attach()  # nobody reads at the other end
    state = SimpleNamespace(
        context=SimpleNamespace(front_ends=further), args=SimpleNamespace(enable_server_load_tracking=True)
    )
    state.exposition = Paced(lambda: routes.exposition(state))  # type: ignore[arg-type]
    with pytest.raises(APIError, match="front ends does not answer") as refused:
        await route(SimpleNamespace(app=SimpleNamespace(state=state)))
    assert refused.value.status == 503 and "retry-after" in refused.value.headers
    further._link._transport.abort()  # type: ignore[union-attr]
    theirs.close()
