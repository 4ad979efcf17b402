"""GuideLLM measures the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
DEMO = str(Path(vllm.__file__).parent / "assets" / "demo")


def test_a_measurement_reports_every_request(server: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={server},model=demo",
        "--tokenizer", f"kind=huggingface_auto,model={DEMO}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=5",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 5 and not requests["errored"]
