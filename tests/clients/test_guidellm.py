"""GuideLLM measures the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
DEMO = str(Path(vllm.__file__).parent / "assets" / "demo")


def measure(backend: str, folder: Path) -> dict[str, Any]:
    """The report of five requests made one after the other."""
    report = folder / "report.json"
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console", "--backend", backend,
        "--tokenizer", f"kind=huggingface_auto,model={DEMO}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=5",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    found: dict[str, Any] = benchmark["requests"]
    return found


def test_a_measurement_reports_every_request(server: str, tmp_path: Path) -> None:
    for _ in range(3):  # on a busy machine it may write its report before it has booked the last request
        requests = measure(f"kind=openai_http,target={server},model=demo", tmp_path)
        assert not requests["errored"]
        if len(requests["successful"]) == 5:
            break
    assert len(requests["successful"]) == 5


@pytest.mark.parametrize("kind", ["vllm_python", "vllm_python_batch"])
def test_an_engine_in_its_own_process_is_measured(kind: str, tmp_path: Path) -> None:
    settings = {"kind": kind, "model": DEMO, "vllm_config": {"max_model_len": 512, "num_gpu_blocks_override": 500}}
    requests = measure(json.dumps({**settings, "request_format": "plain"}), tmp_path)
    assert len(requests["successful"]) == 5 and not requests["errored"]
    assert all(request["output_metrics"]["text_tokens"] == 16 for request in requests["successful"])
