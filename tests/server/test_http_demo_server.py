"""The demonstration server: one route, old shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.http_server import Server


@pytest.fixture(scope="module")
def demo(model_folder: Path) -> Iterator[Server]:
    with Server(model_folder, module="vllm.entrypoints.api_server") as running:
        yield running


def test_texts_begin_with_the_prompt(demo: Server) -> None:
    answer = demo.post("/generate", {"prompt": "Hello", "max_tokens": 6, "n": 3, "temperature": 0.9, "seed": 1})
    assert answer.status == 200, answer.text
    texts = answer.json["text"]
    assert len(texts) == 3
    assert all(text.startswith("Hello") and len(text) > 5 for text in texts)
    streamed = demo.post(
        "/generate", {"prompt": "Hello", "max_tokens": 6, "n": 3, "temperature": 0.9, "seed": 1, "stream": True}
    )
    chunks = [json.loads(chunk)["text"] for chunk in streamed.body.split(b"\0") if chunk]
    assert streamed.body.endswith(b"\0")
    assert chunks[-1] == texts
    assert all(len(a) <= len(b) for a, b in zip(chunks[0], chunks[-1], strict=True))


def test_beams(demo: Server) -> None:
    body = {"prompt": "Hello", "n": 4, "use_beam_search": True, "temperature": 0.0, "max_tokens": 4}
    texts = demo.post("/generate", body).json["text"]
    assert len(texts) == 4
    streamed = demo.post("/generate", {**body, "stream": True})
    assert json.loads(streamed.body.split(b"\0")[-2])["text"] == texts


def test_wrong_requests_are_refused(demo: Server) -> None:
    for body in ({}, {"prompt": ["a"]}, {"prompt": 5}, {"prompt": "x", "temprature": 1}, {"prompt": "x", "n": 0}):
        answer = demo.post("/generate", body)
        assert answer.status == 400, (body, answer.text)
    assert demo.get("/v1/models").status == 404
    assert demo.get("/health").status == 200
