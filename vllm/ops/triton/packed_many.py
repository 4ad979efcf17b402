"""The product of many rows with weights of 4 bits on Hopper GPUs, in Gluon: numbers are made of the next codes while
the matrix units multiply the last ones, which Triton's own pipeline does not do with operands that it computes.

Words as in `packed_linear`, 64 a block and output. Inputs and words come through TMA; the weight is the left operand
and stays in registers, of which two sets are in use: one that is multiplied, one that is being made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm.ops.triton.packed_linear import ASSEMBLY, PackedWords, scaled_assembly

_WORDS = 64
_BLOCK = 256  # inputs of a block
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# the name that newer releases of Triton have for it
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@dataclass(frozen=True, slots=True)
class ManyTiling:
    """Rows and outputs of a tile, warps, and tiles of inputs under way."""

    rows: int
    outputs: int
    warps: int
    stages: int = 4


@gluon.jit(do_not_specialize=["M"])
def _many_kernel(
    x, words, scales, out, M, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr,
    ASM3: gl.constexpr,
):  # fmt: skip
    """Grid (rows / BM * N / BN,), rows first. x: [M, K], words: [blocks * N, 64], both as descriptors. ASM: what makes
    numbers of each of a word's codes.
    """
    J: gl.constexpr = 64
    BLOCK: gl.constexpr = 4 * J
    BLOCKS: gl.constexpr = K // BLOCK
    ASMS: gl.constexpr = (ASM0, ASM1, ASM2, ASM3)
    dtype: gl.constexpr = x.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    row_tiles = (M + BM - 1) // BM
    pid = gl.program_id(0)
    first_n = pid // row_tiles * BN
    first_m = pid % row_tiles * BM
    xs = gl.allocate_shared_memory(dtype, [STAGES, BM, J], x.layout)
    ws = gl.allocate_shared_memory(gl.int16, [2, BN, J], words.layout)
    x_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_there = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_there.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(w_there.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(2):
        mbarrier.expect(w_there.index(i), BN * J * 2, pred=i < BLOCKS)
        _load_tile(words, [i * N + first_n, 0], w_there.index(i), ws.index(i), pred=i < BLOCKS)
    for i in gl.static_range(STAGES - 1):
        mbarrier.expect(x_there.index(i), BM * J * 2)
        _load_tile(x, [first_m, i * J], x_there.index(i), xs.index(i))
    acc = gl.zeros([BN, BM], gl.float32, mma)
    row_scales = scales + first_n + gl.arange(0, BN, gl.SliceLayout(1, left))
    near = gl.load(row_scales).to(dtype)  # of the first and the second half of a block
    far = gl.load(row_scales + BLOCK // 2 // GROUP * N).to(dtype)
    mbarrier.wait(w_there.index(0), 0)
    a = ws.index(0).load(left)
    for b in range(BLOCKS):
        following = gl.minimum(b + 1, BLOCKS - 1)
        next_near = gl.load(row_scales + following * BLOCK // GROUP * N)
        next_far = gl.load(row_scales + (following * BLOCK + BLOCK // 2) // GROUP * N)
        for i in gl.static_range(4):
            step = 4 * b + i
            slot = step % STAGES
            factor = gl.expand_dims(near if i < 2 else far, 1) + gl.zeros([BN, J], dtype, left)
            numbers = gl.inline_asm_elementwise(
                ASMS[i], "=r,r,r,r", [a, factor, factor], dtype=factor.dtype, is_pure=True, pack=2
            )
            mbarrier.wait(x_there.index(slot), step // STAGES % 2)
            token = warpgroup_mma(numbers, xs.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(token,))  # the product before it is done, and its inputs' place is free
            ahead = step + STAGES - 1
            mbarrier.expect(x_there.index(ahead % STAGES), BM * J * 2, pred=ahead < 4 * BLOCKS)
            _load_tile(
                x, [first_m, ahead * J], x_there.index(ahead % STAGES), xs.index(ahead % STAGES),
                pred=ahead < 4 * BLOCKS,
            )  # fmt: skip
        near = next_near.to(dtype)
        far = next_far.to(dtype)
        slot = (b + 1) % 2
        mbarrier.wait(w_there.index(slot), (b + 1) // 2 % 2, pred=b + 1 < BLOCKS)
        a = ws.index(slot).load(left)
        mbarrier.expect(w_there.index(b % 2), BN * J * 2, pred=b + 2 < BLOCKS)
        _load_tile(words, [(b + 2) * N + first_n, 0], w_there.index(b % 2), ws.index(b % 2), pred=b + 2 < BLOCKS)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    n = first_n + gl.arange(0, BN, gl.SliceLayout(1, mma))
    m = first_m + gl.arange(0, BM, gl.SliceLayout(0, mma))
    at = m.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=(m < M)[None, :])


def takes(weight: PackedWords, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies by a weight: of the widths and groups it is cut for, on the GPU it is cut for."""
    if not ASSEMBLY or dtype not in _DTYPES or weight.format != "int4" or weight.offsets is not None:
        return False
    whole = weight.words.shape[2] == _WORDS and weight.shape[1] % _BLOCK == 0 and weight.shape[0] % 64 == 0
    return whole and weight.group % 128 == 0 and triton.runtime.driver.active.get_current_target().arch == 90


def choose_many_tiling(rows: int, outputs: int) -> ManyTiling:
    """The tiling for up to 256 rows, from times on an H200 (`h200_packed_many.json`)."""
    if outputs >= 16384 and outputs % 128 == 0 and rows > 128:
        return ManyTiling(256, 128, 8)
    if outputs >= 6144 and rows > 128:
        return ManyTiling(256, 64, 4)
    return ManyTiling(128, 64, 4)


def many_rows_product(x: Tensor, weight: PackedWords, dtype: torch.dtype, t: ManyTiling | None = None) -> Tensor:
    """x [rows, in] @ weight.T in `dtype`, of a weight that the kernel takes. x: contiguous, in bfloat16 or float16."""
    (rows, k), n = x.shape, weight.shape[0]
    t = choose_many_tiling(rows, n) if t is None else t
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    asms = {f"ASM{i}": scaled_assembly(0, x.dtype == torch.float16, i, False) for i in range(4)}
    flat = weight.words.view(-1, _WORDS)
    tiles = [
        TensorDescriptor(
            tensor, list(tensor.shape), [tensor.shape[1], 1], block,
            gl.NVMMASharedLayout.get_default_for(block, kind),
        )
        for tensor, block, kind in (
            (x, [t.rows, _WORDS], _DTYPES[x.dtype]), (flat, [t.outputs, _WORDS], gl.int16)
        )
    ]  # fmt: skip
    _many_kernel[(n // t.outputs * triton.cdiv(rows, t.rows),)](
        *tiles, weight.scales, out, rows, N=n, K=k, GROUP=weight.group, BM=t.rows, BN=t.outputs, STAGES=t.stages,
        **asms, num_warps=t.warps,
    )  # fmt: skip
    return out
