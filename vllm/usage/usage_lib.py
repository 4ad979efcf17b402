"""Usage statistics: written to a file of this machine if its owner asks for them, and never sent anywhere.

With `VLLM_USAGE_STATS=1` each engine adds one line of JSON to `usage_stats.json` in the folder of configuration files
(`~/.config/vllm`) when it starts: the kind of machine, the model's architecture and a few settings, no prompt, no path
and no name of a model. `VLLM_NO_USAGE_STATS`, `DO_NOT_TRACK` and a file `do_not_track` in the same folder win over it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import time
import uuid
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.logger import init_logger
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

MAX_FILE_BYTES = 4 * 2**20  # some thousand starts; then nothing is added
PROVIDER_FILES = ("/sys/class/dmi/id/product_version", "/sys/class/dmi/id/bios_vendor", "/sys/class/dmi/id/sys_vendor")
PROVIDERS = {"amazon": "AWS", "microsoft": "AZURE", "google": "GCP", "oracle": "OCI"}


class UsageContext(str, Enum):
    """The door through which an engine is used."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def stats_file() -> Path:
    """Where the statistics are, if they are wanted."""
    return Path(envs.VLLM_CONFIG_ROOT) / "usage_stats.json"


def is_usage_stats_enabled() -> bool:
    """Whether the owner of this machine asked for statistics, and nothing speaks against them."""
    refused = envs.VLLM_NO_USAGE_STATS or envs.VLLM_DO_NOT_TRACK
    return envs.VLLM_USAGE_STATS and not refused and not (Path(envs.VLLM_CONFIG_ROOT) / "do_not_track").exists()


def record_usage(config: VllmConfig, context: UsageContext) -> None:
    """Add a line about an engine that has started, if that is wanted. What goes wrong is logged and harms nothing."""
    if not is_usage_stats_enabled():
        return
    path = stats_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_FILE_BYTES:
            logger.warning("Usage statistics: %s is larger than %d bytes; nothing is added.", path, MAX_FILE_BYTES)
            return
        line = json.dumps(collect(config, context)) + "\n"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
            file.write(line)
    except OSError as error:
        logger.warning("Usage statistics could not be written to %s: %s.", path, error)


def collect(config: VllmConfig, context: UsageContext) -> dict[str, Any]:
    """What a line says. Sizes in bytes, the time in nanoseconds since 1970."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return {
        "uuid": str(uuid.uuid4()),
        **_machine(),
        **(_gpus() if config.device_config.device == "cuda" else {}),
        "model_architecture": model.architectures[0] if model.architectures else None,
        "vllm_version": __version__,
        "context": context.value,
        "log_time": time.time_ns(),
        "source": envs.VLLM_USAGE_SOURCE,
        "dtype": f"torch.{model.dtype}",
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "block_size": cache.block_size,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "quantization": model.quantization,
        "kv_cache_dtype": cache.cache_dtype,
        "enable_lora": config.lora_config is not None,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "enforce_eager": model.enforce_eager,
        "disable_custom_all_reduce": parallel.disable_custom_all_reduce,
    }


def _machine() -> dict[str, Any]:
    processor = _read("/proc/cpuinfo")

    def of_processor(name: str) -> str:
        found = re.search(rf"^{name}\s*:\s*(.*)$", processor, re.MULTILINE)
        return found.group(1) if found else ""

    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return {
        "provider": _provider(),
        "num_cpu": os.cpu_count(),
        "cpu_type": of_processor("model name"),
        "cpu_family_model_stepping": ",".join(of_processor(name) for name in ("cpu family", "model", "stepping")),
        "total_memory": int(memory.group(1)) * 1024 if memory else 0,
        "architecture": platform.machine(),
        "platform": platform.platform(),
    }


def _provider() -> str:
    """The cloud that this machine is part of, as its firmware tells."""
    vendor = " ".join(map(_read, PROVIDER_FILES)).lower()
    return next((name for word, name in PROVIDERS.items() if word in vendor), "UNKNOWN")


def _gpus() -> dict[str, Any]:
    """Asked of the driver's tool, so that no device is opened here."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        name, _, mebibytes = lines[0].rpartition(",")
        memory = int(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, LookupError, ValueError):
        return {}
    return {"gpu_count": len(lines), "gpu_type": name.strip(), "gpu_memory_per_device": memory}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
