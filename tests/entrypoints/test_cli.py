"""The `vllm` command: help at once, clear refusals, and clients that talk to a real server."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.server.http_server import MODEL, Server
from vllm.entrypoints.cli.client import _message
from vllm.entrypoints.cli.main import COMMANDS, run, usage
from vllm.version import __version__

HELPS = [[name] for name in COMMANDS] + [["bench", kind] for kind in ("latency", "throughput", "serve")]
HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "pydantic")


@pytest.fixture(scope="module")
def demo_server() -> Iterator[Server]:
    with Server(Path("demo"), key="sesame", env={"VLLM_API_KEY": "sesame"}) as running:
        yield running


@pytest.fixture
def url(demo_server: Server, monkeypatch) -> str:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    return demo_server.url + "/v1"


# -- the dispatcher ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_help_loads_nothing_heavy(command):
    code = (
        "import sys, json\n"
        "from vllm.entrypoints.cli.main import run\n"
        "try: status = run(sys.argv[1:])\n"
        "except SystemExit as stop: status = stop.code or 0\n"
        f"print(json.dumps([status, [m for m in {HEAVY!r} if m in sys.modules]]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True, check=True)
    text, _, last = done.stdout.strip().rpartition("\n")
    assert json.loads(last) == [0, []]
    assert text.startswith(f"usage: vllm {' '.join(command)}")


def test_every_command_is_in_the_usage():
    for name, command in COMMANDS.items():
        assert f"  {name} " in usage() and command.help in usage()


@pytest.mark.parametrize("flag", ["-h", "--help", "help"])
def test_help_of_vllm_itself(flag, capsys):
    assert run([flag]) == 0
    assert capsys.readouterr().out == usage() + "\n"


def test_without_a_command_the_usage_is_shown_and_the_status_is_2(capsys):
    assert run([]) == 2
    assert "usage: vllm" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_version(flag, capsys):
    assert run([flag]) == 0
    assert capsys.readouterr().out == __version__ + "\n"


def test_an_unknown_command_is_named(capsys):
    assert run(["sevre"]) == 2
    error = capsys.readouterr().err
    assert "unknown command 'sevre'" in error and "serve" in error


def test_an_unknown_kind_of_bench_shows_the_kinds(capsys):
    assert run(["bench", "speed"]) == 2
    error = capsys.readouterr().err
    assert "unknown kind 'speed'" in error and "latency,throughput,serve" in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "demo", "--no-such-flag"], "--no-such-flag"),
        (["serve", "demo", "--model", "other"], "two models"),
        (["chat", "--temperature", "warm"], "--temperature"),
        (["run-batch"], "required"),
        (["collect-env", "--all"], "--all"),
    ],
)
def test_bad_flags_exit_with_2_and_name_the_flag(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) < 10, "the message is not hidden behind all flags"


def test_the_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "vllm.entrypoints.cli.main", "-v"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, __version__ + "\n")


# -- complete and chat, against a real server --------------------------------------------------------------------------


def test_complete_prints_what_the_server_says(demo_server, url, capsys):
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 9, "temperature": 0}
    expected = demo_server.post("/v1/completions", body).json["choices"][0]["text"]
    argv = ["complete", "--url", url, "--max-tokens", "9", "--temperature", "0", "-q", "The capital of France is"]
    assert run(argv) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert "Paris" in expected


def test_chat_sends_the_system_prompt_and_prints_the_answer(demo_server, url, capsys):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 7 + 5?"}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24}
    expected = demo_server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    argv = ["chat", "--url", url, "--temperature", "0", "--max-tokens", "24", "--system-prompt", "Be brief."]
    assert run([*argv, "--quick", "What is 7 + 5?"]) == 0
    assert capsys.readouterr().out == expected + "\n"


class Typed(io.StringIO):
    """Lines that somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("source", [Typed, io.StringIO])
def test_a_chat_remembers_the_turns(demo_server, url, capsys, monkeypatch, source):
    monkeypatch.setattr("sys.stdin", source("Hello!\n\nWhat is 2 + 2?\n"))
    assert run(["chat", "--url", url, "--temperature", "0", "--max-tokens", "24"]) == 0
    messages = [{"role": "user", "content": "Hello!"}]
    answers = []
    for following in ("What is 2 + 2?", None):
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24}
        answers.append(demo_server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"])
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": following}]
    said = capsys.readouterr().out
    if source is Typed:  # the empty line asks nothing: it only shows the prompt again
        assert said.split("\n", 1)[1] == f"> {answers[0]}\n> > {answers[1]}\n> \n"
    else:  # nothing but the answers
        assert said == f"{answers[0]}\n{answers[1]}\n"


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_refusal_of_the_server_is_one_line(command, url, capsys, monkeypatch):
    assert run([command, "--url", url, "--model-name", "nobody", "-q", "x"]) == 1
    assert capsys.readouterr().err == f"vllm {command}: The server answered 404: The model `nobody` does not exist.\n"
    assert run([command, "--url", url, "--temperature", "-1", "-q", "x"]) == 1
    assert "answered 400: " in capsys.readouterr().err


def test_the_key_is_needed(demo_server, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    argv = ["complete", "--url", demo_server.url + "/v1", "-q", "x"]
    assert run(argv) == 1
    assert "answered 401" in capsys.readouterr().err
    assert run([*argv, "--api-key", "sesame", "--max-tokens", "2"]) == 0


@pytest.mark.parametrize("body", ['{"error": {"message": "no"}}', '{"error": "no"}', '{"message": "no"}', "no"])
def test_the_errors_of_all_servers_are_read(body):
    assert _message(body.encode()) == "no"


def events_of(*deltas: dict[str, Any]) -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def test_a_chat_shows_calls_asks_for_results_and_sends_them(tmp_path, capsys, monkeypatch):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    function = {"name": "f", "arguments": ""}
    first = events_of(
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    )
    with odd_server(GOOD_MODELS, [first, events_of({"content": "Done."})]) as (url, bodies):
        monkeypatch.setattr("sys.stdin", io.StringIO("Call!\none\ntwo\n"))
        assert run(["chat", "--url", url, "--tools", str(tools)]) == 0
    said = capsys.readouterr()
    assert said.out == 'f({"a": 1})\nf({})\nDone.\n'
    assert said.err == "Hm.\n"
    assert bodies[0]["tools"] == json.loads(tools.read_text())
    sent = bodies[1]["messages"]
    assert [call["function"]["arguments"] for call in sent[1]["tool_calls"]] == ['{"a": 1}', "{}"]
    assert [(m["tool_call_id"], m["content"]) for m in sent[2:]] == [("c1", "one"), ("c2", "two")]


def test_a_chat_asks_for_answers_of_a_schema(demo_server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"big": {"type": "boolean"}}, "required": ["big"]}')
    argv = ["chat", "--url", demo_server.url + "/v1", "--schema", str(schema), "-q", "Is it big?"]
    assert run([*argv, "--max-tokens", "40"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out)["big"], bool)


@pytest.mark.parametrize("option", ["--tools", "--schema"])
def test_files_that_cannot_be_read_are_one_line(option, tmp_path, capsys):
    with odd_server(GOOD_MODELS, [b""]) as (url, _):
        assert run(["chat", "--url", url, option, str(tmp_path / "none.json"), "-q", "x"]) == 1
    assert capsys.readouterr().err.startswith(f"vllm chat: {option} ")


# -- complete and chat, against servers that misbehave -----------------------------------------------------------------


@contextmanager
def odd_server(models: bytes, answers: list[bytes]) -> Iterator[tuple[str, list[Any]]]:
    """Answers GET with `models` and POST with the next of `answers`, all with status 200. Gives its address and the
    bodies that it was sent.
    """
    bodies: list[Any] = []
    waiting = iter(answers)

    class Handler(BaseHTTPRequestHandler):
        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._send(models)

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._send(next(waiting))

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


GOOD_MODELS = b'{"data": [{"id": "m"}]}'


@pytest.mark.parametrize(
    ("models", "answer", "message"),
    [
        (b"<html>", b"", "does not list models"),
        (b'{"data": []}', b"", "does not list models"),
        (b"[]", b"", "does not list models"),
        (GOOD_MODELS, b'data: {"choices": [{"text": "half"}]}\n\n', "ended the answer early"),
        (GOOD_MODELS, b'data: {"error": {"message": "it broke"}}\n\n', "it broke"),
    ],
)
def test_a_broken_answer_is_one_line_on_stderr(models, answer, message, capsys):
    with odd_server(models, [answer]) as (url, _):
        assert run(["complete", "--url", url, "-q", "x"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_nobody_listening(unused_tcp_port: int, capsys):
    assert run(["chat", "--url", f"http://127.0.0.1:{unused_tcp_port}/v1", "-q", "x"]) == 1
    assert "Start one with `vllm serve`" in capsys.readouterr().err


def test_an_address_that_is_none(capsys):
    assert run(["chat", "--url", "localhost:8000", "-q", "x"]) == 1
    assert "--url must look like" in capsys.readouterr().err


# -- help --------------------------------------------------------------------------------------------------------------


def parsers() -> dict[str, argparse.ArgumentParser]:
    from vllm.benchmarks import offline, serve
    from vllm.entrypoints.cli import client
    from vllm.entrypoints.openai import cli_args, run_batch
    from vllm.utils.argparse import FlexibleArgumentParser

    return {
        "serve": cli_args.make_arg_parser(FlexibleArgumentParser()),
        "complete": client._parser("complete"),
        "chat": client._parser("chat"),
        "bench latency": offline.make_parser("latency"),
        "bench throughput": offline.make_parser("throughput"),
        "bench serve": serve.make_parser(),
        "run-batch": run_batch.make_parser(),
    }


def test_every_flag_of_every_command_is_explained():
    for command, parser in parsers().items():
        silent = [action.option_strings for action in parser._actions if not action.help]
        assert not silent, (command, silent)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["latency", "--batch-size", "0"], "--batch-size must be 1 or more"),
        (["latency", "--num-iters", "0"], "--num-iters must be 1 or more"),
        (["latency", "--num-iters-warmup", "-1"], "--num-iters-warmup must be 0 or more"),
        (["throughput", "--num-prompts", "0"], "--num-prompts must be 1 or more"),
        (["throughput", "--n", "0"], "--n must be 1 or more"),
        (["throughput", "--dataset", "/nowhere/x.json"], "There is no file /nowhere/x.json"),
        (["throughput", "--dataset", __file__, "--input-len", "5"], "--input-len is the length of random prompts"),
        (["throughput", "--output-json", "/nowhere/x.json"], "in a folder that exists, got /nowhere/x.json"),
        (["latency", "--output-json", "/"], "--output-json must be a file in a folder that exists, got /"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run(["bench", *argv])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "demo", "--port", "0"],
        ["bench", "latency", "--model", "demo"],
        ["run-batch", "-i", __file__, "-o", os.devnull, "--model", "demo"],
    ],
    ids=" ".join,
)
def test_an_adapter_that_is_not_there_is_one_line_and_a_status(command, capsys):
    """Its error is of a class of its own, which is no ValueError."""
    try:
        status = run([*command, "--quantization", "bitsandbytes", "--qlora-adapter-name-or-path", "/nowhere/x"])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 1 and "No adapter found for /nowhere/x" in error and "Traceback" not in error


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_lengths_that_do_not_fit_the_model_are_not_measured(kind, capsys):
    few = ["--num-prompts", "1"] if kind == "throughput" else ["--batch-size", "1", "--num-iters", "1"]
    with pytest.raises(SystemExit) as stop:
        run(["bench", kind, "--max-model-len", "64", "--input-len", "60", "--output-len", "5", *few])
    assert stop.value.code == 1
    assert "--input-len 60 and --output-len 5 do not fit into max_model_len=64" in capsys.readouterr().err


def test_throughput_counts_what_was_generated(tmp_path, capsys):
    turns = [
        {"from": "human", "value": "What is the capital of France?"},
        {"from": "gpt", "value": "It is Paris, I say."},
    ]
    dataset, figures = tmp_path / "talks.json", tmp_path / "figures.json"
    dataset.write_text(json.dumps([{"conversations": turns}]))
    argv = ["bench", "throughput", "--dataset", str(dataset), "--num-prompts", "3", "--output-json", str(figures)]
    assert run([*argv, "--output-len", "7", "--n", "2"]) == 0
    found = json.loads(figures.read_text())
    tokens = round(found["output_tokens_per_second"] * found["elapsed_time"])
    assert (found["num_requests"], tokens) == (3, 3 * 2 * 7)
    assert found["total_num_tokens"] > tokens
