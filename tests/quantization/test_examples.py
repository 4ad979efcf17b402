"""The examples of quantized models, and the guide's ways to run one, on the packaged model."""

from __future__ import annotations

import json
import logging
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quantization.test_gguf import DEMO, write_demo
from vllm import LLM, SamplingParams
from vllm.config.model import QUANTIZATIONS
from vllm.config.quantization import IN_FLIGHT
from vllm.quantize.run import Job, quantize

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))


def run(name: str, monkeypatch: Any, capsys: Any, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


def test_gguf_inference(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    out = run("gguf_inference.py", monkeypatch, capsys, str(write_demo(tmp_path, "Q8_0")[0]))
    assert out.count("Answer: ") == 2
    assert "Paris" in out


def test_aqlm_example(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    """One codebook that holds every vector of a weight stands for the weight exactly."""
    shutil.copytree(DEMO, tmp_path / "model")
    tensors = {}
    for name, tensor in load_file(DEMO / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        vectors = tensor.half().reshape(-1, 8)
        books = torch.zeros(1, 65536, 1, 8, dtype=torch.float16)
        books[0, : len(vectors), 0] = vectors
        module = name.removesuffix(".weight")
        codes = torch.arange(len(vectors)).view(len(tensor), -1, 1)
        tensors[f"{module}.codes"] = (codes - (codes >= 32768).long() * 65536).to(torch.int16)
        tensors[f"{module}.codebooks"] = books
        tensors[f"{module}.scales"] = torch.ones(len(tensor), 1, 1, 1, dtype=torch.float16)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    config = json.loads((DEMO / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "aqlm", "in_group_size": 8, "out_group_size": 1, "num_codebooks": 1, "nbits_per_codebook": 16
    }  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    arguments = ("--model", str(tmp_path / "model"), "--prompt", "The capital of France is")
    assert "Paris" in run("aqlm_example.py", monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("name", [name for name in IN_FLIGHT if name != "experts_int8"])
def test_the_packaged_model_quantized_in_flight(name: str) -> None:
    options = {"load_format": "bitsandbytes"} if name == "bitsandbytes" else {}
    llm = LLM("demo", quantization=name, max_model_len=64, **options)
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))
    assert "Paris" in output.outputs[0].text


@pytest.mark.parametrize(
    ("method", "quantization"), [("gptq", None), ("fp8", None), ("bitsandbytes", None), (None, "experts_int8")]
)
def test_a_format_that_nothing_is_stored_in_is_warned_about(
    method: str | None, quantization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = {} if method is None else {"quantization_config": {"quant_method": method, "bits": 4}}
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        LLM("demo", hf_overrides=overrides, quantization=quantization, max_model_len=64)
    finally:
        logger.removeHandler(caplog.handler)
    assert f"{method or quantization}: the weights are plain and stay so" in caplog.text


def test_a_quantized_model_under_its_other_name_in_two_processes(tmp_path: Path) -> None:
    quantize(Job("demo", "awq", tmp_path / "out", group=32, nearest=True, tokens=1500))
    llm = LLM(str(tmp_path / "out"), quantization="AWQ_marlin", tensor_parallel_size=2, max_model_len=64)
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))
    assert "Paris" in output.outputs[0].text


def test_the_page_names_formats_that_there_are() -> None:
    page = (ROOT / "docs" / "quantization.md").read_text()
    table = page.split("## Formats")[1].split('"As numbers"')[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    names = {name.strip() for row in rows for name in row.split(",")}
    assert len(rows) > 10 and names <= set(QUANTIZATIONS)
