"""Deadlines, pairs of options, and a bad network between client and server."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.server.engines import assert_idle, final, greedy, running
from tests.server.http_server import Server
from tests.server.test_http_limits import eventually, idle, post_head

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

STRICT = {"VLLM_STRICT": "1"}


async def test_t07_three_hundred_deadlines(model_folder, monkeypatch):
    """They pass in the queue, amid the prompt, amid the answer; some requests are done before."""
    monkeypatch.setenv("VLLM_STRICT", "1")
    async with running(model_folder, max_num_seqs=16, max_num_queued_reqs=4000) as engine:
        canary = (await final(engine, "The capital of France is", greedy(12), "before")).outputs[0].text
        ends: Counter[str] = Counter()
        late = []

        async def one(i: int) -> None:
            rng = random.Random(i)
            limit = rng.choice((0.01, 0.1, 0.3, 1.0, 3.0))
            prompt = {"prompt_token_ids": [rng.randrange(5, 300) for _ in range(rng.choice((3, 200, 450)))]}
            started = False
            begun = time.monotonic()
            try:
                async for _ in engine.generate(prompt, greedy(rng.choice((5, 60))), f"r{i}", timeout=limit):
                    started = True
                ends["done"] += 1
            except TimeoutError:
                ends["amid the answer" if started else "before the first token"] += 1
            late.append(time.monotonic() - begun - limit)

        await asyncio.gather(*(one(i) for i in range(300)))
        await assert_idle(engine)
        assert (await final(engine, "The capital of France is", greedy(12), "after")).outputs[0].text == canary
    told = ", ".join(f"{count} {end}" for end, count in ends.items())
    print(f"T07: 300 of 300 ended, {told}; the last {max(late):.2f} s after its deadline")
    assert ends.total() == 300 and ends["amid the answer"] and ends["before the first token"] and ends["done"]
    assert max(late) <= 0.5


# Two values of each parameter, neither the default, the second sometimes refused.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "n": (2, 3),
    "best_of": (3, 4),
    "temperature": (0, 1.7),
    "top_p": (0.5, 0.01),
    "top_k": (1, 1000),
    "min_p": (0.1, 1.0),
    "presence_penalty": (2, -2),
    "frequency_penalty": (1.5, -0.5),
    "repetition_penalty": (1.5, 0.5),
    "seed": (7, -1),
    "stop": (["a", "the"], "\n"),
    "stop_token_ids": ([5, 6], []),
    "include_stop_str_in_output": (True, "yes"),
    "ignore_eos": (True, 1),
    "max_tokens": (8, 505),
    "min_tokens": (3, 20),
    "logit_bias": ({"5": 100}, {"6": -100}),
    "allowed_token_ids": ([5, 6, 7], []),
    "bad_words": (["the"], ["x" * 1000]),
    "logprobs": (3, 0),
    "prompt_logprobs": (2, 0),
    "echo": (True, False),
    "stream": (True, True),
    "skip_special_tokens": (False, False),
    "truncate_prompt_tokens": (2, 600),
    "use_beam_search": (True, True),
    "cache_salt": ("a", ""),
}


def test_t29_pairs_of_options(model_folder):
    """Every two parameters with two values each, to prompts that are cached or longer than a step."""
    pairs = [
        {a: va, b: vb}
        for a, b in itertools.combinations(OPTIONS, 2)
        for va, vb in itertools.product(OPTIONS[a], OPTIONS[b])
    ]
    flags = ("--max-num-batched-tokens", "64", "--enable-chunked-prefill", "--block-size", "8")
    prompts = ("Hello", "The capital of France is " * 12, [7] * 150)
    with Server(model_folder, *flags, env=STRICT) as server:
        canary = server.canary()
        seen: Counter[int] = Counter()
        wrong = []

        def one(i: int) -> None:
            body = {"prompt": prompts[i % 3], "max_tokens": 4, **pairs[i]}
            answer = server.post("/v1/completions", body)
            seen[answer.status] += 1
            failed = body.get("stream") is True and answer.status == 200 and '"error"' in answer.text
            if answer.status not in (200, 400) or failed:
                wrong.append((body, answer.status, answer.text[-300:]))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(len(pairs))))
        assert server.canary() == canary
        assert eventually(lambda: idle(server), 10)
        print(f"T29: {len(wrong)} of {len(pairs):,} pairs answered wrongly; {seen[200]:,} x 200, {seen[400]:,} x 400")
        assert not wrong, wrong[:10]
        assert seen[200] > len(pairs) / 2


def test_t40_one_id_a_thousand_times_and_salts(model_folder):
    """1,000 requests of one X-Request-Id, with five salts: every answer is its own, and a salt finds its own prefix."""
    prompts = [f"Number {i} " + "of many says " * 8 for i in range(50)]
    with Server(model_folder, "--enable-prompt-tokens-details", env=STRICT) as server:

        def ask(i: int) -> tuple[str, str, bool]:
            body = {"prompt": prompts[i % 50], "max_tokens": 8, "temperature": 0, "cache_salt": f"salt {i // 50 % 5}"}
            answer = server.post("/v1/completions", body, headers={"x-request-id": "the-same"})
            assert answer.status == 200, answer.text
            choice, details = answer.json["choices"][0], answer.json["usage"]["prompt_tokens_details"]
            return answer.json["id"], choice["text"], details is not None

        first = [ask(i) for i in range(250)]  # one by one: what each is the first to ask with its salt
        with ThreadPoolExecutor(16) as pool:
            later = list(pool.map(ask, range(250, 1000)))
        ids = {name for name, _, _ in first + later}
        right = sum(text == first[i % 50][1] for i, (_, text, _) in enumerate(first + later))
        leaked = sum(hit for _, _, hit in first[50:])  # prompts that only other salts had asked
        found = sum(hit for _, _, hit in later)
    print(
        f"T40: {right} of 1,000 answers right, {len(ids)} ids, {leaked} of 200 saw another salt's prefix, {found} own"
    )
    assert (right, len(ids), leaked, found) == (1000, 1000, 0, 750)


def test_t41_ten_thousand_names_make_no_series(model_folder):
    with Server(model_folder, env=STRICT) as server:

        def send(i: int) -> None:
            if i % 3 == 0:
                server.get(f"/path-{i}")
            elif i % 3 == 1:
                server.post("/v1/completions", {"prompt": "x", "model": f"model-{i}"})
            else:
                server.raw(f"METHOD{i} / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode(), timeout=5)

        def series() -> set[str]:
            lines = server.get("/metrics").text.splitlines()
            return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

        series()
        for i in range(3):
            send(i)
        before = series()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, range(3, 10_000)))
        new = series() - before
        print(f"T41: {len(new)} new series of metrics after 10,000 names")
        assert not new


class BadNetwork:
    """A proxy on a port of its own that does to each connection what its number says."""

    WAYS = ("slow", "single bytes", "reset", "half closed", "black hole")

    def __init__(self, port: int) -> None:
        self._port = port
        self._count = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> BadNetwork:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number = next(self._count)
        way, rng = self.WAYS[number % 5], random.Random(number)
        back, there = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            with suppress(ConnectionError):
                await asyncio.gather(
                    self._carry(reader, there, way, rng, True), self._carry(back, writer, way, rng, False)
                )
        finally:
            for end in (there, writer):
                end.transport.abort() if way in ("reset", "black hole") else end.close()
            self._tasks.discard(task)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str, rng: random.Random, up: bool
    ) -> None:
        left = rng.randint(1, 3000) if way in ("reset", "black hole") else 10**9
        while data := await source.read(4096):
            if way == "slow":
                await asyncio.sleep(rng.random() * 0.05)
            pieces = [data[i : i + 1] for i in range(len(data))] if way == "single bytes" else [data]
            for piece in pieces:
                sink.write(piece)
                await sink.drain()
                if way == "single bytes":
                    await asyncio.sleep(0)
            left -= len(data)
            if left <= 0 and way == "black hole":
                await asyncio.sleep(2)  # neither end hears anything
            if left <= 0:
                raise ConnectionResetError
        if way == "half closed" or not up:
            sink.write_eof()


async def test_t22_five_hundred_requests_over_a_bad_network(model_folder):
    """Delays, single bytes, resets, half-closed connections, black holes: what comes is right, and nothing is held."""
    with Server(model_folder, "--write-timeout", "5", env=STRICT) as server:
        canary = server.canary()
        bodies = [
            {"prompt": f"Number {i} says", "max_tokens": 30, "temperature": 0, "ignore_eos": True} for i in range(20)
        ]
        want = [server.post("/v1/completions", body).json["choices"][0]["text"] for body in bodies]
        ends: Counter[str] = Counter()
        async with BadNetwork(server.port) as network:

            async def one(i: int) -> None:
                data = json.dumps(bodies[i % 20]).encode()
                reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
                try:
                    writer.write(post_head(len(data), extra="connection: close\r\n") + data)
                    if i % 10 >= 5:
                        with suppress(OSError):
                            writer.write_eof()
                    raw = await asyncio.wait_for(reader.read(-1), 30)
                    _, _, answer = raw.partition(b"\r\n\r\n")
                    whole = raw.startswith(b"HTTP/1.1 200") and answer.endswith(b"}")
                    if not whole:
                        ends["cut"] += 1
                    else:
                        right = json.loads(answer)["choices"][0]["text"] == want[i % 20]
                        ends["right" if right else "wrong"] += 1
                except ConnectionError:
                    ends["cut"] += 1
                finally:
                    writer.close()

            for start in range(0, 500, 50):
                await asyncio.gather(*(one(i) for i in range(start, start + 50)))
        assert eventually(lambda: idle(server) and server.metric("vllm:gpu_cache_usage_perc") == 0, 10)
        assert server.canary() == canary
    print(f"T22: 500 requests over a bad network: {ends['right']} right, {ends['cut']} cut, {ends['wrong']} wrong")
    assert ends["wrong"] == 0 and ends["right"] >= 150
