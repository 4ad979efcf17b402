"""A process of this package finds the modules that its parent finds, wherever it is started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.ipc import child
from vllm.ipc.helper import Helper

MODULE = "tests.ipc.answering"


@pytest.fixture(params=["here", "before 3.11"])
def helper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    if request.param != "here":
        monkeypatch.setattr(child, "_RUN", child._RUN_BEFORE_3_11)
    made = Helper(MODULE)
    yield made
    made.end()


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has modules of the names that a process imports first, or that are imported late."""
    (tmp_path / "vllm").mkdir()
    for name in ("queue", "runpy", "vllm/__init__", "late"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the current folder')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(helper: Helper) -> list[str]:
    """Where the process looks for modules."""
    helper.start(b"hello", 60)
    return helper.ask(b"path", 60).decode().split("\n")


def test_modules_of_the_current_folder_are_not_taken(
    helper: Helper, trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    path = found(helper)
    assert str(trap) not in path and "" not in path
    hook = "__editable__"  # of a package that is installed from its sources: `site` puts it where it comes
    known = [entry for entry in path if entry in sys.path and not entry.startswith(hook)]
    assert known == [entry for entry in dict.fromkeys(sys.path) if entry in known]


def test_a_parent_that_looks_into_the_current_folder_has_children_that_do(
    helper: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `python -c` and in the interpreter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *filter(None, sys.path)])
    assert str(tmp_path) in found(helper)


def test_the_module_is_seen_in_the_command_line(helper: Helper) -> None:
    psutil = pytest.importorskip("psutil")
    helper.start(b"hello", 60)
    assert helper._process is not None and MODULE in psutil.Process(helper._process.pid).cmdline()
