"""Triton products for a handful of rows, with what precedes and follows them folded in: the linear maps of a decode
step.

Reading the weights once is the whole cost, so that nothing else may touch memory between two products. The RMS norm
before a product is split: the kernel that writes the residual stream h also writes h * norm_weight and, per tile of
outputs, the sum of squares; the next product multiplies by 1 / rms in its epilogue. Epilogues (MODE):

  STORE     out = y, or act(y)
  GATED     out = act(gate) * up, where the weight's second half of rows is `up`
  RESIDUAL  h += y * scale; with a next norm: scaled = h * its weight; squares[row, tile] = sum of h^2 over the tile
  ARGMAX    per tile the maximum of y, its index and the sum of y (which tells whether all of them are finite)

With PDL (programmatic dependent launch) a kernel starts while the one before it still runs: it lets its own
successor start at once, reads what does not depend on anybody, then waits. Every program waits, also those without
work: a kernel must not be complete before its predecessors are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.triton.activation import KINDS
from vllm.ops.triton.decode_lora import (
    Change,
    add_parts,
    columns_of_b,
    expand_rows,
    no_change,
    prefetch_b,
    prefetch_rows,
    shrink_rows,
)
from vllm.ops.triton.decode_parts import (
    Tiling,
    ask_constants,
    ask_inputs,
    ask_rows,
    close_rows,
    finish_row,
    has_warp_roles,
    inverse_rms,
    leave_share,
    processors,
    take_shares,
)
from vllm.ops.triton.float8 import ASSEMBLY, BLOCK, Float8Weight, float8_floats, float8_numbers
from vllm.ops.triton.packed_linear import PackedWords, choose_packed_tiling, launch_packed

STORE, GATED, RESIDUAL, ARGMAX = range(4)
DTYPES = [torch.bfloat16, torch.float16]  # of rows, and of weights without scales


@triton.jit
def _weights(rows, k, in_n, K: tl.constexpr, WHOLE: tl.constexpr):
    """Columns k of some rows of a weight, which nobody will read again in this step."""
    if WHOLE:
        a = tl.load(rows + k[None, :], eviction_policy="evict_first")
    else:
        a = tl.load(rows + k[None, :], mask=in_n[:, None] & (k[None, :] < K), other=0.0, eviction_policy="evict_first")
    return a


@triton.jit
def _inputs(x, k, K: tl.constexpr, WHOLE: tl.constexpr):
    xv = tl.load(x + k) if WHOLE else tl.load(x + k, mask=k < K, other=0.0)
    return xv.to(tl.float32)


@triton.jit
def _inputs_of(x, k, K: tl.constexpr, WHOLE: tl.constexpr, PAIRS: tl.constexpr):
    """The inputs of columns k; with PAIRS, k counts elements of two 8-bit floats, whose inputs are 64 apart."""
    if PAIRS:
        first = k // 64 * 128 + k % 64
        low = _inputs(x, first, K, WHOLE)
        high = _inputs(x, first + 64, K, WHOLE)
    else:
        low = _inputs(x, k, K, WHOLE)
        high = low
    return low, high


@triton.jit
def _times(a, low, high, PAIRS: tl.constexpr, ASM: tl.constexpr):
    """Weights times inputs, not summed."""
    if PAIRS:
        lower, upper = float8_floats(a, ASM)
        product = lower * low[None, :] + upper * high[None, :]
    else:
        product = a.to(tl.float32) * low[None, :]
    return product


@triton.jit(do_not_specialize=["tiles_in", "words"])
def _gemv_kernel(
    x, w, scales, bias, out, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out, best, best_at, sums,
    index, bits, words, scale: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, UNROLL: tl.constexpr,
    MODE: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, NEXT: tl.constexpr, BIAS: tl.constexpr,
    SQUARES: tl.constexpr, PDL: tl.constexpr, WHOLE: tl.constexpr, SCALES: tl.constexpr, ASM: tl.constexpr,
    AT_ONCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One row: grid (N / BN,). Products are kept apart in a [BN, BK] tile of fp32 and summed once at the end.

    WHOLE: the tiles divide N and K, and the compiler has no masks to keep.   AT_ONCE: what follows the sums is loaded
    with the inputs, where the tile leaves registers for it.   SCALES: of weights in 8-bit floats, of
    which each output has one.
    """
    PAIRS: tl.constexpr = SCALES
    COLUMNS: tl.constexpr = K // 2 if PAIRS else K
    STEP: tl.constexpr = BK // 2 if PAIRS else BK
    pid = tl.program_id(0)
    n = pid * BN + tl.arange(0, BN)
    in_n = n < N
    k = tl.arange(0, STEP)
    if PDL:
        gdc_launch_dependents()
    if PAIRS:
        w = w.to(tl.pointer_type(tl.int16))
    rows = w + n[:, None].to(tl.int64) * COLUMNS
    a = _weights(rows, k, in_n, COLUMNS, WHOLE)
    if MODE == 1:
        up_rows = rows + N * COLUMNS
        b = _weights(up_rows, k, in_n, COLUMNS, WHOLE)
    if AT_ONCE:
        first_bias, second_bias, weight = ask_constants(bias, next_weight, n, in_n, N, MODE, NEXT, BIAS)
    if PDL:
        gdc_wait()
    low, high = _inputs_of(x, k, K, WHOLE, PAIRS)
    if AT_ONCE:
        parts, before = ask_inputs(squares_in, tiles_in, h, n, in_n, MODE, NORM, SQUARES)
    acc = _times(a, low, high, PAIRS, ASM)
    if MODE == 1:
        up = _times(b, low, high, PAIRS, ASM)
    for start in tl.range(STEP, COLUMNS, STEP, loop_unroll_factor=UNROLL):
        at = start + k
        a = _weights(rows, at, in_n, COLUMNS, WHOLE)
        if MODE == 1:
            b = _weights(up_rows, at, in_n, COLUMNS, WHOLE)
        low, high = _inputs_of(x, at, K, WHOLE, PAIRS)
        acc += _times(a, low, high, PAIRS, ASM)
        if MODE == 1:
            up += _times(b, low, high, PAIRS, ASM)
    y = tl.sum(acc, 1)
    u = y
    if MODE == 1:
        u = tl.sum(up, 1)
    if SCALES:
        y *= tl.load(scales + n, mask=in_n, other=0.0)
        if MODE == 1:
            u *= tl.load(scales + N + n, mask=in_n, other=0.0)
    if not AT_ONCE:
        first_bias, second_bias, weight = ask_constants(bias, next_weight, n, in_n, N, MODE, NEXT, BIAS)
        parts, before = ask_inputs(squares_in, tiles_in, h, n, in_n, MODE, NORM, SQUARES)
    finish_row(
        y, u, n, in_n, pid, first_bias, second_bias, weight, parts, before, eps, out, h, scaled, squares_out, best,
        best_at, sums, index, bits, scale, WIDTH, BN, MODE, ACT, NORM, NEXT, BIAS, MASKED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_in", "words", "M"])
def _skinny_kernel(
    x, w, scales, bias, out, part, arrived, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out, best,
    best_at, sums, index, bits, words, scale: tl.constexpr, low_a, low_b, ranks, adapters, order, small, ready, M,
    N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr,
    ACT: tl.constexpr, NORM: tl.constexpr, NEXT: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr, LORA: tl.constexpr, MOST: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    PARTS: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr, NARROW: tl.constexpr, FORESEE: tl.constexpr,
    SCALES: tl.constexpr, ASM: tl.constexpr, MASKED: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Up to BM rows: grid (N / BN, SPLIT). The weight is the left operand, so that few rows cost few columns.

    With SPLIT > 1 each program sums a share of K; the last to arrive adds the parts up in fixed order.
    With LORA > 0, so many programs more come first, spread over the shares, for `shrink_rows`. NARROW: rows from before
    the norm's last factor may be too large for the type of the adapters' matrices.
    SCALES: of weights in 8-bit floats, of which each output has one.   LATE: as `Tiling.late`.
    """
    FIRST: tl.constexpr = (LORA + SPLIT - 1) // SPLIT
    LAST: tl.constexpr = NORM and not (LORA > 0 and NARROW)  # the norm's factor comes behind what adapters add
    pid = tl.program_id(0) - FIRST
    share = tl.program_id(1)
    if LORA > 0:  # noqa: SIM102 (what is inside is not compiled without)
        if pid < 0:
            if PDL:
                gdc_launch_dependents()
            program = share * FIRST + pid + FIRST
            if program < LORA:
                shrink_rows(
                    program, x, low_a, ranks, adapters, order, small, ready, M, K, BM, MOST, RANK, PARTS, SHARES, TILE,
                    128 if K >= 128 else 16, 4 if BM <= 32 else 3, PDL, FORESEE,
                )  # fmt: skip
            return
    SHARE: tl.constexpr = K // SPLIT
    n = pid * BN + tl.arange(0, BN)
    in_n = n < N
    m = tl.arange(0, BM)
    in_m = m < M
    rows = w + n[:, None].to(tl.int64) * K
    first_bias, second_bias, weight = ask_constants(bias, next_weight, n, in_n, N, MODE, NEXT, BIAS)
    if PDL:
        if LATE == 0:
            gdc_launch_dependents()
        if AHEAD > 0:
            prefetch_rows(w + n.to(tl.int64) * K, share * SHARE, AHEAD, BN)
            if MODE == 1:
                prefetch_rows(w + (n + N).to(tl.int64) * K, share * SHARE, AHEAD, BN)
        if FORESEE and LORA > 0:
            prefetch_b(low_b, ranks, order, pid * BN, RANK, OUTPUTS, BN)
            if MODE == 1:
                prefetch_b(low_b, ranks, order, pid * BN + N, RANK, OUTPUTS, BN)
    if LORA > 0:
        slot, place, r, used = columns_of_b(0, order, ranks, COLUMNS, RANK, RP)
        count = tl.load(order)
    if PDL:
        gdc_wait()
        if LATE == 1:
            gdc_launch_dependents()
    parts, before = ask_rows(squares_in, tiles_in, h, m, n, in_m, in_n, N, MODE, LAST)
    acc = tl.zeros([BN, BM], tl.float32)
    if MODE == 1:
        up = tl.zeros([BN, BM], tl.float32)
    if SCALES:  # elements of two codes, whose inputs are 64 apart
        j = tl.arange(0, 64)
        pairs = w.to(tl.pointer_type(tl.int16)) + n[:, None].to(tl.int64) * (K // 2) + j[None, :]
        for start in tl.range(share * SHARE, (share + 1) * SHARE, 128, num_stages=STAGES):
            a = tl.load(pairs + start // 2, mask=in_n[:, None], other=0, eviction_policy="evict_first")
            low = tl.load(x + m[None, :] * K + (start + j)[:, None], mask=in_m[None, :], other=0.0)
            high = tl.load(x + m[None, :] * K + (start + 64 + j)[:, None], mask=in_m[None, :], other=0.0)
            one = tl.dot(float8_numbers(a, 0, x.dtype.element_ty, ASM), low)
            acc += tl.dot(float8_numbers(a, 1, x.dtype.element_ty, ASM), high, one)
            if MODE == 1:
                at = start // 2 + N * (K // 2)
                b = tl.load(pairs + at, mask=in_n[:, None], other=0, eviction_policy="evict_first")
                two = tl.dot(float8_numbers(b, 0, x.dtype.element_ty, ASM), low)
                up += tl.dot(float8_numbers(b, 1, x.dtype.element_ty, ASM), high, two)
        acc *= tl.load(scales + n, mask=in_n, other=0.0)[:, None]
        if MODE == 1:
            up *= tl.load(scales + N + n, mask=in_n, other=0.0)[:, None]
    else:
        for start in tl.range(share * SHARE, (share + 1) * SHARE, BK, num_stages=STAGES):
            k = start + tl.arange(0, BK)
            a = tl.load(rows + k[None, :], mask=in_n[:, None], other=0.0, eviction_policy="evict_first")
            xt = tl.load(x + m[None, :] * K + k[:, None], mask=in_m[None, :], other=0.0)
            acc = tl.dot(a, xt, acc)
            if MODE == 1:
                b = tl.load(rows + N * K + k[None, :], mask=in_n[:, None], other=0.0, eviction_policy="evict_first")
                up = tl.dot(b, xt, up)
    if PDL and LATE == 2:
        gdc_launch_dependents()
    keep = in_m[None, :] & in_n[:, None]
    at = m[None, :] * N + n[:, None]
    if SPLIT > 1:
        if not leave_share(acc, acc, part, arrived + pid, at, keep, share, BM * N, SPLIT, False):
            return
        acc, _ = take_shares(acc, acc, part, at, keep, BM * N, SPLIT, False)
    if MODE != 1:
        up = acc
    if LORA > 0:
        factor = tl.full([BM], 1.0, tl.float32)
        if NORM and NARROW:
            factor = inverse_rms(squares_in, m, in_m, tiles_in, WIDTH, eps)
            acc = acc * factor[None, :]
            if MODE == 1:
                up = up * factor[None, :]
        if MODE == 1:  # one half after the other: both products at once have been compiled to wrong ones
            acc = expand_rows(
                acc, factor, slot, place, r, used, count, n, in_n, m, low_b, ranks, order, small, ready, 0, BM, MOST,
                RANK, RP, PARTS, TILE, COLUMNS, OUTPUTS, PDL,
            )  # fmt: skip
            up = expand_rows(
                up, factor, slot, place, r, used, count, n + N, in_n, m, low_b, ranks, order, small, ready, 1, BM,
                MOST, RANK, RP, PARTS, TILE, COLUMNS, OUTPUTS, PDL,
            )  # fmt: skip
        else:
            acc = add_parts(
                acc, factor, slot, place, r, used, count, n, in_n, m, low_b, ranks, order, small, ready, BM, MOST,
                RANK, RP, PARTS, SECOND, THIRD, TILE, COLUMNS, OUTPUTS, PDL,
            )  # fmt: skip
            up = acc
    close_rows(
        acc, up, m, n, in_m, in_n, pid, first_bias, second_bias, weight, parts, before, squares_in, tiles_in, eps, out,
        h, scaled, squares_out, best, best_at, sums, index, bits, words, scale, N, WIDTH, BN, MODE, ACT, LAST, NEXT,
        BIAS, MASKED,
    )  # fmt: skip


Weight = Tensor | PackedWords | Float8Weight


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a decode step: weight [outputs (2 x outputs for GATED), inputs], packed or not, bias [its rows] or
    None.

    act: of STORE and GATED, as in `ops.activation`.   scale: of what RESIDUAL adds.   change: what adapters add to it,
    before all that; not for the tiling of one row.
    """

    weight: Weight
    bias: Tensor | None
    mode: int
    tiling: Tiling
    act: str | None = None
    scale: float = 1.0
    change: Change | None = None

    @property
    def outputs(self) -> int:
        return self.weight.shape[0] // (2 if self.mode == GATED else 1)

    @property
    def tiles(self) -> int:
        return -(-self.outputs // self.tiling.rows)


@dataclass(frozen=True, slots=True)
class Folded:
    """Rows behind an RMS norm but for its last factor: `scaled` [rows, width], to be divided by their root mean
    square, whose squares were summed in parts, `squares` [rows, tiles] fp32.
    """

    scaled: Tensor
    squares: Tensor
    tiles: int
    eps: float


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream and what products pass to each other, all static. `rows` is the number of rows computed.

    h, scaled: [rows, width].   squares: [rows, tiles or more] fp32; it and `scaled` are what RESIDUAL leaves.
    part, arrived: for split products.   best, best_at, sums: [rows, tiles] of ARGMAX.
    """

    rows: int
    width: int
    h: Tensor
    scaled: Tensor
    squares: Tensor
    part: Tensor
    arrived: Tensor
    best: Tensor
    best_at: Tensor
    sums: Tensor


def run_product(
    p: Product, s: Stream, x: Tensor | Folded, out: Tensor, next_weight: Tensor | None = None, pdl: bool = False,
    masks: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Launch one product of x [rows, inputs].

    out: [rows, outputs] of STORE and GATED.   next_weight: of the norm that follows a RESIDUAL product; then the
    stream's `scaled` and `squares` are written, with `p.tiles` parts.   masks: of an ARGMAX product whose weight is
    stored as plain numbers, as for `decode_step.argmax_tiles`.
    """
    t, inputs = p.tiling, p.weight.shape[1]
    norm = isinstance(x, Folded)
    if isinstance(x, Folded):
        rows, squares, tiles, eps = x.scaled, x.squares, x.tiles, x.eps
    else:
        rows, squares, tiles, eps = x, None, 1, 0.0
    extra = {"launch_pdl": True} if pdl else {}
    # What a kernel has no use for is no parameter of it: a step has more than a hundred launches.
    stream = (s.h, None, None, None) if next_weight is None else (s.h, next_weight, s.scaled, s.squares)
    bests = (s.best, s.best_at, s.sums) if p.mode == ARGMAX else (None,) * 3
    rest = (*(stream if p.mode == RESIDUAL else (None,) * 4), *bests)
    bias, parts = p.bias, (None, None) if t.split == 1 else (s.part, s.arrived)
    to = out if p.mode in (STORE, GATED) else None
    const = {"N": p.outputs, "K": inputs, "WIDTH": s.width, "BN": t.rows, "BK": t.depth, "MODE": p.mode}
    const |= {"ACT": -1 if p.act is None else KINDS[p.act], "NORM": norm, "NEXT": next_weight is not None}
    const |= {"BIAS": p.bias is not None, "PDL": pdl, "num_warps": t.warps}
    behind = (squares, tiles, eps, *rest, p.scale)
    if t.registers:
        from vllm.ops.triton.one_row import launch_row

        launch_row(rows, p.weight, (bias, to), behind, masks, t, const, extra)
        return
    if t.whole and not t.vector and not isinstance(p.weight, Tensor):
        from vllm.ops.triton.packed_few import launch_few

        launch_few(rows, p.weight, (bias, to), parts, behind, s.rows, t, const, extra)
        return
    if t.whole and not t.vector and isinstance(p.weight, Tensor):
        from vllm.ops.triton.plain_few import launch_plain

        launch_plain(rows, p.weight, (bias, to), parts, behind, s.rows, t, const, extra)
        return
    if isinstance(p.weight, PackedWords):
        del const["BK"]
        launch_packed(rows, p.weight, (bias, to), parts, behind, s.rows, t, const, extra)
        return
    rest = (*rest, *((None,) * 3 if masks is None else (*masks, masks[1].shape[1])), p.scale)
    const["MASKED"] = masks is not None
    if isinstance(p.weight, Float8Weight):
        weights, scales, scaled = p.weight.codes, p.weight.scales, True
    else:
        weights, scales, scaled = p.weight, None, False
    if t.vector:
        _gemv_kernel[(p.tiles,)](
            rows, weights, scales, bias, to, squares, tiles, eps, *rest,
            UNROLL=t.unroll, SCALES=scaled, ASM=ASSEMBLY, SQUARES=triton.next_power_of_2(max(tiles, 2)),
            WHOLE=_whole(p), AT_ONCE=_has_registers(p), **const, **extra,
        )  # fmt: skip
        return
    tile_rows = max(16, triton.next_power_of_2(s.rows))
    added, low_rank = no_change() if p.change is None else p.change.arguments()
    foresee = pdl and p.outputs % t.rows == 0 and low_rank["RANK"] % 16 == 0
    foresee = foresee and (p.change is None or p.change.weights.a.element_size() == 2)
    _skinny_kernel[(p.tiles + -(-low_rank["LORA"] // t.split), t.split)](
        rows, weights, scales, bias, to, *parts, squares, tiles, eps, *rest, *added, s.rows,
        BM=tile_rows, SPLIT=t.split, STAGES=t.stages, AHEAD=_columns_ahead(p) if pdl else 0, FORESEE=foresee,
        SCALES=scaled, ASM=ASSEMBLY and rows.dtype != torch.float32, LATE=t.late, **const, **low_rank, **extra,
    )  # fmt: skip


def _has_registers(p: Product) -> bool:
    """Whether programs of the kernel for one row can hold what follows the sums from the start. Of GATED products each
    processor runs many, one after the other, so that it would gain little.
    """
    t = p.tiling
    return p.mode != GATED and t.rows * t.depth * t.unroll <= 32 * 32 * t.warps


def _whole(p: Product) -> bool:
    """Whether the kernel for one row does without masks."""
    return p.tiling.whole and p.outputs % p.tiling.rows == 0 and p.weight.shape[1] % p.tiling.depth == 0


def _columns_ahead(p: Product) -> int:
    """As many columns as the tiling asks for, are there, and can be cut into pieces of 16 bytes, one a thread."""
    t = p.tiling
    piece = (8 if isinstance(p.weight, Tensor) else 16) * max(1, 32 * t.warps // t.rows)
    whole = p.outputs % t.rows == 0  # nothing is asked for that is not there
    return min(t.ahead, p.weight.shape[1] // t.split) // piece * piece if whole else 0


def choose_tiling(rows: int, outputs: int, inputs: int, mode: int) -> Tiling:
    """The tiling of a product, from whole-step times on an H200 (`benchmarks/h200/tune_decode.py`)."""
    if rows == 1:
        return _vector_tiling(outputs, inputs, mode)
    if mode == STORE and outputs < 512:  # a router: few programs, which would take long alone
        return _fitting(Tiling(False, 16, 256, 4, split=8, stages=4), inputs)
    if mode == RESIDUAL and outputs < 2048:  # narrow tiles, or the device is not filled
        return _fitting(Tiling(False, 16, 256, 4, split=2, stages=6 if rows <= 32 else 4, ahead=512), inputs)
    if mode == RESIDUAL:
        if inputs >= 8192 and inputs % 256 == 0 and outputs // 64 * 4 <= processors():  # all programs at once
            return Tiling(False, 64, 64, 4, split=4, stages=10)
        return _fitting(Tiling(False, 64, 128, 4, split=2, stages=6, ahead=512), inputs)
    if mode == STORE:
        return _fitting(Tiling(False, 64, 128, 4, stages=6, ahead=256 if inputs <= 2048 else 1024), inputs)
    if mode == GATED:
        small = outputs <= 8192
        if small and inputs <= 2048 and 3 * processors() <= outputs // 64 * 4 <= 4 * processors():
            return _fitting(Tiling(False, 64, 64, 4, stages=6, ahead=512), inputs)  # most programs at once, each alone
        if not small and inputs < 4096:  # two on a processor
            return _fitting(Tiling(False, 64, 64, 4, stages=4, ahead=512), inputs)
        return _fitting(Tiling(False, 32 if small else 64, 128, 4, stages=6 if small else 4), inputs)
    return _fitting(
        Tiling(False, 64, 128, 4, stages=4) if inputs >= 2048 else Tiling(False, 128, 64, 4, stages=3), inputs
    )


def _fitting(t: Tiling, inputs: int) -> Tiling:
    """`t`, or what is nearest to it and divides the inputs (a multiple of 64)."""
    while inputs % (t.depth * t.split):
        t = replace(t, split=1) if t.split > 1 else replace(t, depth=t.depth // 2)
    return t


def _vector_tiling(outputs: int, inputs: int, mode: int) -> Tiling:
    """The usual tiling, with tiles as large but narrower where that makes them divide the inputs, so that no masks are
    needed; unless too few programs are left for the device.
    """
    if mode == GATED and 2048 < inputs <= 8192:
        # in two pieces or one: of several, the compiler puts loads off until behind arithmetic
        limit = triton.next_power_of_2(inputs)
        whole = inputs == limit
        return Tiling(True, 2, limit // 2 if whole else limit, 8 if inputs > 3072 else 4, whole=whole)
    t = usual = _usual_vector_tiling(outputs, inputs, mode)
    if (mode == RESIDUAL and _is_narrow(outputs)) or (mode == STORE and _is_one_piece(outputs, inputs)):
        return usual
    while inputs % t.depth and t.depth > 256:
        t = replace(t, rows=t.rows * 2, depth=t.depth // 2, whole=True)
    return t if inputs % t.depth == 0 and outputs >= t.rows * processors() else usual


def _is_narrow(outputs: int) -> bool:
    """Whether tiles of 16 outputs would leave processors without a second program."""
    return 2 * outputs < 3 * 16 * processors()


def _is_one_piece(outputs: int, inputs: int) -> bool:
    """Whether few outputs are best read in pieces of 2048 inputs, of which at most a quarter is empty."""
    return outputs < 4 * 16 * processors() and 1536 <= inputs < 2048


def _usual_vector_tiling(outputs: int, inputs: int, mode: int) -> Tiling:
    limit = triton.next_power_of_2(inputs)
    if mode == ARGMAX:
        return Tiling(True, 16, min(1024, limit), 8) if inputs <= 2048 else Tiling(True, 32, 256, 8, whole=True)
    if mode == GATED:
        return Tiling(True, 16, limit, 8) if inputs <= 1024 else Tiling(True, 2, 1024, 4, unroll=2)
    if mode == RESIDUAL and 1024 < outputs <= 2048 < inputs <= 4096:
        return Tiling(True, 2, 2048, 4)
    if mode == RESIDUAL and outputs <= 2048:
        return Tiling(True, 4, min(2048, limit), 8)
    if mode == RESIDUAL and _is_narrow(outputs):
        return Tiling(True, 2, min(1024, limit), 4, whole=True)
    if mode == RESIDUAL:
        wide = inputs >= 8192
        return Tiling(True, 16 if wide else 8, min(1024, limit), 8 if wide else 4, whole=True)
    one_piece = _is_one_piece(outputs, inputs)
    if mode == STORE and inputs > 1024 and inputs % 1024 and not one_piece:  # short pieces, or many are half empty
        if outputs < 4 * 16 * processors() and inputs > 2048:
            return Tiling(True, 1, 2048, 4, unroll=2)
        return Tiling(True, 16 if outputs >= 4 * 16 * processors() else 8, 256, 4, unroll=2, whole=True)
    if inputs == 2048 and 4 * processors() <= outputs // 8 <= 5 * processors():  # the last round is nearly full
        return Tiling(True, 8, 2048, 8, whole=True)
    return Tiling(True, 8, limit, 8) if inputs <= 1024 else Tiling(True, 4, 2048, 8, whole=True)


def _float8_vector_tiling(outputs: int, inputs: int, mode: int) -> Tiling:
    """Of 8-bit weights a program holds as many bytes as of others, which are twice as many (times on an H200,
    `benchmarks/h200/quantized.py`)."""
    limit = triton.next_power_of_2(inputs)
    if mode == GATED:
        return Tiling(True, 2, min(2048, limit), 4, whole=True)
    if inputs >= 8192 or outputs < 8 * processors():
        return Tiling(True, 4, min(2048, limit), 4, unroll=2, whole=True)
    return Tiling(True, 8, min(4096, limit), 8, whole=True)


def choose_float8_tiling(rows: int, outputs: int, inputs: int, mode: int) -> Tiling:
    """Of several rows with 8-bit weights, from times on an H200 (`benchmarks/h200/quantized.py`)."""
    return _fitting(_float8_tiling(rows, outputs, inputs, mode), inputs)


def _float8_tiling(rows: int, outputs: int, inputs: int, mode: int) -> Tiling:
    if mode == GATED and outputs > 8192:
        small = Tiling(False, 64, BLOCK, 4, stages=4, ahead=1024)
        return small if rows <= 32 else Tiling(False, 128, BLOCK, 8, stages=4, ahead=512)
    if mode == RESIDUAL and outputs >= 2048:
        return Tiling(False, 64, BLOCK, 4, split=4, stages=6, ahead=512)
    if mode == STORE and outputs >= 2048:
        return Tiling(False, 64, BLOCK, 4, split=2 if outputs < 3 * 32 * processors() else 1, stages=6, ahead=512)
    return replace(choose_tiling(rows, outputs, inputs, mode), depth=BLOCK)


def choose_product_tiling(rows: int, weight: Weight, mode: int, adapted: bool = False) -> Tiling:
    """The tiling of a product with a weight, packed or not. adapted: rows may have adapters."""
    outputs, inputs = weight.shape
    outputs //= 2 if mode == GATED else 1
    if ASSEMBLY and has_warp_roles():
        from vllm.ops.triton import one_row, packed_few  # whose language not every Triton has

        chosen = one_row.choose_row_tiling(weight, mode) if rows == 1 and one_row.takes_row(weight) else None
        if chosen is not None:
            return chosen
        if not isinstance(weight, Tensor) and mode != ARGMAX and packed_few.takes_few(rows, weight, mode):
            return packed_few.choose_few_tiling(rows, weight, mode)
    if isinstance(weight, PackedWords):
        return choose_packed_tiling(rows, outputs, weight.words.shape[0])
    if isinstance(weight, Float8Weight) and rows == 1:
        return _float8_vector_tiling(outputs, inputs, mode)
    if isinstance(weight, Float8Weight):
        return choose_float8_tiling(rows, outputs, inputs, mode)
    if not adapted and has_warp_roles():
        from vllm.ops.triton.plain_few import choose_plain_tiling

        chosen = choose_plain_tiling(rows, weight, mode)
        if chosen is not None:
            return chosen
    return choose_tiling(rows, outputs, inputs, mode)


def supports(weight: Tensor | Float8Weight, mode: int) -> bool:
    """Whether a weight [outputs, inputs] can be used: of a known dtype, dense, and widths that the tiles divide."""
    outputs, inputs = weight.shape
    outputs //= 2 if mode == GATED else 1
    whole = inputs % 64 == 0 and (mode == ARGMAX or outputs % 64 == 0)
    return whole and (isinstance(weight, Float8Weight) or (weight.dtype in DTYPES and weight.is_contiguous()))
