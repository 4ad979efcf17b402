"""T36: every route, by every method, with every wrong key and every trick of path and host: 0 unauthorised answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.server.http_server import CANARY, Server

KEY = "a-key-of-the-test"
SECOND_KEY = "another-key"
OPEN = {"/health", "/ping", "/version", "/", "/ui/app.js", "/ui/markdown.js", "/ui/style.css"}
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
    flags = ("--api-key", KEY, "--enable-tokenizer-info-endpoint", "--protect-metrics")
    with Server(model_folder, *flags, env=environment, key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def routes(locked: Server) -> list[str]:
    return routes_of(locked)


def routes_of(server: Server) -> list[str]:
    """Every path of the server, and some that it does not have."""
    found = sorted(server.get("/openapi.json").json["paths"])
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


@dataclass(frozen=True)
class Attempt:
    """One request without a right key, as it is sent."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    version: str = "1.1"

    @property
    def raw(self) -> bytes:
        lines = {"host": "x", "content-type": "application/json", "content-length": str(len(self.body))}
        lines = {**lines, "connection": "close", **self.headers}
        if "transfer-encoding" in lines:
            del lines["content-length"]
        head = f"{self.method} {self.path} HTTP/{self.version}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.body), self.body) if "content-length" not in lines else self.body
        return (head + "\r\n").encode("latin-1") + sent


def is_refused(attempt: Attempt, raw: bytes) -> bool:
    """Whether the answer is a refusal, or what every browser may ask before it sends a key."""
    if attempt.method == "OPTIONS":
        return status_of(raw) in (400, 401, 404, 405) or raw.endswith(b"\r\n\r\nOK")
    return status_of(raw) in (0, 400, 401) or (status_of(raw) == 403 and "upgrade" in attempt.headers)


def answered(server: Server, attempts: list[Attempt]) -> list[str]:
    """The attempts that were not refused."""

    def send(attempt: Attempt) -> str | None:
        raw = server.raw(attempt.raw, timeout=10)
        return None if is_refused(attempt, raw) else f"{attempt} -> {raw[:200]!r}"

    with ThreadPoolExecutor(4) as pool:
        return [problem for problem in pool.map(send, attempts) if problem]


def test_nothing_is_answered_without_the_key(locked: Server, routes: list[str]) -> None:
    attempts: list[Attempt] = []
    for path in (path for path in routes if path not in OPEN):
        attempts += [Attempt(method, path) for method in METHODS]
        attempts += [Attempt("POST", path, key) for key in WRONG_KEYS]
        attempts += [Attempt("GET", path, WRONG_KEYS[4])]
        attempts += [Attempt("POST", trick) for trick in tricks(path)]
        attempts += [Attempt("GET", path, {"host": host}) for host in HOSTS]
        attempts.append(Attempt("GET", path, {"x-original-url": "/health", "x-rewrite-url": "/health"}))
        attempts.append(Attempt("GET", path, {"x-forwarded-prefix": "/health", "x-http-method-override": "OPTIONS"}))
    assert len(attempts) >= 1000
    wrong = answered(locked, attempts)
    print(f"T36: {len(wrong)} of {len(attempts):,} requests answered without the key")
    assert not wrong, f"{len(wrong)} of {len(attempts)}:\n" + "\n".join(wrong[:30])


# What the wider set draws from, beside what every run tries.
ODD_METHODS = ("OPTIONS", "TRACE", "PROPFIND", "QUERY", "get", "Post", "FOO", "M-SEARCH")
ODD_KEYS: tuple[dict[str, str], ...] = (
    {"authorization": f"Bearer{KEY}"},
    {"authorization": f"Bearer:{KEY}"},
    {"authorization": f"Bearer {KEY[::-1]}"},
    {"authorization": f"Bearer {KEY}%00"},
    {"authorization": "Bearer " + KEY.replace("-", "%2d")},
    {"authorization": f'Bearer "{KEY}"'},
    {"authorization": f"Bearer {KEY},{SECOND_KEY}"},
    {"authorization": "Bearer EMPTY"},
    {"authorization": "Bearer null"},
    {"authorization": "Bearer *"},
    {"authorization": "Bearer \xe9\xff"},
    {"authorization": "Bearer " + "a" * 20_000},
    {"authorization": f"Digest Bearer {KEY}"},
    {"proxy-authorization": f"Bearer {KEY}"},
    {"x-authorization": f"Bearer {KEY}"},
    {"authorization_": f"Bearer {KEY}"},
    {"api-key": KEY},
)
MORE_HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"origin": "http://evil", "access-control-request-method": "POST"},
    {"x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1", "x-forwarded-host": "localhost"},
    {"x-http-method-override": "OPTIONS", "x-method-override": "OPTIONS"},
    {
        "connection": "close, upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "MDEyMw==",
    },
    {"connection": "close, upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQCAAAAAAIAAAAA"},
    {"transfer-encoding": "chunked"},
    {"expect": "100-continue"},
    {"referer": "http://x/health", "x-original-url": "/health", "x-forwarded-uri": "/health"},
    {"x-request-id": "/health", "cookie": f"api_key={KEY}; token={KEY}"},
)


def drawn(routes: list[str], prefix: str, count: int) -> list[Attempt]:
    """`count` different ways to ask for a closed path without a key, every path as often as any other."""
    rng = random.Random(36)
    closed = [path for path in routes if path not in OPEN]
    body = json.dumps(CANARY).encode()
    found: dict[bytes, Attempt] = {}
    while len(found) < count:
        path = closed[len(found) % len(closed)]
        if prefix and rng.random() < 0.5:
            path = prefix + path
        if rng.random() < 0.6:
            spelled = [*tricks(path), f"{path}?api_key={KEY}", f"{path}?authorization=Bearer%20{KEY}", path + "%00"]
            path = rng.choice([*spelled, path + "/.", path + ";/health", prefix + "/health/../.." + path])
        headers = {**rng.choice(MORE_HEADERS), **rng.choice(WRONG_KEYS + ODD_KEYS)}
        if rng.random() < 0.2:
            headers["host"] = rng.choice(HOSTS)
        method = rng.choice(METHODS * 2 + ODD_METHODS)
        attempt = Attempt(method, path, headers, rng.choice((b"{}", body)), rng.choice(("1.1", "1.1", "1.0")))
        found.setdefault(attempt.raw, attempt)
    return list(found.values())


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("prefix", ["", "/behind/proxy"])
def test_nothing_is_answered_however_it_is_asked(model_folder: Path, prefix: str) -> None:
    """2,600 requests, half of them to a server behind a proxy's prefix: no answer; with a key, every path has one."""
    flags = ("--root-path", prefix, "--disable-web-ui", "--enable-request-id-headers") if prefix else ()
    flags += ("--enable-tokenizer-info-endpoint", "--api-key", KEY, "--api-key", SECOND_KEY)
    with Server(model_folder, *flags, env={"VLLM_STRICT": "1", "VLLM_SERVER_DEV_MODE": "1"}, key=KEY) as server:
        before, paths = server.canary(), routes_of(server)
        for path in paths:
            assert 401 not in (server.get(path).status, server.get(prefix + path).status), path
        attempts = drawn(paths, prefix, 1300)
        wrong = answered(server, attempts)
        assert server.canary() == before
        assert server.get("/health").status == 200
        print(f"T36: {prefix or 'no prefix'}: {len(wrong)} of {len(attempts):,} requests answered without the key")
        assert not wrong, f"{len(wrong)} of {len(attempts)}:\n" + "\n".join(wrong[:30])


def test_each_key_opens_and_open_paths_need_none(locked: Server) -> None:
    for key in (KEY, SECOND_KEY):
        for scheme in ("Bearer", "bearer"):
            assert locked.get("/v1/models", headers={"authorization": f"{scheme} {key}"}).status == 200
    for path in ("/health", "/ping", "/version"):
        assert locked.get(path, headers={"authorization": ""}).status == 200
    assert locked.request("POST", "/reset_prefix_cache").status == 200
    assert locked.get("/server_info").json["vllm_config"]["model_config"]["max_model_len"] > 0
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
