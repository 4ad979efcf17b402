"""VLLM_TRACE_FUNCTION: calls of this package's functions, and of no others, land in a file of their thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_calls_are_written_to_a_file_of_their_thread(tmp_path: Path) -> None:
    program = """
import json, threading
from vllm.utils.trace_calls import begin_if_asked
from vllm.utils import random_uuid
begin_if_asked()
begin_if_asked()
json.dumps([1])
thread = threading.Thread(target=random_uuid); thread.start(); thread.join()
random_uuid()
"""
    environment = {"VLLM_TRACE_FUNCTION": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("VLLM_TRACE_FUNCTION is set") + done.stdout.count("VLLM_TRACE_FUNCTION is set") == 1
    files = list(tmp_path.glob("vllm-trace-*/process_*_thread_*.log"))
    assert len(files) == 2
    for file in files:
        text = file.read_text()
        assert text.count("Call to random_uuid in ") == text.count("Return from random_uuid in ") == 1
        assert "json" not in text.replace("from <module>", "")


def test_nothing_is_traced_unless_asked(tmp_path: Path) -> None:
    program = (
        "from vllm.utils.trace_calls import begin_if_asked; begin_if_asked(); import sys; assert not sys.getprofile()"
    )
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert not list(tmp_path.iterdir())
