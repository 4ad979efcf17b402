"""Triton kernels for GPUs, one file per family of operations; `register()` puts them on the ops for "cuda" tensors."""

from __future__ import annotations


def register() -> None:
    """Make every op run its Triton kernel for tensors on "cuda". Imports triton, so call it only where CUDA is used."""
    from vllm.ops.triton import activation, attention, draw, norm, rotary

    for family in (activation, attention, draw, norm, rotary):
        family.register()
