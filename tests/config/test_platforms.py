"""Platforms say what the machine can do, and which package is missing for those that have no code here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm import platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability


@pytest.mark.parametrize(
    ("line", "bfloat16"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("Features\t: fp asimd", False),
        ("model name\t: bf16 machine", False),
    ],
)
def test_the_cpu_has_bfloat16_if_its_flags_say_so(tmp_path: Path, line: str, bfloat16: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n")
    cpu = CpuPlatform(tmp_path / "cpuinfo")
    assert cpu.supports_bfloat16() is bfloat16
    assert ("no bfloat16 instructions" in cpu.bfloat16_reason()) is not bfloat16


def test_a_system_without_cpuinfo_has_no_flags(tmp_path: Path) -> None:
    assert CpuPlatform(tmp_path / "none").flags == frozenset()


def test_facts_about_this_cpu() -> None:
    cpu = platforms.platform_for("cpu")
    assert cpu.is_cpu() and not cpu.is_cuda_alike()
    assert cpu.device_count() == 1
    assert cpu.get_device_total_memory() > 2**28
    assert cpu.get_device_name()
    assert cpu.get_device_capability() is None and not cpu.has_device_capability(80)
    assert platforms.platform_for("cpu") is cpu


def test_the_current_platform_is_the_one_that_is_found() -> None:
    device, reason = platforms.detect_device()
    assert platforms.current_platform.device_type == device
    assert reason


@pytest.mark.parametrize("torch_first", [False, True])
def test_a_torch_without_cuda_is_known_by_its_version(torch_first: bool) -> None:
    code = f"""
import sys
from importlib import metadata
{"import torch" if torch_first else ""}
from vllm import platforms
metadata.version = lambda name: "2.9.0+cpu"
print(platforms.detect_device()[0], "torch" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert printed == (["cpu", "False"] if not torch_first else [platforms.detect_device()[0], "True"])


def test_capabilities_compare() -> None:
    assert DeviceCapability(8, 6).to_int() == 86
    assert DeviceCapability(9, 0).as_version_str() == "9.0"


@pytest.mark.parametrize("device", ["rocm", "xpu", "hpu", "tpu", "neuron", "openvino"])
def test_a_device_without_code_says_what_to_do(device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' is not available: .*[Uu]se device='cpu'"):
        platforms.platform_for(device)


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Unknown device 'abacus', expected one of: auto, cpu, cuda"):
        platforms.platform_for("abacus")


def test_importing_the_configuration_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, vllm.config, vllm.config.resolve, vllm.engine.arg_utils, vllm.platforms, vllm.utils.argparse;"
        "from vllm import EngineArgs; EngineArgs();"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub', 'yaml') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
