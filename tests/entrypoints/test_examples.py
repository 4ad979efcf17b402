"""The offline examples run on the model that comes with the package, and print what they promise."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_offline_inference(monkeypatch, capsys):
    out = run("offline_inference.py", monkeypatch, capsys)
    assert out.count("Generated text: ") == 4
    assert "Prompt: 'The capital of France is'" in out


def test_chat(monkeypatch, capsys):
    out = run("offline_inference_chat.py", monkeypatch, capsys)
    assert "higher education" in out


def test_llm_engine_example(monkeypatch, capsys):
    out = run("llm_engine_example.py", monkeypatch, capsys, "--max-num-seqs", "16", "--seed", "1")
    assert out.count("RequestOutput(") == 4
    assert out.count("CompletionOutput(") == 1 + 1 + 2 + 3


def test_structured_output(monkeypatch, capsys):
    lines = run("offline_structured_output.py", monkeypatch, capsys).splitlines()
    answers = [line.strip() for line in lines if line.startswith("    ")]
    assert answers[0] in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]+\.[a-z]+@[a-z]+\.com", answers[1])
    assert answers[-1].startswith("SELECT col_")


def test_prefix(monkeypatch, capsys):
    out = run("offline_inference_with_prefix.py", monkeypatch, capsys)
    assert "Generated answers are the same: True" in out
    speed = float(out.rsplit("regular is: ", 1)[1])
    assert speed > 0
