"""What one request can take from others: another client's stream, /health, memory. See `benchmarks/attacks.py`."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uvloop
from fastapi import FastAPI

from benchmarks.attacks import (
    AMBIGUOUS,
    CHAT,
    COMPLETIONS,
    FOUND,
    PAIRS,
    SWITCHES,
    TEMPLATES,
    Attack,
    Bystanders,
    bodies,
    family,
    measure,
)
from tests.server.http_server import MODEL, Server
from tests.tiny_encoders import save_bert
from vllm.entrypoints.openai.api_server import ACCEPTED_PER_TURN, several
from vllm.entrypoints.openai.routes import LATER_ROUTES, OTHER_MODELS_ROUTES, router
from vllm.entrypoints.openai.run_batch import main

# Generous: on an idle machine they are a tenth of a second, where they were ten seconds and more.
SECONDS = 2.5
MEMORY_SECONDS = 12.0
POOLED_SECONDS = 60.0  # 2,000 pairs take seconds; a text tokenized anew for each took hours
BRIEF = 128 << 10  # bytes of a field's value; `make soak` takes a megabyte, and every field of every route
WITHOUT_BODY = {
    *("/ping", "/reset_prefix_cache", "/start_profile", "/stop_profile", "/v1/responses/{response_id}/cancel"),
    *(*OTHER_MODELS_ROUTES, *LATER_ROUTES),
}
BATCHED = (COMPLETIONS, CHAT)
QUEUED = ("n = 2,000", "1,000 prompts", "64 beams")  # honest work, see the tests of fairness


@pytest.fixture(scope="module")
def attacked(model_folder: Path) -> Iterator[Server]:
    flags = ("--trust-request-chat-template", "--enable-lora")
    with Server(model_folder, *flags, env=SWITCHES) as running:
        before = running.canary()
        yield running
        assert running.alive, running.log[-3000:]
        assert running.canary() == before


@pytest.fixture
def watched(attacked: Server) -> Iterator[Bystanders]:
    bystanders = Bystanders(attacked.port, MODEL)
    yield bystanders
    bystanders.end()
    assert bystanders.wrong == []


def pid_of(server: Server) -> int:
    assert server.process is not None
    return server.process.pid


@pytest.mark.parametrize(
    "attack", [a for a in (*FOUND, *TEMPLATES) if a.name not in QUEUED], ids=lambda attack: attack.name
)
def test_what_was_found_holds_up_nobody(attacked: Server, watched: Bystanders, attack: Attack) -> None:
    effect = measure(attacked.port, pid_of(attacked), attack, watched, patience=0.0)
    assert effect.status in (200, 400, 404, 503)
    assert effect.gap < SECONDS
    assert effect.health < SECONDS


@pytest.mark.parametrize(
    "attack", [a for a in FOUND if a.name in QUEUED], ids=lambda attack: attack.name.replace(",", "")
)
def test_work_for_many_sequences_leaves_room_for_others(attacked: Server, watched: Bystanders, attack: Attack) -> None:
    """Their first tokens come between its own, and none of them is refused."""
    effect = measure(attacked.port, pid_of(attacked), attack, watched, patience=0.0)
    assert effect.status == 200
    assert effect.gap < SECONDS
    assert effect.health < SECONDS


@pytest.mark.parametrize("attack", AMBIGUOUS[1:6:3], ids=["two", "three"])
def test_texts_that_get_ever_harder_to_read_leave_room_for_others(
    attacked: Server, watched: Bystanders, attack: Attack
) -> None:
    effect = measure(attacked.port, pid_of(attacked), attack, watched, patience=0.0)
    assert effect.status in (200, 400)
    assert effect.gap < SECONDS
    assert effect.health < SECONDS


def test_no_field_holds_up_anybody(attacked: Server, watched: Bystanders) -> None:
    attacks = list(family(BRIEF, brief=True))
    assert len(attacks) > 700
    for attack in attacks:
        effect = measure(attacked.port, pid_of(attacked), attack, watched, patience=0.0)
        assert effect.status in (200, 400, 404, 503), attack.name
        assert effect.gap < SECONDS, attack.name
        assert effect.health < SECONDS, attack.name


def test_a_turn_of_the_event_loop_takes_several_new_connections() -> None:
    """Else clients that ask for much and leave keep new ones out: turns are long while generations are given up."""
    taken = []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            taken.append(transport)
            time.sleep(0.02)

    async def serve() -> None:
        listeners = several(socket.create_server(("127.0.0.1", 0)))
        servers = [await asyncio.get_running_loop().create_server(Taken, sock=each) for each in listeners]
        clients = [socket.create_connection(listeners[0].getsockname()) for _ in range(2 * ACCEPTED_PER_TURN)]
        turns = 0
        while len(taken) < len(clients):
            await asyncio.sleep(0)
            turns += 1
        assert turns < len(clients) // 2
        for each in (*clients, *servers):
            each.close()

    uvloop.run(serve())


def test_every_field_of_every_route_is_attacked() -> None:
    """The list is made of the types that routes read, so that what is added to one of them is in it."""
    app = FastAPI()
    app.include_router(router)
    posts = {path: route["post"] for path, route in app.openapi()["paths"].items() if "post" in route}
    attacked: dict[str, set[str]] = {}
    for pools in (False, True):
        title_of = {body.path: body.model.__name__ for body in bodies(pools)}
        for attack in family(64, pools):
            attacked.setdefault(title_of[attack.path], set()).add(attack.name.split(" ")[1].rstrip(":"))
    for path, route in posts.items():
        if path in WITHOUT_BODY:
            continue
        schema = route["requestBody"]["content"]["application/json"]["schema"]
        assert attacked[schema["title"]] == {*schema["properties"], "no_such_field"}, path


@pytest.mark.parametrize(
    ("classes", "paths"), [(0, ("/v1/embeddings",)), (1, ("/pooling", "/classify", "/score", "/rerank"))]
)
def test_nobody_who_pools_holds_up_others(tmp_path: Path, classes: int, paths: tuple[str, ...]) -> None:
    save_bert(tmp_path, classes=classes)
    attacks = [a for a in (*PAIRS, *family(BRIEF, pools=True, brief=True)) if a.path in paths]
    assert len(attacks) > 60
    with Server(tmp_path, "--dtype", "float32") as server:
        before = server.post("/pooling", {"input": "Hello"}).json["data"]
        bystanders = Bystanders(server.port, MODEL, pools=True)
        for attack in attacks:
            effect = measure(server.port, pid_of(server), attack, bystanders, patience=0.0)
            assert effect.status in (200, 400, 404, 503), attack.name
            assert max(effect.gap, effect.health) < SECONDS, attack.name
            assert effect.took < POOLED_SECONDS, attack.name
        bystanders.end()
        assert bystanders.wrong == [] and len(bystanders.gaps) > len(attacks)
        assert server.post("/pooling", {"input": "Hello"}).json["data"] == before


def test_no_line_of_a_batch_holds_up_the_others(model_folder: Path, tmp_path: Path) -> None:
    """Lines of a batch take the way of requests: each has its own answer, and good ones are as they would be alone."""
    good = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
    bodies_of = [(COMPLETIONS, good), *((a.path, a.body()) for a in family(8 << 10, brief=True) if a.path in BATCHED)]
    lines = []
    for i, (url, body) in enumerate(part for bad in bodies_of for part in (bad, (COMPLETIONS, good))):
        lines.append(json.dumps({"custom_id": str(i), "url": url, "body": {**body, "model": MODEL}}))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--model", str(model_folder),
                 "--served-model-name", MODEL]) == 0  # fmt: skip
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [str(i) for i in range(len(lines))]
    assert {answer["response"]["status_code"] for answer in answers} <= {200, 400}
    texts = {answer["response"]["body"]["choices"][0]["text"] for answer in answers[1::2]}
    assert len(texts) == 1


@pytest.mark.soak
def test_no_field_of_any_kind_holds_up_anybody(attacked: Server, watched: Bystanders) -> None:
    effects = [
        (measure(attacked.port, pid_of(attacked), attack, watched, patience=0.0), attack.name) for attack in family()
    ]
    worst = max(effects, key=lambda found: found[0].gap)
    print(f"{len(effects)} requests, the longest gap {worst[0].gap * 1e3:.0f} ms: {worst[1]}")
    assert [name for effect, name in effects if effect.status not in (200, 400, 404, 503)] == []
    assert worst[0].gap < SECONDS


def test_memory_comes_back(attacked: Server) -> None:
    """What was taken is given back, while others are served."""
    process = psutil.Process(pid_of(attacked))
    large = [attack for attack in FOUND if "MB" in attack.name or "CJK" in attack.name]
    bystanders = Bystanders(attacked.port, MODEL)
    try:
        time.sleep(MEMORY_SECONDS / 4)
        before = process.memory_info().rss
        peak = max(measure(attacked.port, process.pid, attack, bystanders, 0.0).memory[1] for attack in large)
        deadline = time.monotonic() + MEMORY_SECONDS
        while process.memory_info().rss > 1.3 * before and time.monotonic() < deadline:
            time.sleep(0.1)
        after = process.memory_info().rss
    finally:
        bystanders.end()
    print(f"{before >> 20} MB before, {peak >> 20} MB at most, {after >> 20} MB after")
    assert peak > 1.5 * before  # or there was nothing to give back
    assert after <= 1.3 * before
