"""How long loading a model's weights takes beside reading its files, and how much memory at most.

    python -m benchmarks.load_weights MODEL [--load-format auto] [--dtype auto]
    python -m benchmarks.load_weights --random 0.5      # a random Llama of so many GiB, made on the spot

Everything is measured in a process of its own, on the CPU, with the files' pages dropped from the page cache first. One
line of JSON: GiB of the files and of the weights in memory, seconds and GiB/s of reading and of loading, and the peak
of the process's memory above what it had before, as a share of the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GIB = 2**30
_PIECE = 16 << 20


def files_of(folder: Path) -> list[Path]:
    """The files that hold weights."""
    kinds = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
    return sorted(next((found for kind in kinds if (found := list(folder.glob(kind)))), []))


def forget(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        with file.open("rb") as stream:
            os.fdatasync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> float:
    """Seconds that reading files from front to back takes."""
    started, buffer = time.perf_counter(), bytearray(_PIECE)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - started


def _status(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}.")


def measure(model: str, **options: Any) -> dict[str, Any]:
    """The figures of one model, in this process, which should have done nothing else before."""
    from vllm import EngineArgs, ops
    from vllm.model_executor.model_loader import load_model

    config = EngineArgs(model=model, skip_tokenizer_init=True, device="cpu", **options).create_engine_config()
    ops.setup("cpu")
    load_model(EngineArgs(model="demo", device="cpu").create_engine_config(), "cpu")  # code that is imported late
    files = files_of(config.model_config.path)
    size = sum(file.stat().st_size for file in files)
    forget(files)
    raw = read(files)
    forget(files)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, started = _status("VmRSS"), time.perf_counter()
    loaded = load_model(config, "cpu")
    seconds = time.perf_counter() - started
    kept, peak = _status("VmRSS") - before, _status("VmHWM") - before
    del loaded
    return {
        "files_gib": round(size / GIB, 3),
        "kept_gib": round(kept / GIB, 3),
        "read_s": round(raw, 3),
        "load_s": round(seconds, 3),
        "read_gib_s": round(size / GIB / raw, 2),
        "load_gib_s": round(size / GIB / seconds, 2),
        "peak_share": round(peak / size, 3),
    }


def save_random_llama(folder: Path, gib: float) -> None:
    """A random Llama of about `gib` GiB in bfloat16, with several files."""
    import torch
    import transformers

    layers = max(1, round(gib * GIB / 2 / (12 * 1024**2 + 3 * 1024 * 512)))
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2752, num_hidden_layers=layers, num_attention_heads=16
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="256MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--random", type=float, metavar="GIB", help="make a random Llama of this size")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    args = parser.parse_args()
    options = {"load_format": args.load_format, "dtype": args.dtype, "quantization": args.quantization}
    if args.model is not None:
        print(json.dumps(measure(args.model, **options)))
        return
    if args.random is None:
        parser.error("name a model, or use --random")
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(Path(folder), args.random)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        subprocess.run([sys.executable, "-m", "benchmarks.load_weights", folder, *flags], check=True)


if __name__ == "__main__":
    main()
