"""`vllm collect-env`: says what a bug report needs and never a secret."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from vllm import collect_env


@pytest.fixture
def report(monkeypatch, capsys) -> str:
    monkeypatch.setenv("VLLM_API_KEY", "sesame-1")
    monkeypatch.setenv("HF_TOKEN", "sesame-2")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:sesame-3@hub.example/")
    monkeypatch.setenv("VLLM_AUTH", "sesame-4")
    monkeypatch.setenv("UNRELATED_THING", "sesame-5")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert collect_env.main() == 0
    return capsys.readouterr().out


def test_the_report_is_complete_and_holds_no_secret(report):
    for title in ("System", "Processor", "GPU", "Packages", "Torch", "Environment"):
        assert f"{title}\n{'-' * len(title)}\n" in report
    for package in ("torch", "transformers", "numpy"):
        assert f"{package}: {metadata.version(package)}\n" in report
    assert "no-such" not in report
    assert "Cores this process may use:" in report and "Memory: " in report
    assert "VLLM_LOGGING_LEVEL=INFO" in report
    assert "sesame" not in report
    assert "VLLM_API_KEY=(set)" in report and "HF_TOKEN=(set)" in report
    assert "HF_ENDPOINT=https://(set)@hub.example/" in report


def test_a_missing_package_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(collect_env, "PACKAGES", ("no-such-package-at-all",))
    assert list(collect_env._packages()) == ["no-such-package-at-all: not installed"]


def test_a_tool_that_fails_or_hangs_does_no_harm():
    assert collect_env._lines(["/nowhere/nvidia-smi"]) == []
    assert collect_env._version(["false"]) == "no answer"


def test_the_line_of_nvcc_names_its_release(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'nvcc: a compiler driver'\necho 'Some tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "nvcc: Some tools, release 12.8, V12.8.93" in list(collect_env._system())
