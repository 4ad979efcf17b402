"""What the products of a decode step have in common: how they are cut, and what follows the product of several rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from vllm.ops.triton.activation import apply_activation


@cache
def processors() -> int:
    """How many the device has that kernels are cut for; where there is none, those of an H100 or H200."""
    if not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


@cache
def has_tma() -> bool:
    """Whether the device copies tiles by itself (compute capability 9.0 on); where there is none, as on an H200."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


@cache
def has_warp_roles() -> bool:
    """Whether the device is a Hopper GPU, and Triton one whose language for kernels with warps of several roles (Gluon,
    which still changes) is as `hopper_prefill` uses it.
    """
    known = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)
    return known and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut. `vector`: the kernel for one row, with `unroll` and `whole`; `split`, `stages` and `ahead`
    belong to the other. With a packed weight, `vector` is the kernel whose warps take blocks of their own, and `whole`
    the other one's counterpart for Hopper GPUs, `packed_few`.
    """

    vector: bool
    rows: int  # BN, outputs a program
    depth: int  # BK; with a packed weight BM, rows a program
    warps: int
    split: int = 1
    stages: int = 3
    unroll: int = 1
    whole: bool = False  # without masks, if the tiles divide the product
    ahead: int = 0  # columns of its weights that a program asks for before it waits for its predecessor
    late: int = 0  # when the kernel behind may start; 0: at once, 1: after the one in front, 2: after the last tile
    # 3, of `plain_few`: at once, and the one in front is waited for last; its inputs are from before that began
    registers: int = 0  # of a thread of `one_row`, whose tilings they mark; `stages`: blocks of a warp under way


@triton.jit
def inverse_rms(squares, rows, keep, tiles, width, eps):
    """1 / rms of rows whose squares were summed in `tiles` parts. squares: [rows, tiles] fp32."""
    return inverse_rms_from(first_squares(squares, rows, keep, tiles), squares, rows, keep, tiles, width, eps)


@triton.jit
def first_squares(squares, rows, keep, tiles):
    """The first parts of each row's sum of squares, [rows, 64]."""
    j = tl.arange(0, 64)
    listed = keep[:, None] & (j < tiles)[None, :]
    return tl.load(squares + rows[:, None] * tiles + j[None, :], mask=listed, other=0.0)


@triton.jit
def inverse_rms_from(parts, squares, rows, keep, tiles, width, eps):
    """`inverse_rms` where the first parts have been loaded."""
    total = tl.sum(parts, 1)
    j = tl.arange(0, 64)
    for first in range(64, tiles, 64):
        listed = keep[:, None] & (first + j < tiles)[None, :]
        total += tl.sum(tl.load(squares + rows[:, None] * tiles + first + j[None, :], mask=listed, other=0.0), 1)
    return tl.rsqrt(total / width + eps)


@triton.jit
def leave_share(
    acc, up, part, counter, at, keep, share, size, SPLIT: tl.constexpr, BOTH: tl.constexpr
):  # fmt: skip
    """Of a product whose inputs are split among SPLIT programs: put the sums of one share, `acc` (and `up` if BOTH), at
    `at` of the share's `size` numbers of `part`. Returns whether all others are there; the last one takes them.
    """
    tl.store(part + share * size + at, acc, mask=keep)
    if BOTH:
        tl.store(part + (SPLIT + share) * size + at, up, mask=keep)
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    if before == SPLIT - 1:
        tl.store(counter, 0)
    return before == SPLIT - 1


@triton.jit
def take_shares(acc, up, part, at, keep, size, SPLIT: tl.constexpr, BOTH: tl.constexpr):
    """What all shares left, added up in a fixed order: acc, and up if BOTH."""
    acc = tl.zeros_like(acc)
    up = tl.zeros_like(up)
    for s in tl.static_range(SPLIT):
        acc += tl.load(part + s * size + at, mask=keep, other=0.0, cache_modifier=".cg")
        if BOTH:
            up += tl.load(part + (SPLIT + s) * size + at, mask=keep, other=0.0, cache_modifier=".cg")
    return acc, up


@triton.jit
def finish_rows(
    acc, up, m, n, in_m, in_n, pid, bias, out, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out, best,
    best_at, sums, scale: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr,
    ACT: tl.constexpr, NORM: tl.constexpr, NEXT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """acc [outputs n, rows m], and `up` of a GATED product, to where MODE says; the names are those of
    `decode_linear`.
    """
    first_bias, second_bias, weight = ask_constants(bias, next_weight, n, in_n, N, MODE, NEXT, BIAS)
    parts, before = ask_rows(squares_in, tiles_in, h, m, n, in_m, in_n, N, MODE, NORM)
    close_rows(
        acc, up, m, n, in_m, in_n, pid, first_bias, second_bias, weight, parts, before, squares_in, tiles_in, eps, out,
        h, scaled, squares_out, best, best_at, sums, None, None, None, scale, N, WIDTH, BN, MODE, ACT, NORM, NEXT, BIAS,
        False,
    )  # fmt: skip


@triton.jit
def ask_rows(squares_in, tiles_in, h, m, n, in_m, in_n, N: tl.constexpr, MODE: tl.constexpr, NORM: tl.constexpr):
    """What `close_rows` takes that kernels before have written: see `ask_inputs`."""
    parts, before = n, n
    if NORM:
        parts = first_squares(squares_in, m, in_m, tiles_in)
    if MODE == 2:
        keep = in_m[None, :] & in_n[:, None]
        before = tl.load(h + m[None, :] * N + n[:, None], mask=keep, other=0.0)
    return parts, before


@triton.jit
def close_rows(
    acc, up, m, n, in_m, in_n, pid, first_bias, second_bias, weight, parts, before, squares_in, tiles_in, eps, out, h,
    scaled, squares_out, best, best_at, sums, index, bits, words, scale: tl.constexpr, N: tl.constexpr,
    WIDTH: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr,
    NEXT: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`finish_rows` with what `ask_constants` and `ask_rows` have loaded. MASKED: of an ARGMAX product, whose maxima
    are of what the rows' masks allow.
    """
    TILES: tl.constexpr = (N + BN - 1) // BN
    BM: tl.constexpr = m.shape[0]
    keep = in_m[None, :] & in_n[:, None]
    at = m[None, :] * N + n[:, None]
    if NORM:
        rstd = inverse_rms_from(parts, squares_in, m, in_m, tiles_in, WIDTH, eps)
        acc = acc * rstd[None, :]
        if MODE == 1:
            up = up * rstd[None, :]
    if BIAS:
        acc += first_bias.to(tl.float32)[:, None]
        if MODE == 1:
            up += second_bias.to(tl.float32)[:, None]
    if ACT >= 0:
        acc = apply_activation(acc, ACT)
    if MODE == 0:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=keep)
    elif MODE == 1:
        tl.store(out + at, (acc * up).to(out.dtype.element_ty), mask=keep)
    elif MODE == 2:
        r = acc.to(h.dtype.element_ty).to(tl.float32)
        if scale != 1.0:
            r = r * scale
        r = (r + before.to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + at, r, mask=keep)
        if NEXT:
            f = r.to(tl.float32)
            g = f * weight.to(tl.float32)[:, None]
            tl.store(scaled + at, g.to(scaled.dtype.element_ty), mask=keep)
            tl.store(squares_out + m * TILES + pid, tl.sum(f * f, 0), mask=in_m)
    else:
        tl.store(sums + m * TILES + pid, tl.sum(acc, 0), mask=in_m)
        allowed = in_n[:, None]
        if MASKED:
            mask = tl.load(index + m, mask=in_m, other=-1)
            row_bits, has_mask = bits + mask.to(tl.int64)[None, :] * words, (mask >= 0)[None, :]
            if BN % 32 == 0:  # each word is read once
                at = pid * (BN // 32) + tl.arange(0, BN // 32)
                word = tl.load(row_bits + at[:, None], mask=has_mask & (at < words)[:, None], other=-1)
                bit = tl.reshape((word[:, None, :] >> tl.arange(0, 32)[None, :, None]) & 1, [BN, BM])
            else:
                word = tl.load(row_bits + (n // 32)[:, None], mask=has_mask & in_n[:, None], other=-1)
                bit = (word >> (n % 32)[:, None]) & 1
            allowed = allowed & (bit != 0)
        top, row = tl.max(tl.where(allowed, acc, -float("inf")), 0, return_indices=True)
        tl.store(best + m * TILES + pid, top, mask=in_m)
        tl.store(best_at + m * TILES + pid, pid * BN + row, mask=in_m)


@triton.jit
def ask_constants(
    bias, next_weight, n, in_n, N: tl.constexpr, MODE: tl.constexpr, NEXT: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """What `finish_row` and `close_rows` take that no kernel of the step writes, so that it may be loaded before the
    one in front is waited for: biases (of a GATED product two) and the next norm's weights. What is not needed is
    anything.
    """
    first, second, weight = n, n, n
    if BIAS:
        first = tl.load(bias + n, mask=in_n, other=0.0)
        if MODE == 1:
            second = tl.load(bias + N + n, mask=in_n, other=0.0)
    if NEXT:
        weight = tl.load(next_weight + n, mask=in_n, other=0.0)
    return first, second, weight


@triton.jit
def ask_inputs(squares_in, tiles_in, h, n, in_n, MODE: tl.constexpr, NORM: tl.constexpr, SQUARES: tl.constexpr):
    """What else `finish_row` takes: parts of the sum of squares, and the stream. Loads that stand behind a sum over
    warps wait for its barriers; these are to be asked for together with the product's inputs.
    """
    parts, before = n, n
    if NORM:
        j = tl.arange(0, SQUARES)
        parts = tl.load(squares_in + j, mask=j < tiles_in, other=0.0)
    if MODE == 2:
        before = tl.load(h + n, mask=in_n, other=0.0)
    return parts, before


@triton.jit
def finish_row(
    y, u, n, in_n, pid, first_bias, second_bias, weight, parts, before, eps, out, h, scaled, squares_out, best, best_at,
    sums, index, bits, scale: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr,
    ACT: tl.constexpr, NORM: tl.constexpr, NEXT: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As `close_rows` for one row: y [outputs n], u of a GATED product; what was loaded by `ask_constants` and
    `ask_inputs`.
    """
    if NORM:
        factor = tl.rsqrt(tl.sum(parts, 0) / WIDTH + eps)
        y = y * factor
        if MODE == 1:
            u = u * factor
    if BIAS:
        y += first_bias.to(tl.float32)
        if MODE == 1:
            u += second_bias.to(tl.float32)
    if ACT >= 0:
        y = apply_activation(y, ACT)
    if MODE == 0:
        tl.store(out + n, y.to(out.dtype.element_ty), mask=in_n)
    elif MODE == 1:
        tl.store(out + n, (y * u).to(out.dtype.element_ty), mask=in_n)
    elif MODE == 2:
        r = y.to(h.dtype.element_ty).to(tl.float32)
        if scale != 1.0:
            r = r * scale
        r = (r + before.to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + n, r, mask=in_n)
        if NEXT:
            f = r.to(tl.float32)
            tl.store(scaled + n, (f * weight.to(tl.float32)).to(scaled.dtype.element_ty), mask=in_n)
            tl.store(squares_out + pid, tl.sum(f * f, 0))
    else:
        tl.store(sums + pid, tl.sum(y, 0))
        allowed = in_n
        if MASKED:  # noqa: SIM102 (what is inside is not compiled without)
            if tl.load(index) >= 0:  # one row has the first mask, or none
                word = tl.load(bits + n // 32, mask=in_n, other=0)
                allowed = allowed & (((word >> (n % 32)) & 1) != 0)
        y = tl.where(allowed, y, -float("inf"))
        top = tl.max(y, 0)
        tl.store(best + pid, top)
        tl.store(best_at + pid, tl.min(tl.where((y == top) | (y != y), n, pid * BN + BN - 1), 0))
