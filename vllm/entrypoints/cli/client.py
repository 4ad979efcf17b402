"""`vllm complete` and `vllm chat`: interactive or one-shot clients of a running server, over plain HTTP."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any


class ServerError(Exception):
    """The server refused, or could not be reached."""


class Client:
    """A small client of one OpenAI-compatible server. `url` ends in /v1."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"--url must look like http://localhost:8000/v1, got {url!r}.")
        self._parts = parts
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    @contextmanager
    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host = self._parts.hostname
        assert host is not None
        with closing(kind(host, self._parts.port, timeout=600)) as connection:
            try:
                payload = None if body is None else json.dumps(body)
                connection.request(method, self._parts.path.rstrip("/") + path, payload, self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(
                    f"No server answers at {self._parts.geturl()}: {error}. Start one with `vllm serve`."
                ) from error
            with response:
                if response.status != 200:
                    raise ServerError(f"The server answered {response.status}: {_message(response.read())}")
                yield response

    def first_model(self) -> str:
        """The name of the first model that the server has."""
        try:
            with self._request("GET", "/models", None) as response:
                data = json.loads(response.read())
            return str(data["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self._parts.geturl()}/models does not list models; does --url end in /v1?") from error

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The first choice of each event of a streamed answer."""
        with self._request("POST", path, {**body, "stream": True}) as response:
            for line in _lines(response):
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ServerError(str(event["error"].get("message", event["error"])))
                if event["choices"]:
                    yield event["choices"][0]


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The lines of a stream up to [DONE]; a stream that ends before it is an error."""
    try:
        for raw in response:
            line = raw.strip()
            yield line
            if line == b"data: [DONE]":
                return
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"The connection broke: {error}") from error
    raise ServerError("The server ended the answer early.")


def _message(body: bytes) -> str:
    try:
        data = json.loads(body)
        nested = data.get("error")
        found = nested.get("message") if isinstance(nested, dict) else nested
        return str(found or data.get("message") or data.get("detail") or data)
    except (ValueError, AttributeError):
        return body[:500].decode(errors="replace")


def _parser(command: str) -> argparse.ArgumentParser:
    text = "Chat with a running server." if command == "chat" else "Continue texts with a running server."
    parser = argparse.ArgumentParser(prog=f"vllm {command}", description=text)
    parser.add_argument("--url", default="http://localhost:8000/v1", help="Address of the API (default: %(default)s).")
    parser.add_argument("--model-name", default=None, help="Model to ask; default: the server's first.")
    parser.add_argument("--api-key", default=None, help="Key of the server; default: OPENAI_API_KEY.")
    parser.add_argument("--max-tokens", type=int, default=None, help="At most this many tokens per answer.")
    parser.add_argument("--temperature", type=float, default=None, help="Sampling temperature.")
    parser.add_argument(
        "-q", "--quick", default=None, metavar="TEXT", help="Send this one text, print the answer, end."
    )
    if command == "chat":
        parser.add_argument("--system-prompt", default=None, help="System message of the conversation.")
    return parser


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    values = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in values.items() if value is not None}


def _say(pieces: Iterator[str]) -> str:
    said = []
    for piece in pieces:
        said.append(piece)
        print(piece, end="", flush=True)
    print()
    return "".join(said)


def _inputs(quick: str | None) -> Iterator[str]:
    if quick is not None:
        yield quick
        return
    typed = sys.stdin.isatty()  # out of a pipe, lines come without anybody to ask
    while True:
        try:
            line = input("> " if typed else "")
        except EOFError:
            if typed:
                print()
            return
        if line.strip():
            yield line


def _complete(client: Client, args: argparse.Namespace, model: str) -> None:
    for text in _inputs(args.quick):
        body = {"model": model, "prompt": text, "max_tokens": 128, **_settings(args)}
        _say(choice["text"] for choice in client.stream("/completions", body))


def _chat(client: Client, args: argparse.Namespace, model: str) -> None:
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    for text in _inputs(args.quick):
        messages.append({"role": "user", "content": text})
        body = {"model": model, "messages": messages, **_settings(args)}
        choices = client.stream("/chat/completions", body)
        answer = _say(choice["delta"].get("content") or "" for choice in choices)
        messages.append({"role": "assistant", "content": answer})


def main(argv: Sequence[str]) -> int:
    """`argv[0]` is "complete" or "chat"."""
    args = _parser(argv[0]).parse_args(list(argv[1:]))
    try:
        client = Client(args.url, args.api_key or os.environ.get("OPENAI_API_KEY"))
        model = args.model_name or client.first_model()
        if args.quick is None and sys.stdin.isatty():
            print(f"{model} at {args.url}; end with Ctrl-D.")
        (_chat if argv[0] == "chat" else _complete)(client, args, model)
    except ServerError as error:
        print(f"vllm {argv[0]}: {error}", file=sys.stderr)
        return 1
    return 0
