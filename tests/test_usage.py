"""Usage statistics: none unless asked for, then a line per start in a file that stays here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage import usage_lib
from vllm.usage.usage_lib import UsageContext, record_usage

GUIDE_FIELDS = {
    "uuid", "provider", "num_cpu", "cpu_type", "cpu_family_model_stepping", "total_memory", "architecture", "platform",
    "model_architecture", "vllm_version", "context", "log_time", "source", "dtype", "tensor_parallel_size",
    "block_size", "gpu_memory_utilization", "quantization", "kv_cache_dtype", "enable_lora", "enable_prefix_caching",
    "enforce_eager", "disable_custom_all_reduce",
}  # fmt: skip


@pytest.fixture
def config() -> VllmConfig:
    return EngineArgs(model="demo").create_engine_config()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("VLLM_USAGE_STATS", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CONFIG_ROOT", str(tmp_path / "config"))
    return tmp_path / "config"


def test_nothing_is_written_unless_asked_for(config: VllmConfig, folder: Path) -> None:
    record_usage(config, UsageContext.LLM_CLASS)
    assert not folder.exists()


def test_each_start_adds_a_line(config: VllmConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USAGE_STATS", "1")
    monkeypatch.setenv("VLLM_USAGE_SOURCE", "a test")
    for context in (UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER):
        record_usage(config, context)
    path = folder / "usage_stats.json"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert set(first) == GUIDE_FIELDS
    assert (first["context"], second["context"]) == ("LLM_CLASS", "OPENAI_API_SERVER")
    assert first["uuid"] != second["uuid"]
    assert first["model_architecture"] == "LlamaForCausalLM"
    assert first["dtype"].startswith("torch.") and first["source"] == "a test"
    assert first["total_memory"] > 0 and first["cpu_type"]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("refusal", ["VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK", "file"])
def test_every_way_to_refuse_wins(
    config: VllmConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    monkeypatch.setenv("VLLM_USAGE_STATS", "1")
    if refusal == "file":
        folder.mkdir()
        (folder / "do_not_track").touch()
    else:
        monkeypatch.setenv(refusal, "1")
    record_usage(config, UsageContext.LLM_CLASS)
    assert not (folder / "usage_stats.json").exists()


def test_a_file_that_cannot_be_written_and_a_full_one_harm_nothing(
    config: VllmConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_USAGE_STATS", "1")
    usage_lib.logger.propagate = True
    folder.write_text("not a folder")
    record_usage(config, UsageContext.LLM_CLASS)
    assert folder.read_text() == "not a folder"
    folder.unlink()
    folder.mkdir()
    path = folder / "usage_stats.json"
    path.write_bytes(b"x" * (usage_lib.MAX_FILE_BYTES + 1))
    record_usage(config, UsageContext.LLM_CLASS)
    assert path.stat().st_size == usage_lib.MAX_FILE_BYTES + 1


def test_a_gpu_is_described_by_the_drivers_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'NVIDIA H200, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(tool))
    expected = {"gpu_count": 2, "gpu_type": "NVIDIA H200", "gpu_memory_per_device": 143771 * 2**20}
    assert usage_lib._gpus() == expected
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert usage_lib._gpus() == {}
