#!/usr/bin/env bash
# Makes .venv ready: creates it, installs torch (a CPU build on machines without an NVIDIA GPU) and this project, editable.
# Usage: tools/venv.sh [EXTRA,EXTRA...]    Nothing is installed again while pyproject.toml and setup.py stay the same.
set -euo pipefail
cd "$(dirname "$0")/.."

extras="${1:-}"
python="${PYTHON:-python3}"
tested_torch="2.13.0"
cpu_index="https://download.pytorch.org/whl/cpu"
stamp=".venv/.ready-${extras//,/-}"
native_stamp=".venv/.native"

digest() { cat "$@" | sha256sum | cut -d' ' -f1; }
# pip is told to be quiet, not to be silent: it still prints errors.
pip_install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

install_torch() {
    if .venv/bin/python -c 'import torch' 2>/dev/null; then
        return
    fi
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        echo "Installing torch for NVIDIA GPUs"
        pip_install 'torch>=2.9'
    elif [ "$(uname -s)" != Linux ]; then
        pip_install 'torch>=2.9'
    else
        # On Linux, PyPI's torch brings gigabytes of CUDA. CPU builds carry "+cpu" in their version: take one from the
        # package sources configured on this machine, else from PyTorch's own index, else whatever there is.
        echo "Installing torch for CPUs"
        pip_install "torch==${tested_torch}+cpu" 2>/dev/null ||
            pip_install --index-url "$cpu_index" --retries 1 --timeout 20 'torch>=2.9' ||
            pip_install 'torch>=2.9'
    fi
}

if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import sys; assert (3, 10) <= sys.version_info[:2] <= (3, 13), "Python 3.10 to 3.13 is needed; set PYTHON"'
    "$python" -m venv .venv
fi

wanted="$(digest pyproject.toml setup.py)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    install_torch
    echo "Installing the project${extras:+ with the extras $extras}"
    VLLM_BUILD_NATIVE=0 pip_install --editable ".${extras:+[$extras]}"
    echo "$wanted" >"$stamp"
fi

# The native CPU library, once for each state of its sources. A machine without a compiler goes without.
sources="$(digest csrc/cpu/* tools/build_native.py)"
if [ "$(cat "$native_stamp" 2>/dev/null)" != "$sources" ] || ! ls vllm/_native/*.so >/dev/null 2>&1; then
    echo "Building the native CPU library"
    if .venv/bin/python tools/build_native.py >/dev/null; then
        echo "$sources" >"$native_stamp"
    else
        echo "Going on without it: torch's own operations are slower on a CPU." >&2
    fi
fi
