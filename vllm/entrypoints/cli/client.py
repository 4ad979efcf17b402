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
from pathlib import Path
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
        parser.add_argument(
            "--tools",
            default=None,
            metavar="FILE",
            help="JSON list of tools that the model may call; you are asked for what they return.",
        )
        parser.add_argument(
            "--schema", default=None, metavar="FILE", help="JSON schema that every answer of the model satisfies."
        )
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
    messages: list[dict[str, Any]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    asked: dict[str, Any] = {}
    if args.tools is not None:
        found = _json_of("--tools", args.tools)
        asked["tools"] = found if isinstance(found, list) else [found]
    if args.schema is not None:
        schema = _json_of("--schema", args.schema)
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    inputs = _inputs(args.quick)
    for text in inputs:
        messages.append({"role": "user", "content": text})
        while True:
            body = {"model": model, "messages": messages, **asked, **_settings(args)}
            answer = _answer(client.stream("/chat/completions", body))
            messages.append(answer)
            if not _results(answer.get("tool_calls", ()), inputs, messages):
                break


def _json_of(option: str, path: str) -> Any:
    """What a file holds that an option names."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServerError(f"{option} {path}: {error}") from error


def _answer(choices: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Print an answer as it comes: thoughts to the other stream, calls one in a line. Returns its message."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    thinks = False
    for choice in choices:
        delta = choice["delta"]
        if thought := delta.get("reasoning_content"):
            thinks = True
            print(thought, end="", file=sys.stderr, flush=True)
        if thinks and (delta.get("content") or delta.get("tool_calls")):
            thinks = False
            print(file=sys.stderr)
        if piece := delta.get("content"):
            message["content"] = (message["content"] or "") + piece
            print(piece, end="", flush=True)
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": {**part["function"]}})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if message["content"] is not None or not calls:
        print()
    for call in calls:
        print(f"{call['function']['name']}({call['function']['arguments']})", flush=True)
    if calls:
        return {**message, "tool_calls": calls}
    return {**message, "content": message["content"] or ""}


def _results(calls: Sequence[dict[str, Any]], inputs: Iterator[str], messages: list[dict[str, Any]]) -> bool:
    """Ask for what the called functions return. False if none was called, or nobody says."""
    for call in calls:
        name = call["function"]["name"]
        if sys.stdin.isatty():
            print(f"{name} returns", end=" ", flush=True)
        result = next(inputs, None)
        if result is None:
            return False
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
    return bool(calls)


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
