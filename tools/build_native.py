"""Builds the native CPU library from csrc/cpu, once per instruction set, with the C++ compiler that is there.

    python tools/build_native.py [out_dir]        # default: vllm/_native

The package build calls `build`; the result is loaded by ctypes and needs no particular Python or torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc" / "cpu"
DEFAULT_OUT = ROOT / "vllm" / "_native"

# One library per instruction set, named as vllm/ops/cpu/library.py looks for them.
INSTRUCTION_SETS: dict[str, list[str]] = {
    "generic": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
}

# No -ffast-math, and no fused multiply-add but where the code says so: the order of additions and their roundings are
# part of the contract (the same tokens whatever the batch and the threads).
# GCC 12 warns about its own AVX-512 header: -Wno-(maybe-)uninitialized.
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=off"),
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
]
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]


def instruction_sets() -> list[str]:
    """Those that this machine's compiler can build for: all four on x86-64, the portable one elsewhere."""
    return list(INSTRUCTION_SETS) if platform.machine() in ("x86_64", "AMD64") else ["generic"]


def compiler() -> str | None:
    """The C++ compiler: $CXX, else the first of c++, g++, clang++ on the path; None if there is none."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def build(out_dir: Path = DEFAULT_OUT, *, sanitize: bool = False, only: list[str] | None = None) -> list[Path]:
    """Compile every instruction set (or `only` those) into `out_dir` and return the libraries.

    Raises RuntimeError without a compiler, or with the compiler's own message if it fails.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(
            "The native CPU library needs a C++17 compiler with OpenMP (g++ or clang++), and none was found."
        )
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    flags = FLAGS + (SANITIZE if sanitize else [])
    names = only or instruction_sets()
    libraries = [out_dir / f"libvllm_cpu_{name}.so" for name in names]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects: dict[str, list[Path]] = {name: [] for name in names}
        jobs = []
        for name in names:
            for source in sorted(SOURCES.glob("*.cpp")):
                target = Path(scratch) / f"{name}_{source.stem}.o"
                objects[name].append(target)
                command = [cxx, *flags, *INSTRUCTION_SETS[name], "-c", str(source), "-o", str(target)]
                jobs.append(pool.submit(_run, command))
        for job in jobs:
            job.result()
        for name, library in zip(names, libraries, strict=True):
            # Written beside and renamed: a process that has the old library open keeps it.
            fresh = library.with_suffix(".so.new")
            link = ["-g"] if sanitize else ["-s", "-static-libstdc++", "-static-libgcc"]
            _run([cxx, *flags, *link, "-shared", *map(str, objects[name]), "-o", str(fresh)])
            fresh.replace(library)
    return libraries


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"The native CPU library did not compile: {' '.join(command)}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


if __name__ == "__main__":
    for path in build(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_OUT):
        print(path, path.stat().st_size)
