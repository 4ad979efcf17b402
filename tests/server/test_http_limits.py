"""Bounds of one client: sizes, times, counts, and what the server does when they are crossed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.http_server import Server
from vllm.entrypoints.openai.connection import LINGER_SECONDS
from vllm.entrypoints.openai.context import LARGE_BYTES, ServerContext
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.limits import (
    LARGEST_BODIES,
    SMALL_BODY_BYTES,
    KeyChecker,
    Limits,
    LimitsMiddleware,
    Message,
    Receive,
    Scope,
    Send,
)

BODY_LIMIT = 256 * 1024
SECONDS = 1.5
PATIENCE = 60.0  # with what should come about at once, or SECONDS later: the machine may be busy


@pytest.fixture(scope="module")
def strict(model_folder: Path) -> Iterator[Server]:
    limits = ("--max-body-size", str(BODY_LIMIT), "--max-connections", "40")
    times = ("--header-timeout", str(SECONDS), "--body-timeout", str(SECONDS), "--write-timeout", str(SECONDS))
    with Server(model_folder, *limits, *times) as running:
        before = running.canary()
        yield running
        assert running.alive
        assert running.canary() == before


def status_of(raw: bytes) -> int:
    return int(raw.split(b" ", 2)[1]) if raw.startswith(b"HTTP/1.") else 0


def post_head(length: int | None, path: str = "/v1/completions", extra: str = "") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{extra}{size}\r\n\r\n".encode()


def memory(server: Server) -> int:
    assert server.process is not None
    return psutil.Process(server.process.pid).memory_info().rss


def closed(server: Server, data: bytes) -> bytes:
    """What the server says to `data` until it closes. Raises TimeoutError if it is silent and does not."""
    received = b""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(data)
        while part := connection.recv(1 << 16):
            received += part
    return received


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def idle(server: Server) -> bool:
    return server.metric("vllm:num_requests_running") == 0 and server.metric("vllm:num_requests_waiting") == 0


def test_body_over_the_limit_is_413(strict: Server) -> None:
    body = json.dumps({"prompt": "x" * BODY_LIMIT}).encode()
    answer = strict.post("/v1/completions", body)
    assert answer.status == 413
    assert answer.json["error"]["type"] == "RequestTooLargeError"
    assert status_of(strict.raw(post_head(10**15))) == 413
    assert status_of(strict.raw(post_head(10**17 * 5))) == 413


def test_chunked_body_over_the_limit_is_413(strict: Server) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    assert status_of(strict.raw(post_head(None) + chunk * 5)) == 413


def test_a_million_small_chunks_are_no_problem(server: Server) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1}' + b" " * 100_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    before = memory(server)
    assert status_of(closed(server, post_head(None, extra="connection: close\r\n") + chunks)) == 200
    assert memory(server) - before < 50 << 20


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nx-foo: " + b"a" * 10_000_000,
        b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(300_000)),
        b"GET /" + b"a" * 3_000_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nconnection: close\r\nx-foo: " + b"a" * 50_000 + b"\r\n\r\n",
        post_head(None) + b"1;" + b"x" * 3_000_000,
        post_head(None) + b"1\r\n{\r\n0\r\n" + b"a: " + b"b" * 3_000_000,
    ],
    ids=["one-header", "many-headers", "path", "complete-head", "chunk-extension", "trailer"],
)
def test_endless_heads_are_cut(strict: Server, head: bytes) -> None:
    before = memory(strict)
    raw = closed(strict, head)
    assert status_of(raw) in (0, 400, 408, 431), raw[:100]
    assert memory(strict) - before < 20 << 20


def test_heads_of_very_many_fields_take_little_memory(strict: Server) -> None:
    for fields, status in ((250, 405), (260, 431)):
        assert status_of(strict.raw(post_head(0, "/v1/models", "a:\r\n" * fields), timeout=10)) == status
    before = memory(strict)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", strict.port), timeout=10))
            connection.sendall(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 15_000)  # and no end
        time.sleep(1.0)
        assert memory(strict) - before < 40 << 20


def test_an_endless_head_behind_a_request_is_cut(strict: Server) -> None:
    body = json.dumps({**LONG, "prompt": ["Hi"] * 16, "stream": False}).encode()
    before = memory(strict)
    with socket.create_connection(("127.0.0.1", strict.port), timeout=30) as connection:
        connection.sendall(post_head(len(body)) + body + b"GET / HTTP/1.1\r\n")
        connection.setblocking(False)
        lines, sent = b"x: y\r\n" * 10_000, 0
        received, reset = b"", False
        while not received and not reset and sent < 200 << 20:
            try:
                with contextlib.suppress(BlockingIOError):
                    received = connection.recv(1 << 10)
                with contextlib.suppress(BlockingIOError):
                    sent += connection.send(lines)
            except ConnectionResetError:  # it was cut while we wrote: what it had said is lost
                reset = True
        assert memory(strict) - before < 20 << 20
        connection.setblocking(True)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                received += part
    assert sent < 200 << 20
    assert reset or (received.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 431" in received)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        post_head(None) + b"zz\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: \x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(strict: Server, data: bytes) -> None:
    status = status_of(strict.raw(data, half_close=True))
    assert status == 0 or 400 <= status < 500


def test_slow_heads_and_bodies_are_cut(strict: Server) -> None:
    def trickle(start: bytes, drop: bytes) -> tuple[bool, bytes]:
        """(whether it was cut, what was said)."""
        with socket.create_connection(("127.0.0.1", strict.port), timeout=10) as connection:
            connection.sendall(start)
            connection.settimeout(0.1)
            started, received = time.monotonic(), b""
            while time.monotonic() - started < PATIENCE:
                try:
                    connection.send(drop)
                    data = connection.recv(65536)
                    if not data:
                        return True, received
                    received += data
                except TimeoutError:
                    continue
                except OSError:
                    return True, received
            return False, received

    for start, drop in ((b"GET / HTTP/1.1\r\n", b"a"), (post_head(1000), b" "), (b"", b"")):
        cut, received = trickle(start, drop)  # a body of 1000 bytes would take 100 seconds
        assert cut and status_of(received) in (0, 408), (start, received)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (post_head(BODY_LIMIT + 1), 413),
        (post_head(1000, extra="x: " + "y" * 40_000 + "\r\n"), 431),
        (post_head(1000, extra="x: y\r\n" * 300), 431),
        (post_head(1000, "/nowhere"), 404),
        (post_head(1000, "/v1/models"), 405),
        (post_head(1000).replace(b"application/json", b"text/plain"), 415),
    ],
    ids=["413", "431", "fields", "404", "405", "415"],
)
def test_a_refused_request_whose_body_never_comes_holds_no_connection(strict: Server, head: bytes, status: int) -> None:
    assert status_of(closed(strict, head)) == status  # it was held for 75 seconds


def test_a_refused_request_whose_body_comes_keeps_its_connection(strict: Server) -> None:
    data = [post_head(8, "/nowhere"), b"12345678", b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"]
    received = strict.pieces(data)
    assert received.count(b"HTTP/1.1 404") == 1 and received.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_has_closed_its_half_gets_its_answer(strict: Server, stream: bool) -> None:
    body = json.dumps({**LONG, "max_tokens": 200, "stream": stream}).encode()
    received = strict.raw(post_head(len(body)) + body, half_close=True)
    final = received.partition(b"HTTP/1.1 100 Continue\r\n\r\n")[2] or received
    assert status_of(final) == 200
    assert final.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else b'"finish_reason": "length"' in final
    version = strict.raw(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", half_close=True)
    assert version.count(b"HTTP/1.1 200 OK") == 1


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /version HTTP/1.1\r\nhost: x\r\n", 200),
        (b"GET /version HTTP/1.1\r\n", 400),
        (b"GET /version HTTP/1.1\r\nhost: x\r\nhost: x\r\n", 400),
        (b"GET /version HTTP/1.0\r\n", 200),
        (b"GET /version HTTP/1.0\r\nhost: x\r\nhost: y\r\n", 400),
    ],
)
def test_a_request_has_one_host(strict: Server, head: bytes, status: int) -> None:
    assert status_of(strict.raw(head + b"connection: close\r\n\r\n")) == status


def test_http_of_before_there_were_versions_is_refused(strict: Server) -> None:
    received = strict.raw(b"GET /version\r\n\r\n", half_close=True)
    assert status_of(received) in (0, 400)


def test_http_1_0_gets_its_events_without_chunks(strict: Server) -> None:
    body = json.dumps({"prompt": "Hi", "ignore_eos": True, "stream": True, "stream_interval": 1}).encode()
    request = post_head(len(body)) + body
    chunked = strict.raw(request.replace(b"content-type", b"connection: close\r\ncontent-type", 1))
    head, _, events = strict.raw(request.replace(b"HTTP/1.1", b"HTTP/1.0")).partition(b"\r\n\r\n")
    assert status_of(head) == 200 and b"\r\nconnection: close" in head
    assert b"transfer-encoding" not in head and b"transfer-encoding: chunked" in chunked
    blocks = events.decode().split("\n\n")
    assert blocks.pop() == "" and len(blocks) > 5
    assert all(block.startswith("data: ") and "\r" not in block for block in blocks)
    plain = strict.raw(b"GET /version HTTP/1.0\r\nhost: x\r\n\r\n")
    assert b"content-length: " in plain and plain.endswith(b"}")


def test_pipelined_and_kept_alive_requests_are_answered_in_order(strict: Server) -> None:
    one = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    raw = strict.raw(one * 3 + last)
    assert raw.count(b"HTTP/1.1 200 OK") == 4
    assert raw.rindex(b'"object"') > raw.rindex(b'"version"')


def test_many_requests_in_one_piece_hold_up_nobody(strict: Server) -> None:
    """20,000 requests pipelined take their turns with those of others, and are read only as they are answered."""
    before = memory(strict)
    connection = socket.create_connection(("127.0.0.1", strict.port))
    sent = threading.Thread(target=connection.sendall, args=(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000,))
    sent.start()
    answers, rest, others = 0, b"", 0
    connection.settimeout(30)
    while answers < 20_000:
        received = connection.recv(1 << 20)
        assert received, answers
        answers += (rest + received).count(b"HTTP/1.1 200 OK")
        rest = received[-14:]
        if answers > others * 2000:
            others += 1
            assert strict.get("/health").status == 200
    sent.join()
    connection.close()
    assert answers == 20_000 and others == 10
    assert memory(strict) - before < 20 << 20


def test_pipelined_bodies_arrive_whole(strict: Server) -> None:
    """Of more than is looked at in one turn, with requests behind them."""
    bodies = [json.dumps({"prompt": "Hi", "max_tokens": 1, "user": c * 100_000}).encode() for c in "ab"]
    requests = b"".join(post_head(len(body)) + body for body in bodies)
    raw = strict.raw(requests + b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert raw.count(b"HTTP/1.1 200 OK") == 3
    assert raw.count(b'"text_completion"') == 2


@pytest.mark.parametrize("answered", [1, 2])
def test_a_body_that_takes_its_time_behind_other_requests_is_waited_for(narrow: Server, answered: int) -> None:
    """It is not that of a request which was answered before its body came."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    request = post_head(len(body)) + body
    with socket.create_connection(("127.0.0.1", narrow.port), timeout=30) as connection:
        connection.sendall(request * answered + request[:-5])
        received = b""
        while received.count(b'"text_completion"') < answered:
            part = connection.recv(1 << 16)
            assert part
            received += part
        time.sleep(LINGER_SECONDS + 0.5)
        connection.sendall(request[-5:] + b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while part := connection.recv(1 << 16):
            received += part
    assert received.count(b"HTTP/1.1 200 OK") == answered + 2


def test_all_requests_before_the_end_of_the_clients_half_are_answered(strict: Server) -> None:
    """Of more than is read at once, while those before them are at work; but for the last, which did not come whole."""
    bodies = [json.dumps({"prompt": "Hi", "max_tokens": 1 + i % 9, "user": "x" * 4000}).encode() for i in range(100)]
    requests = b"".join(post_head(len(body)) + body for body in bodies)
    for sent, answers in ((requests, 100), (requests[:-1], 99)):
        received = strict.raw(sent, half_close=True)
        assert received.count(b"HTTP/1.1 200 OK") == answers
        assert received.count(b'"text_completion"') == answers


LONG = {"prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "stream": True}


def test_too_many_connections_get_503_and_a_hint(strict: Server) -> None:
    body = json.dumps({**LONG, "prompt": ["Hi"] * 16, "stream": False}).encode()
    held = []
    try:
        answer = strict.get("/v1/models")
        while answer.status == 200 and len(held) < 120:  # those without a request would make room
            held.append(socket.create_connection(("127.0.0.1", strict.port)))
            held[-1].sendall(post_head(len(body)) + body)
            answer = strict.get("/v1/models")  # by its answer the request before it has been read
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json["error"]["code"] == 503
    finally:
        for connection in held:
            connection.close()
    assert eventually(lambda: strict.get("/v1/models").status == 200)


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/completions HTTP/1.1\r\n", post_head(1000), b"GET /version HTTP/1.1\r\n\r\n"]
)
@pytest.mark.parametrize("behind", [b"", post_head(1000)])
def test_connections_without_a_request_make_room_for_others(strict: Server, sent: bytes, behind: bytes) -> None:
    body = json.dumps({**LONG, "prompt": ["Hi"] * 16}).encode()
    working = socket.create_connection(("127.0.0.1", strict.port))
    working.sendall(post_head(len(body)) + body + behind)
    held = []
    try:
        for _ in range(60):
            held.append(socket.create_connection(("127.0.0.1", strict.port)))
            held[-1].sendall(sent)
        assert [strict.get("/v1/models").status for _ in range(5)] == [200] * 5
        received = b""
        while b"data: [DONE]" not in received:
            part = working.recv(1 << 20)
            assert part
            received += part
    finally:
        for connection in (working, *held):
            connection.close()


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_aborts_the_request(strict: Server, leave: str, stream: bool, n: int) -> None:
    assert eventually(lambda: idle(strict))
    before = strict.metric("vllm:generation_tokens_total")
    body = json.dumps({**LONG, "prompt": [[5]] * 64, "stream": stream, "n": n, "temperature": 1.0}).encode()
    connection = socket.create_connection(("127.0.0.1", strict.port))
    connection.sendall(post_head(len(body)) + body)
    assert eventually(lambda: strict.metric("vllm:generation_tokens_total") > before)
    if leave == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    assert eventually(lambda: idle(strict))
    assert strict.metric("vllm:generation_tokens_total") - before < 64 * 500 * n


def count_left(server: Server) -> int:
    """Completions whose client left before the answer (499), or had done something wrong."""
    wanted = r'^http_requests_total\{handler="/v1/completions",method="POST",status="4xx"\} (\d+)'
    found = re.search(wanted, server.get("/metrics").text, re.MULTILINE)
    return int(found.group(1)) if found else 0


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_drops_the_prompts_that_have_not_begun(strict: Server, stream: bool) -> None:
    assert eventually(lambda: idle(strict))
    before, left = strict.metric("vllm:prompt_tokens_total"), count_left(strict)
    for call in range(8):
        prompts = [f"{call} {i}" for i in range(1000)]
        body = json.dumps({**LONG, "prompt": prompts, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", strict.port)) as connection:
            connection.sendall(post_head(len(body)) + body)
    assert eventually(lambda: idle(strict) and count_left(strict) - left == 8)
    assert strict.metric("vllm:prompt_tokens_total") - before < 8 * 1000


@pytest.fixture(scope="module")
def narrow(model_folder: Path) -> Iterator[Server]:
    with Server(model_folder, "--max-num-seqs", "1") as running:
        yield running


QUEUED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize(("path", "stream"), [("/v1/completions", False), *((path, True) for path in QUEUED)])
def test_leaving_takes_the_request_out_of_the_queue(narrow: Server, path: str, stream: bool, leave: str) -> None:
    body = json.dumps({**LONG, "prompt": [5]}).encode()
    model = json.loads(narrow.get("/v1/models").text)["data"][0]["id"]
    queued = json.dumps({**QUEUED[path], "model": model, "stream": stream}).encode()

    def computed() -> float:
        """The tokens of prompts that were computed while a request runs and others leave the queue behind it."""
        assert eventually(lambda: idle(narrow))
        before = narrow.metric("vllm:prompt_tokens_total")
        with contextlib.ExitStack() as stack:
            working = stack.enter_context(socket.create_connection(("127.0.0.1", narrow.port)))
            working.sendall(post_head(len(body), extra="connection: close\r\n") + body)
            assert working.recv(1 << 10)
            leaving = [stack.enter_context(socket.create_connection(("127.0.0.1", narrow.port))) for _ in range(3)]
            for connection in leaving:
                connection.sendall(post_head(len(queued), path) + queued)
            assert eventually(lambda: narrow.metric("vllm:num_requests_waiting") >= 3 or idle(narrow))
            for connection in leaving:
                if leave == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            while working.recv(1 << 16):
                pass
        assert eventually(lambda: idle(narrow))
        return narrow.metric("vllm:prompt_tokens_total") - before

    # Nobody computes what nobody waits for, unless the request that runs had ended before they left.
    assert any(computed() == 1 for _ in range(20))


@pytest.mark.parametrize("rubbish", [b"\x00\xff\r\n\r\n", post_head(None) + b"ZZZ\r\n"], ids=["head", "chunk"])
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_rubbish_behind_requests_is_answered_behind_them(
    strict: Server, rubbish: bytes, requests: int, stream: bool
) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    received = strict.raw((post_head(len(body)) + body) * requests + rubbish + b"GET / HTTP/1.1\r\n\r\n")
    *answers, last = received.split(b"HTTP/1.1 ")[1:]
    assert len(answers) == requests and all(answer.startswith(b"200") for answer in answers)
    assert all((b"data: [DONE]" if stream else b'"finish_reason": "length"') in answer for answer in answers)
    assert last.startswith(b"400") and last.endswith(b"}")


def test_leaving_aborts_the_request_before_rubbish(strict: Server) -> None:
    body = json.dumps({**LONG, "prompt": [[5]] * 64}).encode()
    before = strict.metric("vllm:generation_tokens_total")
    with socket.create_connection(("127.0.0.1", strict.port)) as connection:
        connection.sendall(post_head(len(body)) + body + b"\x00\xff\r\n\r\n")
        assert connection.recv(1 << 10).startswith(b"HTTP/1.1 200")
    assert eventually(lambda: idle(strict))
    assert strict.metric("vllm:generation_tokens_total") - before < 500 * 64


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_aborts_the_first_of_two_pipelined_requests(strict: Server, stream: bool) -> None:
    assert eventually(lambda: idle(strict))
    before = strict.metric("vllm:generation_tokens_total")
    body = json.dumps({**LONG, "prompt": [[5]] * 64, "stream": stream}).encode()  # seconds, of which half a one is seen
    with socket.create_connection(("127.0.0.1", strict.port)) as connection:
        connection.sendall((post_head(len(body)) + body) * 2)
        assert eventually(lambda: strict.metric("vllm:generation_tokens_total") > before)
    assert eventually(lambda: idle(strict))
    assert strict.metric("vllm:generation_tokens_total") - before < 64 * 500


def test_a_reader_that_stops_is_cut(strict: Server) -> None:
    """Its request ends, its connection too, and the others keep their pace."""
    assert eventually(lambda: idle(strict))
    before = strict.metric("vllm:generation_tokens_total")
    held = []
    for _ in range(8):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", strict.port))
        body = json.dumps({**LONG, "prompt": ["Hi"] * 64, "logprobs": 10}).encode()
        connection.sendall(post_head(len(body)) + body)
        held.append(connection)
    assert eventually(lambda: not idle(strict))
    try:
        assert strict.canary()
        assert eventually(lambda: idle(strict))
        assert strict.metric("vllm:generation_tokens_total") - before < 8 * 64 * 500

        def all_cut() -> bool:
            assert strict.process is not None
            connections = psutil.Process(strict.process.pid).net_connections(kind="tcp")
            return sum(c.status == psutil.CONN_ESTABLISHED for c in connections) <= 1

        assert eventually(all_cut)
    finally:
        for connection in held:
            connection.close()


def test_streams_of_many_clients_end(strict: Server) -> None:
    ends: list[bool] = []

    def read() -> None:
        answer = strict.post("/v1/completions", {**LONG, "max_tokens": 20})
        ends.append(answer.text.endswith("data: [DONE]\n\n"))

    threads = [threading.Thread(target=read) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [True] * 24


def test_large_bodies_do_not_hold_up_the_others(server: Server) -> None:
    """Parsing, tokenizing and refusing megabytes happens beside the event loop."""
    ids = json.dumps({"prompt": [5] * 500_000, "max_tokens": 1}).encode()
    text = json.dumps({"prompt": "hello world " * 20_000}).encode()
    threads = [
        threading.Thread(target=server.post, args=(route, body))
        for route, body in (("/v1/completions", ids), ("/tokenize", text), ("/v1/completions", ids)) * 2
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert server.get("/health", timeout=PATIENCE).status == 200


def test_bodies_have_a_bound_together() -> None:
    """Small ones are taken all the same, and others when those have gone."""
    size = 2 * SMALL_BODY_BYTES
    limits = Limits(max_body_bytes=size)

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass

    async def ask(last: asyncio.Event, length: int) -> int:
        """The status of what is raised; 200 for nothing."""
        sent = 0

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await last.wait()
            sent += 1
            return {"type": "http.request", "body": b" " * (length // 2), "more_body": sent == 1}

        async def send(message: Message) -> None: ...

        scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"x")]}
        try:
            await server(scope, receive, send)
        except APIError as error:
            return error.status
        return 200

    async def serve() -> None:
        come, now = asyncio.Event(), asyncio.Event()
        now.set()
        held = [asyncio.ensure_future(ask(come, size)) for _ in range(2 * LARGEST_BODIES)]
        await asyncio.sleep(0)
        assert [await ask(now, length) for length in (size, 1000, size)] == [503, 200, 503]
        held.pop().cancel()
        held.pop().cancel()
        await asyncio.sleep(0)
        assert await ask(now, size) == 200
        come.set()
        assert await asyncio.gather(*held) == [200] * len(held)
        assert [await ask(now, size) for _ in range(2)] == [200, 200]

    server = LimitsMiddleware(read, limits, KeyChecker(()))
    asyncio.run(serve())


def test_very_large_bodies_do_not_hold_up_smaller_ones() -> None:
    """Those that take long to be read wait for each other alone."""
    engine: Any = None
    context = ServerContext(engine, ("m",), "m", 1, {})
    ended = threading.Event()

    async def read() -> bool:
        large = [asyncio.ensure_future(context.in_reader(LARGE_BYTES, ended.wait, 60)) for _ in range(3)]
        smaller = await asyncio.wait_for(context.in_reader(LARGE_BYTES - 1, lambda: True), 30)
        ended.set()
        return smaller and all(await asyncio.gather(*large))

    assert asyncio.run(read())


def test_there_is_one_door_and_it_runs_nothing(strict: Server, tmp_path: Path) -> None:
    """T38: one listener in all processes, no named socket, and a pickle sent to it is only a bad request."""
    assert strict.process is not None
    front = psutil.Process(strict.process.pid)
    sockets = [c for p in (front, *front.children(recursive=True)) for c in p.net_connections(kind="all")]
    assert [c.laddr.port for c in sockets if c.status == psutil.CONN_LISTEN] == [strict.port]
    assert [c.laddr for c in sockets if c.family == socket.AF_UNIX and c.laddr] == []
    bait = tmp_path / "bait"
    attack = pickle.dumps(Touch(str(bait)))
    for sent in (attack, post_head(len(attack)) + attack):
        assert status_of(strict.raw(sent, half_close=True)) == 400
    assert not bait.exists()
    pickle.loads(attack).close()  # it would have
    assert bait.exists()


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self._path, "w")
