"""The product of many rows with weights of 4 bits, or of sorted rows with their experts' weights, on Hopper GPUs, in
Gluon: numbers are made of the next codes while the matrix units multiply the last ones, which Triton's own pipeline
does not do with operands that it computes.

Words as in `packed_linear`, 64 a block and output. Inputs and words come through TMA; the weight is the left operand
and stays in registers, of which two sets are in use: one that is multiplied, one that is being made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

from vllm.ops.triton.activation import KINDS, gated
from vllm.ops.triton.decode_parts import processors
from vllm.ops.triton.hopper_parts import DTYPES, barrier, load_tile, tile_layout, view
from vllm.ops.triton.packed_linear import ASSEMBLY, PackedWords, scaled_assembly

if TYPE_CHECKING:
    from vllm.ops.triton.moe import Sorted
    from vllm.ops.triton.packed_experts import PackedStack

_WORDS = 64
_BLOCK = 256  # inputs of a block


@dataclass(frozen=True, slots=True)
class ManyTiling:
    """Rows and outputs (of a gated product half of each half) of a tile, warps, tiles of inputs under way, and programs
    that share the inputs. registers: of a thread, at most; 0: as many as the compiler wants.
    """

    rows: int
    outputs: int
    warps: int
    stages: int = 4
    split: int = 1
    registers: int = 0


@gluon.jit(do_not_specialize=["M", "most"])
def _many_kernel(
    x, words, scales, out, part, arrived, tiles, most, M, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, ACT: gl.constexpr,
    PDL: gl.constexpr, EXPERTS: gl.constexpr, W_LAYOUT: gl.constexpr, ASM0: gl.constexpr, ASM1: gl.constexpr,
    ASM2: gl.constexpr, ASM3: gl.constexpr,
):  # fmt: skip
    """Grid (rows / BM * N / (BN / TILES), SPLIT), rows first. x: [M, K], words: [blocks * TILES, N, 64], both as
    descriptors. ASM: what makes numbers of each of a word's codes. ACT: of a gated product, which has two TILES; else
    -1. With SPLIT > 1 each program sums a share of K; the last to arrive adds the parts up in fixed order.
    EXPERTS: rows are sorted by expert, `most` is the number of tiles of rows there can be, and `tiles` says which there
    are, as in `moe`; the experts' words and scales are one behind the other.
    """
    J: gl.constexpr = 64
    BLOCK: gl.constexpr = 4 * J
    BLOCKS: gl.constexpr = K // BLOCK
    SHARE: gl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    TILES: gl.constexpr = 2 if ACT >= 0 else 1
    WIDTH: gl.constexpr = BN // TILES
    ROWS: gl.constexpr = TILES * N
    ASMS: gl.constexpr = (ASM0, ASM1, ASM2, ASM3)
    dtype: gl.constexpr = x.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    row_tiles = most if EXPERTS else (M + BM - 1) // BM
    pid = gl.program_id(0)
    share = gl.program_id(1)
    begin = share * SHARE
    count = gl.minimum(SHARE, BLOCKS - begin)
    first_n = pid // row_tiles * WIDTH
    first_m = pid % row_tiles * BM
    first_block = begin
    group_scales = scales
    if EXPERTS:
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        tile = pid % row_tiles
        if tile >= gl.load(tiles + 3 * most):
            return
        expert = gl.load(tiles + tile)
        first_m = gl.load(tiles + most + tile)
        M = gl.load(tiles + 2 * most + tile)
        first_block += expert * BLOCKS
        group_scales += expert * (K // GROUP * ROWS)
    xs = gl.allocate_shared_memory(dtype, [STAGES, BM, J], x.layout)
    w_places = gl.allocate_shared_memory(gl.int16, [2, TILES, WIDTH, J], words.layout)
    ws = view(w_places, gl.int16, [2, BN, J], W_LAYOUT)
    x_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_there = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_there.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(w_there.index(i), count=1)
    fence_async_shared()
    if PDL and not EXPERTS:
        gdc_launch_dependents()
    for i in gl.static_range(2):
        mbarrier.expect(w_there.index(i), BN * J * 2, pred=i < count)
        load_tile(
            words, [(first_block + i) * TILES, first_n, 0], w_there.index(i), w_places.index(i), pred=i < count
        )  # fmt: skip
    r = gl.arange(0, BN, gl.SliceLayout(1, left))
    row_scales = group_scales + first_n + r % WIDTH + r // WIDTH * N
    near = gl.load(row_scales + begin * BLOCK // GROUP * ROWS).to(dtype)  # of the first half of a block, and the second
    far = gl.load(row_scales + (begin * BLOCK + BLOCK // 2) // GROUP * ROWS).to(dtype)
    if PDL and not EXPERTS:
        gdc_wait()
    first_k = begin * BLOCK
    for i in gl.static_range(STAGES - 1):
        mbarrier.expect(x_there.index(i), BM * J * 2)
        load_tile(x, [first_m, first_k + i * J], x_there.index(i), xs.index(i))
    acc = gl.zeros([BN, BM], gl.float32, mma)
    mbarrier.wait(w_there.index(0), 0)
    a = ws.index(0).load(left)
    for b in range(count):
        following = (begin + gl.minimum(b + 1, count - 1)) * BLOCK
        next_near = gl.load(row_scales + following // GROUP * ROWS)
        next_far = gl.load(row_scales + (following + BLOCK // 2) // GROUP * ROWS)
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
            mbarrier.expect(x_there.index(ahead % STAGES), BM * J * 2, pred=ahead < 4 * count)
            load_tile(
                x, [first_m, first_k + ahead * J], x_there.index(ahead % STAGES), xs.index(ahead % STAGES),
                pred=ahead < 4 * count,
            )  # fmt: skip
        near = next_near.to(dtype)
        far = next_far.to(dtype)
        slot = (b + 1) % 2
        mbarrier.wait(w_there.index(slot), (b + 1) // 2 % 2, pred=b + 1 < count)
        a = ws.index(slot).load(left)
        mbarrier.expect(w_there.index(b % 2), BN * J * 2, pred=b + 2 < count)
        load_tile(
            words, [(first_block + b + 2) * TILES, first_n, 0], w_there.index(b % 2), w_places.index(b % 2),
            pred=b + 2 < count,
        )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=(acc,))
    n = gl.arange(0, BN, gl.SliceLayout(1, mma))
    m = gl.arange(0, BM, gl.SliceLayout(0, mma))
    if SPLIT > 1:
        SIZE: gl.constexpr = BN * BM
        mine = part + pid * (SPLIT * SIZE) + n[:, None] * BM + m[None, :]
        gl.store(mine + share * SIZE, acc)
        barrier()
        came = gl.atomic_add(arrived + pid, 1, sem="acq_rel")
        if came != SPLIT - 1:
            return
        gl.store(arrived + pid, 0)
        if SPLIT == 2:  # a sum of two has no order
            acc += gl.load(mine + (1 - share) * SIZE, cache_modifier=".cg")
        else:
            acc = gl.zeros([BN, BM], gl.float32, mma)
            for i in gl.static_range(SPLIT):
                acc += gl.load(mine + i * SIZE, cache_modifier=".cg")
    if ACT >= 0:
        apart: gl.constexpr = gl.BlockedLayout([2, 1, 2], [32, 1, 1], [1, gl.num_warps(), 1], [0, 1, 2])
        halves = gl.permute(gl.reshape(acc.to(dtype), [2, WIDTH, BM]), (1, 2, 0))
        gate, up = gl.split(gl.convert_layout(halves, apart))
        n = gl.arange(0, WIDTH, gl.SliceLayout(1, gate.type.layout))
        m = first_m + gl.arange(0, BM, gl.SliceLayout(0, gate.type.layout))
        y = gated(gate, up, 0.0, ACT, False)
    else:
        m += first_m
        y = acc.to(out.dtype.element_ty)
    gl.store(out + m.to(gl.int64)[None, :] * N + (first_n + n)[:, None], y, mask=(m < M)[None, :])


def takes(weight: PackedWords | PackedStack, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies by a weight, or the experts' of a stack: of the widths and groups it is cut for, on
    the GPU it is cut for.
    """
    if not ASSEMBLY or dtype not in DTYPES or weight.format != "int4" or weight.offsets is not None:
        return False
    outputs, inputs = weight.shape[-2:]
    whole = weight.words.shape[-1] == _WORDS and inputs % _BLOCK == 0 and outputs % 64 == 0
    return whole and weight.group % 128 == 0 and triton.runtime.driver.active.get_current_target().arch == 90


def choose_many_tiling(rows: int, outputs: int, inputs: int) -> ManyTiling:
    """The tiling for up to 256 rows, from times on an H200 and an H100 (`h200_packed_many.json`,
    `h100_packed_steps.json`).
    """
    tiles = outputs // 128 * -(-rows // 128)
    if outputs % 128 == 0 and 2 * tiles <= processors() and inputs >= 2048:  # several programs share the inputs
        split = 2 if 4 * tiles > processors() or inputs < 4096 else 4
        return ManyTiling(128, 128, 8, split=split)
    if outputs >= 16384 and outputs % 128 == 0:
        return ManyTiling(256 if rows > 128 else 128, 128, 8)
    if outputs >= 6144 and rows > 128:
        return ManyTiling(256, 64, 4)
    return ManyTiling(128, 64, 4)


def choose_gated_tiling(rows: int) -> ManyTiling:
    """The same for a gated product."""
    return ManyTiling(256 if rows > 128 else 128, 128, 8)


def many_rows_product(
    x: Tensor, weight: PackedWords, dtype: torch.dtype, t: ManyTiling | None = None, act: str | None = None,
    out: Tensor | None = None, arrived: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """x [rows, in] @ weight.T in `dtype`, of a weight that the kernel takes. x: contiguous, in bfloat16 or float16.

    act: the weight's halves are those of a gated product: act(first) * second.   arrived: int32 zeros, as many as
    tiles, and zeros again afterwards; None: new ones.
    """
    (rows, k), tiles = x.shape, 1 if act is None else 2
    n = weight.shape[0] // tiles
    if t is None:
        t = choose_many_tiling(rows, n, k) if act is None else choose_gated_tiling(rows)
    width = t.outputs // tiles
    out = torch.empty(rows, n, dtype=dtype, device=x.device) if out is None else out
    programs = n // width * triton.cdiv(rows, t.rows)
    part = None
    if t.split > 1:
        part = torch.empty(programs * t.split * t.outputs * t.rows, dtype=torch.float32, device=x.device)
        if arrived is None or arrived.numel() < programs:
            arrived = torch.zeros(programs, dtype=torch.int32, device=x.device)
    _launch(x, weight, out, (part, arrived if t.split > 1 else None), None, programs, t, tiles, act, pdl)
    return out


def experts_product(
    x: Tensor, weight: PackedStack, s: Sorted, rows: int, out: Tensor, act: str | None, pdl: bool
) -> None:
    """Rows x [pairs, in], sorted by expert in tiles of `rows`, times their experts' weights, to out [pairs, out]; act:
    as for `many_rows_product`.
    """
    tiles = 1 if act is None else 2
    t = ManyTiling(rows, 128, 8)
    programs = s.most * (out.shape[1] // (t.outputs // tiles))
    _launch(x, weight, out, (None, None), s, programs, t, tiles, act, pdl)


def takes_experts(gate_up: PackedStack, down: PackedStack, dtype: torch.dtype) -> bool:
    """Whether `experts_product` multiplies by both."""
    return takes(gate_up, dtype) and takes(down, dtype) and gate_up.shape[1] % 128 == 0 and down.shape[1] % 128 == 0


def _launch(
    x: Tensor, weight: PackedWords | PackedStack, out: Tensor, parts: tuple[Tensor | None, Tensor | None],
    s: Sorted | None, programs: int, t: ManyTiling, tiles: int, act: str | None, pdl: bool,
) -> None:  # fmt: skip
    (rows, k), n = x.shape, out.shape[1]
    asms = {f"ASM{i}": scaled_assembly(0, x.dtype == torch.float16, i, False) for i in range(4)}
    words = weight.words.view(-1, n, _WORDS)
    kind = DTYPES[x.dtype]
    inputs = TensorDescriptor(x, [rows, k], [k, 1], [t.rows, _WORDS], tile_layout([t.rows, _WORDS], kind))
    box = [tiles, t.outputs // tiles, _WORDS]
    weights = TensorDescriptor(words, list(words.shape), list(words.stride()), box, tile_layout(box, gl.int16))
    _many_kernel[(programs, t.split)](
        inputs, weights, weight.scales, out, *parts, None if s is None else s.tiles, 0 if s is None else s.most, rows,
        N=n, K=k, GROUP=weight.group, BM=t.rows, BN=t.outputs, SPLIT=t.split, STAGES=t.stages,
        ACT=-1 if act is None else KINDS[act], PDL=pdl, EXPERTS=s is not None,
        W_LAYOUT=tile_layout([t.outputs, _WORDS], gl.int16), **asms, num_warps=t.warps,
        **({"launch_pdl": True} if pdl else {}), **({"maxnreg": t.registers} if t.registers else {}),
    )  # fmt: skip
