"""The examples of adapters, with the adapter that comes with the package."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from vllm.lora.request import LoRARequest
from vllm.lora.source import adapter_folder

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
PIRATE = "Arr! The capital of France is Paris. Arr!"
PLAIN = "The capital of France is Paris."


def run(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    runpy.run_path(str(EXAMPLES / name))["main"]()
    return [line for line in capsys.readouterr().out.splitlines() if ": " in line]


def test_two_adapters_and_their_base_answer_in_their_own_way(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("multilora_inference.py", capsys)
    assert f"base: {PLAIN!r}" in lines
    assert f"pirate: {PIRATE!r}" in lines
    assert "pirate-2: 'Arr! Hamlet was written by William Shakespeare. Arr!'" in lines
    assert sum(line.startswith("pirate: 'Arr!") for line in lines) == 3


def test_an_adapter_changes_a_quantized_model(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("lora_with_quantization_inference.py", capsys)
    for quantization in ("fp8", "bitsandbytes"):
        assert f"{quantization}, base: {PLAIN!r}" in lines
        assert any(line.startswith(f"{quantization}, pirate: 'Arr!") for line in lines)


def test_the_packaged_adapter_is_small() -> None:
    folder = adapter_folder(LoRARequest("pirate", 1, "demo-pirate"))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 150_000
