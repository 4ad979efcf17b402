"""The product of several rows with weights of 4 bits on Hopper GPUs, in Gluon, with what follows it folded in: numbers
are made of the next codes while the matrix units multiply the last ones, and sums get their scales a group at a time.

Words as in `packed_linear`, 64 a block and output. Words and inputs of a block come through TMA, words before the
kernel in front has ended. The weight is the left operand and stays in registers.
"""

from __future__ import annotations

from typing import Any

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.triton.activation import apply_activation
from vllm.ops.triton.decode_parts import Tiling, has_warp_roles, processors
from vllm.ops.triton.packed_linear import ASSEMBLY, PackedWords, number_assembly

_WORDS = 64
_OUTPUTS = 64  # of a program
_MOST_PROGRAMS = 384
_MEMORY = 227 << 10  # shared, of a processor
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# the name that newer releases of Triton have for it
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _ask_words(words, there, ws, block, first_n, N: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr,
               TILES: gl.constexpr, BM: gl.constexpr, slot, pred):  # fmt: skip
    """A block's words, to its place. The barrier waits for its inputs, too."""
    mbarrier.expect(there.index(slot), TILES * BN * 128 + BM * 512, pred=pred)
    for t in gl.static_range(TILES):
        _load_tile(words, [block * ROWS + t * N + first_n, 0], there.index(slot), ws.index(slot * TILES + t), pred=pred)


@gluon.jit
def _ask_inputs(x, there, xs, block, slot, pred):
    for i in gl.static_range(4):
        _load_tile(x, [0, block * 256 + i * 64], there.index(slot), xs.index(slot * 4 + i), pred=pred)


@gluon.jit
def _numbers(words, ASM: gl.constexpr, HALF: gl.constexpr):
    if HALF:
        numbers = gl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2)
    else:
        numbers = gl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
    return numbers


@gluon.jit(do_not_specialize=["tiles_in", "M"])
def _few_kernel(
    x, words, scales, bias, out, part, arrived, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out,
    scale: gl.constexpr, M, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr,
    SQUARES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    MODE: gl.constexpr, ACT: gl.constexpr, NORM: gl.constexpr, NEXT: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr, ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr,
):  # fmt: skip
    """Grid (N / BN, SPLIT), of up to BM rows. x: [M, K], words: [blocks * ROWS, 64], both as descriptors. ASM: what
    makes numbers of each of a word's codes.
    """
    BLOCKS: gl.constexpr = K // 256
    SHARE: gl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    GATED: gl.constexpr = MODE == 1
    TILES: gl.constexpr = 2 if GATED else 1
    ROWS: gl.constexpr = TILES * N
    ASMS: gl.constexpr = (ASM0, ASM1, ASM2, ASM3)
    dtype: gl.constexpr = x.dtype
    HALF: gl.constexpr = dtype == gl.float16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    pid = gl.program_id(0)
    share = gl.program_id(1)
    first_n = pid * BN
    begin = share * SHARE
    end = gl.minimum(begin + SHARE, BLOCKS)
    xs = gl.allocate_shared_memory(dtype, [STAGES * 4, BM, 64], x.layout)
    ws = gl.allocate_shared_memory(gl.int16, [STAGES * TILES, BN, 64], words.layout)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        _ask_words(words, there, ws, begin + i, first_n, N, ROWS, BN, TILES, BM, i, begin + i < end)
    n = first_n + gl.arange(0, BN, gl.SliceLayout(1, mma))
    m = gl.arange(0, BM, gl.SliceLayout(0, mma))
    in_m = m < M
    row_scales = scales + n
    s = ()
    for t in gl.static_range(TILES):
        for g in gl.static_range(2):
            s += (gl.load(row_scales + t * N + (begin * 256 + g * 128) // GROUP * ROWS),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        _ask_inputs(x, there, xs, begin + i, i, begin + i < end)
    acc = gl.zeros([BN, BM], gl.float32, mma)
    up = acc
    zero = acc
    for b in range(begin, end):
        slot = (b - begin) % STAGES
        mbarrier.wait(there.index(slot), (b - begin) // STAGES % 2)
        following = gl.minimum(b + 1, end - 1)
        more = ()
        for t in gl.static_range(TILES):
            for g in gl.static_range(2):
                more += (gl.load(row_scales + t * N + (following * 256 + g * 128) // GROUP * ROWS),)  # type: ignore[assignment]
        a = ()
        for t in gl.static_range(TILES):
            a += (ws.index(slot * TILES + t).load(left),)  # type: ignore[assignment]
        before = ()
        for u in gl.static_range(2 * TILES):  # groups of the first tile, then of the second
            first = _numbers(a[u // 2], ASMS[u % 2 * 2], HALF)
            second = _numbers(a[u // 2], ASMS[u % 2 * 2 + 1], HALF)
            token = warpgroup_mma(
                first, xs.index(slot * 4 + u % 2 * 2).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            token = warpgroup_mma(second, xs.index(slot * 4 + u % 2 * 2 + 1).permute((1, 0)), token, is_async=True)
            if u > 0:
                done = warpgroup_mma_wait(2, deps=(before[u - 1],))
                if u - 1 < 2:
                    acc += done * gl.expand_dims(s[u - 1].to(gl.float32), 1)
                else:
                    up += done * gl.expand_dims(s[u - 1].to(gl.float32), 1)
            before += (token,)  # type: ignore[assignment]
        done = warpgroup_mma_wait(0, deps=(before[2 * TILES - 1],))
        if GATED:
            up += done * gl.expand_dims(s[2 * TILES - 1].to(gl.float32), 1)
        else:
            acc += done * gl.expand_dims(s[2 * TILES - 1].to(gl.float32), 1)
        s = more
        ahead = b + STAGES
        _ask_words(words, there, ws, ahead, first_n, N, ROWS, BN, TILES, BM, slot, ahead < end)
        _ask_inputs(x, there, xs, ahead, slot, ahead < end)
    in_n = n < N
    keep = in_m[None, :] & in_n[:, None]
    at = m[None, :] * N + n[:, None]
    if SPLIT > 1:
        SIZE: gl.constexpr = BM * N
        gl.store(part + share * SIZE + at, acc, mask=keep)
        if GATED:
            gl.store(part + (SPLIT + share) * SIZE + at, up, mask=keep)
        gl.thread_barrier()
        came = gl.atomic_add(arrived + pid, 1, sem="acq_rel")
        if came != SPLIT - 1:
            return
        gl.store(arrived + pid, 0)
        acc = zero
        up = zero
        for i in gl.static_range(SPLIT):
            acc += gl.load(part + i * SIZE + at, mask=keep, other=0.0, cache_modifier=".cg")
            if GATED:
                up += gl.load(part + (SPLIT + i) * SIZE + at, mask=keep, other=0.0, cache_modifier=".cg")
    if NORM:
        wide: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
        r = gl.arange(0, BM, gl.SliceLayout(1, wide))
        j = gl.arange(0, SQUARES, gl.SliceLayout(0, wide))
        listed = (r < M)[:, None] & (j < tiles_in)[None, :]
        parts = gl.load(squares_in + r[:, None] * tiles_in + j[None, :], mask=listed, other=0.0)
        rstd = gl.convert_layout(gl.rsqrt(gl.sum(parts, 1) / WIDTH + eps), gl.SliceLayout(0, mma))
        acc = acc * gl.expand_dims(rstd, 0)
        if GATED:
            up = up * gl.expand_dims(rstd, 0)
    if BIAS:
        acc += gl.expand_dims(gl.load(bias + n, mask=in_n, other=0.0).to(gl.float32), 1)
        if GATED:
            up += gl.expand_dims(gl.load(bias + N + n, mask=in_n, other=0.0).to(gl.float32), 1)
    if ACT >= 0:
        acc = apply_activation(acc, ACT)
    if MODE == 0:
        gl.store(out + at, acc.to(out.dtype.element_ty), mask=keep)
    elif MODE == 1:
        gl.store(out + at, (acc * up).to(out.dtype.element_ty), mask=keep)
    else:
        y = acc.to(h.dtype.element_ty).to(gl.float32)
        if scale != 1.0:
            y = y * scale
        y = (y + gl.load(h + at, mask=keep, other=0.0).to(gl.float32)).to(h.dtype.element_ty)
        gl.store(h + at, y, mask=keep)
        if NEXT:
            f = y.to(gl.float32)
            factor = gl.load(next_weight + n, mask=in_n, other=0.0).to(gl.float32)
            gl.store(scaled + at, (f * gl.expand_dims(factor, 1)).to(scaled.dtype.element_ty), mask=keep)
            gl.store(squares_out + m * ((N + BN - 1) // BN) + pid, gl.sum(f * f, 0), mask=in_m)


def takes_few(weight: PackedWords, mode: int) -> bool:
    """Whether the kernel multiplies by a weight: of the widths and groups it is cut for, on the GPU it is cut for."""
    if not ASSEMBLY or mode == 3 or weight.format != "int4" or weight.offsets is not None or not has_warp_roles():
        return False
    (n, k), n_tile = weight.shape, _OUTPUTS * (2 if mode == 1 else 1)
    return weight.words.shape[2] == _WORDS and k % 256 == 0 and n % n_tile == 0 and weight.group % 128 == 0


def choose_few_tiling(rows: int, weight: PackedWords, mode: int) -> Tiling:
    """From times of whole steps on an H200 (`benchmarks/h200/tune_decode.py`, `h200_packed_rows.json`)."""
    depth, blocks, split = max(16, triton.next_power_of_2(rows)), weight.words.shape[0], 1
    tiles = weight.shape[0] // _OUTPUTS // (2 if mode == 1 else 1)
    while split < 4 and 2 * tiles * split <= _MOST_PROGRAMS and blocks >= 4 * split:
        split *= 2
    if mode == 1:
        return Tiling(False, _OUTPUTS, depth, 4, split, 2, whole=True)
    room = _MEMORY // -(-tiles * split // processors()) // (_OUTPUTS * 128 + depth * 512)  # for all programs at once
    return Tiling(False, _OUTPUTS, depth, 4, split, max(1, min(4, -(-blocks // split), room)), whole=True)


def launch_few(
    x: Tensor, weight: PackedWords, ends: tuple[Tensor | None, ...], parts: tuple[Tensor | None, ...],
    behind: tuple[Any, ...], rows: int, t: Tiling, const: dict[str, Any], extra: dict[str, Any],
) -> None:  # fmt: skip
    """Launch a product, as `launch_packed` does."""
    squares, tiles, eps, h, next_weight, scaled, squares_out, *_, scale = behind
    const = {name: const[name] for name in ("N", "K", "WIDTH", "MODE", "ACT", "NORM", "NEXT", "BIAS", "PDL")}
    assemblies = {f"ASM{i}": number_assembly(x.dtype == torch.float16, i) for i in range(4)}
    described = [
        TensorDescriptor(
            tensor, list(tensor.shape), [tensor.shape[1], 1], block, gl.NVMMASharedLayout.get_default_for(block, kind)
        )
        for tensor, block, kind in (
            (x, [t.depth, 64], _DTYPES[x.dtype]), (weight.words.view(-1, _WORDS), [t.rows, _WORDS], gl.int16)
        )
    ]  # fmt: skip
    _few_kernel[(const["N"] // t.rows, t.split)](
        *described, weight.scales, *ends, *parts, squares, tiles, eps, h, next_weight, scaled, squares_out, scale, rows,
        GROUP=weight.group, SQUARES=triton.next_power_of_2(max(tiles, 8)), BM=t.depth, BN=t.rows, SPLIT=t.split,
        STAGES=t.stages, num_warps=t.warps, **assemblies, **const, **extra,
    )  # fmt: skip
