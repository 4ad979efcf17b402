"""Much at once, from outside: steady load, overload, readers that do not read, clients that leave at any moment."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.server.http_server import CANARY, Server, sse_events
from tests.server.test_http_limits import eventually, idle, post_head

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

STRICT = {"VLLM_STRICT": "1"}
PROMPTS = [f"Number {i} says: Hello, my name is {'Ada ' * (i % 7)}" for i in range(30)]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Requests of both routes, greedy and with seeds, each of which has one right answer."""
    found: list[tuple[str, dict[str, Any]]] = []
    for i, prompt in enumerate(PROMPTS):
        common = {"max_tokens": 4 + i % 20, "seed": i, "temperature": (0.0, 1.0)[i % 2]}
        found.append((COMPLETIONS, {"prompt": prompt, **common}))
        found.append((CHAT, {"messages": [{"role": "user", "content": prompt}], **common}))
    return found


def text_of(server: Server, route: str, body: dict[str, Any], stream: bool) -> str:
    answer = server.post(route, {**body, "stream": stream}, timeout=120)
    assert answer.status == 200, answer.text
    choices = [e["choices"][0] for e in sse_events(answer.text)] if stream else answer.json["choices"]
    if route == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta" if stream else "message"].get("content") or "" for choice in choices)


def test_t01_three_thousand_answers_at_64_clients(model_folder):
    with Server(model_folder, env=STRICT) as server:
        asked = bodies()
        expected = [text_of(server, route, body, False) for route, body in asked]

        def one(i: int) -> bool:
            route, body = asked[i % len(asked)]
            return text_of(server, route, body, stream=i % 3 > 0) == expected[i % len(asked)]

        with ThreadPoolExecutor(64) as clients:
            right = sum(clients.map(one, range(3000)))
        assert eventually(lambda: idle(server))
        print(f"T01: {right} of 3,000 answers right at 64 clients")
        assert right == 3000


async def ask(port: int, body: dict[str, Any]) -> tuple[int, bytes, float]:
    """Status, whole answer and seconds of one request on a connection of its own."""
    begun = time.monotonic()
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post_head(len(data), extra="connection: close\r\n") + data)
    answer = await reader.read(-1)
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer, time.monotonic() - begun


@pytest.mark.parametrize(("queued", "seconds"), [(32, 30), (128, 60)])
async def test_t02_five_times_more_than_the_server_can_do(model_folder, queued, seconds):
    """Requests that come whether or not the ones before were answered, then the canary at once."""
    flags = ("--max-num-seqs", "4", "--max-num-queued-reqs", str(queued))
    with Server(model_folder, *flags, env=STRICT) as server:
        canary = server.canary()
        body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
        begun = time.monotonic()
        await asyncio.gather(*(ask(server.port, body) for _ in range(16)))
        rate = 5 * 16 / (time.monotonic() - begun)
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        tasks = []
        begun = time.monotonic()
        for i in range(round(seconds * rate)):
            await asyncio.sleep(max(0.0, begun + i / rate - time.monotonic()))
            tasks.append(asyncio.ensure_future(ask(server.port, body)))
        answers = await asyncio.gather(*tasks)
        ended = time.monotonic()
        assert server.canary() == canary
        after = time.monotonic() - ended
        served = [a for a in answers if a[0] == 200]
        refused = [a for a in answers if a[0] == 503]
        slow = sorted(a[2] for a in refused)[int(0.99 * len(refused))]
        growth = (process.memory_info().rss - before) / 2**20
        print(
            f"T02: {rate:.0f} requests/s, 5 times the capacity: {len(served)} served, {len(refused)} refused with 503, "
            f"refusals' p99 {slow * 1000:.0f} ms, memory {growth:+.0f} MB, canary exact {after * 1000:.0f} ms after"
        )
        assert len(served) + len(refused) == len(answers)
        assert served and len(refused) > len(answers) / 2
        assert all(b"retry-after:" in a[1].lower() for a in refused)
        assert slow <= 0.05
        assert growth <= 50
        assert after <= 1.0
        assert eventually(lambda: idle(server))


def received(connection: socket.socket) -> bytes:
    """Everything that is still to be read, to the end of the connection."""
    parts = []
    connection.settimeout(10)
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def test_t04_two_hundred_readers_that_do_not_read(model_folder):
    flags = ("--write-timeout", "3", "--max-num-seqs", "256", "--max-num-queued-reqs", "4000")
    with Server(model_folder, *flags, env=STRICT) as server:
        canary = server.canary()
        body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "logprobs": True, "top_logprobs": 20}
        data = json.dumps({**body, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
        held = []
        for _ in range(200):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(post_head(len(data), CHAT) + data)
            held.append(connection)
        try:
            beside = server.post(COMPLETIONS, CANARY, timeout=300)
            assert beside.json["choices"][0]["text"] == canary
            assert eventually(lambda: idle(server), 600)
            process = psutil.Process(server.process.pid)

            def open_connections() -> int:
                return sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections(kind="tcp"))

            assert eventually(lambda: open_connections() <= 1, 60)
            cut = sum(not received(connection).endswith(b"0\r\n\r\n") for connection in held)
            print(f"T04: {cut} of 200 readers cut, {process.memory_info().rss / 2**20:.0f} MB")
            assert cut == 200
        finally:
            for connection in held:
                connection.close()
        assert server.canary() == canary


NAME = "a-model-with-a-long-name-" * 16  # so that the events of a stream are large, and nothing else is


async def gaps(port: int, done: asyncio.Event) -> list[float]:
    """The seconds between the events of a client's streams, one stream after the other, until `done`."""
    found: list[float] = []
    body = {"model": NAME, "prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    while not done.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post_head(len(data), extra="connection: close\r\n") + data)
        assert (await reader.readuntil(b"data: ")).startswith(b"HTTP/1.1 200")
        last = time.monotonic()
        while await reader.read(65536):
            now = time.monotonic()
            found.append(now - last)
            last = now
        writer.close()
    return found


async def drip(connection: socket.socket, done: asyncio.Event) -> int:
    """Read one byte a second. Returns how many bytes came before the connection was cut, or `done`."""
    count = 0
    loop = asyncio.get_running_loop()
    while not done.is_set():
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(done.wait(), 1.0)
        try:
            if not await asyncio.wait_for(loop.sock_recv(connection, 1), 1.0):
                break
            count += 1
        except asyncio.TimeoutError:
            continue
        except ConnectionError:
            break
    return count


async def test_t04_pace_and_memory_beside_two_hundred_slow_readers(model_folder):
    """The gaps in four other clients' streams, and the server's memory: alone, beside 200 clients that read, beside
    200 that read a byte a second while their answers are computed, and when these are done and wait to be read.
    """
    flags = ("--write-timeout", "40", "--max-num-seqs", "512", "--max-num-queued-reqs", "4000")
    with Server(model_folder, *flags, "--served-model-name", NAME, env=STRICT) as server:
        process = psutil.Process(server.process.pid)
        body = {"model": NAME, "prompt": "Hi", "n": 2, "max_tokens": 400, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        loop = asyncio.get_running_loop()
        p99: dict[str, float] = {}
        memory: dict[str, float] = {}

        async def watch(what: str, until: Awaitable[Any]) -> None:
            """The pace of four clients and the most memory until that has come."""
            done = asyncio.Event()
            others = [asyncio.ensure_future(gaps(server.port, done)) for _ in range(4)]
            waiting = asyncio.ensure_future(until)
            memory[what] = 0.0
            while not waiting.done():
                memory[what] = max(memory[what], process.memory_info().rss / 2**20)
                await asyncio.sleep(0.05)
            await waiting
            done.set()
            found = sorted(gap for client in await asyncio.gather(*others) for gap in client)
            p99[what] = 1000 * found[int(0.99 * len(found))]

        async def all_computed() -> None:
            """Of the streams of 200, each of two sequences; the four clients' own are four."""
            while await loop.run_in_executor(None, server.metric, "vllm:num_requests_running") > 4:
                await asyncio.sleep(0.2)

        async def all_read() -> None:
            assert all(a[0] == 200 for a in await asyncio.gather(*(ask(server.port, body) for _ in range(200))))

        await watch("alone", asyncio.sleep(5))
        for _ in range(2):  # the first time the memory grows for good
            await watch("200 that read", all_read())
        done, held = asyncio.Event(), []
        for _ in range(200):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", server.port))
            await loop.sock_sendall(connection, post_head(len(data)) + data)
            held.append(connection)
        readers = [asyncio.ensure_future(drip(connection, done)) for connection in held]
        try:
            await asyncio.sleep(0.5)
            await watch("200 slow", all_computed())
            await watch("200 slow, computed", asyncio.sleep(5))
            begun = time.monotonic()
            while sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections(kind="tcp")) > 1:
                assert time.monotonic() - begun < 60
                await asyncio.sleep(0.1)
        finally:
            done.set()
            await asyncio.gather(*readers)
            for connection in held:
                connection.close()
        assert eventually(lambda: idle(server) and server.metric("vllm:gpu_cache_usage_perc") == 0, 2)
        each = (max(memory["200 slow"], memory["200 slow, computed"]) - memory["200 that read"]) * 1024 / 200
        told = ", ".join(f"{what} {ms:.0f} ms and {memory[what]:.0f} MB" for what, ms in p99.items())
        print(f"T04: p99 of the gaps in others' streams, and memory: {told}; {each:.0f} KiB for each slow reader")
        assert p99["200 slow"] <= 2 * p99["200 that read"]
        assert p99["200 slow, computed"] <= 2 * p99["alone"] + 10
        assert each <= 64


def test_t06_a_thousand_clients_leave(model_folder):
    """By end or reset, before the body is whole, queued, in the prompt, in the middle and at the end; n > 1 too."""
    with Server(model_folder, "--max-num-queued-reqs", "4000", env=STRICT) as server:
        canary = server.canary()

        def one(i: int) -> int:
            rng = random.Random(i)
            body = {"prompt": PROMPTS[i % 30] * rng.randint(1, 4), "max_tokens": rng.randint(1, 60), "ignore_eos": True}
            body |= {"n": rng.choice((1, 1, 3)), "temperature": 1.0, "stream": rng.random() < 0.7}
            data = json.dumps(body).encode()
            part = data[: rng.randint(1, len(data) - 1)] if rng.random() < 0.1 else data
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(post_head(len(data)) + part)
                connection.settimeout(rng.choice((0.001, 0.01, 0.05, 0.2, 1.0)))
                try:
                    for _ in range(rng.randint(0, 30)):
                        connection.recv(256)
                except TimeoutError:
                    pass
                if rng.random() < 0.5:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return part is data

        with ThreadPoolExecutor(32) as clients:
            sent = sum(clients.map(one, range(1000)))
        begun = time.monotonic()
        assert eventually(lambda: idle(server), 30)
        seconds = time.monotonic() - begun
        assert server.canary() == canary
        assert server.alive and server.metric("vllm:gpu_cache_usage_perc") == 0
        print(f"T06: 1,000 clients left, {sent} with a whole request; idle with a free cache {seconds:.2f} s later")
