"""Run as a program, outside of Triton's interpreter: compiles decode attention for dtypes and norms.

    python -m tests.ops.triton.compile_decode_attention

The interpreter takes what the compiler refuses, such as a variable whose type depends on a condition.
"""

from __future__ import annotations

import torch
import triton

from vllm.ops.triton import decode_attention
from vllm.ops.triton.decode_attention import DecodeAttention, DecodeRows
from vllm.ops.triton.precompile import _NoDevice

HEADS, KV_HEADS, D, SPLITS = 4, 2, 32, 2


class Compiled(dict):  # type: ignore[type-arg]
    """Stands in for a kernel: compiles what would be launched."""

    def __init__(self, kernel: triton.runtime.jit.JITFunction) -> None:
        self.kernel = kernel

    def __missing__(self, grid: tuple[int, ...]) -> object:
        return lambda *args, **options: self.kernel.run(*args, grid=grid, warmup=True, **options)


def attend(rows: torch.dtype, cache: torch.dtype, joint: bool) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cos_sin = empty(64, D, dtype=torch.float32)
    weights = [empty(n * D, dtype=rows) for n in (HEADS, KV_HEADS)] if joint else [None, None]
    layer = DecodeAttention(
        HEADS, 0.25, empty(4, 2, KV_HEADS, 16, D, dtype=cache), cos_sin, *weights, eps=1e-5, joint=joint
    )
    parts = [empty(HEADS * SPLITS * n, dtype=torch.float32) for n in (D, 1)]
    step = DecodeRows(empty(1), empty(1), [empty(1, 16)], parts[0], parts[1], empty(KV_HEADS), SPLITS, 16)
    qkv = empty(1, (HEADS + 2 * KV_HEADS) * D, dtype=rows)
    decode_attention.decode_attention(qkv, empty(1, HEADS * D, dtype=rows), layer, step)


def main() -> None:
    triton.runtime.driver.set_active(_NoDevice(90))
    decode_attention._decode_kernel = Compiled(decode_attention._decode_kernel)
    half, brain = torch.float16, torch.bfloat16
    for rows, cache in ((brain, brain), (brain, torch.float8_e4m3fn), (half, torch.float8_e5m2)):
        for joint in (False, True):
            attend(rows, cache, joint)


if __name__ == "__main__":
    main()
