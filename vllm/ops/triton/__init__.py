"""Triton kernels for GPUs, one file per family of operations; `register()` puts them on the ops."""

from __future__ import annotations


def register(device_type: str = "cuda") -> None:
    """Make every op run its kernel for tensors on `device_type`. Imports triton, so call it only where CUDA is used.

    "meta" is for compiling ahead: kernels are launched on tensors without memory, in a process that does not run them.
    """
    from vllm.ops.triton import (
        activation,
        attention,
        bitmask,
        draw,
        encoder_attention,
        latent_attention,
        linear,
        lora,
        moe,
        norm,
        quantized,
        rotary,
        ssm,
    )

    families = (
        activation, attention, bitmask, draw, encoder_attention, latent_attention, linear, lora, moe, norm, quantized,
        rotary, ssm,
    )  # fmt: skip
    for family in families:
        family.register(device_type)
