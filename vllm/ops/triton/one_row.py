"""The product of one row with any weights on Hopper GPUs, in Gluon: a program's weights fill its shared memory while
kernels in front of it still compute.

A block is 128 bytes of each of 16 outputs (of a gated product 8 of each half): of 4 bits 256 inputs, as in
`packed_linear` with 64 words, of 8-bit floats 128, as in `float8`, of others 64. Each warp takes blocks of its own and
copies them by whole lines, several under way at once; what the warps have summed up is added at the end. The order of
inputs within a product of the matrix units is free: the four words of 32 bits that a lane takes of an output at once
are operands of two of them for each code. All columns of the right operand are the one row.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.triton.decode_linear import ARGMAX, GATED, RESIDUAL, STORE
from vllm.ops.triton.decode_parts import Tiling, ask_constants, finish_row, processors
from vllm.ops.triton.float8 import Float8Weight
from vllm.ops.triton.hopper_parts import ask_inputs, barrier
from vllm.ops.triton.packed_linear import PackedWords

_WORDS = 2048  # bytes of a block
_MOST_BLOCKS = 64  # of each of eight warps, whose loop over them is written out


@triton.constexpr_function
def _registers(name, first, count):
    return "{" + ", ".join(f"{name}{first + i}" for i in range(count)) + "}"


@triton.constexpr_function
def _copy_assembly(apart, ahead, place, lanes, factors_place, line, inputs_ahead, inputs_place, there):
    """Copies of a lane's words of a block, `ahead` bytes behind $3, to shared memory at $1, of every second output at
    $2; outputs are `apart` bytes. Of the factors, 16 bytes by each of the first `lanes`, from $5 to $6, and of the
    inputs, by each of the first `line`, from behind $7 to $8. Unless the block is `there` by any means, zeros where $4
    is 0. The places in shared memory are those of its slot, behind the first one's.
    """
    text = "{ .reg .b32 n, lane; .reg .b64 policy, from; .reg .pred p, q; mov.u32 lane, %laneid; mov.b32 n, 16; "
    text += "setp.ne.b32 q, $4, 0; selp.b32 n, 16, 0, q; " if not there else ""
    text += f"createpolicy.fractional.L2::evict_first.b64 policy, 1.0; add.s64 from, $3, {ahead}; "
    text += "bar.warp.sync 0xffffffff; " if line else ""
    for i in range(4):
        to, source = f"[${1 + i % 2}+{place + 512 * i}]", f"[from+{i * apart}]"
        text += f"cp.async.cg.shared.global.L2::cache_hint {to}, {source}, 16, n, policy; "
    if lanes:
        text += f"setp.lt.u32 p, lane, {lanes}; @p cp.async.cg.shared.global [$6+{factors_place}], [$5], 16, n; "
    if line:
        text += f"setp.lt{'' if there else '.and'}.u32 p, lane, {line}{'' if there else ', q'}; add.s64 from, $7, "
        text += f"{inputs_ahead}; @p cp.async.ca.shared.global [$8+{inputs_place}], [from], 16; "
    return text + "cp.async.commit_group; mov.u32 $0, 0; }"


@triton.constexpr_function
def _sums_assembly(codes, half, scale_size, offset_size, place, inputs_place, factors_place, wait):
    """Sums of a block for a lane's two outputs: $0, $1 of the first, over two parts of the inputs, $2, $3 of the
    second. Its words are in shared memory at $4 and, of the second pieces, $8 bytes behind; inputs at $12; of 4 bits,
    factors at $16 and what is added to codes at $20, of so many bytes each. All places are those of the first slot.
    Copies of `wait` later blocks may be under way.
    """
    kind, fma = ("f16", "fma.rn.f16x2") if half else ("bf16", "fma.rn.bf16x2")
    if codes == 4:  # 0x4300 | c is 128 + c in bfloat16, 0x6400 | c is 1024 + c in float16
        magic = "0x64006400" if half else "0x43004300"
        factor, more = ("0x3C003C00", "0xE408E408") if half else ("0x3F803F80", "0xC308C308")
    else:  # the bits of a float8 are those of a wider float but for the exponent's bias
        magic = "0x3F803F80" if half else "0x07F007F0"
        factor, more = ("0x5C005C00" if half else "0x7B807B80"), "0x80008000"
    text = "{ .reg .b32 w<16>, x<4>, a<4>, u, factor, more, one; .reg .f32 s<8>, t<8>, g<4>; .reg .b16 h<4>; "
    text += f"cp.async.wait_group {wait}; bar.warp.sync 0xffffffff; add.s32 u, $4, $8; "
    text += f"mov.b32 factor, {factor}; mov.b32 more, {more}; mov.b32 one, {'0x3C003C00' if half else '0x3F803F80'}; "
    for i, at in enumerate((f"$4+{place}", f"$4+{place + 256}", f"u+{place}", f"u+{place + 256}")):
        text += f"ld.shared.v4.b32 {_registers('w', 4 * i, 4)}, [{at}]; "
    text += "".join(f"mov.f32 s{c}, 0f00000000; mov.f32 t{c}, 0f00000000; " for c in range(8))
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    for i in range(codes):
        for h in range(2):
            text += f"ld.shared.v4.b32 {_registers('x', 0, 4)}, [$12+{inputs_place + 128 * i + 64 * h}]; "
            part = i // (codes // 2) if codes > 1 else h
            sums = _registers("s", 4 * part, 4)
            for j in range(2):
                words = [f"w{8 * h + 4 * (a % 2) + 2 * j + a // 2}" for a in range(4)]
                if codes > 1:
                    for a, source in enumerate(words):
                        if codes == 4:
                            text += f"shr.b32 a{a}, {source}, {4 * i}; " if i else f"mov.b32 a{a}, {source}; "
                            text += f"lop3.b32 a{a}, a{a}, 0x000F000F, {magic}, 0xEA; "
                        else:
                            up = (7 if half else 4) - 8 * i
                            text += f"{'shl' if up > 0 else 'shr'}.b32 a{a}, {source}, {abs(up)}; "
                            text += f"mov.b32 u, {source}; " if i else f"shl.b32 u, {source}, 8; "
                            text += f"and.b32 a{a}, a{a}, {magic}; lop3.b32 a{a}, u, 0x80008000, a{a}, 0xEA; "
                        text += f"{fma} a{a}, a{a}, factor, more; "
                    words = [f"a{a}" for a in range(4)]
                x = _registers("x", 2 * j, 2)
                text += f"{product} {sums}, {{{', '.join(words)}}}, {x}, {sums}; "
                if offset_size:
                    totals = _registers("t", 4 * part, 4)
                    text += f"{product} {totals}, {{one, one, one, one}}, {x}, {totals}; "
    if codes != 4:
        return text + "mov.f32 $0, s0; mov.f32 $1, s4; mov.f32 $2, s2; mov.f32 $3, s6; }"
    for name, at, size in (("s", "$16", scale_size), ("t", "$20", offset_size)):
        for o in range(4 if size else 0):  # output o // 2, half o % 2
            place = f"[{at}+{factors_place + size * (16 * (o % 2) + 8 * (o // 2))}]"
            narrow = f"ld.shared.b16 h{o}, {place}; cvt.f32.f16 g{o}, h{o}; "
            text += f"ld.shared.f32 g{o}, {place}; " if size == 4 else narrow
            sums = f"{name}{4 * (o % 2) + 2 * (o // 2)}, g{o}"
            text += f"mul.f32 ${o}, {sums}; " if name == "s" else f"fma.rn.f32 ${o}, {sums}, ${o}; "
    return text + "}"


@triton.constexpr_function
def _sums_constraints():
    return ",".join(["=&f"] * 4 + ["r"] * 20)


@triton.constexpr_function
def _leave_assembly():
    """Two outputs' sums $8 + $9 and $10 + $11, which four lanes have, to shared memory at $4 and 32 bytes behind."""
    text = "{ .reg .pred p; .reg .b32 t; .reg .f32 y, z; add.f32 y, $8, $9; add.f32 z, $10, $11; "
    text += "mov.u32 t, %laneid; and.b32 t, t, 3; setp.eq.u32 p, t, 0; "
    text += "@p st.shared.f32 [$4], y; @p st.shared.f32 [$4+32], z; "
    return text + "".join(f"mov.u32 ${o}, 0; " for o in range(4)) + "}"


@triton.constexpr_function
def _size(pointer):
    """Of what it points to, in bytes; of None 0."""
    return 0 if pointer is None else pointer.dtype.element_ty.primitive_bitwidth // 8


@gluon.jit
def _issue(
    put, put_swap, factors, inputs, source, x, scales, offsets, unit, warp, lane, T: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, GATED: gl.constexpr, GROUP: gl.constexpr, CODES: gl.constexpr, SCALE: gl.constexpr,
    OFFSET: gl.constexpr, SHARE: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Ask for a lane's words and factors of a warp's block number T, and, if that is none of the first, of its inputs;
    zeros where there is no such block.
    """
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = K // (64 * CODES)
    ROWS: gl.constexpr = 2 * N if GATED else N
    BN: gl.constexpr = 8 if GATED else 16
    SECOND: gl.constexpr = N if GATED else 8  # the ninth output of a unit behind its first
    ROW: gl.constexpr = 128 if CODES == 4 else K * 2 // CODES  # bytes
    STEP: gl.constexpr = ROWS * 128 if CODES == 4 else 128
    LANES: gl.constexpr = 2 * (SCALE + OFFSET) if CODES == 4 else 0
    SLOT: gl.constexpr = T % DEPTH
    LINE: gl.constexpr = 8 * CODES if T >= DEPTH else 0
    COPY: gl.constexpr = _copy_assembly(
        ROW, T % SHARE * WARPS * STEP + T // SHARE * BN * ROW, SLOT * 2048, LANES, SLOT * 32 * (SCALE + OFFSET), LINE,
        T % SHARE * WARPS * 128 * CODES, SLOT * 128 * CODES, (T % SHARE + 1) * WARPS <= BLOCKS,
    )  # fmt: skip
    block = T % SHARE * WARPS + warp
    first = source
    if CODES == 4:
        half = lane // SCALE % 2
        part = lane % SCALE * (16 // SCALE)
        column = (unit + T // SHARE) * BN + part // 8 * SECOND + part % 8
        first = scales.to(gl.pointer_type(gl.int8)) + ((block * 2 + half) // (GROUP // 128) * ROWS + column) * SCALE
        if OFFSET > 0:
            half = (lane - 2 * SCALE) // OFFSET % 2
            part = (lane - 2 * SCALE) % OFFSET * (16 // OFFSET)
            column = (unit + T // SHARE) * BN + part // 8 * SECOND + part % 8
            at = ((block * 2 + half) // (GROUP // 128) * ROWS + column) * OFFSET
            first = gl.where(lane < 2 * SCALE, first, offsets.to(gl.pointer_type(gl.int8)) + at)
        if (T % SHARE + 1) * WARPS > BLOCKS:
            first = gl.where(block < BLOCKS, first, scales.to(gl.pointer_type(gl.int8)) + 0 * lane)
    gl.inline_asm_elementwise(
        COPY, "=r,r,r,l,r,l,r,l,r",
        [put, put + put_swap, source, (block < BLOCKS).to(gl.int32), first, factors, x, inputs], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _sums(
    take, take_swap, take_x, scale_place, offset_place, SLOT: gl.constexpr, CODES: gl.constexpr, HALF: gl.constexpr,
    SCALE: gl.constexpr, OFFSET: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Of a block, once it is there."""
    ASM: gl.constexpr = _sums_assembly(
        CODES, HALF, SCALE, OFFSET, SLOT * 2048, SLOT * 128 * CODES, SLOT * 32 * (SCALE + OFFSET), WAIT
    )
    CONSTRAINTS: gl.constexpr = _sums_constraints()
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [take, take_swap, take_x, scale_place, offset_place], dtype=gl.float32, is_pure=False, pack=4
    )


@gluon.jit
def _all_shares(at):
    """What all warps summed up for an output, added in their order."""
    y = gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [at], dtype=gl.float32, is_pure=False, pack=1)
    for w in gl.static_range(1, gl.num_warps()):
        y += gl.inline_asm_elementwise(
            "ld.shared.f32 $0, [$1];", "=f,r", [at + w * 64], dtype=gl.float32, is_pure=False, pack=1
        )
    return y


@gluon.jit(do_not_specialize=["tiles_in"])
def _row_kernel(
    x, words, scales, offsets, bias, out, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out, best, best_at,
    sums_out, index, bits, scale: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    CODES: gl.constexpr, WIDTH: gl.constexpr, SQUARES: gl.constexpr, UNITS: gl.constexpr, DEPTH: gl.constexpr,
    MODE: gl.constexpr, ACT: gl.constexpr, NORM: gl.constexpr, NEXT: gl.constexpr, BIAS: gl.constexpr,
    MASKED: gl.constexpr, PDL: gl.constexpr, LATE: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """Grid (N / 16 / UNITS,), of gated products (N / 8 / UNITS,). UNITS: of 16 outputs that a program multiplies one
    behind the other. DEPTH: blocks of a warp that are under way. SQUARES: at least the tiles of the norm in front.
    LATE: as `Tiling.late`.   ROOM: of shared memory, in units of 128 bytes, of which one is left.
    """
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK: gl.constexpr = 64 * CODES
    BLOCKS: gl.constexpr = K // BLOCK
    SHARE: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    GATED: gl.constexpr = MODE == 1
    EACH: gl.constexpr = 8 if GATED else 16
    BN: gl.constexpr = EACH * UNITS
    HALF: gl.constexpr = x.dtype.element_ty == gl.float16
    SCALE: gl.constexpr = _size(scales) if CODES == 4 else 0
    OFFSET: gl.constexpr = _size(offsets)
    FACTORS: gl.constexpr = 32 * (SCALE + OFFSET)  # bytes of a block's
    LINE: gl.constexpr = 8 * CODES  # lanes that copy the inputs of a block
    LOADS: gl.constexpr = (DEPTH * LINE + 31) // 32
    LEAVE: gl.constexpr = _leave_assembly()
    lanes: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    each: gl.constexpr = gl.SliceLayout(1, lanes)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pid = gl.program_id(0)
    thread = gl.arange(0, 32 * WARPS, each)
    e = gl.arange(0, 4, gl.SliceLayout(0, lanes))
    lane = thread % 32
    warp = thread // 32
    if PDL and LATE == 0:
        gdc_launch_dependents()
    room = gl.allocate_shared_memory(gl.int32, [ROOM, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    room.index(ROOM - 1).store(gl.zeros([32], gl.int32, line))  # so that shared memory, of which it is all, has a name
    base = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    ring = base + warp * (DEPTH * 2048)
    inputs = base + WARPS * DEPTH * 2048 + warp * (LOADS * 512)
    factors = base + WARPS * (DEPTH * 2048 + LOADS * 512) + warp * (DEPTH * FACTORS)
    # of four outputs the pieces of 16 bytes change places in every second one, so that lanes take from other banks
    put = ring + lane * 16
    put_swap = 64 - lane // 4 % 2 * 128
    put_factors = factors + lane * 16
    put_inputs = inputs + lane * 16
    SECOND: gl.constexpr = N if GATED else 8
    ROW: gl.constexpr = 32 if CODES == 4 else K * 2 // CODES // 4
    STEP: gl.constexpr = (2 * N if GATED else N) * 32 if CODES == 4 else 32
    source = lane // 16 * (SECOND * ROW) + lane // 8 % 2 * (4 * ROW) + lane % 8 * 4
    source = words.to(gl.pointer_type(gl.int32)) + (source + warp * STEP + pid * (BN * ROW))
    x = x.to(gl.pointer_type(gl.int32))
    x_source = x + (warp * (BLOCK // 2) + lane * 4)
    for t in gl.static_range(DEPTH):
        _issue(put, put_swap, put_factors, put_inputs, source, x_source, scales, offsets, pid * UNITS, warp, lane, t, N,
               K, GATED, GROUP, CODES, SCALE, OFFSET, SHARE, DEPTH)  # fmt: skip
    n = pid * BN + gl.arange(0, BN, line)
    in_n = n < N
    first_bias, second_bias, weight = ask_constants(bias, next_weight, n, in_n, N, MODE, NEXT, BIAS)
    if CODES == 2:
        first_scale = gl.load(scales + n)
        second_scale = gl.load(scales + n + N) if GATED else first_scale
    if PDL:
        gdc_wait()
    if PDL and LATE == 1:
        gdc_launch_dependents()
    given = ()
    for j in gl.static_range(LOADS):
        block = (lane // LINE + j * (32 // LINE)) % SHARE * WARPS + warp
        at = (block * (BLOCK // 2) + lane % LINE * 4)[:, None] + e[None, :]
        given += (gl.load(x + at, mask=(block < BLOCKS)[:, None] & (e >= 0)[None, :], other=0),)  # type: ignore[assignment]
    parts, before = ask_inputs(squares_in, tiles_in, h, n, in_n, MODE, NORM, SQUARES)
    for j in gl.static_range(LOADS):
        gl.inline_asm_elementwise(
            "st.shared.v4.b32 [$4], {$8, $9, $10, $11}; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [(inputs + j * 512 + lane * 16)[:, None] + 0 * e[None, :], given[j]],
            dtype=gl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    row = lane // 4
    take = (ring + row % 4 * 512 + row // 4 * 128 + (lane % 4 + row % 2 * 4) * 16)[:, None] + 0 * e[None, :]
    take_swap = (64 - row % 2 * 128)[:, None] + 0 * e[None, :]
    take_x = (inputs + lane % 4 * 16)[:, None] + 0 * e[None, :]
    scale_place = (factors + row * SCALE)[:, None] + 0 * e[None, :]
    offset_place = (factors + 32 * SCALE + row * OFFSET)[:, None] + 0 * e[None, :]
    sums = base + WARPS * (DEPTH * (2048 + FACTORS) + LOADS * 512)
    acc = gl.zeros([32 * WARPS, 4], gl.float32, lanes)
    for t in gl.static_range(UNITS * SHARE):
        found = _sums(take, take_swap, take_x, scale_place, offset_place, t % DEPTH, CODES, HALF, SCALE, OFFSET,
                      DEPTH - 1 if t + DEPTH <= UNITS * SHARE else UNITS * SHARE - 1 - t)  # fmt: skip
        acc = acc + found if t % SHARE > 0 else found
        if t % SHARE == SHARE - 1:
            gl.inline_asm_elementwise(
                LEAVE, "=&r,=&r,=&r,=&r,r,r,r,r,f,f,f,f",
                [(sums + (t // SHARE * WARPS + warp) * 64 + row * 4)[:, None] + 0 * e[None, :], acc], dtype=gl.int32,
                is_pure=False, pack=4,
            )  # fmt: skip
        if t + DEPTH < UNITS * SHARE:
            _issue(put, put_swap, put_factors, put_inputs, source, x_source, scales, offsets, pid * UNITS, warp, lane,
                   t + DEPTH, N, K, GATED, GROUP, CODES, SCALE, OFFSET, SHARE, DEPTH)  # fmt: skip
    if PDL and LATE == 2:
        gdc_launch_dependents()
    barrier()
    o = gl.arange(0, BN, line)
    at = sums + o // EACH * (WARPS * 64) + o % EACH * 4
    y = _all_shares(at)
    u = y
    if GATED:
        u = _all_shares(at + 32)
    if CODES == 2:
        y *= first_scale
        u *= second_scale
    finish_row(
        y, u, n, in_n, pid, first_bias, second_bias, weight, parts, before, eps, out, h, scaled, squares_out, best,
        best_at, sums_out, index, bits, scale, WIDTH, BN, MODE, ACT, NORM, NEXT, BIAS, MASKED,
    )  # fmt: skip
    room._keep_alive()


Weight = Tensor | PackedWords | Float8Weight


def _codes(weight: Weight) -> int:
    """Numbers in 16 bits."""
    return 4 if isinstance(weight, PackedWords) else 2 if isinstance(weight, Float8Weight) else 1


def _blocks(weight: Weight) -> int:
    return weight.shape[1] // (64 * _codes(weight))


def takes_row(weight: Weight) -> bool:
    """Whether the kernel multiplies by a weight: of the widths and groups it is cut for."""
    if isinstance(weight, PackedWords):
        fitting = weight.format == "int4" and weight.words.shape[2] == 64 and weight.group % 128 == 0
        if not fitting:
            return False
    outputs, inputs, codes = *weight.shape, _codes(weight)
    small = _blocks(weight) <= 8 * _MOST_BLOCKS and outputs * inputs < codes << 32  # places are counted in 32 bits
    return small and outputs % 16 == 0 and inputs % (64 * codes) == 0


def choose_row_tiling(weight: Weight, mode: int) -> Tiling | None:
    """The tiling, from times of whole steps on an H200 (`benchmarks/h200/tune_decode.py`, `h200_one_row_py23.json`);
    None where `decode_linear`'s kernel for one row is faster.
    """
    outputs, inputs = weight.shape[0] // (2 if mode == GATED else 1), weight.shape[1]
    each = 8 if mode == GATED else 16

    def cut(warps: int, stages: int, registers: int, units: int = 1, late: int = 0) -> Tiling:
        rows = each * (units if outputs % (each * units) == 0 else 1)
        return Tiling(True, rows, 1, warps, stages=stages, late=late, registers=registers)

    if isinstance(weight, PackedWords):
        if mode == GATED:
            return cut(4, 3, 96, units=2)
        return cut(4, 2, 96, late=1) if mode == STORE else cut(8, 3, 96)
    if isinstance(weight, Float8Weight):
        if mode == GATED:
            return cut(4, 4, 96)
        if mode == STORE:
            return cut(8, 2, 64, late=1)
        return cut(8, 4 if inputs >= 8192 else 2, 128)
    if mode == ARGMAX:
        return cut(8, 6, 96, units=2) if inputs >= 4096 else cut(4, 3, 80)
    if mode == GATED and inputs <= 3072:
        return cut(8, 2, 64) if inputs % 512 == 0 else cut(4, 4, 96)
    if mode == STORE and outputs >= 16 * processors():
        uneven = inputs <= 1024 or inputs % (512 if inputs <= 3072 else 2048)
        return cut(4, 4, 96) if uneven or outputs >= 8192 else cut(8, 2, 96 if inputs <= 2048 else 64)
    wide = inputs > 2048 and inputs >= 2 * outputs
    if mode == RESIDUAL and 1024 <= outputs <= 32 * processors() and inputs <= 4096 and not wide:
        return cut(8, 2, 96)
    return None


def launch_row(
    x: Tensor, weight: Weight, ends: tuple[Tensor | None, ...], behind: tuple[Any, ...],
    masks: tuple[Tensor, Tensor] | None, t: Tiling, const: dict[str, Any], extra: dict[str, Any],
) -> None:  # fmt: skip
    """Launch a product. masks: as for `run_product`. The rest as for `launch_packed`."""
    squares, tiles, eps, *rest, scale = behind
    const = {name: const[name] for name in ("N", "K", "WIDTH", "MODE", "ACT", "NORM", "NEXT", "BIAS", "PDL")}
    codes, words, scales, offsets, group = _codes(weight), weight, None, None, 0
    if isinstance(weight, PackedWords):
        words, scales, offsets, group = weight.words, weight.scales, weight.offsets, weight.group
    elif isinstance(weight, Float8Weight):
        words, scales = weight.codes, weight.scales
    factors = sum(32 * part.element_size() for part in (scales, offsets) if part is not None) if group else 0
    units = t.rows // (8 if const["MODE"] == GATED else 16)
    depth = min(t.stages, -(-_blocks(weight) // t.warps) * units)
    room = t.warps * (depth * (_WORDS + factors) + -(-depth * codes // 4) * 512 + 64 * units)
    _row_kernel[(const["N"] // t.rows,)](
        x, words, scales, offsets, *ends, squares, tiles, eps, *rest, *(masks or (None, None)), scale,
        GROUP=group, CODES=codes, UNITS=units, SQUARES=triton.next_power_of_2(max(tiles, 2)), DEPTH=depth,
        MASKED=masks is not None, LATE=t.late, ROOM=-(-room // 128) + 1, num_warps=t.warps, maxnreg=t.registers,
        **const, **extra,
    )  # fmt: skip
