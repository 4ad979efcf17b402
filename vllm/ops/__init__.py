"""Operations: signature with shapes, torch reference, fast kernels; one file each."""

from __future__ import annotations


def setup(device_type: str) -> None:
    """Register the fast kernels of `device_type` ("cpu" | "cuda"). Called once by the worker, before weights load."""
    if device_type == "cpu":
        from vllm.ops import cpu

        cpu.register()
    elif device_type == "cuda":
        from vllm.ops import triton

        triton.register()
