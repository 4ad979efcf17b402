"""Compiling ahead never holds up an engine for long, whatever becomes of the processes that do it; what it compiles
can be compiled.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

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


def _part(x: int) -> int:
    """Stands for a function that kernels call; it is longer than the two kernels below."""
    return x + 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12 + 13 + 14 + 15 + 16 + 17 + 18 + 19 + 20 + 21 + 22


def _short(x: int) -> int:
    return part(x)


def _long(x: int) -> int:
    y = x + 1
    return y * y * y


part = JITFunction(_part)


def test_kernels_that_call_the_most_are_compiled_first() -> None:
    short, long = JITFunction(_short), JITFunction(_long)
    assert len(short.src) < len(long.src)  # without what it calls
    collector = precompile._Collector()
    collector.jobs = [(long, (), {}), (short, (), {})]
    assert [kernel for kernel, _, _ in collector.take()] == [short, long]
    assert collector.take() == []


@pytest.mark.parametrize("kernel", ["decode_attention", "hopper_prefill", "hopper_products"])
def test_what_the_interpreter_does_not_show_compiles_without_a_device(kernel: str) -> None:
    root = Path(__file__).parents[3]
    program = [sys.executable, "-m", f"tests.ops.triton.compile_{kernel}"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    done = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
