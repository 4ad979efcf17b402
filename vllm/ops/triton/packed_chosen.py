"""The products of one row with the experts that it chooses, of 4 bits, on Hopper GPUs, in Gluon: a lane loads the words
of which the matrix units take numbers from it, several blocks at once.

A block is 128 bytes of an output: 256 inputs, as in `packed_linear` with 64 words. Each warp takes blocks of its own,
of 16 outputs (of a gated product 8 of each half), and multiplies them as `one_row` does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.triton.decode_parts import ask_constants, finish_row

if TYPE_CHECKING:
    from vllm.ops.triton.packed_experts import PackedStack

_MOST_BLOCKS = 16  # of a warp, whose loop over them is written out


@triton.constexpr_function
def _block_assembly(half):
    """Sums of a block for a lane's two outputs: $0, $1 of the first, over the first and the second half of the codes in
    a word, $2, $3 of the second. Words: $4 to $7 of the first output, $8 to $11 of the second, then both again, of the
    second pieces. Inputs: from $20 on, 4 for each of the 4 codes in 16 bits and each piece.
    """
    kind, fma = ("f16", "fma.rn.f16x2") if half else ("bf16", "fma.rn.bf16x2")
    magic = "0x64006400" if half else "0x43004300"  # 0x4300 | c is 128 + c in bfloat16, 0x6400 | c 1024 + c in float16
    factor, more = ("0x3C003C00", "0xE408E408") if half else ("0x3F803F80", "0xC308C308")
    text = "{ .reg .b32 a<4>, factor, more; .reg .f32 s<4>, t<4>; "
    text += f"mov.b32 factor, {factor}; mov.b32 more, {more}; "
    text += "".join(f"mov.f32 s{c}, 0f00000000; mov.f32 t{c}, 0f00000000; " for c in range(4))
    for h in range(2):
        for i in range(4):
            for j in range(2):
                for a in range(4):  # of the first and the second output, then again of the next word
                    source = f"${4 + 8 * h + 4 * (a % 2) + 2 * j + a // 2}"
                    text += f"shr.b32 a{a}, {source}, {4 * i}; " if i else f"mov.b32 a{a}, {source}; "
                    text += f"lop3.b32 a{a}, a{a}, 0x000F000F, {magic}, 0xEA; {fma} a{a}, a{a}, factor, more; "
                sums = ", ".join(f"{'s' if i < 2 else 't'}{c}" for c in range(4))
                x = 20 + 8 * i + 4 * h + 2 * j
                text += f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{sums}}}, {{a0, a1, a2, a3}}, "
                text += f"{{${x}, ${x + 1}}}, {{{sums}}}; "
    return text + "mov.f32 $0, s0; mov.f32 $1, t0; mov.f32 $2, s2; mov.f32 $3, t2; }"


@triton.constexpr_function
def _total_assembly(half):
    """Sums of a block's inputs: $0, $2 of its first half, $1, $3 of its second. Inputs: from $4 on."""
    kind, one = ("f16", "0x3C003C00") if half else ("bf16", "0x3F803F80")
    text = f"{{ .reg .b32 one; .reg .f32 s<4>, t<4>; mov.b32 one, {one}; "
    text += "".join(f"mov.f32 s{c}, 0f00000000; mov.f32 t{c}, 0f00000000; " for c in range(4))
    for x in range(4, 36, 2):
        sums = ", ".join(f"{'s' if x < 20 else 't'}{c}" for c in range(4))
        text += f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{sums}}}, {{one, one, one, one}}, "
        text += f"{{${x}, ${x + 1}}}, {{{sums}}}; "
    return text + "mov.f32 $0, s0; mov.f32 $1, t0; mov.f32 $2, s0; mov.f32 $3, t0; }"


@triton.constexpr_function
def _constraints(registers):
    """Of four sums made from so many registers."""
    return ",".join(["=f"] * 4 + ["r"] * registers)


@gluon.jit
def _ask_words(at, APART: gl.constexpr):
    """The words of a lane's two outputs, APART of each other, of a block. at: of the first one's."""
    return (
        gl.load(at, eviction_policy="evict_first"), gl.load(at + APART, eviction_policy="evict_first"),
        gl.load(at + 16, eviction_policy="evict_first"), gl.load(at + (APART + 16), eviction_policy="evict_first"),
    )  # fmt: skip


@gluon.jit
def _ask_row(at):
    """The inputs of a block that a lane multiplies, by code and piece."""
    return (
        gl.load(at), gl.load(at + 16), gl.load(at + 32), gl.load(at + 48),
        gl.load(at + 64), gl.load(at + 80), gl.load(at + 96), gl.load(at + 112),
    )  # fmt: skip


@gluon.jit
def _sums(w, x, HALF: gl.constexpr):
    ASM: gl.constexpr = _block_assembly(HALF)
    CONSTRAINTS: gl.constexpr = _constraints(48)
    operands = [w[0], w[1], w[2], w[3], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=gl.float32, is_pure=False, pack=4)


@gluon.jit
def _totals(x, HALF: gl.constexpr):
    ASM: gl.constexpr = _total_assembly(HALF)
    CONSTRAINTS: gl.constexpr = _constraints(32)
    operands = [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=gl.float32, is_pure=False, pack=4)


@gluon.jit
def _ask_chosen(
    words, scales, offsets, experts, weights, i, choice, first, inside, row4, half, EACH: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, OFFSETS: gl.constexpr,
    SECOND: gl.constexpr,
):  # fmt: skip
    """Words, factors and offsets of a warp's block number i: of the expert that is the program's choice or, of second
    products, the choice that the block belongs to, whose weight is in the factors.
    """
    BLOCKS: gl.constexpr = EACH // 256
    block = first + i
    if not GATED:
        choice = block // BLOCKS
        block = block % BLOCKS
    expert = gl.load(experts + choice).to(gl.int64)
    found = _ask_words(words + (((expert * BLOCKS + block) * (ROWS * 32))[:, None] + inside), SECOND * 32)
    group = (expert * GROUPS)[:, None] if not GATED else expert * GROUPS
    at = (group + ((block * 2)[:, None] + half) * 128 // GROUP) * ROWS + row4
    factor = gl.load(scales + at).to(gl.float32)
    more = factor
    if OFFSETS:
        more = gl.load(offsets + at)
    if not GATED:
        weight = gl.load(weights + choice)[:, None]
        factor *= weight
        more *= weight
    return found, factor, more


@gluon.jit(do_not_specialize=["tiles_in"])
def _chosen_kernel(
    x, words, scales, offsets, experts, weights, out, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out,
    scale: gl.constexpr, N: gl.constexpr, EACH: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    TOP_K: gl.constexpr, SQUARES: gl.constexpr, AHEAD: gl.constexpr, MODE: gl.constexpr, ACT: gl.constexpr,
    NORM: gl.constexpr, NEXT: gl.constexpr, OFFSETS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Gated, grid (N / 8, TOP_K): the first products, of EACH inputs, one
    choice behind the other. Else, grid (N / 16,): the sum of the second ones, whose inputs lie so.
    """
    WARPS: gl.constexpr = gl.num_warps()
    GATED: gl.constexpr = MODE == 1
    SHARE: gl.constexpr = (EACH if GATED else TOP_K * EACH) // 256 // WARPS
    ROWS: gl.constexpr = 2 * N if GATED else N
    BN: gl.constexpr = 8 if GATED else 16
    SECOND: gl.constexpr = N if GATED else 8
    HALF: gl.constexpr = x.dtype.element_ty == gl.float16
    lanes: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pid = gl.program_id(0)
    choice = gl.program_id(1)
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, lanes))
    e = gl.arange(0, 4, gl.SliceLayout(0, lanes))
    q = thread % 4
    row = pid * BN + thread // 4 % 8
    first = thread // 32 * SHARE
    if PDL:
        gdc_launch_dependents()
    inside = (row * 32 + q * 4)[:, None] + e[None, :]
    row4 = row[:, None] + (e // 2 * SECOND)[None, :]
    half = (e % 2)[None, :]
    n = pid * BN + gl.arange(0, BN, line)
    in_n = n < N
    first_bias, second_bias, weight = ask_constants(None, next_weight, n, in_n, N, MODE, NEXT, False)
    if PDL:
        gdc_wait()
    words = words.to(gl.pointer_type(gl.int32))
    asked = ()
    for i in gl.static_range(AHEAD):
        asked += (
            _ask_chosen(
                words,
                scales,
                offsets,
                experts,
                weights,
                i,
                choice,
                first,
                inside,
                row4,
                half,
                EACH,
                GROUP,
                GROUPS,
                ROWS,
                GATED,
                OFFSETS,
                SECOND,
            ),
        )  # type: ignore[assignment]
    x_at = x.to(gl.pointer_type(gl.int32)) + (first * 128 + q * 4)[:, None] + e[None, :]
    parts, before = n, n  # as `hopper_parts.ask_inputs`; with a call of it more registers are spilled
    if NORM:
        j = gl.arange(0, SQUARES, line)
        parts = gl.load(squares_in + j, mask=j < tiles_in, other=0.0)
    if MODE == 2:
        before = gl.load(h + n, mask=in_n, other=0.0)
    acc = gl.zeros([32 * WARPS, 4], gl.float32, lanes)
    for i in gl.static_range(SHARE):
        xs = _ask_row(x_at + i * 128)
        acc += _sums(asked[i][0], xs, HALF) * asked[i][1]
        if OFFSETS:
            acc += _totals(xs, HALF) * asked[i][2]
        if i + AHEAD < SHARE:
            asked += (
                _ask_chosen(
                    words,
                    scales,
                    offsets,
                    experts,
                    weights,
                    i + AHEAD,
                    choice,
                    first,
                    inside,
                    row4,
                    half,
                    EACH,
                    GROUP,
                    GROUPS,
                    ROWS,
                    GATED,
                    OFFSETS,
                    SECOND,
                ),
            )  # type: ignore[assignment]
    acc = gl.sum(gl.reshape(acc, [WARPS, 8, 4, 2, 2]), 4)
    acc = gl.sum(gl.sum(acc, 2) * 0.25, 0)  # the four lanes of an output have the same
    if GATED:
        first_half, second_half = gl.split(acc)
        y = gl.convert_layout(first_half, line)
        u = gl.convert_layout(second_half, line)
        out += choice * N
    else:
        y = gl.convert_layout(gl.reshape(gl.permute(acc, (1, 0)), [16]), line)
        u = y
    finish_row(
        y, u, n, in_n, pid, first_bias, second_bias, weight, parts, before, eps, out, h, scaled, squares_out, None,
        None, None, None, None, scale, EACH, BN, MODE, ACT, NORM, NEXT, False, False,
    )  # fmt: skip


def takes_chosen(weight: PackedStack, top_k: int) -> bool:
    """Whether the kernel multiplies by the weights of so many experts at once; top_k: 1 of first products."""
    fitting = weight.format == "int4" and weight.words.shape[3] == 64 and weight.group % 128 == 0
    if not fitting or weight.shape[2] % 256 or weight.shape[1] % 16:
        return False
    blocks = top_k * (weight.shape[2] // 256)
    return blocks // math.gcd(blocks, 8) <= _MOST_BLOCKS


def launch_chosen(
    x: Tensor, norm: tuple[Tensor, int, float] | None, weight: PackedStack, act: int, experts: Tensor,
    weights: Tensor | None, out: Tensor | None, stream: tuple[Tensor | None, ...], scale: float, pdl: bool,
) -> int:  # fmt: skip
    """The first products of chosen experts or, with `weights`, the sum of the second ones. Returns how many parts the
    squares have. act: of `activation.KINDS`.   stream: h, the next norm's weight or None, scaled and squares.
    """
    gated, top_k = weights is None, len(experts)
    n, k = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    blocks = k // 256 * (1 if gated else top_k)
    warps = math.gcd(blocks, 4 if gated else 8)
    if blocks // warps > _MOST_BLOCKS:
        warps = math.gcd(blocks, 8)
    squares, tiles, eps = (None, 1, 0.0) if norm is None else norm
    programs = n // (8 if gated else 16)
    mode = 1 if gated else 2 if out is None else 0
    _chosen_kernel[(programs, top_k if gated else 1)](
        x, weight.words, weight.scales, weight.offsets, experts, weights, out, squares, tiles, eps,
        *(stream if mode == 2 else (None,) * 4), scale, N=n, EACH=k, GROUP=weight.group, GROUPS=weight.scales.shape[1],
        TOP_K=top_k, SQUARES=triton.next_power_of_2(max(tiles, 2)), AHEAD=min(3, blocks // warps), MODE=mode,
        ACT=act if gated else -1, NORM=norm is not None, NEXT=mode == 2 and stream[1] is not None,
        OFFSETS=weight.offsets is not None, PDL=pdl, num_warps=warps, maxnreg=128,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return programs
