"""Connections by the thousand, slow ones, too many for the process, and bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import socket
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.server.http_server import Server, sse_events
from tests.server.test_http_limits import eventually, idle, post_head

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

STRICT = {"VLLM_STRICT": "1"}
PROMPTS = [f"Number {i} says: Hello, my name is {'Ada ' * (i % 7)}" for i in range(30)]


@pytest.fixture(autouse=True)
def many_files() -> None:
    """Let this process open as many connections as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))


def body_of(raw: bytes) -> str:
    """The body of a chunked answer."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts).decode()


async def exchange(port: int, data: bytes) -> bytes:
    """Everything that one connection answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read(-1)
    finally:
        writer.close()


async def test_t03_a_thousand_streams_beside_a_thousand_idle_connections(model_folder):
    flags = ("--max-connections", "2100", "--max-num-queued-reqs", "4000", "--max-num-seqs", "64")
    with Server(model_folder, *flags, env=STRICT) as server:
        loop = asyncio.get_running_loop()

        def timed_canary() -> tuple[str, float]:
            begun = time.monotonic()
            return server.canary(), time.monotonic() - begun

        canary, _ = timed_canary()
        alone = statistics.median(timed_canary()[1] for _ in range(9))
        asked = [{"prompt": p, "max_tokens": 40, "temperature": 0, "ignore_eos": True} for p in PROMPTS]
        want = [server.post("/v1/completions", body).json["choices"][0]["text"] for body in asked]
        resting = []
        for _ in range(1000):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            resting.append((reader, writer))
        beside = statistics.median([(await loop.run_in_executor(None, timed_canary))[1] for _ in range(9)])

        async def stream(i: int) -> bool:
            data = json.dumps({**asked[i % 30], "stream": True}).encode()
            raw = await exchange(server.port, post_head(len(data), extra="connection: close\r\n") + data)
            return "".join(e["choices"][0]["text"] for e in sse_events(body_of(raw))) == want[i % 30]

        begun = time.monotonic()
        right = sum(await asyncio.gather(*(stream(i) for i in range(1000))))
        seconds = time.monotonic() - begun
        for reader, writer in resting:  # they are still open
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
            writer.close()
        assert server.canary() == canary
        assert eventually(lambda: idle(server))
        print(
            f"T03: {right} of 1,000 streams right in {seconds:.1f} s, 1,000 of 1,000 idle connections open; canary "
            f"{1000 * alone:.0f} ms alone, {1000 * beside:.0f} ms beside them"
        )
        assert right == 1000
        assert beside <= 5 * alone


async def test_t05_five_hundred_slow_senders(model_folder):
    """Half of them send a head, half a body, a byte a second."""
    flags = ("--header-timeout", "5", "--body-timeout", "12")
    with Server(model_folder, *flags, env=STRICT) as server:
        canary = server.canary()

        async def send_slowly(start: bytes, drop: bytes) -> float:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            begun = time.monotonic()
            writer.write(start)
            end = asyncio.ensure_future(reader.read(-1))
            while not end.done():
                writer.write(drop)
                await asyncio.wait({end}, timeout=1.0)
            writer.close()
            with_answer = end.exception() is None and end.result()
            assert not with_answer or b" 408 " in end.result()[:20], end.result()[:100]
            return time.monotonic() - begun

        heads = [send_slowly(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-", b"a") for _ in range(250)]
        bodies = [send_slowly(post_head(1000), b" ") for _ in range(250)]
        work = asyncio.gather(*(asyncio.gather(*kind) for kind in (heads, bodies)))
        while not work.done():
            assert await asyncio.get_running_loop().run_in_executor(None, server.canary) == canary
            await asyncio.sleep(0.5)
        worst = [max(times) for times in await work]
        print(f"T05: 500 of 500 cut, heads after {worst[0]:.1f} s (limit 5), bodies after {worst[1]:.1f} s (limit 12)")
        assert worst[0] < 5 + 3 and worst[1] < 12 + 5


def test_t23_more_connections_than_the_process_may_have(model_folder):
    """A limit of open files that falls under the running server: it refuses or lets wait, and recovers."""
    with Server(model_folder, env=STRICT) as server:
        assert server.process is not None
        canary = server.canary()
        process = psutil.Process(server.process.pid)
        room = process.num_fds() + 60
        process.rlimit(psutil.RLIMIT_NOFILE, (room, room))

        def recovered() -> bool:
            try:
                return server.get("/version").status == 200
            except OSError:  # refused
                return False

        for _ in range(3):
            held = []
            for _ in range(300):
                connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
                connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
                held.append(connection)
            time.sleep(1)
            assert server.alive and process.num_fds() <= room
            for connection in held:
                connection.close()
            begun = time.monotonic()
            assert eventually(recovered, 5)
            assert server.canary() == canary
            print(f"T23: 300 connections, room for 60: exact again after {time.monotonic() - begun:.2f} s")
        assert eventually(lambda: idle(server), 5)


WHOLE = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
SOUND = (
    post_head(len(WHOLE)) + WHOLE,
    post_head(None) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(WHOLE), WHOLE),
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\naccept: */*\r\n\r\n",
    b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 2 + post_head(len(WHOLE)) + WHOLE,
    b"HEAD /health HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
)
PIECES = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b"\xff\xfe",
        b" ",
        b":",
        b"\t",
        b"0\r\n\r\n",
        b"\x16\x03\x01",
        b"PRI * HTTP/2.0\r\n\r\n",
    ),
    *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n", b"transfer-encoding: chunked, x\r\n"),
    *(b"content-length: 5\r\n", b"content-length: -1\r\n", b"content-length: 99999999999999999999\r\n"),
    *(b"content-length: 0x10\r\n", b"content-length: 5, 6\r\n", b"host: a\r\nhost: b\r\n", b"host: \x01\r\n"),
    *(b"connection: upgrade\r\nupgrade: websocket\r\n", b"expect: 100-continue\r\n", b"te: trailers\r\n"),
    *(
        b"ffffffffffffffff\r\n",
        b"-1\r\n",
        b"5;a=b;c\r\n",
        b"zz\r\n",
        b"1\r\nx\r\n" * 200,
        b"x: " + b"y" * 40_000 + b"\r\n",
    ),
    *(b"x: y\r\n" * 2_000, b"/" + b"a" * 70_000, b" HTTP/3.0\r\n", b"{" * 5_000, b"[[[[", b'"\\ud800"'),
)


def mutated(rng: random.Random) -> bytes:
    """A sound request with one to four changes: bytes changed, cut, doubled, or put in."""
    data = bytearray(rng.choice(SOUND))
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        to = min(len(data), at + rng.choice((1, 2, 5, 20, 100)))
        change = rng.randrange(5)
        if change == 0 and data:
            data[min(at, len(data) - 1)] = rng.randrange(256)
        elif change == 1:
            del data[at:to]
        elif change == 2:
            data[at:at] = data[at:to] * rng.randint(1, 3)
        else:
            lines = [match.end() for match in re.finditer(b"\r\n", bytes(data))] or [at]
            at = rng.choice(lines) if rng.random() < 0.6 else at
            data[at:at] = rng.choice(PIECES)
    return bytes(data)


def statuses_of(server: Server, data: bytes, rng: random.Random) -> list[int]:
    """The statuses of all answers to what is sent at once, in two parts, or by single bytes at the end."""
    cut = rng.choice((len(data), len(data), rng.randint(0, len(data)), max(0, len(data) - 20)))
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        try:
            connection.sendall(data[:cut])
            for i in range(cut, len(data)) if len(data) - cut <= 20 else ():
                connection.sendall(data[i : i + 1])
            connection.sendall(data[cut:] if len(data) - cut > 20 else b"")
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except TimeoutError:
            raise
        except OSError:  # cut
            pass
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z][A-Za-z -]*\r\n", bytes(answer))]


def test_t27_ten_thousand_requests_that_are_not_quite_http(model_folder):
    with Server(model_folder, env=STRICT) as server:
        assert server.process is not None
        canary = server.canary()
        process = psutil.Process(server.process.pid)
        seen: Counter[int] = Counter()
        wrong: list[Any] = []

        def one(i: int) -> None:
            rng = random.Random(i)
            data = mutated(rng)
            try:
                found = statuses_of(server, data, rng)
            except TimeoutError:
                wrong.append(("no end", data[:300]))
                return
            seen.update(found or [0])
            if any(status >= 500 for status in found):
                wrong.append((found, data[:300]))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(500)))
            before = process.memory_info().rss
            list(pool.map(one, range(500, 10_000)))
        growth = (process.memory_info().rss - before) / 2**20
        assert server.canary() == canary
        assert eventually(lambda: idle(server), 5)
        told = ", ".join(f"{count:,} x {status or 'closed'}" for status, count in sorted(seen.items()))
        print(
            f"T27: {len(wrong)} of 10,000 answered with a server error or not at all; {told}; memory {growth:+.1f} MB"
        )
        assert not wrong, wrong[:20]
        assert growth <= 50
