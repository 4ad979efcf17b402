"""The product of several rows with weights of 4 bits or 8-bit floats on Hopper GPUs, in Gluon, with what follows it
folded in: numbers are made of the next codes while the matrix units multiply the last ones, and sums get their scales a
group at a time. Of sorted rows, with their experts' weights of 4 bits, it takes a tile at a time.

Blocks of 128 bytes of an output, as in `one_row`. Words and inputs of a block come through TMA, words before the
kernel in front has ended. The weight is the left operand and stays in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
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

from vllm.ops.triton.activation import KINDS
from vllm.ops.triton.decode_parts import Tiling, ask_constants, processors
from vllm.ops.triton.float8 import Float8Weight
from vllm.ops.triton.hopper_parts import (
    DTYPES,
    MEMORY,
    ask_squares,
    barrier,
    close_rows,
    inverse_rms,
    leave_share,
    load_tile,
    take_shares,
    tile_layout,
    view,
)
from vllm.ops.triton.packed_linear import PackedWords, number_assembly

if TYPE_CHECKING:
    from vllm.ops.triton.moe import Sorted
    from vllm.ops.triton.packed_experts import PackedStack

MOST_ROWS = 64  # of a tile
_WORDS = 64
_MOST_PROGRAMS = 384


@gluon.jit
def _ask_words(
    words, there, ws, block, pid, slot, pred, CODES: gl.constexpr, TILES: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """A block's words, to their place. The barrier waits for its inputs, too."""
    mbarrier.expect(there.index(slot), TILES * BN * 128 + BM * CODES * 128, pred=pred)
    at = [block * TILES, pid * BN, 0] if CODES == 4 else [0, pid * BN, block * 64]
    load_tile(words, at, there.index(slot), ws.index(slot), pred=pred)


@gluon.jit
def _numbers(words, ASM: gl.constexpr, HALF: gl.constexpr):
    if HALF:
        numbers = gl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2)
    else:
        numbers = gl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
    return numbers


@gluon.jit(do_not_specialize=["tiles_in", "M", "most"])
def _few_kernel(
    x, words, scales, bias, out, part, arrived, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out,
    scale: gl.constexpr, tiles, most, M, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, CODES: gl.constexpr,
    WIDTH: gl.constexpr, SQUARES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, MODE: gl.constexpr, ACT: gl.constexpr, NORM: gl.constexpr, NEXT: gl.constexpr,
    BIAS: gl.constexpr, PDL: gl.constexpr, X_LAYOUT: gl.constexpr, W_LAYOUT: gl.constexpr, ASM0: gl.constexpr,
    ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr, GROUPS: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """Grid (N / BN, SPLIT), of up to BM rows; four warps for 64 outputs. x: [K / 64, M, 64], words: [blocks * TILES, N,
    64] or, of 8-bit floats, [TILES, N, K / 2], both as descriptors. ASM: what makes numbers of each of the CODES in 16
    bits. TILES: of outputs, two of a gated product. GROUPS: at least the pieces of 128 inputs of a share, whose scales
    a program holds: loads in the loop would take as long as a block does.
    EXPERTS: grid (most * N / BN,), rows first, of tiles of rows as in `packed_many`. `tiles` is read before the kernel
    in front has ended: it was there when that let this one begin.
    """
    BLOCKS: gl.constexpr = K // (64 * CODES)
    SHARE: gl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    TILES: gl.constexpr = 2 if MODE == 1 else 1
    ROWS: gl.constexpr = TILES * N
    ASMS: gl.constexpr = (ASM0, ASM1, ASM2, ASM3)
    dtype: gl.constexpr = x.dtype
    HALF: gl.constexpr = dtype == gl.float16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    pid = gl.program_id(0)
    share = gl.program_id(1)
    begin = share * SHARE
    end = gl.minimum(begin + SHARE, BLOCKS)
    first_m = 0
    first_block = 0
    if PDL:
        gdc_launch_dependents()
    if EXPERTS:
        tile = pid % most
        pid = pid // most
        if tile >= gl.load(tiles + 3 * most, cache_modifier=".cg"):
            return
        expert = gl.load(tiles + tile, cache_modifier=".cg")
        first_m = gl.load(tiles + most + tile, cache_modifier=".cg")
        M = gl.load(tiles + 2 * most + tile, cache_modifier=".cg") - first_m
        first_block = expert * BLOCKS
        scales += expert * (K // GROUP * ROWS)
    x_places = gl.allocate_shared_memory(dtype, [STAGES, CODES, BM, 64], x.layout)
    w_places = gl.allocate_shared_memory(gl.int16, [STAGES, TILES, BN, 64], words.layout)
    xs = view(x_places, dtype, [STAGES * CODES, BM, 64], X_LAYOUT)
    ws = view(w_places, gl.int16, [STAGES * TILES, BN, 64], W_LAYOUT)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        _ask_words(words, there, w_places, first_block + begin + i, pid, i, begin + i < end, CODES, TILES, BM, BN)
    n = pid * BN + gl.arange(0, BN, gl.SliceLayout(1, mma))
    m = gl.arange(0, BM, gl.SliceLayout(0, mma))
    keep = (m < M)[None, :]
    at = (first_m + m)[None, :] * N + n[:, None]
    first_bias, second_bias, weight = ask_constants(bias, next_weight, n, n < N, N, MODE, NEXT, BIAS)
    flat: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    if CODES == 4:
        g = begin * 2 + gl.arange(0, GROUPS, gl.SliceLayout(1, flat))
        c = gl.arange(0, TILES * BN, gl.SliceLayout(0, flat))
        listed = (g < 2 * BLOCKS)[:, None] & (c >= 0)[None, :]
        column = pid * BN + c % BN + c // BN * N
        asked = gl.load(scales + (g * 128 // GROUP * ROWS)[:, None] + column[None, :], mask=listed, other=0.0)
        s_places = gl.allocate_shared_memory(
            scales.dtype.element_ty, [GROUPS, TILES * BN], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        ss = view(s_places, scales.dtype.element_ty, [GROUPS * TILES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        first_scale = gl.load(scales + n)
        second_scale = gl.load(scales + N + n) if TILES == 2 else first_scale
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        load_tile(x, [(begin + i) * CODES, first_m, 0], there.index(i), x_places.index(i), pred=begin + i < end)
    parts = ask_squares(squares_in, tiles_in, M, SQUARES, BM, NORM)
    if CODES == 4:
        s_places.store(asked)
        barrier()
    rstd = inverse_rms(parts, m, WIDTH, eps, NORM)
    acc = gl.zeros([BN, BM], gl.float32, mma)
    up = acc
    zero = acc
    for b in range(begin, end):
        slot = (b - begin) % STAGES
        mbarrier.wait(there.index(slot), (b - begin) // STAGES % 2)
        a = ()
        for t in gl.static_range(TILES):
            a += (ws.index(slot * TILES + t).load(left),)  # type: ignore[assignment]
        tokens = ()
        for u in gl.static_range(CODES // 2 * TILES):  # two codes of the first tile, ..., then of the second
            first = _numbers(a[u // (CODES // 2)], ASMS[u % (CODES // 2) * 2], HALF)
            second = _numbers(a[u // (CODES // 2)], ASMS[u % (CODES // 2) * 2 + 1], HALF)
            near = xs.index(slot * CODES + u % (CODES // 2) * 2).permute((1, 0))
            far = xs.index(slot * CODES + u % (CODES // 2) * 2 + 1).permute((1, 0))
            if CODES == 4:
                token = warpgroup_mma(first, near, zero, use_acc=False, is_async=True)
            else:
                token = warpgroup_mma(first, near, acc if u == 0 else up, is_async=True)
            token = warpgroup_mma(second, far, token, is_async=True)
            if CODES == 4 and u > 0:
                factor = ss.index((2 * (b - begin) + (u - 1) % 2) * TILES + (u - 1) // 2).load(gl.SliceLayout(1, mma))
                done = warpgroup_mma_wait(2, deps=(tokens[u - 1],)) * gl.expand_dims(factor.to(gl.float32), 1)
                if u <= 2:
                    acc += done
                else:
                    up += done
            tokens += (token,)  # type: ignore[assignment]
        if CODES == 4:
            factor = ss.index((2 * (b - begin) + 1) * TILES + TILES - 1).load(gl.SliceLayout(1, mma))
            last = warpgroup_mma_wait(0, deps=(tokens[2 * TILES - 1],)) * gl.expand_dims(factor.to(gl.float32), 1)
            if TILES == 2:
                up += last
            else:
                acc += last
        elif TILES == 2:
            acc, up = warpgroup_mma_wait(0, deps=(tokens[0], tokens[1]))  # type: ignore[misc]
        else:
            acc = warpgroup_mma_wait(0, deps=(tokens[0],))  # type: ignore[misc]
        ahead = b + STAGES
        _ask_words(words, there, w_places, first_block + ahead, pid, slot, ahead < end, CODES, TILES, BM, BN)
        load_tile(x, [ahead * CODES, first_m, 0], there.index(slot), x_places.index(slot), pred=ahead < end)
    if CODES == 2:
        acc *= gl.expand_dims(first_scale, 1)
        if TILES == 2:
            up *= gl.expand_dims(second_scale, 1)
    before = n
    if MODE == 2:
        before = gl.load(h + at, mask=keep, other=0.0)
    if SPLIT > 1:
        last = leave_share(acc, up, part, arrived + pid, at, keep, share, BM * N, SPLIT, TILES == 2)
        if not last:
            return
        acc, up = take_shares(zero, part, at, keep, BM * N, SPLIT, TILES == 2)
    close_rows(
        acc, up, m, n, keep, at, pid, M, N // BN, first_bias, second_bias, weight, rstd, before, out, h, scaled,
        squares_out, scale, MODE, ACT, NORM, NEXT, BIAS,
    )  # fmt: skip


def takes_few(rows: int, weight: PackedWords | Float8Weight, mode: int) -> bool:
    """Whether the kernel multiplies so many rows by a weight: of the widths and groups it is cut for."""
    if not (8 if isinstance(weight, PackedWords) else 1) < rows <= MOST_ROWS:
        return False
    if isinstance(weight, PackedWords):
        fitting = weight.format == "int4" and weight.offsets is None and weight.words.shape[2] == _WORDS
        if not fitting or weight.group % 128 or weight.shape[1] % 256:
            return False
    return weight.shape[0] % (128 if mode == 1 else 64) == 0


def choose_few_tiling(rows: int, weight: PackedWords | Float8Weight, mode: int) -> Tiling:
    """From times of whole steps (`benchmarks/h200/tune_decode.py`) on an H200, `h200_packed_rows.json`, and, of shares
    and stages with 4 bits, on an H100, `h100_packed_steps.json`.
    """
    packed = isinstance(weight, PackedWords)
    codes, pair = 4 if packed else 2, 2 if mode == 1 else 1
    depth, blocks, split = max(16, triton.next_power_of_2(rows)), weight.shape[1] // (64 * codes), 1
    tiles = weight.shape[0] // 64 // pair
    while split < 4 and 2 * tiles * split <= _MOST_PROGRAMS:
        if blocks < (4 if not packed else 16 if tiles * split < 96 else 24) * split:
            break
        split *= 2
    stage = pair * 8192 + depth * codes * 128
    scales = (
        0 if not packed else weight.scales.element_size() * 128 * pair * triton.next_power_of_2(-(-blocks // split))
    )
    room = (MEMORY // -(-tiles * split // processors()) - scales) // stage  # for all programs at once
    most = (4 if mode == 1 else 8) if not packed else 2 if mode == 1 else 6 if split <= 2 else 4
    return Tiling(False, 64, depth, 4, split, min(most, -(-blocks // split), max(2, room)), whole=True)


def launch_few(
    x: Tensor, weight: PackedWords | Float8Weight, ends: tuple[Tensor | None, ...], parts: tuple[Tensor | None, ...],
    behind: tuple[Any, ...], rows: int, t: Tiling, const: dict[str, Any], extra: dict[str, Any],
) -> None:  # fmt: skip
    """Launch a product, as `launch_packed` does."""
    squares, tiles, eps, h, next_weight, scaled, squares_out, *_, scale = behind
    const = {name: const[name] for name in ("N", "K", "WIDTH", "MODE", "ACT", "NORM", "NEXT", "BIAS", "PDL")}
    n, k, pair = const["N"], const["K"], 2 if const["MODE"] == 1 else 1
    packed = isinstance(weight, PackedWords)
    if isinstance(weight, PackedWords):
        words, group, codes = weight.words.view(-1, n, _WORDS), weight.group, 4
    else:
        words, group, codes = weight.codes.view(torch.int16).view(pair, n, k // 2), 0, 2
    depth, half = max(16, triton.next_power_of_2(rows)), x.dtype == torch.float16
    assemblies = {f"ASM{i}": number_assembly(packed, half, i % codes) for i in range(4)}
    kind = DTYPES[x.dtype]
    inputs = TensorDescriptor(
        x, [k // 64, x.shape[0], 64], [64, k, 1], [codes, depth, 64], tile_layout([codes, depth, 64], kind)
    )
    weights = TensorDescriptor(
        words,
        list(words.shape),
        list(words.stride()),
        [pair, t.rows, _WORDS],
        tile_layout([pair, t.rows, _WORDS], gl.int16),
    )
    share = -(-(k // (64 * codes)) // t.split)
    _few_kernel[(n // t.rows, t.split)](
        inputs, weights, weight.scales, *ends, *parts, squares, tiles, eps, h, next_weight, scaled, squares_out, scale,
        None, 0, rows, GROUP=group, CODES=codes, SQUARES=triton.next_power_of_2(max(tiles, 8)), BM=depth, BN=t.rows,
        SPLIT=t.split, STAGES=t.stages, X_LAYOUT=tile_layout([depth, 64], kind),
        W_LAYOUT=tile_layout([t.rows, _WORDS], gl.int16), GROUPS=triton.next_power_of_2(2 * share), EXPERTS=False,
        num_warps=t.warps, **assemblies, **const, **extra,
    )  # fmt: skip


def experts_product(
    x: Tensor, weight: PackedStack, s: Sorted, rows: int, out: Tensor, act: str | None, pdl: bool
) -> None:
    """What `packed_many.experts_product` computes, with tiles of few rows."""
    n, k, pair = out.shape[1], x.shape[1], 1 if act is None else 2
    # programs of more outputs or of more blocks under way leave less room for others, which first products need
    width, stages = (128, 3) if pair == 1 and rows == 16 else (64, 2)
    kind = DTYPES[x.dtype]
    inputs = TensorDescriptor(x, [k // 64, len(x), 64], [64, k, 1], [4, rows, 64], tile_layout([4, rows, 64], kind))
    words = weight.words.view(-1, n, _WORDS)
    box = [pair, width, _WORDS]
    weights = TensorDescriptor(words, list(words.shape), list(words.stride()), box, tile_layout(box, gl.int16))
    _few_kernel[(s.most * (n // width), 1)](
        inputs, weights, weight.scales, None, out, None, None, None, 1, 0.0, None, None, None, None, 1.0, s.tiles,
        s.most, 0, N=n, K=k, GROUP=weight.group, CODES=4, WIDTH=k, SQUARES=8, BM=rows, BN=width, SPLIT=1,
        STAGES=stages, MODE=pair - 1, ACT=-1 if act is None else KINDS[act], NORM=False, NEXT=False,
        BIAS=False, PDL=pdl, X_LAYOUT=tile_layout([rows, 64], kind), W_LAYOUT=tile_layout([width, _WORDS], gl.int16),
        GROUPS=triton.next_power_of_2(k // 128), EXPERTS=True, num_warps=4,
        **{f"ASM{i}": number_assembly(True, x.dtype == torch.float16, i) for i in range(4)},
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
