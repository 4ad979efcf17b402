"""What the one who runs a server sees: its limits of the machine, its address, its config file."""

from __future__ import annotations

import argparse
import logging
import resource
import socket
from pathlib import Path

import pytest

from vllm.entrypoints.cli.main import run
from vllm.entrypoints.openai import api_server
from vllm.entrypoints.openai.api_server import bind, url_of, uvicorn_logging
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.entrypoints.openai.open_files import OTHER_FILES, room_for_connections
from vllm.utils.argparse import FlexibleArgumentParser


@pytest.mark.parametrize(
    ("soft", "hard", "room", "raised"),
    [
        (1024, 524288, 4096, 4096 + OTHER_FILES),
        (1024, resource.RLIM_INFINITY, 4096, 4096 + OTHER_FILES),
        (1024, 2000, 2000 - OTHER_FILES, 2000),
        (64, 64, 32, 64),
        (65536, 524288, 4096, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, None),
    ],
)
def test_connections_fit_into_the_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    room: int,
    raised: int | None,
) -> None:
    """A limit that can be raised is raised; else fewer connections are served, and the log says so."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, "vllm"):
        assert room_for_connections(4096) == room
    assert asked == ([] if raised is None else [(raised, hard)])
    assert (f"it serves {room} connections at once, not 4096" in caplog.text) == (room < 4096)


def test_a_limit_that_the_system_does_not_raise_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 524288))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert room_for_connections(4096) == 1024 - OTHER_FILES


@pytest.mark.parametrize(("host", "url"), [("::1", "https://[::1]:"), ("127.0.0.1", "https://127.0.0.1:")])
def test_the_address_in_the_log_can_be_opened(host: str, url: str) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    try:
        listener = bind(parser.parse_args(["--host", host, "--port", "0"]))
    except ValueError:
        assert host == "::1" and not _has_ipv6()
        return
    with listener:
        assert url_of(listener, tls=True) == f"{url}{listener.getsockname()[1]}"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("name", ["uvicorn", "uvicorn.access"])
def test_the_operators_own_settings_of_the_http_log_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for logger in ("uvicorn", "uvicorn.access", "uvicorn.error"):
        monkeypatch.setattr(logging.getLogger(logger), "handlers", [])
    settings = uvicorn_logging()
    assert settings is not None and "asctime" in settings["formatters"]["access"]["fmt"]
    monkeypatch.setattr(logging.getLogger(name), "handlers", [logging.NullHandler()])
    assert uvicorn_logging() is None


def test_the_model_of_the_command_line_wins_over_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: of-the-file\nport: 5\n")
    served: list[tuple[str, int]] = []
    monkeypatch.setattr(api_server, "serve", lambda args: served.append((args.model, args.port)) or 0)
    for words in (["of-the-line"], ["--model", "of-the-line"], ["--model=of-the-line"], []):
        assert run(["serve", *words, "--config", str(file), "--port", "6"]) == 0
    assert served == [("of-the-line", 6)] * 3 + [("of-the-file", 6)]


@pytest.mark.parametrize("words", [["--model", "/nowhere/at/all"], ["--model", "demo", "--port", "-1"]])
def test_what_cannot_be_explained_is_one_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert api_server.serve(make_arg_parser(FlexibleArgumentParser()).parse_args([*words, "--explain"])) == 1
    (error,) = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("INFO")]
    assert error.startswith("ERROR")


def test_a_config_file_names_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("port: 1\nconfig: other.yaml\n")
    with pytest.raises(SystemExit):
        make_arg_parser(FlexibleArgumentParser()).parse_args(["--config", str(file)])
    assert "a config file cannot name another one" in capsys.readouterr().err


def parsed(*words: str) -> argparse.Namespace:
    return make_arg_parser(FlexibleArgumentParser()).parse_args(list(words))


def test_all_interfaces_are_listened_on_unless_one_is_named() -> None:
    with bind(parsed("--port", "0")) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    with bind(parsed("--port", "0", "--host", "127.0.0.1")) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("words", "key", "warned", "origins"),
    [
        ([], "", True, ["*"]),
        (["--host", "127.0.0.1"], "", False, []),
        (["--host", "localhost"], "", False, []),
        (["--host", "127.0.0.1", "--allowed-origins", '["http://a"]'], "", False, ["http://a"]),
        (["--host", "127.0.0.1", "--api-key", "k"], "", False, ["*"]),
        (["--api-key", "k"], "", False, ["*"]),
        ([], "k", False, ["*"]),
        (["--host", "0.0.0.0"], "", True, ["*"]),
    ],
)
def test_an_open_door_is_told_and_shut_for_pages_of_others(
    words: list[str],
    key: str,
    warned: bool,
    origins: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, "vllm"):
        api_server.warn_of_open_door(parsed(*words))
    assert ("Without a key, everybody" in caplog.text) is warned
    assert api_server.allowed_origins(parsed(*words)) == origins
