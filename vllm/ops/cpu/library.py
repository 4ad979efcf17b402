"""The native CPU library: finding the build for this machine's instruction set, loading it, and its C signatures."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Collection
from functools import cache
from pathlib import Path

import torch

DIRECTORY = Path(__file__).resolve().parents[2] / "_native"
INTERFACE_VERSION = 13

# Best first; the processor flags each needs, by Linux's names.
_AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
INSTRUCTION_SETS: dict[str, set[str]] = {
    "avx512_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni"},
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": set(),
}

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_CODES = {**DTYPE_CODES, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


class AttentionCall(ctypes.Structure):
    """The argument of `vllm_attend`; field by field as in csrc/cpu/attention.cpp."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("alibi_slopes", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("requests", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("v_scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("cache_dtype", ctypes.c_int32),
    ]


LORA_PARTS = 16


class LoraArguments(ctypes.Structure):
    """The argument of `vllm_add_lora`; field by field as in csrc/cpu/kernels.h."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("small", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("starts", ctypes.c_int64 * LORA_PARTS),
        ("counts", ctypes.c_int64 * LORA_PARTS),
    ]


_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "vllm_interface_version": (_I, []),
    "vllm_lanes": (_I, []),
    "vllm_advise_huge_pages": (_I, [_P, _L]),
    "vllm_read": (_F, [_P, _L]),
    "vllm_packed_bytes": (_L, [_L, _L, _I]),
    "vllm_pack_weight": (_I, [_P, _P, _L, _L, _L, _I]),
    "vllm_unpack_rows": (_I, [_P, _P, _P, _L, _L, _L, _I]),
    "vllm_linear": (_I, [_P, _P, _P, _P, _L, _L, _L, _L, _L, _I, _I]),
    "vllm_packed_int8_bytes": (_L, [_L, _L]),
    "vllm_pack_int8": (_I, [_P, _P, _L, _L, _L]),
    "vllm_quantize_rows": (_I, [_P, _P, _P, _L, _L, _L, _I]),
    "vllm_linear_int8": (_I, [_P, _P, _P, _P, _P, _P, _L, _L, _L, _I]),
    "vllm_packed_groups_bytes": (_L, [_L, _L, _L, _I, _I]),
    "vllm_pack_groups": (_I, [_P, _P, _P, _P, _L, _L, _L, _I]),
    "vllm_pack_blocks": (_I, [_P, _P, _P, _L, _L, _I]),
    "vllm_linear_groups": (_I, [_P, _P, _P, _P, *[_L] * 5, *[_I] * 5]),
    "vllm_add_lora": (_I, [ctypes.POINTER(LoraArguments), _I, _I]),
    "vllm_norm": (_I, [_P, _P, _P, _P, _P, _L, _L, _L, _F, _F, _I, _I]),
    "vllm_activate": (_I, [_P, _P, _L, _L, _L, _I, _I, _I]),
    "vllm_rotate_and_write": (_I, [_P, *[_L] * 5, _P, _P, _L, _I, _P, _L, _L, _P, _P, _P, *[_F] * 4, _I, _I]),
    "vllm_write_kv": (_I, [_P, _P, _L, _L, _L, _L, _L, _P, _L, _L, _P, _F, _F, _I, _I]),
    "vllm_greedy": (_I, [_P, _L, _L, _L, _P, _P]),
    "vllm_finite_rows": (_I, [_P, _L, _L, _L, _P]),
    "vllm_mask_rows": (_I, [_P, _L, _L, _L, _P, _L, _P, _L, _P]),
    "vllm_greedy_masked": (_I, [_P, _L, _L, _L, _P, _L, _P, _L, _P, _P, _P]),
    "vllm_top_logprobs": (_I, [_P, *[_L] * 4, *[_P] * 4]),
    "vllm_draw": (_I, [_P, _L, _L, _L, *[_P] * 7, _I]),
    "vllm_attend": (_I, [ctypes.POINTER(AttentionCall)]),
}


def supported_instruction_sets(flags: Collection[str]) -> list[str]:
    """The builds that a processor with these flags can run, best first."""
    return [name for name, needed in INSTRUCTION_SETS.items() if needed <= set(flags)]


@cache
def processor_flags() -> frozenset[str]:
    """This processor's feature flags as Linux reports them; empty where it does not (macOS, ARM)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def path_of(instruction_set: str, directory: Path = DIRECTORY) -> Path:
    """Where the build for `instruction_set` lies, if it was built."""
    return directory / f"libvllm_cpu_{instruction_set}.so"


@cache
def load(path: Path) -> ctypes.CDLL:
    """Open one build and declare its functions. Torch is loaded by now: the library gets torch's OpenMP runtime.

    Raises OSError if the file cannot be loaded here, RuntimeError if it speaks another interface version.
    """
    library = ctypes.CDLL(str(path))
    library.vllm_interface_version.restype = _I
    version = library.vllm_interface_version()
    rebuild = "rebuild it with `python tools/build_native.py` or reinstall."
    if version != INTERFACE_VERSION:
        raise RuntimeError(f"{path} has interface version {version}, this package needs {INTERFACE_VERSION}: {rebuild}")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise RuntimeError(f"{path} has no function {name}, which this package needs: {rebuild}")
        function.restype, function.argtypes = result, arguments
    return library


def find(directory: Path = DIRECTORY) -> Path | None:
    """The best build in `directory` that this processor can run, or None."""
    candidates = (path_of(name, directory) for name in supported_instruction_sets(processor_flags()))
    return next((path for path in candidates if path.exists()), None)
