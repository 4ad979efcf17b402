"""What one request can take from others: `python -m benchmarks.attacks [--family]` prints a table.

Beside each attack another client reads streams of 64 tokens, one after the other, and a third asks for /health. Shown
are the longest time in which the reader got nothing, the slowest /health, the answer, and the memory of the front end
before, at most, and 10 s after the attack. --leaving: instead, /health asked by a new connection each time and by one
that is kept, alone and beside eight clients that ask for much and leave, over and over.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import psutil

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
STREAM = {"prompt": "Hello", "max_tokens": 64, "stream": True, "ignore_eos": True, "temperature": 0}
USER = {"role": "user", "content": "Hi"}
CALLED = {"type": "tool_use", "id": "t", "name": "f"}
MEGABYTE = 1 << 20
KNOWN = {
    **{"input": "a", "max_output_tokens": 1500, "ignore_eos": True, "store": True},
    **{"top_logprobs": 20, "include": ["message.output_text.logprobs"]},
}
SWITCHES = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}  # what is off by default


@dataclass(frozen=True)
class Attack:
    name: str
    path: str
    body: Callable[[], dict[str, Any]]  # made when it is needed: many are megabytes


@dataclass
class Effect:
    """Times in seconds, memory in bytes."""

    status: int = 0
    took: float = 0.0
    gap: float = 0.0
    health: float = 0.0
    memory: list[int] = field(default_factory=lambda: [0, 0, 0])  # before, at most, in the end


# What was found to hold up a server, each by a request of its own.
FOUND = [
    Attack(
        "bad_words: 1,500 of 4,000 characters",
        COMPLETIONS,
        lambda: {"prompt": "a", "max_tokens": 1, "bad_words": ["a" * 4000 + str(i) for i in range(1500)]},
    ),
    Attack(
        "bad_words: 4,000 of 20 characters",
        COMPLETIONS,
        lambda: {"prompt": "a", "max_tokens": 1, "bad_words": [f"{i} and some more text" for i in range(4000)]},
    ),
    Attack("/tokenize: 1,000,000 CJK characters", "/tokenize", lambda: {"prompt": "世界" * 500_000}),
    Attack(
        "/detokenize: 1,000,000 tokens", "/detokenize", lambda: {"tokens": [100 + i % 100 for i in range(1_000_000)]}
    ),
    Attack(
        "truncate_prompt_tokens of 5 MB",
        COMPLETIONS,
        lambda: {"prompt": "ab " * 1_700_000, "max_tokens": 1, "truncate_prompt_tokens": -1},
    ),
    Attack("a prompt of 15 MB", COMPLETIONS, lambda: {"prompt": "ab " * (5 * MEGABYTE), "max_tokens": 1}),
    Attack("messages of 15 MB", CHAT, lambda: {"messages": [{"role": "user", "content": "ab " * (5 * MEGABYTE)}]}),
    Attack(
        "1,000 prompts with a logit_bias of 100,000",
        COMPLETIONS,
        lambda: {"prompt": ["a"] * 1000, "max_tokens": 1, "logit_bias": {str(i): 1 for i in range(500, 100_500)}},
    ),
    Attack(
        "480 prompts with a logit_bias of 4,090",
        COMPLETIONS,
        lambda: {"prompt": ["a b c"] * 480, "max_tokens": 4, "logit_bias": {str(i): 1 for i in range(4090)}},
    ),
    Attack(
        "1,000 prompts with a schema of 200 KB",
        COMPLETIONS,
        lambda: {
            "prompt": ["a b c"] * 1000,
            "max_tokens": 4,
            "guided_json": {"type": "integer", "title": "a" * 200_000},
        },
    ),
    Attack(
        "/v1/messages: a tool's input of 200,000 keys",
        "/v1/messages",
        lambda: {
            "max_tokens": 8,
            "messages": [
                USER,
                {"role": "assistant", "content": [{**CALLED, "input": {f"k{i}": i for i in range(200_000)}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
            ],
        },
    ),
    Attack("model: 15 MB", COMPLETIONS, lambda: {"model": "/a" * (7 * MEGABYTE), "prompt": "a"}),
    Attack("n = 2,000", COMPLETIONS, lambda: {"prompt": "a", "max_tokens": 30, "n": 2000, "ignore_eos": True}),
    Attack("1,000 prompts", COMPLETIONS, lambda: {"prompt": ["a b c"] * 1000, "max_tokens": 30, "ignore_eos": True}),
    Attack(
        "n = 128 with 20 log probabilities of 100 tokens",
        COMPLETIONS,
        lambda: {"prompt": "a", "n": 128, "max_tokens": 100, "logprobs": 20, "ignore_eos": True},
    ),
    Attack(
        "32 prompts of 400 tokens echoed with 20 log probabilities",
        COMPLETIONS,
        lambda: {"prompt": [[5 + i, *range(5, 404)] for i in range(32)], "max_tokens": 1, "echo": True, "logprobs": 20},
    ),
    Attack(
        "the same as a stream",
        COMPLETIONS,
        lambda: {
            **{"prompt": [[5 + i, *range(5, 404)] for i in range(32)], "max_tokens": 1, "echo": True, "logprobs": 20},
            "stream": True,
        },
    ),
    Attack(
        "64 prompts of 1,000 tokens with 20 log probabilities",
        COMPLETIONS,
        lambda: {"prompt": [[5 + i, *range(5, 1004)] for i in range(64)], "max_tokens": 1, "prompt_logprobs": 20},
    ),
    Attack(
        "300 answers that echo 1,000 tokens with 5 log probabilities, as a stream",
        COMPLETIONS,
        lambda: {
            **{"prompt": list(range(5, 1005)), "n": 300, "max_tokens": 30, "echo": True, "logprobs": 5, "stream": True},
            "ignore_eos": True,
        },
    ),
    Attack("a stored response with 20 log probabilities of 1,500 tokens", RESPONSES, lambda: dict(KNOWN)),
    Attack("the same response as a stream", RESPONSES, lambda: {**KNOWN, "stream": True}),
    Attack(
        "64 beams",
        COMPLETIONS,
        lambda: {"prompt": "a", "max_tokens": 30, "use_beam_search": True, "best_of": 64, "temperature": 0},
    ),
]
AMBIGUOUS = [  # each token can be read in more ways than the one before it, and so takes longer
    Attack(
        f"{count} texts of the grammar {grammar!r}",
        COMPLETIONS,
        lambda grammar=grammar, count=count: {  # type: ignore[misc]
            **{"prompt": "a", "max_tokens": 300, "n": count, "ignore_eos": True, "temperature": 1, "seed": 5},
            "guided_grammar": grammar,
        },
    )
    for grammar in ('start: a\na: a "x" | a a | "y"', 'start: s\ns: s s s | s s | "a" | "b"')
    for count in (1, 30, 128)
]
PAIRS = [  # what a model that scores pairs tokenizes: a text of many characters and few tokens, with many others
    Attack(
        "/score: 100,000 spaces with 2,000 texts" + named,
        "/score",
        lambda more=more: {"text_1": " " * 100_000, "text_2": ["a"] * 2000, **more},
    )
    for named, more in (("", {}), (", cut", {"truncate_prompt_tokens": -1}))
] + [
    Attack(
        "/score: 1 MB with 500 texts, cut to 5 tokens",
        "/score",
        lambda: {"text_1": "a " * 500_000, "text_2": ["b " * 1000] * 500, "truncate_prompt_tokens": 5},
    )
]
TEMPLATES = [
    Attack(
        f"chat_template {name}", CHAT, lambda text=text: {"messages": [USER], "chat_template": text, "max_tokens": 1}
    )
    for name, text in (
        ("tojson(indent)", "{{ messages|tojson(indent=40000000) }}"),
        ("center", "{{ 'a'.center(1000000000)|length }}"),
        ("replace", "{{ ('a'*9000000).replace('a', 'b'*1000)|length }}"),
        ("join", "{{ (['x'*9000000]*1000000)|join|length }}"),
        ("format", "{{ '%1000000000d'|format(1)|length }}"),
        ("loops", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    )
]


@dataclass(frozen=True)
class Body:
    """What a route reads: its type, and a body that is valid."""

    path: str
    model: type[Any]
    valid: dict[str, Any]


# A valid body for each type of body that a route reads; a type that is not here has no attacks, which is an error.
VALID: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "a", "max_tokens": 1},
    "ChatCompletionRequest": {"messages": [USER], "max_tokens": 1},
    "ResponsesRequest": {"input": "a", "max_output_tokens": 1},
    "MessagesRequest": {"messages": [USER], "max_tokens": 1},
    "CountTokensRequest": {"messages": [USER]},
    "TokenizeRequest": {"prompt": "a"},
    "DetokenizeRequest": {"tokens": [5]},
    "LoadLoRAAdapterRequest": {"lora_name": "a", "lora_path": "/no/such/folder"},
    "UnloadLoRAAdapterRequest": {"lora_name": "a"},
    "EmbeddingRequest": {"input": "a"},
    "PoolingRequest": {"input": "a"},
    "ClassifyRequest": {"input": "a"},
    "ScoreRequest": {"text_1": "a", "text_2": "b"},
    "RerankRequest": {"query": "a", "documents": ["b"]},
}


def bodies(pools: bool = False) -> list[Body]:
    """Every type of body that the server's routes read, of a model that generates or `pools`, at the first of its
    paths.
    """
    from vllm.entrypoints.openai import pooling, protocol
    from vllm.entrypoints.openai.routes import router

    types = {found.__name__: found for found in _subclasses(protocol._Request)}
    paths: dict[str, str] = {}
    for route in router.routes:
        wanted = (getattr(route, "openapi_extra", None) or {}).get("requestBody")
        if wanted is not None and (route.path in pooling.ROUTES) == pools:  # type: ignore[attr-defined]
            paths.setdefault(wanted["content"]["application/json"]["schema"]["title"], route.path)  # type: ignore[attr-defined]
    return [Body(path, types[name], VALID[name]) for name, path in paths.items()]


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for found in kind.__subclasses__():
        yield found
        yield from _subclasses(found)


def family(size: int = MEGABYTE, pools: bool = False, brief: bool = False) -> Iterator[Attack]:
    """Every field of every body, with texts and counts of about `size` bytes: long, many, multi-byte, nested.

    brief: a field that several bodies have in common only once, and numbers alone for those that take nothing else.
    """
    seen = set()
    for body in bodies(pools):
        for name in (*body.model.model_fields, "no_such_field"):
            field = body.model.model_fields.get(name)
            found = shapes(name, size)
            if brief and field is not None:
                owner = next(kind for kind in body.model.__mro__ if name in kind.__dict__.get("__annotations__", {}))
                if (owner, name) in seen:
                    continue
                seen.add((owner, name))
                if _is_number(field.annotation):
                    found = {kind: found[kind] for kind in ("a large number", "many numbers")}
            for kind, make in found.items():
                yield Attack(
                    f"{body.path} {name}: {kind}", body.path, lambda b=body, n=name, m=make: {**b.valid, n: m()}
                )


def _is_number(annotation: Any) -> bool:
    """Whether a field takes numbers, flags and choices among a few words, and nothing else."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal or annotation in (int, float, bool, type(None)):
        return True
    return get_origin(annotation) in (Union, UnionType, Annotated) and all(
        _is_number(part) for part in (parts[:1] if get_origin(annotation) is Annotated else parts)
    )


def shapes(name: str, size: int) -> dict[str, Callable[[], Any]]:
    """The values of one field: of any kind, and of the kind that the field takes."""
    words = size // 12
    found: dict[str, Callable[[], Any]] = {
        "long": lambda: "ab " * (size // 3),
        "many": lambda: [f"w{i}" for i in range(words)],
        "many numbers": lambda: list(range(size // 8)),
        "multi-byte": lambda: "世🙂" * (size // 7),
        "nested": lambda: nested(60, size // 64),
        "many keys": lambda: {str(i): 1 for i in range(words)},
        "a large number": lambda: 10**9,
    }
    if name in ("messages", "input"):
        found |= {
            "long content": lambda: [{"role": "user", "content": "ab " * (size // 3)}],
            "multi-byte content": lambda: [{"role": "user", "content": "世🙂" * (size // 7)}],
            "many messages": lambda: [USER] * (size // 40),
            "2,000 messages": lambda: [USER] * 2000,
            "many parts": lambda: [{"role": "user", "content": [{"type": "text", "text": "a"}] * (size // 32)}],
            "long role": lambda: [{"role": "x" * size, "content": "a"}],
        }
    elif name == "text_2":
        found |= {"1,000 texts": lambda: ["ab"] * 1000}
    elif name == "tools":
        found |= {
            "long tool": lambda: [tool("f", "x" * size)],
            "many tools": lambda: [tool(f"f{i}", "") for i in range(size // 80)],
            "nested tool": lambda: [tool("f", "", nested(50, size // 64))],
        }
    elif name == "documents":
        found |= {
            "2,000 texts": lambda: ["ab"] * 2000,
            "long document": lambda: [{"title": "a", "text": "x" * size}],
            "many documents": lambda: [{"title": "a", "text": "b"}] * (size // 32),
        }
    elif name == "prompt":
        found |= {
            "many ids lists": lambda: [[5, 6]] * (size // 8),
            "1,000 texts": lambda: ["ab " * (size // 3000)] * 1000,
        }
    elif name == "chat_template_kwargs":
        found |= {"long value": lambda: {"x": "y" * size}, "nested value": lambda: {"x": nested(50, size // 64)}}
    return found


def tool(name: str, description: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters or {}}}


def nested(depth: int, width: int) -> Any:
    """Lists in lists, with a wide one inside."""
    value: Any = ["x"] * width
    for _ in range(depth):
        value = [value]
    return value


class Bystanders:
    """A client that reads streams (answers of /pooling, if the model `pools`) and one that asks for /health, until
    `end`.
    """

    def __init__(self, port: int, model: str, pools: bool = False) -> None:
        self._port = port
        self._path, asked = ("/pooling", {"input": "Hello"}) if pools else (COMPLETIONS, STREAM)
        self._end_of_answer = b"}" if pools else b"data: [DONE]\n\n"
        self._stream = json.dumps({**asked, "model": model})
        self._ended = False
        self.gaps: list[tuple[float, float]] = []  # (when, how long)
        self.healths: list[tuple[float, float]] = []
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._ask)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()

    def worst_since(self, begun: float) -> tuple[float, float]:
        """The longest gap and the slowest /health that ended after `begun`."""
        return tuple(  # type: ignore[return-value]
            max((seconds for when, seconds in found if when >= begun), default=0.0)
            for found in (list(self.gaps), list(self.healths))
        )

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        while not self._ended:
            before = time.monotonic()
            connection.request("POST", self._path, self._stream, {"content-type": "application/json"})
            answer = connection.getresponse()
            whole = b""
            while part := answer.read1(65536):
                now = time.monotonic()
                self.gaps.append((now, now - before))
                before = now
                whole += part
            answer.close()
            if answer.status != 200 or not whole.endswith(self._end_of_answer):
                self.wrong.append(f"{answer.status} {whole[-200:]!r}")
            time.sleep(0.002)
        connection.close()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        while not self._ended:
            begun = time.monotonic()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            now = time.monotonic()
            self.healths.append((now, now - begun))
            if answer.status != 200:
                self.wrong.append(f"/health: {answer.status}")
            time.sleep(0.02)
        connection.close()


def post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer; 0 if the connection ends without one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (ConnectionError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def measure(port: int, pid: int, attack: Attack, watched: Bystanders, patience: float = 10.0) -> Effect:
    """Make one attack. `patience`: seconds that the memory gets to come back, 0 if nobody wants to know."""
    body = json.dumps(attack.body()).encode()
    process, effect = psutil.Process(pid), Effect()
    effect.memory[0] = process.memory_info().rss
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            effect.memory[1] = max(effect.memory[1], process.memory_info().rss)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    begun = time.monotonic()
    effect.status, _ = post(port, attack.path, body)
    effect.took = time.monotonic() - begun
    time.sleep(0.05 if patience else 0.01)
    effect.gap, effect.health = watched.worst_since(begun)
    done.set()
    looking.join()
    if patience:
        time.sleep(patience)
    effect.memory[2] = process.memory_info().rss
    return effect


@contextmanager
def serving(*flags: str, model: str = "demo") -> Iterator[tuple[int, int]]:
    """(port, process id) of a server."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", "0"]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        quiet = ["--disable-log-requests", "--disable-uvicorn-access-log"]
        process = subprocess.Popen([*command, *quiet, *flags], stdout=log, stderr=subprocess.STDOUT)
        try:
            found = None
            while found is None:
                text = Path(log.name).read_text(errors="replace")
                if process.poll() is not None:
                    raise RuntimeError(f"The server did not start:\n{text}")
                found = re.search(r"Serving on https?://\S+:(\d+)", text)
                time.sleep(0.05)
            yield int(found.group(1)), process.pid
        finally:
            process.terminate()
            process.wait()


def health_seconds(port: int, keep: bool, ended: threading.Event, found: list[float]) -> None:
    """Ask for /health, by one connection that is kept or by a new one each time, until `ended`."""
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while not ended.is_set():
        begun = time.monotonic()
        connection = kept if keep else http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", "/health")
        connection.getresponse().read()
        found.append(time.monotonic() - begun)
        if not keep:
            connection.close()
        time.sleep(0.02)


def come_and_leave(port: int, ended: threading.Event) -> None:
    """Ask for four answers of 200 tokens and close the connection soon after, over and over."""
    body = json.dumps({"prompt": "x " * 200, "max_tokens": 200, "n": 4, "ignore_eos": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    while not ended.is_set():
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            time.sleep(0.05)


def leaving(seconds: float = 6.0) -> None:
    """Print how long /health takes alone and beside eight clients that leave."""
    print(
        "| clients that leave | /health, new connections: median, longest | a connection that is kept |\n|---|---|---|"
    )
    with serving() as (port, _):
        for clients in (0, 8):
            ended = threading.Event()
            new: list[float] = []
            kept: list[float] = []
            threads = [threading.Thread(target=come_and_leave, args=(port, ended)) for _ in range(clients)]
            threads += [
                threading.Thread(target=health_seconds, args=(port, keep, ended, found))
                for keep, found in ((False, new), (True, kept))
            ]
            for thread in threads:
                thread.start()
            time.sleep(seconds)
            ended.set()
            for thread in threads:
                thread.join()
            shown = (f"{statistics.median(found) * 1e3:.0f}, {max(found) * 1e3:.0f} ms" for found in (new, kept))
            print("| " + " | ".join((str(clients), *shown)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaving", action="store_true", help="clients that ask for much and leave, and nothing else")
    parser.add_argument("--family", action="store_true", help="every field instead of what was found, the worst ten")
    parser.add_argument("--task", help="with --family: of the routes of a model that does this, such as embed")
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--part", default="1/1", help="every n-th of them, from the i-th on: i/n")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that memory gets to come back")
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    args = parser.parse_args()
    if args.leaving:
        leaving()
        return
    first, step = map(int, args.part.split("/"))
    attacks = (list(family(pools=bool(args.task))) if args.family else [*FOUND, *TEMPLATES])[first - 1 :: step]
    flags = ["--task", args.task] if args.task else ["--enable-lora"]
    os.environ.update(SWITCHES)
    results = []
    with serving("--trust-request-chat-template", *(flags if args.family else [])) as (port, pid):
        watched = Bystanders(port, "demo", pools=bool(args.task))
        time.sleep(3.0)
        alone = watched.worst_since(0.0)
        for attack in attacks:
            if args.only in attack.name:
                patience = 0.0 if args.family else args.patience
                results.append((attack.name, measure(port, pid, attack, watched, patience)))
        watched.end()
    count, errors = len(results), sum(effect.status >= 500 for _, effect in results)
    if args.family:
        print(f"{count} requests, {errors} server errors")
        results = sorted(results, key=lambda result: -result[1].gap)[:10]
    print("| request | answer | longest gap | /health | memory before, at most, after |\n|---|---|---|---|---|")
    print(f"| none | - | {alone[0] * 1e3:.0f} ms | {alone[1] * 1e3:.0f} ms | - |")
    for name, effect in results:
        memory = ", ".join(f"{size / MEGABYTE:.0f}" for size in effect.memory)
        print(
            f"| {name} | {effect.status} after {effect.took:.2f} s | {effect.gap * 1e3:.0f} ms | "
            f"{effect.health * 1e3:.0f} ms | {memory} MB |"
        )
    for text in watched.wrong[:5]:
        print("wrong:", text)
    if args.out:
        rows = [{"attack": name, **asdict(effect)} for name, effect in results]
        figures = {"requests": count, "server_errors": errors, "alone": alone, "wrong": watched.wrong, "rows": rows}
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
