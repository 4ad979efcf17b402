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

from vllm.ops.triton.decode_linear import ARGMAX, GATED, RESIDUAL, STORE
from vllm.ops.triton.decode_parts import Tiling, ask_constants, processors
from vllm.ops.triton.hopper_parts import (
    DTYPES,
    MEMORY,
    ask_squares,
    close_rows,
    inverse_rms,
    leave_share,
    load_tile,
    take_shares,
    tile_layout,
    view,
)


@gluon.jit
def _ask_weights(
    w, there, ws, begin, block, pid, pred, N: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, SUB: gl.constexpr,
    TILES: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A block's weights, to their place. The barrier waits for its inputs, too."""
    slot = block % STAGES
    mbarrier.expect(there.index(slot), SUB * ((2 if PAIRS else TILES) * BN + BM) * 128, pred=pred)
    if PAIRS:
        at = [(begin + block) * SUB, pid * (BN // 8), 0, 0, 0]
        load_tile(w, at, there.index(slot), ws.index(slot), pred=pred)
    else:
        for t in gl.static_range(TILES):
            at = [(begin + block) * SUB, pid * BN + t * N, 0]
            load_tile(w, at, there.index(slot), ws.index(slot * TILES + t), pred=pred)


@gluon.jit
def _halves(acc, to: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr):
    """The rows of a gated product's halves, of which eight of the one lie behind eight of the other, in a layout."""
    pairs: gl.constexpr = gl.BlockedLayout([1, 4, 2], [4, 8, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    parts = gl.permute(gl.reshape(acc, [BN // 8, 2, 8, BM]), (0, 2, 3, 1))
    first, second = gl.split(gl.convert_layout(gl.reshape(parts, [BN, BM, 2]), pairs))
    return gl.convert_layout(first, to), gl.convert_layout(second, to)


@gluon.jit(do_not_specialize=["tiles_in", "M"])
def _few_kernel(
    x, w, bias, out, part, arrived, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out,
    scale: gl.constexpr, M, N: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, SQUARES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    MODE: gl.constexpr, ACT: gl.constexpr, NORM: gl.constexpr, NEXT: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr, LATE: gl.constexpr, X_LAYOUT: gl.constexpr, W_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Grid (N / BN, SPLIT), of up to BM rows. x: [K / 64, M, 64], w: [K / 64, rows of the weight, 64], both as
    descriptors of tiles of SUB * 64 inputs; w of a gated product's 32 outputs, so that both halves fill one tile of the
    matrix units: [K / 64, N / 8, 2, 8, 64]. LATE: as `Tiling.late`. The rest: as in `decode_linear`.
    """
    BLOCKS: gl.constexpr = K // (64 * SUB)
    COUNT: gl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT  # of the longest share
    EVEN: gl.constexpr = BLOCKS % SPLIT == 0
    PAIRS: gl.constexpr = MODE == 1 and BN == 32
    TILES: gl.constexpr = 2 if MODE == 1 and not PAIRS else 1
    ROWS: gl.constexpr = 2 * BN if PAIRS else BN
    FIRST: gl.constexpr = STAGES if STAGES < COUNT else COUNT
    dtype: gl.constexpr = x.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BM, 16])
    ends: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0]) if PAIRS else mma
    pid = gl.program_id(0)
    share = gl.program_id(1)
    begin = share * BLOCKS // SPLIT
    count = COUNT
    if not EVEN:
        count = (share + 1) * BLOCKS // SPLIT - begin
    x_places = gl.allocate_shared_memory(dtype, [STAGES, SUB, BM, 64], x.layout)
    w_shape: gl.constexpr = [STAGES, SUB, BN // 8, 2, 8, 64] if PAIRS else [STAGES * TILES, SUB, BN, 64]
    w_places = gl.allocate_shared_memory(dtype, w_shape, w.layout)
    xs = view(x_places, dtype, [STAGES * SUB, BM, 64], X_LAYOUT)
    ws = view(w_places, dtype, [STAGES * TILES * SUB, ROWS, 64], W_LAYOUT)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
    fence_async_shared()
    if PDL and (LATE == 0 or LATE == 3):
        gdc_launch_dependents()
    for i in gl.static_range(FIRST):
        _ask_weights(w, there, w_places, begin, i, pid, EVEN or i < count, N, BN, BM, SUB, TILES, PAIRS, STAGES)
    n = pid * BN + gl.arange(0, BN, gl.SliceLayout(1, ends))
    m = gl.arange(0, BM, gl.SliceLayout(0, ends))
    keep = (m < M)[None, :]
    at = m[None, :] * N + n[:, None]
    first_bias, second_bias, factor = ask_constants(bias, next_weight, n, n < N, N, MODE, NEXT, BIAS)
    if PDL and LATE != 3:
        gdc_wait()
        if LATE == 1:
            gdc_launch_dependents()
    for i in gl.static_range(FIRST):
        load_tile(x, [(begin + i) * SUB, 0, 0], there.index(i), x_places.index(i), pred=EVEN or i < count)
    parts = ask_squares(squares_in, tiles_in, M, SQUARES, BM, NORM)
    before = n
    if MODE == 2:
        before = gl.load(h + at, mask=keep, other=0.0)
    acc = gl.zeros([ROWS, BM], gl.float32, mma)
    up = acc
    zero = acc
    for b in range(count):
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
            more = following < count
            _ask_weights(w, there, w_places, begin, following, pid, more, N, BN, BM, SUB, TILES, PAIRS, STAGES)
            load_tile(x, [(begin + following) * SUB, 0, 0], there.index(slot), x_places.index(slot), pred=more)
    if PDL and LATE == 2:
        gdc_launch_dependents()
    if PDL and LATE == 3:
        gdc_wait()
    if SPLIT > 1:
        last = leave_share(acc, up, part, arrived + pid, at, keep, share, BM * N, SPLIT, TILES == 2)
        if not last:
            return
        acc, up = take_shares(zero, part, at, keep, BM * N, SPLIT, TILES == 2)
    if PAIRS:
        acc, up = _halves(acc, ends, BN, BM)
    rstd = inverse_rms(parts, m, WIDTH, eps, NORM)
    close_rows(
        acc, up, m, n, keep, at, pid, M, N // BN, first_bias, second_bias, factor, rstd, before, out, h, scaled,
        squares_out, scale, MODE, ACT, NORM, NEXT, BIAS,
    )  # fmt: skip


def launch_plain(
    x: Tensor, weight: Tensor, ends: tuple[Tensor | None, ...], parts: tuple[Tensor | None, ...],
    behind: tuple[Any, ...], rows: int, t: Tiling, const: dict[str, Any], extra: dict[str, Any],
) -> None:  # fmt: skip
    """Launch a product, as `launch_few` does; the tiling's depth counts inputs, a multiple of 64."""
    squares, tiles, eps, h, next_weight, scaled, squares_out, *_, scale = behind
    const = {name: const[name] for name in ("N", "K", "BN", "WIDTH", "MODE", "ACT", "NORM", "NEXT", "BIAS", "PDL")}
    n, k, sub, padded = const["N"], const["K"], t.depth // 64, max(16, triton.next_power_of_2(rows))
    kind = DTYPES[x.dtype]
    inputs = TensorDescriptor(
        x, [k // 64, x.shape[0], 64], [64, k, 1], [sub, padded, 64], tile_layout([sub, padded, 64], kind)
    )
    shape, strides, block = [k // 64, weight.shape[0], 64], [64, k, 1], [sub, t.rows, 64]
    if const["MODE"] == GATED and t.rows == 32:  # eight rows of the one half and eight of the other
        shape, strides, block = [k // 64, n // 8, 2, 8, 64], [64, 8 * k, n * k, k, 1], [sub, 4, 2, 8, 64]
    weights = TensorDescriptor(weight, shape, strides, block, tile_layout(block, kind))
    _few_kernel[(n // t.rows, t.split)](
        inputs, weights, *ends, *parts, squares, tiles, eps, h, next_weight, scaled, squares_out, scale, rows,
        SQUARES=triton.next_power_of_2(max(tiles, 8)), BM=padded, SUB=sub, SPLIT=t.split, STAGES=t.stages, LATE=t.late,
        X_LAYOUT=tile_layout([padded, 64], kind), W_LAYOUT=tile_layout([max(t.rows, 64), 64], kind), num_warps=t.warps,
        **const, **extra,
    )  # fmt: skip


def choose_plain_tiling(rows: int, weight: Tensor, mode: int) -> Tiling | None:
    """From times of whole steps (`h100_few_rows.json`, `h200_rows32_py22.json`); None where the kernel in Triton is as
    fast, or the only one.
    """
    pair = 2 if mode == GATED else 1
    outputs, inputs = weight.shape[0] // pair, weight.shape[1]
    tiles = outputs // 64
    if not 1 < rows <= 64 or mode == ARGMAX or weight.dtype not in DTYPES or outputs % 64 or inputs % 64:
        return None
    if tiles < (40 if mode == GATED else 48 if mode == STORE else 32 if inputs > 2048 else 24):
        return None
    depth, split = 128 if inputs % 128 == 0 else 64, 1
    if mode == RESIDUAL:  # as many shares as there are processors for, if each is worth it
        if depth == 64:  # steps of Qwen2.5-3B are slower
            return None
        split = max(1, min(4, processors() // tiles, inputs // (1024 if tiles >= 32 else 256)))
        if rows > 32 and split == 4 and inputs % (4 * depth):  # likewise
            return None
    padded = max(16, triton.next_power_of_2(rows))
    each = -(-2 * tiles // processors())
    if mode == GATED and each < 2 * -(-tiles // processors()):  # tiles half as large spread more evenly
        room = MEMORY * 2 // 3 if each == 1 else MEMORY // min(each, 3)
        return Tiling(False, 32, depth, 4, 1, max(2, (room - 1024) // ((64 + padded) * depth * 2)), whole=True)
    stage = (pair * 64 + padded) * depth * 2
    alone = tiles * split <= processors()  # a program a processor
    room = MEMORY // (1 if alone else 2) - 1024
    stages = max(2, min(inputs // split // depth, room // stage))
    if mode == STORE and alone:  # what follows is attention, whose programs are to have room
        return Tiling(False, 64, depth, 4, split, (stages + 1) // 2, whole=True, late=1)
    return Tiling(False, 64, depth, 4, split, stages, whole=True)
