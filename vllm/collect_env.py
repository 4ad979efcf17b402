"""`vllm collect-env`: what a bug report needs to say about a machine; never a key or a token."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "vllm", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "msgspec", "pydantic",
    "fastapi", "uvicorn", "uvloop", "httptools", "triton", "flash_attn", "flashinfer-python", "jinja2",
)  # fmt: skip
SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
INTERESTING = re.compile(
    r"^(VLLM_|CUDA|NVIDIA_|NCCL_|OMP_|MKL_|KMP_|GOMP_|TORCH|PYTORCH_|HF_|TRITON_|LD_LIBRARY_PATH$)"
)


def collect() -> str:
    """The report as text."""
    sections = {
        "System": _system(),
        "Processor": _processor(),
        "GPU": _gpus(),
        "Packages": _packages(),
        "Torch": _torch(),
        "Environment": _environment(),
    }
    parts = []
    for title, lines in sections.items():
        parts.append(f"{title}\n{'-' * len(title)}\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _system() -> Iterator[str]:
    yield f"OS: {platform.platform()}"
    yield f"Python: {sys.version.split()[0]} ({platform.python_implementation()})"
    yield f"libc: {' '.join(platform.libc_ver())}"
    for tool in ("gcc", "g++", "nvcc"):
        path = shutil.which(tool)
        yield f"{tool}: {_version([path, '--version']) if path else 'not found'}"


def _processor() -> Iterator[str]:
    yield f"Cores this process may use: {len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        yield f"Model: {platform.processor() or platform.machine()}"
        return
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    yield f"Model: {model.group(1) if model else platform.machine()}"
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    useful = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    found = flags.group(1).split() if flags else []
    yield f"Instructions: {' '.join(f for f in useful if f in found) or 'none of ' + ' '.join(useful)}"
    memory = re.search(r"^MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if memory:
        yield f"Memory: {int(memory.group(1)) / 2**20:.1f} GiB"


def _gpus() -> Iterator[str]:
    path = shutil.which("nvidia-smi")
    if path is None:
        yield "nvidia-smi: not found"
        return
    query = [path, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    yield from _lines(query) or ["nvidia-smi gave no answer"]


def _packages() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name}: {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name}: not installed"


def _torch() -> Iterator[str]:
    try:
        import torch
    except ImportError as error:
        yield f"torch cannot be imported: {error}"
        return
    yield f"CUDA of the build: {torch.version.cuda}; available: {torch.cuda.is_available()}"
    yield f"Threads: {torch.get_num_threads()}"
    from vllm.ops import setup

    setup("cpu")
    from vllm.ops.attention import attend

    yield f"CPU attention: {attend.kernel('cpu').__module__}"


def _environment() -> Iterator[str]:
    for name in sorted(os.environ):
        if INTERESTING.match(name):
            value = USER_IN_URL.sub("(set)", os.environ[name])
            yield f"{name}={'(set)' if SECRET.search(name) else value}"


def _version(command: Sequence[str]) -> str:
    """The line that names the release, as in nvcc's answer, else the first."""
    lines = _lines(command)
    return next((line for line in lines if ", release " in line), lines[0]) if lines else "no answer"


def _lines(command: Sequence[str]) -> list[str]:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in result.stdout.splitlines() if line.strip()]


def main(argv: Sequence[str] = ("collect-env",)) -> int:
    """Print the report; `argv[0]` is the command's name."""
    text = "Print versions, hardware and settings for a bug report; keys and tokens are only said to be set."
    argparse.ArgumentParser(prog="vllm collect-env", description=text).parse_args(list(argv[1:]))
    print(collect())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
