"""The product of several rows with weights stored as plain numbers on Hopper GPUs, in Gluon, with what follows it
folded in. Tiles of weights and inputs come through TMA, into places for several of each: those of weights are asked for
before the kernel in front has ended, and are there when the inputs come.

Compare `packed_few`, whose weights have to be made first. The weight is the left operand.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.triton.activation import apply_activation
from vllm.ops.triton.decode_linear import ARGMAX, GATED, RESIDUAL, STORE
from vllm.ops.triton.decode_parts import Tiling, processors
from vllm.ops.triton.packed_few import _DTYPES, _barrier, _layout, _load_tile, _view

_MEMORY = 227 << 10  # shared, of a processor


@gluon.jit
def _ask_weights(
    w, there, ws, begin, block, pid, pred, N: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, SUB: gl.constexpr,
    TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A block's weights, to their place. The barrier waits for its inputs, too."""
    slot = block % STAGES
    mbarrier.expect(there.index(slot), SUB * (TILES * BN + BM) * 128, pred=pred)
    for t in gl.static_range(TILES):
        at = [(begin + block) * SUB, pid * BN + t * N, 0]
        _load_tile(w, at, there.index(slot), ws.index(slot * TILES + t), pred=pred)


@gluon.jit(do_not_specialize=["tiles_in", "M"])
def _few_kernel(
    x, w, bias, out, part, arrived, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out,
    scale: gl.constexpr, M, N: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, SQUARES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    MODE: gl.constexpr, ACT: gl.constexpr, NORM: gl.constexpr, NEXT: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr, LATE: gl.constexpr, X_LAYOUT: gl.constexpr, W_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Grid (N / BN, SPLIT), of up to BM rows. x: [K / 64, M, 64], w: [K / 64, rows of the weight, 64], both as
    descriptors of tiles of SUB * 64 inputs. The rest: as in `decode_linear`.
    """
    COUNT: gl.constexpr = K // (64 * SUB * SPLIT)
    TILES: gl.constexpr = 2 if MODE == 1 else 1
    FIRST: gl.constexpr = STAGES if STAGES < COUNT else COUNT
    dtype: gl.constexpr = x.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BM, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    pid = gl.program_id(0)
    share = gl.program_id(1)
    begin = share * COUNT
    x_places = gl.allocate_shared_memory(dtype, [STAGES, SUB, BM, 64], x.layout)
    w_places = gl.allocate_shared_memory(dtype, [STAGES * TILES, SUB, BN, 64], w.layout)
    xs = _view(x_places, dtype, [STAGES * SUB, BM, 64], X_LAYOUT)
    ws = _view(w_places, dtype, [STAGES * TILES * SUB, BN, 64], W_LAYOUT)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
    fence_async_shared()
    if PDL and LATE == 0:
        gdc_launch_dependents()
    for i in gl.static_range(FIRST):
        _ask_weights(w, there, w_places, begin, i, pid, True, N, BN, BM, SUB, TILES, STAGES)
    n = pid * BN + gl.arange(0, BN, gl.SliceLayout(1, mma))
    m = gl.arange(0, BM, gl.SliceLayout(0, mma))
    keep = (m < M)[None, :]
    at = m[None, :] * N + n[:, None]
    if BIAS:
        first_bias = gl.load(bias + n)
        if TILES == 2:
            second_bias = gl.load(bias + N + n)
    if NEXT:
        factor = gl.load(next_weight + n)
    if PDL:
        gdc_wait()
        if LATE == 1:
            gdc_launch_dependents()
    for i in gl.static_range(FIRST):
        _load_tile(x, [(begin + i) * SUB, 0, 0], there.index(i), x_places.index(i))
    if NORM:
        p = gl.arange(0, BM, gl.SliceLayout(1, wide))
        j = gl.arange(0, SQUARES, gl.SliceLayout(0, wide))
        listed = (p < M)[:, None] & (j < tiles_in)[None, :]
        parts = gl.load(squares_in + p[:, None] * tiles_in + j[None, :], mask=listed, other=0.0)
    if MODE == 2:
        before = gl.load(h + at, mask=keep, other=0.0)
    acc = gl.zeros([BN, BM], gl.float32, mma)
    up = acc
    zero = acc
    for b in range(COUNT):
        slot = b % STAGES
        mbarrier.wait(there.index(slot), b // STAGES % 2)
        for s in gl.static_range(SUB):
            inputs = xs.index(slot * SUB + s).permute((1, 0))
            acc = warpgroup_mma(ws.index(slot * TILES * SUB + s), inputs, acc, is_async=True)
            if TILES == 2:
                up = warpgroup_mma(ws.index((slot * TILES + 1) * SUB + s), inputs, up, is_async=True)
        if TILES == 2:
            acc, up = warpgroup_mma_wait(0, deps=(acc, up))  # type: ignore[misc]
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        if STAGES < COUNT:
            following = b + STAGES
            more = following < COUNT
            _ask_weights(w, there, w_places, begin, following, pid, more, N, BN, BM, SUB, TILES, STAGES)
            _load_tile(x, [(begin + following) * SUB, 0, 0], there.index(slot), x_places.index(slot), pred=more)
    if PDL and LATE == 2:
        gdc_launch_dependents()
    if SPLIT > 1:
        SIZE: gl.constexpr = BM * N
        gl.store(part + share * SIZE + at, acc, mask=keep)
        if TILES == 2:
            gl.store(part + (SPLIT + share) * SIZE + at, up, mask=keep)
        _barrier()
        came = gl.atomic_add(arrived + pid, 1, sem="acq_rel")
        if came != SPLIT - 1:
            return
        gl.store(arrived + pid, 0)
        acc = zero
        up = zero
        for i in gl.static_range(SPLIT):
            acc += gl.load(part + i * SIZE + at, mask=keep, other=0.0, cache_modifier=".cg")
            if TILES == 2:
                up += gl.load(part + (SPLIT + i) * SIZE + at, mask=keep, other=0.0, cache_modifier=".cg")
    if NORM:
        rstd = gl.convert_layout(gl.rsqrt(gl.sum(parts, 1) / WIDTH + eps), gl.SliceLayout(0, mma))
        acc = acc * gl.expand_dims(rstd, 0)
        if TILES == 2:
            up = up * gl.expand_dims(rstd, 0)
    if BIAS:
        acc += gl.expand_dims(first_bias.to(gl.float32), 1)
        if TILES == 2:
            up += gl.expand_dims(second_bias.to(gl.float32), 1)
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
        y = (y + before.to(gl.float32)).to(h.dtype.element_ty)
        gl.store(h + at, y, mask=keep)
        if NEXT:
            f = y.to(gl.float32)
            gl.store(scaled + at, (f * gl.expand_dims(factor.to(gl.float32), 1)).to(scaled.dtype.element_ty), mask=keep)
            gl.store(squares_out + m * (N // BN) + pid, gl.sum(f * f, 0), mask=m < M)


def launch_plain(
    x: Tensor, weight: Tensor, ends: tuple[Tensor | None, ...], parts: tuple[Tensor | None, ...],
    behind: tuple[Any, ...], rows: int, t: Tiling, const: dict[str, Any], extra: dict[str, Any],
) -> None:  # fmt: skip
    """Launch a product, as `launch_few` does; the tiling's depth counts inputs, a multiple of 64."""
    squares, tiles, eps, h, next_weight, scaled, squares_out, *_, scale = behind
    const = {name: const[name] for name in ("N", "K", "BN", "WIDTH", "MODE", "ACT", "NORM", "NEXT", "BIAS", "PDL")}
    n, k, sub, padded = const["N"], const["K"], t.depth // 64, max(16, triton.next_power_of_2(rows))
    kind = _DTYPES[x.dtype]
    inputs = TensorDescriptor(
        x, [k // 64, x.shape[0], 64], [64, k, 1], [sub, padded, 64], _layout([sub, padded, 64], kind)
    )
    weights = TensorDescriptor(
        weight, [k // 64, weight.shape[0], 64], [64, k, 1], [sub, t.rows, 64], _layout([sub, t.rows, 64], kind)
    )
    _few_kernel[(n // t.rows, t.split)](
        inputs, weights, *ends, *parts, squares, tiles, eps, h, next_weight, scaled, squares_out, scale, rows,
        SQUARES=triton.next_power_of_2(max(tiles, 8)), BM=padded, SUB=sub, SPLIT=t.split, STAGES=t.stages, LATE=t.late,
        X_LAYOUT=_layout([padded, 64], kind), W_LAYOUT=_layout([t.rows, 64], kind), num_warps=t.warps, **const,
        **extra,
    )  # fmt: skip


def choose_plain_tiling(rows: int, weight: Tensor, mode: int) -> Tiling | None:
    """From times of whole steps on an H100 (`h100_few_rows.json`); None where the kernel in Triton is as fast, or the
    only one.
    """
    pair = 2 if mode == GATED else 1
    outputs, inputs = weight.shape[0] // pair, weight.shape[1]
    tiles = outputs // 64
    if not 1 < rows <= 64 or mode == ARGMAX or weight.dtype not in _DTYPES or outputs % 64 or inputs % 64:
        return None
    if tiles < (40 if mode == GATED else 48 if mode == STORE else 32):
        return None
    split = 1
    while mode == RESIDUAL and split < 4 and 2 * tiles * split <= processors() and inputs % (128 * split) == 0:
        if inputs // (2 * split) < 1024:
            break
        split *= 2
    depth = 128 if inputs // split % 128 == 0 else 64
    if mode == RESIDUAL and depth == 64 and rows > 32:  # steps of Qwen2.5-3B were slower
        return None
    stage = (pair * 64 + max(16, triton.next_power_of_2(rows))) * depth * 2
    alone = tiles * split <= processors()  # a program a processor
    room = _MEMORY // (1 if alone else 2) - 1024
    stages = max(2, min(inputs // split // depth, room // stage))
    if mode == STORE and alone:  # what follows is attention, whose programs are to have room
        return Tiling(False, 64, depth, 4, split, (stages + 1) // 2, whole=True, late=1)
    return Tiling(False, 64, depth, 4, split, stages, whole=True)
