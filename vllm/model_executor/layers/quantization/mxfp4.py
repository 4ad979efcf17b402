"""MXFP4, as gpt-oss is published: experts' matrices in blocks of 32 four-bit floats with a power of two as their scale.

Layout, for all experts in one tensor: `*_blocks` uint8 [experts, out, in / 32, 16], byte b of a block holding values
2 b (low nibble) and 2 b + 1; `*_scales` uint8 [experts, out, in / 32], 2 ** (scale - 127). They become plain numbers
while they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import Format, Reader, Tensors, names_of

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN = 255  # a scale that is no number


class Mxfp4(Format):
    """The format: nothing but stacks of experts is quantized."""

    name = "mxfp4"
    stacks = ("_blocks", "_scales")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        names_of(settings, "modules_to_not_convert")

    def reader(self, names: Sequence[str]) -> Reader | None:
        return None

    def read_stack(self, tensors: Tensors, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        experts, n, k = shape
        parts = {"_blocks": (experts, n, k // 32, 16), "_scales": (experts, n, k // 32)}
        for suffix, expected in parts.items():
            tensor = tensors.get(suffix)
            if tensor is None:
                raise ValueError(f"the tensor {suffix!r} is missing")
            if k % 32 or tensor.dtype != torch.uint8 or tuple(tensor.shape) != expected:
                raise ValueError(
                    f"{suffix!r} is {tensor.dtype} {list(tensor.shape)}, expected torch.uint8 {list(expected)}"
                )
        table = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=dtype, device=device)
        out = torch.empty(shape, dtype=dtype, device=device)
        for expert in range(experts):  # one by one, for the sake of memory
            codes, scales = (tensors[suffix][expert].to(device) for suffix in parts)
            if (scales == _NAN).any():
                raise ValueError("a scale is no number")
            values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
            out[expert] = torch.ldexp(values.float(), (scales.int() - 127)[..., None]).to(dtype).view(n, k)
        return out
