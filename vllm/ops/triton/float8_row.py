"""The product of one row with 8-bit floats on Hopper GPUs, in Gluon: `packed_row`, which launches it, with other lanes.

A lane loads 16 of the 128 bytes that a block has of an output, of each of four outputs, so that every load of a warp
reads whole lines. Eight lanes have the same outputs: four are an even row of the matrix units, with the first half of a
block's inputs, four an odd one, with the second half. Columns of the right operand are alike: of a row's sums the one
in a column of its own kind counts.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.triton.decode_parts import ask_constants, finish_row
from vllm.ops.triton.hopper_parts import ask_inputs


@triton.constexpr_function
def _block_assembly(half):
    """Sums of a block for a lane's four outputs, over its half of the inputs: $0 to $3 over the first of two codes in
    16 bits, $4 to $7 over the second. Words: four of each output from $8 on. Inputs: four for each code from $24 on.
    """
    kind, fma = ("f16", "fma.rn.f16x2") if half else ("bf16", "fma.rn.bf16x2")
    # the bits of a float8 are those of a wider float but for the exponent's bias
    magic, factor = ("0x3F803F80", "0x5C005C00") if half else ("0x07F007F0", "0x7B807B80")
    text = "{ .reg .b32 a<4>, u, factor, more; .reg .f32 s<16>; .reg .pred odd; "
    text += f"mov.b32 factor, {factor}; mov.b32 more, 0x80008000; "
    text += "".join(f"mov.f32 s{c}, 0f00000000; " for c in range(16))
    for i in range(2):
        for j in range(2):
            for pair in (1, 0):  # of outputs; by this order the compiler moves the least
                for a in range(4):  # of the pair's first and second output, then again of the next word
                    source = f"${8 + 8 * pair + 4 * (a % 2) + 2 * j + a // 2}"
                    text += _shifted(f"a{a}", source, (7 if half else 4) - 8 * i) + _shifted("u", source, 8 - 8 * i)
                    text += f"and.b32 a{a}, a{a}, {magic}; lop3.b32 a{a}, u, 0x80008000, a{a}, 0xEA; "
                    text += f"{fma} a{a}, a{a}, factor, more; "
                sums = ", ".join(f"s{8 * i + 4 * pair + c}" for c in range(4))
                x = 24 + 4 * i + 2 * j
                text += f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{sums}}}, {{a0, a1, a2, a3}}, "
                text += f"{{${x}, ${x + 1}}}, {{{sums}}}; "
    text += "mov.u32 u, %laneid; and.b32 u, u, 4; setp.ne.u32 odd, u, 0; "
    return text + "".join(f"selp.f32 ${o}, s{2 * o + 1}, s{2 * o}, odd; " for o in range(8)) + "}"


@triton.constexpr_function
def _shifted(to, source, left):
    return f"{'shl' if left > 0 else 'shr'}.b32 {to}, {source}, {abs(left)}; " if left else f"mov.b32 {to}, {source}; "


@triton.constexpr_function
def _constraints():
    return ",".join(["=f"] * 8 + ["r"] * 24)


@gluon.jit
def _ask_words(at, APART: gl.constexpr):
    """The words of a lane's four outputs, APART of each other, of a block. at: of the first one's."""
    return (
        gl.load(at, eviction_policy="evict_first"), gl.load(at + APART, eviction_policy="evict_first"),
        gl.load(at + 2 * APART, eviction_policy="evict_first"), gl.load(at + 3 * APART, eviction_policy="evict_first"),
    )  # fmt: skip


@gluon.jit
def _sums(w, x_at, HALF: gl.constexpr):
    """Of a block, by output. x_at: where a lane's first words of inputs are."""
    ASM: gl.constexpr = _block_assembly(HALF)
    CONSTRAINTS: gl.constexpr = _constraints()
    operands = [w[0], w[1], w[2], w[3], gl.load(x_at), gl.load(x_at + 32)]
    first, second = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, operands, dtype=(gl.float32, gl.float32), is_pure=False, pack=4
    )
    return first + second


@gluon.jit
def _halves(acc, BN: gl.constexpr):
    """The sums of the outputs of a gated product's two halves."""
    WARPS: gl.constexpr = gl.num_warps()
    pairs: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    return gl.split(gl.convert_layout(gl.permute(gl.reshape(acc, [2, BN]), (1, 0)), pairs))


@gluon.jit(do_not_specialize=["tiles_in"])
def float8_row_kernel(
    x, codes, scales, bias, out, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out, scale: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, SQUARES: gl.constexpr, AHEAD: gl.constexpr,
    MODE: gl.constexpr, ACT: gl.constexpr, NORM: gl.constexpr, NEXT: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """As `packed_row`'s kernel."""
    WARPS: gl.constexpr = gl.num_warps()
    SHARE: gl.constexpr = K // 128 // WARPS
    GATED: gl.constexpr = MODE == 1
    BN: gl.constexpr = 8 if GATED else 16
    SECOND: gl.constexpr = N if GATED else 8  # the ninth output behind the first
    ROW: gl.constexpr = K // 4  # words of 32 bits between outputs; 32 between blocks
    HALF: gl.constexpr = x.dtype.element_ty == gl.float16
    lanes: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pid = gl.program_id(0)
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, lanes))
    e = gl.arange(0, 4, gl.SliceLayout(0, lanes))
    row = pid * BN + thread // 16 % 2 * SECOND + thread // 8 % 2 * 4  # the first of a lane's outputs
    first = thread // 32 * SHARE
    if PDL and LATE == 0:
        gdc_launch_dependents()
    at = codes.to(gl.pointer_type(gl.int32)) + (first * 32 + row * ROW + thread % 8 * 4)[:, None] + e[None, :]
    w = ()
    for i in gl.static_range(AHEAD):
        w += (_ask_words(at + i * 32, ROW),)  # type: ignore[assignment]
    n = pid * BN + gl.arange(0, BN, line)
    in_n = n < N
    first_bias, second_bias, weight = ask_constants(bias, next_weight, n, in_n, N, MODE, NEXT, BIAS)
    first_scale = gl.load(scales + n)
    second_scale = gl.load(scales + n + N) if GATED else first_scale
    if PDL:
        gdc_wait()
    if PDL and LATE == 1:
        gdc_launch_dependents()
    x_at = x.to(gl.pointer_type(gl.int32)) + (first * 64 + thread % 8 * 4)[:, None] + e[None, :]
    parts, before = ask_inputs(squares_in, tiles_in, h, n, in_n, MODE, NORM, SQUARES)
    acc = gl.zeros([32 * WARPS, 4], gl.float32, lanes)
    for i in gl.static_range(SHARE):
        acc += _sums(w[i], x_at + i * 64, HALF)
        if i + AHEAD < SHARE:
            w += (_ask_words(at + (i + AHEAD) * 32, ROW),)  # type: ignore[assignment]
    if PDL and LATE == 2:
        gdc_launch_dependents()
    acc = gl.sum(gl.reshape(acc, [WARPS, 4, 2, 4, 4]), 3)  # four lanes have the same
    acc = gl.sum(gl.sum(acc, 2) * 0.25, 0)
    if GATED:
        first_half, second_half = _halves(acc, BN)
        y = gl.convert_layout(first_half, line) * first_scale
        u = gl.convert_layout(second_half, line) * second_scale
    else:
        y = gl.convert_layout(gl.reshape(acc, [BN]), line) * first_scale
        u = y
    finish_row(
        y, u, n, in_n, pid, first_bias, second_bias, weight, parts, before, eps, out, h, scaled, squares_out, None,
        None, None, None, None, scale, WIDTH, BN, MODE, ACT, NORM, NEXT, BIAS, False,
    )  # fmt: skip
