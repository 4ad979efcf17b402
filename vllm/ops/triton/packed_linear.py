"""Triton products with weights of 4 or 8 bits: codes stay packed on their way from memory to the registers of the
matrix units, where bit tricks make numbers of them.

A block is W = 16, 32 or 64 words of 16 bits for each output, of 4 codes of 4 bits or 2 codes of 8 bits: code i of word
j belongs to input i * W + j of the block, so that the same code of neighbouring words, which share a register, makes a
tile of a product. Words lie [blocks, outputs, W]: what a program reads of a block is one piece. Scales lie [groups,
outputs].

Few rows are too few programs for the device, so the inputs may be split among several; the last one to arrive adds the
parts up in a fixed order. What follows a product is folded in as in `decode_linear`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

from vllm.ops.quantized_weights import GroupedWeight
from vllm.ops.triton.decode_parts import Tiling, finish_rows, leave_share, processors, take_shares

WORDS = (64, 32, 16)  # of a block and an output, the first that fits; the matrix units take 16 inputs at a time
_LEAST_GROUP = 16
_SLICED_ROWS = 8  # up to which warps take blocks of their own: one tile of the matrix units
_PROGRAMS = 256  # that few rows should be cut into, from times on an H200
FORMATS = {"int4": 0, "int8": 1, "fp8": 2}
ASSEMBLY = os.environ.get("TRITON_INTERPRET") != "1"  # the interpreter knows none


@triton.constexpr_function
def _assembly(kind, half, code):
    """Instructions that make two numbers, in float16 if `half`, else in bfloat16, of codes number `code` of two
    neighbouring elements, which are the halves of a register; kind: of `FORMATS`.

    Of 4 bits: 0x4300 | c is 128 + c in bfloat16, 0x6400 | c is 1024 + c in float16. 8 bits do not fit behind 0x4300,
    and the halves of a code are joined. The bits of a float8 are those of a wider float but for the exponent's bias,
    which a product mends.
    """
    one = "0x3C003C00" if half else "0x3F803F80"
    fma = "fma.rn.f16x2" if half else "fma.rn.bf16x2"
    last = "mov.b32 v, {}; mov.b32 w, {}; " + fma + " $0, {}, v, w; }}"

    def shifted(register, bits):
        return f"shr.b32 {register}, $1, {bits}; " if bits else f"mov.b32 {register}, $1; "

    def behind(register, mask, magic):
        return f"lop3.b32 {register}, {register}, {mask}, {magic}, 0xEA; "

    if kind == 0:
        first = shifted("t", 4 * code) + behind("t", "0x000F000F", "0x64006400" if half else "0x43004300")
        end = last.format(one, "0xE408E408" if half else "0xC308C308", "t")
    elif kind == 1 and half:
        first = shifted("t", 8 * code) + behind("t", "0x00FF00FF", "0x64006400")
        end = last.format(one, "0xE480E480", "t")
    elif kind == 1:  # 16 * upper half + (lower half - 128)
        first = shifted("u", 8 * code + 4) + behind("u", "0x000F000F", "0x43004300")
        first += f"mov.b32 v, 0x41804180; mov.b32 w, 0xC500C500; {fma} u, u, v, w; "
        first += shifted("t", 8 * code) + behind("t", "0x000F000F", "0x43004300")
        first += f"mov.b32 v, {one}; mov.b32 w, 0xC380C380; {fma} t, t, v, w; "
        end = last.format(one, "t", "u")
    else:
        up = (7 if half else 4) - 8 * code
        move = f"shl.b32 t, $1, {up}; " if up > 0 else f"shr.b32 t, $1, {-up}; "
        first = move + ("and.b32 t, t, 0x3F803F80; " if half else "and.b32 t, t, 0x07F007F0; ")
        first += ("mov.b32 u, $1; " if code else "shl.b32 u, $1, 8; ") + "lop3.b32 t, u, 0x80008000, t, 0xEA; "
        end = last.format("0x5C005C00" if half else "0x7B807B80", "0x80008000", "t")
    return "{ .reg .b32 t, u, v, w; " + first + end


def number_assembly(packed: bool, half: bool, code: int) -> str:
    """`_assembly` of 4 bits if `packed`, else of 8-bit floats."""
    return str(_assembly(0 if packed else 2, half, code))


@triton.jit
def _numbers(words, CODE: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """What codes number CODE of the elements stand for, before scales: integers from -8 or -128 on, or float8."""
    HALF: tl.constexpr = DTYPE == tl.float16  # noqa: SIM300
    if ASSEMBLY:
        ASM: tl.constexpr = _assembly(FORMAT, HALF, CODE)
        if HALF:
            numbers = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        else:
            numbers = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif FORMAT == 0:
        numbers = (((words.to(tl.int32) >> (4 * CODE)) & 15) - 8).to(DTYPE)
    elif FORMAT == 1:
        numbers = (((words.to(tl.int32) >> (8 * CODE)) & 255) - 128).to(DTYPE)
    else:
        code = (words.to(tl.int32) >> (8 * CODE)) & 255
        size = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
        numbers = tl.where(code > 127, -size, size).to(DTYPE)
    return numbers


@triton.constexpr_function
def scaled_assembly(kind, half, code, shifted):
    """As `_assembly`, times $2; with `shifted`, plus $3."""
    fma = "fma.rn.f16x2" if half else "fma.rn.bf16x2"
    more = f"{fma} $0, t, $2, $3; }}" if shifted else f"mov.b32 w, 0x80008000; {fma} $0, t, $2, w; }}"
    return _assembly(kind, half, code).replace("$0", "t")[:-1] + more


@triton.jit
def _scaled_numbers(
    words, scales, offsets, CODE: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, OFFSETS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """What codes number CODE of elements [BN, W] stand for. scales, offsets: [BN], of their group, in DTYPE."""
    if ASSEMBLY:
        HALF: tl.constexpr = DTYPE == tl.float16  # noqa: SIM300
        ASM: tl.constexpr = scaled_assembly(FORMAT, HALF, CODE, OFFSETS)
        factor = tl.broadcast_to(scales[:, None], words.shape)
        more = tl.broadcast_to(offsets[:, None], words.shape)
        if HALF:
            numbers = tl.inline_asm_elementwise(
                ASM, "=r,r,r,r", [words, factor, more], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            numbers = tl.inline_asm_elementwise(
                ASM, "=r,r,r,r", [words, factor, more], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    else:
        numbers = _numbers(words, CODE, FORMAT, tl.float32, False) * scales.to(tl.float32)[:, None]
        if OFFSETS:
            numbers += offsets.to(tl.float32)[:, None]
        numbers = numbers.to(DTYPE)
    return numbers


@triton.jit
def _group(block, s: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The group of part s of a block."""
    if GROUP >= BLOCK:
        return block // (GROUP // BLOCK)
    return block * (BLOCK // GROUP) + s


@triton.jit
def _prefetch(words, first, share, ROWS: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, BLOCKS: tl.constexpr):
    """Bring the first BLOCKS blocks of BN outputs into the L2. One piece a thread."""
    PIECES: tl.constexpr = num_threads() // BLOCKS
    SIZE: tl.constexpr = BN * W // PIECES  # elements in a piece
    at = words + ((share + tl.arange(0, BLOCKS)).to(tl.int64) * ROWS + first)[:, None] * W
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [at + tl.arange(0, PIECES)[None, :] * SIZE, tl.full([BLOCKS, PIECES], SIZE * 2, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def packed_sums(
    x, words, scales, offsets, source, in_m, n, in_n, first, end, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, OFFSETS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Products [BN, BM] of outputs n, and if GATED of n + N, with rows `source` (int64) of x, over some blocks."""
    PER: tl.constexpr = 4 if FORMAT == 0 else 2
    BLOCK: tl.constexpr = W * PER
    SUB: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    j = tl.arange(0, W)
    acc = tl.zeros([BN, BM], tl.float32)
    up = acc
    for block in tl.range(first, end, num_stages=STAGES):
        at = (block * ROWS + n)[:, None] * W + j[None, :]
        a = tl.load(words + at, mask=in_n[:, None], other=0, eviction_policy="evict_first")
        if GATED:
            b = tl.load(words + at + N * W, mask=in_n[:, None], other=0, eviction_policy="evict_first")
        for s in tl.static_range(SUB):
            group = _group(block, s, GROUP, BLOCK) * ROWS + n
            one = tl.zeros([BN, BM], tl.float32)
            two = one
            total = tl.zeros([BM], tl.float32)
            for i in tl.static_range(s * PER // SUB, (s + 1) * PER // SUB):
                k = block * BLOCK + i * W + j
                keep = in_m[None, :]
                if K % BLOCK != 0:
                    keep = keep & (k < K)[:, None]
                xt = tl.load(x + source[None, :] * K + k[:, None], mask=keep, other=0.0)
                one = tl.dot(_numbers(a, i, FORMAT, x.dtype.element_ty, ASSEMBLY), xt, one)
                if GATED:
                    two = tl.dot(_numbers(b, i, FORMAT, x.dtype.element_ty, ASSEMBLY), xt, two)
                if OFFSETS:
                    total += tl.sum(xt.to(tl.float32), 0)
            acc += one * tl.load(scales + group, mask=in_n, other=0.0).to(tl.float32)[:, None]
            if OFFSETS:
                acc += tl.load(offsets + group, mask=in_n, other=0.0).to(tl.float32)[:, None] * total[None, :]
            if GATED:
                up += two * tl.load(scales + group + N, mask=in_n, other=0.0).to(tl.float32)[:, None]
                if OFFSETS:
                    up += tl.load(offsets + group + N, mask=in_n, other=0.0).to(tl.float32)[:, None] * total[None, :]
    return acc, up


@triton.jit
def sliced_sums(
    x, words, scales, offsets, m, in_m, n, in_n, first, end, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, OFFSETS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As `packed_sums`, with rows m of x, where each of SLICES warps takes blocks of its own."""
    PER: tl.constexpr = 4 if FORMAT == 0 else 2
    BLOCK: tl.constexpr = W * PER
    SUB: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    WHOLE: tl.constexpr = BLOCKS % SLICES == 0 and K % BLOCK == 0  # no slice is without a block
    j = tl.arange(0, W)
    slices = tl.arange(0, SLICES)
    acc = tl.zeros([SLICES, BN, BM], tl.float32)
    up = acc
    for at_once in tl.range(first, end, SLICES, num_stages=STAGES):
        block = at_once + slices
        keep_n = in_n[None, :] & (block >= 0)[:, None]
        if not WHOLE:
            keep_n = keep_n & (block < BLOCKS)[:, None]
        at = (block[:, None] * ROWS + n[None, :])[:, :, None] * W + j[None, None, :]
        a = tl.load(words + at, mask=keep_n[:, :, None], other=0, eviction_policy="evict_first")
        if GATED:
            b = tl.load(words + at + N * W, mask=keep_n[:, :, None], other=0, eviction_policy="evict_first")
        for s in tl.static_range(SUB):
            one = tl.zeros([SLICES, BN, BM], tl.float32)
            two = one
            total = tl.zeros([SLICES, BM], tl.float32)
            for i in tl.static_range(s * PER // SUB, (s + 1) * PER // SUB):
                k = block[:, None] * BLOCK + i * W + j[None, :]
                keep = in_m[None, None, :]
                if not WHOLE:
                    keep = keep & (k < K)[:, :, None]
                xt = tl.load(x + m.to(tl.int64)[None, None, :] * K + k[:, :, None], mask=keep, other=0.0)
                one = tl.dot(_numbers(a, i, FORMAT, x.dtype.element_ty, ASSEMBLY), xt, one)
                if GATED:
                    two = tl.dot(_numbers(b, i, FORMAT, x.dtype.element_ty, ASSEMBLY), xt, two)
                if OFFSETS:
                    total += tl.sum(xt.to(tl.float32), 1)
            group = _group(block, s, GROUP, BLOCK)[:, None] * ROWS + n[None, :]
            acc += one * tl.load(scales + group, mask=keep_n, other=0.0).to(tl.float32)[:, :, None]
            if OFFSETS:
                given = tl.load(offsets + group, mask=keep_n, other=0.0).to(tl.float32)
                acc += given[:, :, None] * total[:, None, :]
            if GATED:
                up += two * tl.load(scales + group + N, mask=keep_n, other=0.0).to(tl.float32)[:, :, None]
                if OFFSETS:
                    given = tl.load(offsets + group + N, mask=keep_n, other=0.0).to(tl.float32)
                    up += given[:, :, None] * total[:, None, :]
    y = tl.sum(acc, 0)
    u = y
    if GATED:
        u = tl.sum(up, 0)
    return y, u


@triton.jit(do_not_specialize=["tiles_in", "M"])
def _packed_kernel(
    x, words, scales, offsets, bias, out, part, arrived, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out,
    best, best_at, sums, scale: tl.constexpr, M, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    W: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    MODE: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, NEXT: tl.constexpr, BIAS: tl.constexpr,
    OFFSETS: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Grid (N / BN, SPLIT, rows / BM). The weight is the left operand, so that few rows cost few columns."""
    PER: tl.constexpr = 4 if FORMAT == 0 else 2
    BLOCK: tl.constexpr = W * PER
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    SHARE: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    ROWS: tl.constexpr = 2 * N if MODE == 1 else N
    pid = tl.program_id(0)
    share = tl.program_id(1)
    n = pid * BN + tl.arange(0, BN)
    in_n = n < N
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    in_m = m < M
    if PDL:
        gdc_launch_dependents()
        if AHEAD > 0:
            _prefetch(words, pid * BN, share * SHARE, ROWS, W, BN, AHEAD)
            if MODE == 1:
                _prefetch(words, N + pid * BN, share * SHARE, ROWS, W, BN, AHEAD)
        gdc_wait()
    acc, up = packed_sums(
        x, words, scales, offsets, m.to(tl.int64), in_m, n, in_n, share * SHARE,
        tl.minimum(share * SHARE + SHARE, BLOCKS), N, K, GROUP, FORMAT, W, ROWS, BM, BN, STAGES, MODE == 1, OFFSETS,
        ASSEMBLY,
    )  # fmt: skip
    keep = in_m[None, :] & in_n[:, None]
    at = m[None, :] * N + n[:, None]
    if SPLIT > 1:  # of one tile of rows
        if not leave_share(acc, up, part, arrived + pid, at, keep, share, BM * N, SPLIT, MODE == 1):
            return
        acc, up = take_shares(acc, up, part, at, keep, BM * N, SPLIT, MODE == 1)
    finish_rows(
        acc, up, m, n, in_m, in_n, pid, bias, out, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out, best,
        best_at, sums, scale, N, WIDTH, BN, MODE, ACT, NORM, NEXT, BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_in", "M"])
def _sliced_kernel(
    x, words, scales, offsets, bias, out, part, arrived, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out,
    best, best_at, sums, scale: tl.constexpr, M, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    W: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    MODE: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, NEXT: tl.constexpr, BIAS: tl.constexpr,
    OFFSETS: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, ASSEMBLY: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Grid (N / BN, SPLIT). Each of SLICES warps takes blocks of its own, so that none waits for another's products."""
    PER: tl.constexpr = 4 if FORMAT == 0 else 2
    BLOCK: tl.constexpr = W * PER
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    SHARE: tl.constexpr = (BLOCKS + SPLIT * SLICES - 1) // (SPLIT * SLICES) * SLICES
    ROWS: tl.constexpr = 2 * N if MODE == 1 else N
    pid = tl.program_id(0)
    share = tl.program_id(1)
    n = pid * BN + tl.arange(0, BN)
    in_n = n < N
    m = tl.arange(0, BM)
    in_m = m < M
    if PDL:
        gdc_launch_dependents()
        if AHEAD > 0:
            _prefetch(words, pid * BN, share * SHARE, ROWS, W, BN, AHEAD)
            if MODE == 1:
                _prefetch(words, N + pid * BN, share * SHARE, ROWS, W, BN, AHEAD)
        gdc_wait()
    y, u = sliced_sums(
        x, words, scales, offsets, m, in_m, n, in_n, share * SHARE, tl.minimum(share * SHARE + SHARE, BLOCKS), N, K,
        GROUP, FORMAT, W, ROWS, BM, BN, SLICES, STAGES, MODE == 1, OFFSETS, ASSEMBLY,
    )  # fmt: skip
    keep = in_m[None, :] & in_n[:, None]
    at = m[None, :] * N + n[:, None]
    if SPLIT > 1:
        if not leave_share(y, u, part, arrived + pid, at, keep, share, BM * N, SPLIT, MODE == 1):
            return
        y, u = take_shares(y, u, part, at, keep, BM * N, SPLIT, MODE == 1)
    finish_rows(
        y, u, m, n, in_m, in_n, pid, bias, out, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out, best,
        best_at, sums, scale, N, WIDTH, BN, MODE, ACT, NORM, NEXT, BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _wide_packed_kernel(
    x, words, scales, offsets, bias, out, part, arrived, M, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, J: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, BIAS: tl.constexpr, OFFSETS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows / BM * N / BN, SPLIT), rows first: what runs together reads the same weights. J: words at a time."""
    PER: tl.constexpr = 4 if FORMAT == 0 else 2
    BLOCK: tl.constexpr = W * PER
    STEPS: tl.constexpr = (K + BLOCK - 1) // BLOCK * (W // J)
    SHARE: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    dtype = x.dtype.element_ty
    row_tiles = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    share = tl.program_id(1)
    n = pid // row_tiles * BN + tl.arange(0, BN)
    m = pid % row_tiles * BM + tl.arange(0, BM)
    in_n = n < N
    in_m = m < M
    j = tl.arange(0, J)
    rows = x + m.to(tl.int64)[None, :] * K
    acc = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(share * SHARE, tl.minimum(share * SHARE + SHARE, STEPS), num_stages=STAGES):
        block = step // (W // J)
        first = step % (W // J) * J
        a = tl.load(words + (block * N + n)[:, None] * W + first + j[None, :], mask=in_n[:, None], other=0)
        for i in tl.static_range(PER):
            k = block * BLOCK + i * W + first + j
            keep = in_m[None, :]
            if K % BLOCK != 0:
                keep = keep & (k < K)[:, None]
            xt = tl.load(rows + k[:, None], mask=keep, other=0.0)
            group = (block * BLOCK + i * W) // GROUP * N + n
            factor = tl.load(scales + group, mask=in_n, other=0.0).to(dtype)
            more = factor
            if OFFSETS:
                more = tl.load(offsets + group, mask=in_n, other=0.0).to(dtype)
            acc = tl.dot(_scaled_numbers(a, factor, more, i, FORMAT, dtype, OFFSETS, ASSEMBLY), xt, acc)
    keep = in_m[None, :] & in_n[:, None]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    if SPLIT > 1:
        size = M.to(tl.int64) * N
        if not leave_share(acc, acc, part, arrived + pid, at, keep, share, size, SPLIT, False):
            return
        acc, _ = take_shares(acc, acc, part, at, keep, size, SPLIT, False)
    if BIAS:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _dequantize_kernel(
    words, scales, offsets, out, N, K: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, OFFSETS: tl.constexpr,
    W: tl.constexpr, BN: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """out [N, K] as numbers. Grid (N / BN, blocks)."""
    PER: tl.constexpr = 4 if FORMAT == 0 else 2
    BLOCK: tl.constexpr = W * PER
    SUB: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    dtype = out.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    in_n = n < N
    j = tl.arange(0, W)
    a = tl.load(words + (block * N + n)[:, None] * W + j[None, :], mask=in_n[:, None], other=0)
    for s in tl.static_range(SUB):
        group = _group(block, s, GROUP, BLOCK) * N + n
        factor = tl.load(scales + group, mask=in_n, other=0.0).to(tl.float32)
        if OFFSETS:
            offset = tl.load(offsets + group, mask=in_n, other=0.0).to(tl.float32)
        for i in tl.static_range(s * PER // SUB, (s + 1) * PER // SUB):
            values = _numbers(a, i, FORMAT, dtype, ASSEMBLY).to(tl.float32) * factor[:, None]
            if OFFSETS:
                values += offset[:, None]
            k = block * BLOCK + i * W + j
            at = out + n.to(tl.int64)[:, None] * K + k[None, :]
            tl.store(at, values.to(dtype), mask=in_n[:, None] & (k < K)[None, :])


class PackedWords:
    """A quantized [out, in] weight, packed.

    words: int16 [blocks, out, W].   scales, offsets: [groups, out], in float16 where that loses nothing, else fp32.
    group: inputs of a scale, a divisor or a multiple of a block.   order: as of `GroupedWeight`.
    """

    __slots__ = ("format", "group", "num_bytes", "offsets", "order", "scales", "shape", "words")

    def __init__(self, weight: GroupedWeight) -> None:
        n, k = weight.shape
        self.format = "fp8" if weight.codes.dtype == torch.float8_e4m3fn else f"int{weight.bits}"
        self.shape, self.order = weight.shape, weight.order
        per = 16 // weight.bits
        width = next((w for w in WORDS if k % (w * per) == 0 and _fits(weight.group, k, w * per, w)), WORDS[-1])
        block = width * per
        blocks = -(-k // block)
        zero = 0 if self.format == "fp8" else 1 << (weight.bits - 1)
        codes = weight.codes.view(torch.uint8)
        if blocks * block > k:
            codes = torch.nn.functional.pad(codes, (0, blocks * block - k), value=zero)
        shifts = torch.arange(0, 16, weight.bits, device=codes.device)[:, None]
        words = (codes.view(n, blocks, per, width).int() << shifts).sum(2)
        self.words = words.to(torch.int16).transpose(0, 1).contiguous()
        self.group = weight.group
        scales, offsets = weight.scales, weight.offsets
        if weight.group >= k:
            self.group = blocks * block
        elif weight.group % block and block % weight.group:
            self.group = math.gcd(weight.group, block)
            repeats = weight.group // self.group
            scales = scales.repeat_interleave(repeats, 1)
            offsets = None if offsets is None else offsets.repeat_interleave(repeats, 1)
        if weight.zero != zero:
            more = (zero - weight.zero) * scales
            offsets = more if offsets is None else offsets + more
        groups = -(-blocks * block // self.group)  # those of padding count too
        self.scales = _narrowed(_padded(scales, groups), torch.float16)
        # (a product of a scale and a zero has too many digits for float16)
        self.offsets = None if offsets is None else _narrowed(_padded(offsets, groups), torch.float32)
        tensors = (self.words, self.scales, self.offsets)
        self.num_bytes = sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def device(self) -> torch.device:
        return self.words.device


def _fits(group: int, k: int, block: int, width: int) -> bool:
    """Whether a block's codes of one number, `width` of them, have one scale, and blocks and groups divide another."""
    return group >= k or (group % width == 0 and (group % block == 0 or block % group == 0))


def _padded(values: Tensor, groups: int) -> Tensor:
    return torch.nn.functional.pad(values[:, :groups], (0, max(0, groups - values.shape[1])))


def _narrowed(values: Tensor, usual: torch.dtype) -> Tensor:
    """[out, groups] -> [groups, out], in float16 if that is as exact. usual: what values without memory are put in."""
    values = values.t().contiguous()
    if values.is_meta:
        return values.to(usual)
    half = values.half()
    return half if torch.equal(half.float(), values) else values


def packs(weight: GroupedWeight) -> bool:
    """Whether the kernels take a weight: integer codes or float8, no tables, groups that blocks can be cut into."""
    k = weight.shape[1]
    whole = weight.group >= k or math.gcd(weight.group, WORDS[-1] * 16 // weight.bits) >= _LEAST_GROUP
    return weight.table is None and whole and weight.codes.dtype in (torch.uint8, torch.float8_e4m3fn)


def dequantize(weight: PackedWords, dtype: torch.dtype) -> Tensor:
    """The weight as numbers, [out, in] in the order of its columns."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    offsets = weight.scales if weight.offsets is None else weight.offsets
    _dequantize_kernel[(triton.cdiv(n, 64), weight.words.shape[0])](
        weight.words, weight.scales, offsets, out, n, K=k, GROUP=weight.group, FORMAT=FORMATS[weight.format],
        OFFSETS=weight.offsets is not None, W=weight.words.shape[2], BN=64,
        ASSEMBLY=ASSEMBLY and dtype != torch.float32, num_warps=4,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class WidePacked:
    """How a product of many rows is cut: rows, outputs and words of a tile; warps, shares of the inputs, stages."""

    rows: int
    outputs: int
    words: int
    warps: int
    split: int
    stages: int


def choose_wide_packed(rows: int, outputs: int, inputs: int) -> WidePacked:
    """The tiling of a product of 65 to 256 rows, from times on an H200 (`benchmarks/h200/quantized.py`)."""
    tiles = -(-outputs // 128) * -(-rows // 128)
    if tiles >= processors():
        return WidePacked(128, 128, 32, 8, 1, 3)
    if 3 * tiles >= 2 * processors():
        return WidePacked(128, 128, 64, 8, 1, 2)
    if rows > 128 and inputs >= 8192:
        return WidePacked(256, 128, 32, 8, 4, 3)
    return WidePacked(128, 128, 32, 8, 2 if inputs >= 1024 else 1, 3)


def wide_packed_product(
    x: Tensor, weight: PackedWords, bias: Tensor | None, dtype: torch.dtype, t: WidePacked | None = None
) -> Tensor:
    """x [rows, in] @ weight.T + bias in `dtype`, where each weight is made a number for every tile of rows anew."""
    (rows, k), n = x.shape, weight.shape[0]
    t = choose_wide_packed(rows, n, k) if t is None else t
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    tiles = -(-n // t.outputs) * -(-rows // t.rows)
    part = torch.empty(t.split * rows * n if t.split > 1 else 1, dtype=torch.float32, device=x.device)
    arrived = torch.zeros(tiles if t.split > 1 else 1, dtype=torch.int32, device=x.device)
    _wide_packed_kernel[(tiles, t.split)](
        x, weight.words, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        x if bias is None else bias, out, part, arrived, rows, N=n, K=k, GROUP=weight.group,
        FORMAT=FORMATS[weight.format], W=weight.words.shape[2], BM=t.rows, BN=t.outputs,
        J=min(t.words, weight.words.shape[2]), SPLIT=t.split, STAGES=t.stages, BIAS=bias is not None,
        OFFSETS=weight.offsets is not None, ASSEMBLY=ASSEMBLY and x.dtype != torch.float32, num_warps=t.warps,
    )  # fmt: skip
    return out


def launch_packed(
    x: Tensor, weight: PackedWords, ends: tuple[Tensor | None, ...], parts: tuple[Tensor | None, ...],
    behind: tuple[Any, ...], rows: int, t: Tiling, const: dict[str, Any], extra: dict[str, Any],
) -> None:  # fmt: skip
    """Launch a product. ends: bias and out.   parts: of split products.   behind: what follows in the kernels'
    signatures.   const: of `decode_linear`'s products.
    """
    offsets = weight.scales if weight.offsets is None else weight.offsets
    tensors = (x, weight.words, weight.scales, offsets, *ends)
    const = {
        **const,
        "GROUP": weight.group,
        "FORMAT": FORMATS[weight.format],
        "W": weight.words.shape[2],
        "OFFSETS": weight.offsets is not None,
    }
    tiles = -(-const["N"] // t.rows)
    blocks = -(-weight.words.shape[0] // t.split)
    whole = const["N"] % t.rows == 0 and const["PDL"]  # nothing is asked for that is not there
    if t.vector:
        _sliced_kernel[(tiles, t.split)](
            *tensors, *parts, *behind, rows, BM=t.depth, SPLIT=t.split, STAGES=t.stages, SLICES=t.warps,
            AHEAD=t.ahead if whole and t.ahead <= blocks else 0, ASSEMBLY=ASSEMBLY and x.dtype != torch.float32,
            **const, **extra,
        )  # fmt: skip
        return
    _packed_kernel[(tiles, t.split, -(-rows // t.depth))](
        *tensors, *parts, *behind, rows, BM=t.depth, SPLIT=t.split, STAGES=t.stages,
        AHEAD=t.ahead if whole and t.ahead <= blocks else 0, ASSEMBLY=ASSEMBLY and x.dtype != torch.float32, **const,
        **extra,
    )  # fmt: skip


def choose_packed_tiling(rows: int, outputs: int, blocks: int) -> Tiling:
    """The tiling of a product of `rows` rows with a weight of so many outputs (of each half, if gated) and blocks. From
    times on an H200 (`benchmarks/h200/quantized.py`, `h200_packed_products.json`).
    """
    split = 1
    if rows <= _SLICED_ROWS:
        if outputs >= 8192:
            return Tiling(True, 64, 8, 2, 1, 3, ahead=2)
        tiles = -(-outputs // 16)
        while split < 8 and tiles * split < _PROGRAMS + 1 and blocks >= 16 * split:
            split *= 2
        return Tiling(True, 16, 8, 4, split, 3, ahead=4)
    tiles = -(-outputs // 64)
    while tiles < 200 and split < 8 and tiles * split < 384 and blocks >= 2 * split:
        split *= 2
    tile_rows = min(64, max(16, triton.next_power_of_2(rows)))
    return Tiling(False, 64, tile_rows, 4, split, 3 if split <= 4 else 2, ahead=2)


def packed_product(x: Tensor, weight: PackedWords, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [rows, in] @ weight.T + bias, in `dtype`. The inputs' cut depends on the weight alone up to 64 rows."""
    (rows, _), n = x.shape, weight.shape[0]
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    if rows == 0:
        return out
    # one cut for all small batches: a row's sums do not depend on its company
    t = choose_packed_tiling(max(rows, _SLICED_ROWS + 1), n, weight.words.shape[0])
    part = torch.empty(t.split * t.depth * n if t.split > 1 else 1, dtype=torch.float32, device=x.device)
    arrived = torch.zeros(-(-n // t.rows), dtype=torch.int32, device=x.device)
    const = {"N": n, "K": x.shape[1], "WIDTH": 1, "BN": t.rows, "MODE": 0, "ACT": -1, "NORM": False, "NEXT": False}
    const |= {"BIAS": bias is not None, "PDL": False, "num_warps": t.warps}
    behind = (out, 1, 0.0, *(out,) * 7, 1.0)
    launch_packed(x, weight, (x if bias is None else bias, out), (part, arrived), behind, rows, t, const, {})
    return out
