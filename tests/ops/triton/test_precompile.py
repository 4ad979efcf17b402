"""Compiling ahead never holds up an engine for long, whatever becomes of the processes that do it."""

import os
import time

import pytest

from vllm.ops.triton import precompile


def test_processes_that_hang_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "_STALL", 0.5)
    found = precompile.precompile([lambda: time.sleep(600)], [], 90, processes=2)
    found.wait()
    found.finish()
    assert not found._alive


def test_processes_that_fail_hold_up_nobody() -> None:
    found = precompile.precompile([lambda: os._exit(3)], [], 90, processes=2)
    found.wait()
    found.finish()
    assert not found._alive
