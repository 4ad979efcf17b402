"""What is compiled ahead is all that steps need: in a process without Triton's interpreter, which compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_random_steps_need_no_kernel_that_was_not_foreseen() -> None:
    program = [sys.executable, "-m", "tests.worker.kernel_variants"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
