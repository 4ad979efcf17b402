"""HTTP as clients, proxies and probes speak it: offers to switch protocols, HEAD, old versions, pieces."""

from __future__ import annotations

import json

import pytest

from tests.server.http_server import Server

BODY = json.dumps({"prompt": "Hi", "max_tokens": 3, "temperature": 0, "ignore_eos": True}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
# What Java's HTTP client sends with its first request on a connection.
H2C = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


def parts_of(answer: bytes) -> tuple[int, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "data",
    [
        POST + H2C + LENGTH + BODY,
        POST + H2C + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
        POST + b"Upgrade: websocket, foo/2\r\nConnection: upgrade,close\r\n" + LENGTH + BODY,
    ],
    ids=["length", "chunked", "other"],
)
def test_an_offer_to_switch_protocols_is_passed_over(server: Server, data: bytes) -> None:
    status, body = parts_of(server.raw(data))
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == server.post("/v1/completions", BODY).json["choices"][0]["text"]


def test_requests_behind_an_offer_are_answered_too(server: Server) -> None:
    """Wherever the network cuts them."""
    offer = b"GET /version HTTP/1.1\r\nHost: a\r\n" + H2C.replace(b", close", b"") + b"\r\n"
    first = POST + H2C.replace(b", close", b"") + LENGTH + BODY
    last = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    data = offer * 3 + first + last
    whole = server.raw(data)
    assert whole.count(b"HTTP/1.1 200 OK") == 5
    assert whole.count(b'"version"') == 3
    assert whole.count(b'"usage"') == 1
    assert "WebSocket" not in server.log
    for cut in (len(offer) - 9, 3 * len(offer) + len(first) - len(BODY), 3 * len(offer) + len(first) - 5):
        assert server.pieces([data[:cut], data[cut:]]).count(b"HTTP/1.1 200 OK") == 5


@pytest.mark.parametrize("host", [b"", b"a", b"a_b.example:80", b"127.0.0.1:8000", b"[::1]:8000", b"[fe80::1%25eth0]"])
def test_a_host_has_any_name(server: Server, host: bytes) -> None:
    assert parts_of(server.raw(b"GET /version HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % host))[0] == 200


@pytest.mark.parametrize("host", [b"a b", b"a/../b", b"a:80:80", b"a@b", b"[::1", b"a:b", b"\xc3\xa4", b"a\tb"])
def test_a_host_that_is_none_is_refused(server: Server, host: bytes) -> None:
    answer = parts_of(server.raw(b"GET /version HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % host))
    assert answer[0] == 400


def test_head_is_get_without_the_body(server: Server) -> None:
    """Probes of load balancers ask so."""
    for path in ("/health", "/ping", "/version", "/v1/models", "/metrics", "/"):
        answer = server.request("HEAD", path)
        assert (answer.status, answer.body) == (200, b""), path
        asked = b"HEAD %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % path.encode()
        assert parts_of(server.raw(asked)) == (200, b"")
    assert server.request("HEAD", "/v1/completions").status == 405
    assert server.request("HEAD", "/nowhere").status == 404


def test_the_document_of_the_routes_says_what_they_answer(server: Server) -> None:
    paths = server.get("/openapi.json").json["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        answers = paths[path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "415", "503", "500"} <= set(answers)
        assert set(answers["200"]["content"]) == {"text/event-stream", "application/json"}
        assert "error" in answers["400"]["content"]["application/json"]["schema"]["properties"]
    for path, method in (("/health", "get"), ("/ping", "get"), ("/reset_prefix_cache", "post")):
        assert "content" not in paths[path][method]["responses"]["200"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answers = paths[path]["post"]["responses"]
        assert list(answers["200"]["content"]) == ["text/plain"] and {"400", "404"} <= set(answers)
    for path in ("/sleep", "/wake_up", "/v1/audio/transcriptions"):  # which only ever refuse
        assert set(paths[path]["post"]["responses"]) == {"400"}
        assert server.post(path, {}).status == 400
    assert "503" in paths["/ping"]["get"]["responses"]
    for path, methods in paths.items():
        assert all("422" not in route["responses"] for route in methods.values()), path


def test_echo_shows_all_tokens_that_logprobs_are_told_of(server: Server) -> None:
    """Special tokens of a prompt given as ids are part of its text, else text and offsets disagree."""
    body = {"prompt": [0, 40, 41, 1, 42], "max_tokens": 2, "echo": True, "logprobs": 0, "temperature": 0}
    choice = server.post("/v1/completions", body).json["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("<s>") and "</s>" in choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
