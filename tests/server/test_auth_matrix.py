"""T36: every route, by every method, with every wrong key and every trick of path and host: 0 unauthorised answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.http_server import Server

KEY = "a-key-of-the-test"
SECOND_KEY = "another-key"
OPEN = {"/health", "/ping", "/version", "/", "/ui/app.js", "/ui/style.css"}
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD")
WRONG_KEYS: tuple[dict[str, str], ...] = (
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"x-api-key": KEY},
    {"authorization": f"Bearer {KEY} {SECOND_KEY}"},
    {"cookie": f"authorization=Bearer {KEY}"},
)
HOSTS = ("a/b?c", "x/y?", "127.0.0.1/health", "a#b", "a@b", "/health", "x?/health")


@pytest.fixture(scope="module")
def locked(model_folder: Path) -> Iterator[Server]:
    environment = {"VLLM_API_KEY": SECOND_KEY, "VLLM_SERVER_DEV_MODE": "1"}
    with Server(
        model_folder, "--api-key", KEY, "--enable-tokenizer-info-endpoint", env=environment, key=KEY
    ) as running:
        yield running


@pytest.fixture(scope="module")
def routes(locked: Server) -> list[str]:
    found = sorted(locked.get("/openapi.json").json["paths"])
    assert len(found) >= 30, found
    return [path.replace("{response_id}", "resp_1") for path in found] + ["/openapi.json", "/", "/nowhere", "/ui/x"]


def tricks(path: str) -> list[str]:
    """Spellings that some parsers take for an open path, or for `path` itself."""
    return [
        path.upper() if path.upper() != path else path + "/",
        "/" + path,
        path + "/",
        path + "?/health",
        path + "%3F/health",
        "/health/.." + path,
        "/health/%2e%2e" + path,
        "/health" + path,
        "/health;" + path,
        "/health%00" + path,
        path + "#/health",
        "/%68ealth/../" + path.lstrip("/"),
        "http://health" + path,
        path.replace("/v1", "/%761"),
    ]


def status_of(raw: bytes) -> int:
    """The status of the first answer; 0 if the connection was just closed."""
    return int(raw.split(b" ", 2)[1]) if raw.startswith(b"HTTP/1.") else 0


def test_nothing_is_answered_without_the_key(locked: Server, routes: list[str]) -> None:
    closed = [path for path in routes if path not in OPEN]
    requests: list[tuple[str, str, dict[str, str]]] = []
    for path in closed:
        requests += [(method, path, WRONG_KEYS[0]) for method in METHODS]
        requests += [("POST", path, key) for key in WRONG_KEYS]
        requests += [("GET", path, WRONG_KEYS[4])]
        requests += [("POST", trick, {}) for trick in tricks(path)]
        requests += [("GET", path, {"host": host}) for host in HOSTS]
        requests.append(("GET", path, {"x-original-url": "/health", "x-rewrite-url": "/health"}))
        requests.append(("GET", path, {"x-forwarded-prefix": "/health", "x-http-method-override": "OPTIONS"}))
    assert len(requests) >= 1000

    def send(request: tuple[str, str, dict[str, str]]) -> str | None:
        method, path, headers = request
        lines = {
            "host": "x",
            "content-type": "application/json",
            "content-length": "2",
            "connection": "close",
        } | headers
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        raw = locked.raw((head + "\r\n{}").encode(), timeout=10)
        status = status_of(raw)
        refused = status in (0, 400, 401)
        return None if refused else f"{request} -> {raw[:200]!r}"

    with ThreadPoolExecutor(4) as pool:
        wrong = [problem for problem in pool.map(send, requests) if problem]
    print(f"T36: {len(wrong)} of {len(requests):,} requests answered without the key")
    assert not wrong, f"{len(wrong)} of {len(requests)}:\n" + "\n".join(wrong[:30])


def test_each_key_opens_and_open_paths_need_none(locked: Server) -> None:
    for key in (KEY, SECOND_KEY):
        for scheme in ("Bearer", "bearer"):
            assert locked.get("/v1/models", headers={"authorization": f"{scheme} {key}"}).status == 200
    for path in ("/health", "/ping", "/version"):
        assert locked.get(path, headers={"authorization": ""}).status == 200
    assert status_of(locked.raw(b"OPTIONS /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")) in (200, 405)
    answer = locked.get("/v1/models", headers={"authorization": "Bearer wrong"})
    assert answer.status == 401
    assert answer.json["error"]["message"] == "Unauthorized"


def test_two_authorization_headers_are_refused(locked: Server) -> None:
    head = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    both = head + f"authorization: Bearer wrong\r\nauthorization: Bearer {KEY}\r\n\r\n"
    assert status_of(locked.raw(both.encode())) == 401


def test_the_key_is_checked_before_the_body_is_read(locked: Server) -> None:
    """The answer comes although the body never does."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    )
    assert status_of(locked.raw(head.encode(), timeout=1.0)) == 401
    assert KEY not in locked.log
