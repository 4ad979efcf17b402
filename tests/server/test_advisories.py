"""Replay of the inputs that have taken down other servers: refused or answered, never a 5xx, and nobody else notices.

The numbers are rows of the table of advisories in the project's reliability goals.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.http_server import MAX_MODEL_LEN, Server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
USER = [{"role": "user", "content": "Hi"}]
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 3},
    CHAT: {"messages": USER, "max_tokens": 3},
    RESPONSES: {"input": "Hi", "max_output_tokens": 3},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
}
GENERATING = (COMPLETIONS, CHAT)
SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|image_pad|>", "<image>", "<|endoftext|>")
WRONG_IDS: tuple[Any, ...] = (-1, -(2**31), 320, 321, 151_936, 2**31, 2**40, 2**63, 2**64, True, 1.5, "5", None)
BAD_REGEXES = ("(", "[", "*", "")
HARD_REGEXES = ("(a+)+$", "(a|a)*b", ".{0,60000}", "x{1000}{1000}")
BAD_SCHEMAS: tuple[Any, ...] = ({"properties": [1]}, {"type": 5}, "{", "", {"type": "something"}, {"pattern": "\\"}, [])
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("n", "best_of", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs")
LEAK = re.compile(r"0x[0-9a-fA-F]{6,}|Traceback|site-packages|\.py\b|/home/|/root/|/tmp/|/usr/| object at ")


class Canary(http.server.BaseHTTPRequestHandler):
    """Notes that somebody fetched a URL."""

    hits: list[str] = []

    def do_GET(self) -> None:
        self.hits.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def listener() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canary) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running.server_address[1]
        running.shutdown()


def urls(port: int) -> list[str]:
    hosts = ("127.0.0.1", "[::1]", "0x7f000001", "2130706433", "localhost", "0.0.0.0", "169.254.169.254")
    tricks = (r"http://allowed\@127.0.0.1:{}/", "http://allowed#@127.0.0.1:{}/", "http://a:b@127.0.0.1:{}/")
    return [
        *(f"http://{host}:{port}/" for host in hosts),
        *(trick.format(port) for trick in tricks),
        "file:///etc/passwd",
        "/etc/passwd",
        "data:video/jpeg;base64," + "AAAA," * 5000,
        "data:image/png;base64,iVBORw0KGgo=",
    ]


def cases(port: int) -> Iterator[tuple[int, str, dict[str, Any], tuple[int, ...]]]:
    """(row, route, body, allowed statuses)."""
    for prompt in ("", [], [""], [[]], [[], []], [[1], []]):
        yield 1, COMPLETIONS, {"prompt": prompt}, (400,)
    yield 1, CHAT, {"messages": []}, (400,)
    yield 1, RESPONSES, {"input": []}, (400,)
    for route in GENERATING:
        valid = VALID[route]
        for extra in (
            {"best_of": 1_000_000},
            {"n": 1_000_000},
            {"n": 2**31},
            {"n": 16385},
            {"n": 10_000, "use_beam_search": True},
            {"n": 65, "use_beam_search": True},
            {"n": 2, "best_of": 2**63, "use_beam_search": True},
        ):
            yield 45, route, {**valid, **extra}, (400,)
        for schema in BAD_SCHEMAS:
            yield 22, route, {**valid, "guided_json": schema}, (400,)
            yield 22, route, {**valid, "structured_outputs": {"json": schema}}, (400,)
            yield 22, route, {**valid, "response_format": {"type": "json_schema", "json_schema": schema}}, (400,)
        for regex in BAD_REGEXES:
            yield 60, route, {**valid, "guided_regex": regex}, (400,)
            yield 60, route, {**valid, "structured_outputs": {"regex": regex}}, (400,)
        for regex in HARD_REGEXES:
            yield 60, route, {**valid, "guided_regex": regex}, (200, 400)
        for name, value in (("guided_grammar", ""), ("guided_choice", []), ("structural_tag", "")):
            yield 99, route, {**valid, name: value}, (400,)
        for kwargs in ({"max_frames": 10**9}, {"fps": 0}, {"num_frames": -1}, {}):
            yield 96, route, {**valid, "media_io_kwargs": {"video": kwargs}}, (400,)
        for kwargs in ({"code_revision": "x", "trust_remote_code": True}, {"num_crops": 10**9}, {}):
            yield 104, route, {**valid, "mm_processor_kwargs": kwargs}, (400,)
        for embeds in ("AAAA", ["AAAA"], {"indices": [[-1]]}, "gASV"):
            yield 31, route, {**valid, "prompt_embeds": embeds}, (400,)
            yield 113, route, {**valid, "prompt_embeds": embeds, "presence_penalty": 1.0}, (400,)
        for transfer in ({}, {"x": 1}, {"remote_host": "10.0.0.1", "remote_port": 1}, {"tp_size": 10**9}):
            yield 94, route, {**valid, "kv_transfer_params": transfer}, (400,)
        for salt in ("x" * 129, "y" * 1_000_000, "", 5, ["a"]):
            yield 79, route, {**valid, "cache_salt": salt}, (400,)
        for salt in ("/", "..", "a/b", "\U0001f600", "\u0000", "x" * 128):
            yield 101, route, {**valid, "cache_salt": salt}, (200, 400)
        for token in WRONG_IDS:
            if token is not None:
                yield 78, route, {**valid, "allowed_token_ids": [token]}, (400,)
                yield 85, route, {**valid, "stop_token_ids": [token], "min_tokens": 1}, (400,)
            if token != "5":
                yield 87, route, {**valid, "logit_bias": {str(token): 1.0}, "presence_penalty": 1.0}, (400,)
        for words in ([""], ["\u0000"], ["<|added|>"], ["a"] * 100_001, [5], ["x" * 200_000]):
            yield 88, route, {**valid, "bad_words": words}, (200, 400)
        yield 78, route, {**valid, "allowed_token_ids": []}, (400,)
        yield 108, route, {**valid, "allowed_token_ids": [7]}, (200,)
        for value in (2**31, 2**63, 4, -1):
            yield 107, route, {**valid, "min_tokens": value}, (400,)
        for name in INTEGERS:
            for value in (-(2**63), -2 if name == "top_k" else -1, 2**64, "1", 1.5):
                yield 45, route, {**valid, name: value}, (400,)
        yield 89, route, {**valid, "max_tokens": 0}, (400,)
        yield 24, route, {**valid, "priority": 2**63}, (400,)
        yield 40, route, {**valid, "logits_processors": ["os.system"]}, (400,)
        yield 48, route, {**valid, "n": 64, "logprobs": 20 if route == COMPLETIONS else True, "seed": 1}, (200,)
        yield 104, route, {**valid, "lora_request": {"path": "/etc"}}, (400,)
    for token in WRONG_IDS:
        yield 72, COMPLETIONS, {"prompt": [5, token], "max_tokens": 2}, (400,)
        yield 72, COMPLETIONS, {"prompt": [[5], [token]], "max_tokens": 2}, (400,)
        yield 69, "/detokenize", {"tokens": [token]}, (400,)
        for path in ("/v1/embeddings", "/pooling", "/score", "/classify"):
            yield 72, path, {"input": [token]}, (400,)
    yield 69, "/detokenize", {"tokens": [5] * 2_000_000}, (400,)
    yield 69, "/detokenize", {"tokens": [5] * 5_600_000}, (413,)
    for text in SPECIALS:
        for shaped in (text, text * 3, f"<{text}>", f"a{text}b"):
            yield 46, COMPLETIONS, {"prompt": shaped, "max_tokens": 2}, (200,)
            yield 46, CHAT, {"messages": [{"role": "user", "content": shaped}], "max_tokens": 2}, (200,)
            yield 46, "/tokenize", {"prompt": shaped}, (200,)
    yield 15, COMPLETIONS, {"prompt": "<|image_pad|>" * 50_000, "max_tokens": 2}, (400,)
    yield 61, COMPLETIONS, {"prompt": None, "prompt_embeds": "AAAA"}, (400,)
    yield 67, COMPLETIONS, {"prompt": ["a"] * 100_000}, (400,)
    yield 67, COMPLETIONS, {"prompt": [[5]] * 100_000}, (400,)
    yield 67, COMPLETIONS, {"prompt": ["a"] * 1000, "n": 100}, (400,)
    yield 91, COMPLETIONS, {"prompt": ["a", "hello there, this is longer", "b"], "max_tokens": 3}, (200,)
    yield 83, COMPLETIONS, {"prompt": [5] * (MAX_MODEL_LEN + 1), "max_tokens": 1}, (400,)
    yield 83, COMPLETIONS, {"prompt": [5] * 1_000_000, "max_tokens": 1}, (400,)
    template_loop = "{% for i in range(10**9) %}x{% endfor %}"
    for template in (template_loop, "{{ ''.__class__.__mro__ }}", "{{", "x"):
        yield 29, CHAT, {**VALID[CHAT], "chat_template": template}, (400,)
        yield 29, CHAT, {**VALID[CHAT], "chat_template_kwargs": {"chat_template": template}}, (400,)
        yield 29, "/tokenize", {"messages": USER, "chat_template": template}, (400,)
        yield 29, "/tokenize", {"messages": USER, "chat_template_kwargs": {"chat_template": template}}, (400,)
    for kwargs in ({"tokenize": True}, {"add_generation_prompt": False}, {"tools": []}, {"messages": []}):
        yield 30, CHAT, {**VALID[CHAT], "chat_template_kwargs": kwargs}, (400,)
    for pattern in ("\\", "(", "a" * 10_000):
        function = {"name": "f", "parameters": {"type": "something", "properties": {"a": {"pattern": pattern}}}}
        tools = [{"type": "function", "function": function}]
        for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}, "none"):
            body = {**VALID[CHAT], "tools": tools, "tool_choice": choice}
            yield 24, CHAT, body, (200, 400) if choice == "none" else (400,)
    for url in urls(port):
        for kind in ("image_url", "video_url", "audio_url"):
            part = {"type": kind, kind: {"url": url}}
            yield 28, CHAT, {"messages": [{"role": "user", "content": [part]}]}, (400,)
        yield (
            28,
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
            (400,),
        )
        # Nothing scans texts for addresses.
        yield 28, COMPLETIONS, {"prompt": f"![]({url[:200]})", "max_tokens": 1}, (200,)
        yield 28, CHAT, {"messages": [{"role": "user", "content": f"![]({url[:200]})"}], "max_tokens": 1}, (200,)
    for kind in ("image_embeds", "input_audio", "image_pil", "unknown", "", 5, None):
        part = {"type": kind, "image_embeds": "AAAA", "input_audio": {"data": "AAAA", "format": "wav"}}
        yield 32, CHAT, {"messages": [{"role": "user", "content": [part]}]}, (400,)
        yield 82, CHAT, {"messages": [{"role": "user", "content": [part] * 10_000}]}, (400,)
    for messages in ([{}], [5], [None], [{"role": 5, "content": "x"}], [{"role": "user"}], "x", {}, [USER]):
        yield 1, CHAT, {"messages": messages}, (400,)
    calls: tuple[Any, ...] = ([5], ["x"], 5, "x", [{"function": 5}], {"a": 1})
    for call in calls:
        yield 24, CHAT, {"messages": [{"role": "assistant", "tool_calls": call}, *USER], "max_tokens": 1}, (400,)
    cut = [{"function": {"name": "f", "arguments": "{"}}]  # what agents show a model that has to mend it
    yield 24, CHAT, {"messages": [{"role": "assistant", "tool_calls": cut}, *USER], "max_tokens": 1}, (200,)
    yield 111, COMPLETIONS, {"prompt": "The capital of France is " * 5, "max_tokens": 1, "prompt_logprobs": 5}, (200,)
    yield 111, COMPLETIONS, {"prompt": "The capital of France is " * 5, "max_tokens": 1, "prompt_logprobs": 5}, (200,)


def raw_bodies() -> Iterator[tuple[int, str, bytes]]:
    """Bodies that are no JSON, or JSON with numbers that are none. All are 400."""
    for name in FLOATS:
        for value in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400"):
            for route in GENERATING:
                valid = json.dumps(VALID[route])[:-1]
                yield 54, route, f'{valid}, "{name}": {value}}}'.encode()
    broken = (
        b'{"messages": ,',
        b"[1]",
        b'{"prompt": "Hi", "max_to',
        b"",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800", "messages": "\\ud800", "input": "\\ud800"}',
        b'{"a": ' * 100_000,
        b"[" * 100_000,
        b'{"model": "tiny", "model": "other"}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} {"prompt": "b"}',
        b'{"prompt": "a",}',
        b"{'prompt': 'a'}",
    )
    for route in VALID:
        for body in broken:
            yield 64, route, body


def test_no_input_of_the_advisories_does_harm(steady: Server, listener: int) -> None:
    """T24, with T39: what the answers may not show."""
    todo = [(row, route, json.dumps(body).encode(), allowed) for row, route, body, allowed in cases(listener)]
    todo += [(row, route, body, (400,)) for row, route, body in raw_bodies()]
    assert len(todo) >= 400

    def send(case: tuple[int, str, bytes, tuple[int, ...]]) -> str | None:
        row, route, body, allowed = case
        answer = steady.post(route, body)
        what = f"row {row}: {route} {body[:160]!r} -> {answer.status} {answer.text[:300]}"
        if answer.status not in allowed:
            return what
        if answer.status == 200:
            return None
        found = answer.json
        if found["error"]["code"] != answer.status or found["code"] != answer.status or not found["message"]:
            return what
        return what if LEAK.search(answer.text) else None

    with ThreadPoolExecutor(4) as pool:
        wrong = [problem for problem in pool.map(send, todo) if problem]
    print(f"T24: {len(wrong)} of {len(todo)} inputs answered wrongly")
    assert not wrong, f"{len(wrong)} of {len(todo)}:\n" + "\n".join(wrong[:40])
    assert Canary.hits == []
    assert steady.get("/health").status == 200


def test_the_same_request_id_does_not_mix_answers(steady: Server) -> None:
    """Rows 102, 112 and T40: what a client calls its request means nothing to the server."""
    names = ["same", "../../etc", "10.0.0.1:5000", "a" * 5000, "a\tb", "___prefill_addr_10.0.0.1:1___"]

    def ask(i: int) -> tuple[str, str]:
        body = {"prompt": f"Number {i % 10}", "max_tokens": 4, "temperature": 0}
        answer = steady.post(
            COMPLETIONS, body, headers={"x-request-id": names[0 if i < 60 else i % 5].strip("\x01\x02")}
        )
        assert answer.status == 200, answer.text
        return answer.json["id"], answer.json["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(100)))
    harmless = {f"cmpl-{name}" for name in names if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", name)}
    shown = [name for name, _ in answers]
    assert shown[:60] == ["cmpl-same"] * 60  # what was asked for; the server tells them apart by names of its own
    assert all(name in harmless or re.fullmatch("cmpl-[0-9a-f]{32}", name) for name in shown)
    for i, (_, text) in enumerate(answers):
        assert text == answers[i % 10][1]


def test_strange_names_do_not_grow_the_metrics(steady: Server) -> None:
    """Row 97 and T41: what is counted for the first of such requests counts all of them."""

    def send(i: int) -> None:
        steady.request("GET", f"/path-{i}")
        steady.post(COMPLETIONS, {"prompt": "x", "model": f"model-{i}"})
        steady.raw(f"METHOD{i} / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode(), timeout=5)

    def series() -> set[str]:
        lines = steady.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    series()  # /metrics is counted, too
    send(0)
    before = series()
    for i in range(1, 100):
        send(i)
    assert series() == before
