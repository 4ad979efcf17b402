"""General plugins of installed distributions: which are loaded, how often, and what becomes of one that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PLUGIN = """
import os
from vllm import ModelRegistry

def note(name):
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{os.getpid()} {name}\\n")

def first():
    note("first")
    ModelRegistry.register_model("PluggedForCausalLM", "plugged:Model")

def second():
    note("second")

def broken():
    note("broken")
    raise RuntimeError("no such luck")
"""
LOAD = """
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
print("PluggedForCausalLM" in ModelRegistry.get_supported_archs())
"""
SERVE = """
import asyncio
from vllm import AsyncEngineArgs, AsyncLLMEngine

async def main():
    arguments = AsyncEngineArgs("demo", device="cpu", tensor_parallel_size=2, max_model_len=256, max_num_seqs=4)
    await AsyncLLMEngine.from_engine_args(arguments).shutdown()

asyncio.run(main())
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed distribution of three plugins."""
    (tmp_path / "plugged.py").write_text(PLUGIN)
    info = tmp_path / "plugged-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nzoo = plugged:second\nbroken = plugged:broken\nalpha = plugged:first\n"
        "[vllm.other_plugins]\nother = plugged:second\n"
    )
    return tmp_path


def run(site: Path, code: str, allowed: str | None) -> tuple[list[tuple[str, str]], subprocess.CompletedProcess[str]]:
    """(pid, plugin) of every call of a plugin, and the process that ran `code`."""
    notes = site / "notes"
    notes.touch()
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "NOTES": str(notes), "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_PLUGINS", None)
    if allowed is not None:
        environment["VLLM_PLUGINS"] = allowed
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return [(line.split()[0], line.split()[1]) for line in notes.read_text().splitlines()], done


@pytest.mark.parametrize(
    ("allowed", "called"),
    [
        (None, ["first", "broken", "second"]),  # by name: alpha, broken, zoo
        ("zoo, alpha", ["first", "second"]),
        ("zoo", ["second"]),
        ("", []),
    ],
)
def test_each_allowed_plugin_is_called_once(site: Path, allowed: str | None, called: list[str]) -> None:
    calls, done = run(site, LOAD, allowed)
    assert [name for _, name in calls] == called
    assert done.stdout.split()[-1] == str("first" in called)


def test_a_plugin_that_fails_is_named_and_left_out(site: Path) -> None:
    _, done = run(site, LOAD, None)
    assert "The plugin broken of plugged 1.5 (plugged:broken) failed and is left out." in done.stderr
    assert "RuntimeError: no such luck" in done.stderr
    assert "Loaded the plugin zoo of plugged 1.5" in done.stderr


def test_a_plugin_that_is_not_installed_is_named(site: Path) -> None:
    _, done = run(site, LOAD, "zoo,missing")
    assert "VLLM_PLUGINS names missing, not installed here. Installed plugins: alpha, broken, zoo." in done.stderr


def test_every_process_of_an_engine_loads_plugins_once(site: Path) -> None:
    calls, _ = run(site, SERVE, "alpha,zoo")
    by_name = Counter(name for _, name in calls)
    assert by_name == {"first": 3, "second": 3}  # front end, core with the first rank, second rank
    assert len(set(calls)) == 6
