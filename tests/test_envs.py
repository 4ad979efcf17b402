"""Environment variables and the log lines that they configure."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from vllm import envs

TABLE = json.loads((Path(__file__).parent / "public_api.json").read_text(encoding="utf-8"))["environment_variables"]


def without_settings(**settings: str) -> dict[str, str]:
    """The environment of a process in which no variable of the table is set except these."""
    kept = {name: value for name, value in os.environ.items() if name not in envs.environment_variables}
    return {**kept, **settings}


def run(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=without_settings(**settings), capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*envs.environment_variables, "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HOST_IP", "DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_each_variable_has_its_default(clean: pytest.MonkeyPatch) -> None:
    home, tmp = os.path.expanduser("~"), tempfile.gettempdir()
    for name, expected in TABLE.items():
        if isinstance(expected, str):
            expected = expected.replace("<home>", home).replace("<tmp>", tmp)
        value = getattr(envs, name)
        assert (value, type(value)) == (expected, type(expected)), name


def test_each_variable_is_declared_once_with_type_and_help() -> None:
    tree = ast.parse(Path(envs.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = [node.target.id for node in block.body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
    assert sorted(declared) == sorted(envs.environment_variables)
    assert set(TABLE) <= set(envs.environment_variables)
    assert all(len(variable.help) > 5 for variable in envs.environment_variables.values())
    assert set(envs.environment_variables) <= set(dir(envs))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("VLLM_PORT", "5000", 5000),
        ("VLLM_CPU_KVCACHE_SPACE", "40", 40),
        ("VLLM_CPU_KVCACHE_SPACE", "0.5", 0.5),
        ("VLLM_USE_MODELSCOPE", "True", True),
        ("VLLM_NO_USAGE_STATS", "1", True),
        ("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "0", False),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", " true ", True),
        ("VLLM_PLUGINS", "", []),
        ("VLLM_PLUGINS", "a,b", ["a", "b"]),
        ("VLLM_LOGGING_LEVEL", "debug", "DEBUG"),
        ("VLLM_ASSETS_CACHE", "~/x", os.path.expanduser("~/x")),
        ("VLLM_CONFIGURE_LOGGING", "0", False),
    ],
)
def test_text_becomes_a_typed_value(clean: pytest.MonkeyPatch, name: str, text: str, value: Any) -> None:
    clean.setenv(name, text)
    assert getattr(envs, name) == value
    assert type(getattr(envs, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("VLLM_PORT", "http", "VLLM_PORT must be an integer, got 'http'"),
        ("VLLM_PORT", "70000", "VLLM_PORT must be a port number from 0 to 65535, got '70000'"),
        ("VLLM_CPU_KVCACHE_SPACE", "-1", "VLLM_CPU_KVCACHE_SPACE must be a number of GiB, 0 or more, got '-1'"),
        ("VLLM_MAX_N_SEQUENCES", "0", "VLLM_MAX_N_SEQUENCES must be 1 or more, got '0'"),
        ("VLLM_USE_MODELSCOPE", "maybe", r"VLLM_USE_MODELSCOPE must be 1 or 0 \(or true or false\), got 'maybe'"),
        ("VLLM_LOGGING_LEVEL", "LOUD", "VLLM_LOGGING_LEVEL must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "thread", "must be one of spawn, fork, got 'thread'"),
    ],
)
def test_wrong_value_is_refused_by_name(clean: pytest.MonkeyPatch, name: str, text: str, expected: str) -> None:
    clean.setenv(name, text)
    with pytest.raises(ValueError, match=expected):
        getattr(envs, name)


def test_variables_are_read_when_used(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("VLLM_HOST_IP", "10.0.0.1")
    assert envs.VLLM_HOST_IP == "10.0.0.1"
    clean.setenv("VLLM_HOST_IP", "10.0.0.2")
    assert envs.VLLM_HOST_IP == "10.0.0.2"
    clean.delenv("VLLM_HOST_IP")
    clean.setenv("HOST_IP", "10.0.0.3")
    assert envs.VLLM_HOST_IP == "10.0.0.3"


def test_folders_follow_the_desktop_standard(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("XDG_CACHE_HOME", "/cache")
    clean.setenv("XDG_CONFIG_HOME", "/config")
    assert (envs.VLLM_CACHE_ROOT, envs.VLLM_ASSETS_CACHE) == ("/cache/vllm", "/cache/vllm/assets")
    assert envs.VLLM_CONFIG_ROOT == "/config/vllm"


def test_variables_without_effect_are_reported_with_a_reason(clean: pytest.MonkeyPatch) -> None:
    assert envs.set_without_effect() == {}
    clean.setenv("VLLM_OPENVINO_KVCACHE_SPACE", "8")
    clean.setenv("VLLM_PORT", "5000")
    assert envs.set_without_effect() == {"VLLM_OPENVINO_KVCACHE_SPACE": "there is no OpenVINO backend"}


def test_a_variable_says_that_it_is_unused_if_and_only_if_nothing_reads_it() -> None:
    root = Path(envs.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in root.rglob("*.py") if path != Path(envs.__file__)]
    read = {name for name in envs.environment_variables if any(name in source for source in sources)}
    # These are read by others: the dynamic linker, CUDA and Triton.
    read |= {"CUDA_HOME", "LD_LIBRARY_PATH"}
    assert {v.name for v in envs.environment_variables.values() if not v.unused} == read


def test_useless_variables_are_logged_with_the_settings(clean: pytest.MonkeyPatch) -> None:
    code = (
        "from vllm import EngineArgs\n"
        "try:\n    EngineArgs(model='demo', device='cpu').create_engine_config()\n"
        "except ValueError as error:\n    print(error)"
    )
    done = run(code, VLLM_RINGBUFFER_WARNING_INTERVAL="5")
    assert (
        "VLLM_RINGBUFFER_WARNING_INTERVAL changes nothing: there is no ring buffer between processes" in done.stderr
    ), done


def test_unknown_variable_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'VLLM_NO_SUCH_THING'"):
        _ = envs.VLLM_NO_SUCH_THING


# --- Log lines ---

LOG = "from vllm.logger import init_logger; log = init_logger('vllm.test'); "


def test_log_lines_go_to_stderr_with_level_and_place() -> None:
    done = run(LOG + "log.debug('no'); log.info('cache has %d blocks, %.1f GiB of %s', 7, 1.5, 'x')")
    assert done.stdout == ""
    assert done.stderr.startswith("INFO ") and done.stderr.endswith("<string>:1] cache has 7 blocks, 1.5 GiB of x\n")
    assert done.stderr.count("\n") == 1


def test_level_follows_the_environment() -> None:
    assert "DEBUG" in run(LOG + "log.debug('yes')", VLLM_LOGGING_LEVEL="DEBUG").stderr
    assert run(LOG + "log.warning('no')", VLLM_LOGGING_LEVEL="ERROR").stderr == ""


def test_values_cannot_forge_lines_or_control_the_terminal() -> None:
    code = (
        LOG + r"v = 'x\r\nERROR 01-01 fake\x1b[2J\x9b\u2028\0'; log.info('got %s and %r', v, [v]);"
        r" log.info('%(a)s', {'a': v}); log.error(ValueError(v))"
    )
    lines = run(code).stderr.split("\n")
    assert lines[0].endswith(
        r"got x\r\nERROR 01-01 fake\x1b[2J\x9b\u2028\x00 and ['x\r\nERROR 01-01 fake\x1b[2J\x9b\u2028\x00']"
    )
    assert lines[1].endswith(r"] x\r\nERROR 01-01 fake\x1b[2J\x9b\u2028\x00")
    assert not [line for line in lines if line.startswith("ERROR 01-01 fake")]
    assert all(ord(c) >= 0x20 for line in lines for c in line)


def test_each_line_of_a_long_message_has_the_prefix() -> None:
    lines = run(LOG + r"log.info('first\nsecond')").stderr.splitlines()
    assert [line.rpartition("] ")[2] for line in lines] == ["first", "second"]
    assert all(line.startswith("INFO ") for line in lines)


def test_lines_of_one_of_several_copies_begin_with_its_number() -> None:
    code = "from vllm.logger import mark_lines; mark_lines('replica 1'); log.info('a\\nb')"
    lines = run(LOG + code).stderr.splitlines()
    assert [re.sub(r"pid=\d+\) INFO .*\] ", "", line) for line in lines] == ["(replica 1 a", "(replica 1 b"]


def test_logging_can_be_left_to_the_application() -> None:
    code = "import logging; logging.basicConfig(format='APP %(message)s', level='INFO'); " + LOG + "log.info('hello')"
    assert run(code, VLLM_CONFIGURE_LOGGING="0").stderr == "APP hello\n"


def test_logging_can_be_configured_by_a_file(tmp_path: Path) -> None:
    config = {
        "version": 1,
        "formatters": {"plain": {"class": "vllm.logger.SafeFormatter", "format": "FILE %(message)s"}},
        "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "plain"}},
        "loggers": {"vllm": {"handlers": ["err"], "level": "DEBUG", "propagate": False}},
    }
    path = tmp_path / "logging.json"
    path.write_text(json.dumps(config))
    assert run(LOG + "log.debug('a\\nb %s', 1)", VLLM_LOGGING_CONFIG_PATH=str(path)).stderr == "FILE a\nFILE b 1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "RuntimeError: VLLM_LOGGING_CONFIG_PATH must name a readable JSON file"),
        ("{", "ValueError: VLLM_LOGGING_CONFIG_PATH must name a JSON file"),
        ("[]", "must hold a JSON object for logging.config.dictConfig, got list"),
    ],
)
def test_wrong_logging_file_is_refused(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "logging.json"
    if text is not None:
        path.write_text(text)
    done = run(LOG, VLLM_LOGGING_CONFIG_PATH=str(path))
    assert done.returncode == 1 and expected in done.stderr


def test_logging_file_needs_logging_to_be_configured(tmp_path: Path) -> None:
    done = run(LOG, VLLM_LOGGING_CONFIG_PATH=str(tmp_path / "x"), VLLM_CONFIGURE_LOGGING="0")
    assert "needs VLLM_CONFIGURE_LOGGING=1, got 0" in done.stderr


def test_a_variable_says_whether_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PORT", raising=False)
    assert not envs.is_set("VLLM_PORT")
    assert envs.get_vllm_port() is None
    monkeypatch.setenv("VLLM_PORT", "5570")
    assert envs.is_set("VLLM_PORT")
    assert envs.get_vllm_port() == 5570
    with pytest.raises(AttributeError, match="VLLM_PROT"):
        envs.is_set("VLLM_PROT")
