"""What one request can take from others: another client's stream, /health, memory. See `benchmarks/attacks.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.attacks import FOUND, PAIRS, TEMPLATES, Attack, Bystanders, bodies, family, measure
from tests.server.http_server import MODEL, Server
from tests.tiny_encoders import save_bert
from vllm.entrypoints.openai.pooling import ROUTES

# Generous: on an idle machine they are a tenth of a second, where they were ten seconds and more.
SECONDS = 2.5
MEMORY_SECONDS = 12.0
POOLED_SECONDS = 60.0  # 2,000 pairs take seconds; a text tokenized anew for each took hours
# Fields that take text or lists; the others refuse whatever is no number or flag at once (`make soak` tries them all).
FIELDS = frozenset(
    {"prompt", "messages", "input", "instructions", "stop", "bad_words", "logit_bias", "allowed_token_ids", "tokens"}
    | {"stop_token_ids", "suffix", "user", "model", "tools", "tool_choice", "documents", "chat_template", "request_id"}
    | {"chat_template_kwargs", "metadata", "cache_salt", "guided_json", "response_format", "no_such_field", "include"}
    | {"text_1", "text_2", "query", "dimensions", "truncate_prompt_tokens"}
    | {"system", "stop_sequences", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "text"}
)
QUEUED = ("n = 2,000", "1,000 prompts", "64 beams")  # honest work, see the tests of fairness


@pytest.fixture(scope="module")
def attacked(model_folder: Path) -> Iterator[Server]:
    with Server(model_folder, "--trust-request-chat-template") as running:
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


def test_no_field_holds_up_anybody(attacked: Server, watched: Bystanders) -> None:
    attacks = [a for a in family(256 << 10) if a.name.split(" ")[1].rstrip(":") in FIELDS]
    assert len(attacks) > 250
    for attack in attacks:
        effect = measure(attacked.port, pid_of(attacked), attack, watched, patience=0.0)
        assert effect.status in (200, 400, 404, 503), attack.name
        assert effect.gap < SECONDS, attack.name
        assert effect.health < SECONDS, attack.name


def test_every_route_of_pooling_is_attacked() -> None:
    assert {model for _, model, _ in bodies(pools=True)} == {route.request for route in ROUTES.values()}


@pytest.mark.parametrize(
    ("classes", "paths"), [(0, ("/v1/embeddings",)), (1, ("/pooling", "/classify", "/score", "/rerank"))]
)
def test_nobody_who_pools_holds_up_others(tmp_path: Path, classes: int, paths: tuple[str, ...]) -> None:
    save_bert(tmp_path, classes=classes)
    attacks = [a for a in (*PAIRS, *family(256 << 10, pools=True)) if a.path in paths]
    attacks = [a for a in attacks if a in PAIRS or a.name.split(" ")[1].rstrip(":") in FIELDS]
    assert len(attacks) > 30
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
