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


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut. `vector`: the kernel for one row, with `unroll` and `whole`; `split`, `stages` and `ahead`
    belong to the other. With a packed weight, `vector` is the kernel whose warps take blocks of their own.
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


@triton.jit
def inverse_rms(squares, rows, keep, tiles, width, eps):
    """1 / rms of rows whose squares were summed in `tiles` parts. squares: [rows, tiles] fp32."""
    j = tl.arange(0, 64)
    total = tl.zeros([rows.shape[0]], tl.float32)
    for first in range(0, tiles, 64):
        part = tl.load(
            squares + rows[:, None] * tiles + first + j[None, :],
            mask=keep[:, None] & (first + j[None, :] < tiles),
            other=0.0,
        )
        total += tl.sum(part, 1)
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
    TILES: tl.constexpr = (N + BN - 1) // BN
    keep = in_m[None, :] & in_n[:, None]
    at = m[None, :] * N + n[:, None]
    if NORM:
        rstd = inverse_rms(squares_in, m, in_m, tiles_in, WIDTH, eps)
        acc = acc * rstd[None, :]
        if MODE == 1:
            up = up * rstd[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        if MODE == 1:
            up += tl.load(bias + N + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
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
        r = (r + tl.load(h + at, mask=keep, other=0.0).to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + at, r, mask=keep)
        if NEXT:
            f = r.to(tl.float32)
            g = f * tl.load(next_weight + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
            tl.store(scaled + at, g.to(scaled.dtype.element_ty), mask=keep)
            tl.store(squares_out + m * TILES + pid, tl.sum(f * f, 0), mask=in_m)
    else:
        tl.store(sums + m * TILES + pid, tl.sum(acc, 0), mask=in_m)
        top, row = tl.max(tl.where(in_n[:, None], acc, -float("inf")), 0, return_indices=True)
        tl.store(best + m * TILES + pid, top, mask=in_m)
        tl.store(best_at + m * TILES + pid, pid * BN + row, mask=in_m)


@triton.jit
def finish_row(
    y, u, n, in_n, pid, bias, out, squares_in, tiles_in, eps, h, next_weight, scaled, squares_out, best, best_at, sums,
    scale: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, ACT: tl.constexpr,
    NORM: tl.constexpr, NEXT: tl.constexpr, BIAS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """As `finish_rows` for one row: y [outputs n], u of a GATED product. SQUARES: at least `tiles_in`."""
    if NORM:
        j = tl.arange(0, SQUARES)
        total = tl.sum(tl.load(squares_in + j, mask=j < tiles_in, other=0.0), 0)
        y = y * tl.rsqrt(total / WIDTH + eps)
        if MODE == 1:
            u = u * tl.rsqrt(total / WIDTH + eps)
    if BIAS:
        y += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
        if MODE == 1:
            u += tl.load(bias + N + n, mask=in_n, other=0.0).to(tl.float32)
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
        r = (r + tl.load(h + n, mask=in_n, other=0.0).to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + n, r, mask=in_n)
        if NEXT:
            f = r.to(tl.float32)
            g = f * tl.load(next_weight + n, mask=in_n, other=0.0).to(tl.float32)
            tl.store(scaled + n, g.to(scaled.dtype.element_ty), mask=in_n)
            tl.store(squares_out + pid, tl.sum(f * f, 0))
    else:
        tl.store(sums + pid, tl.sum(y, 0))
        top, at = tl.max(tl.where(in_n, y, -float("inf")), 0, return_indices=True)
        tl.store(best + pid, top)
        tl.store(best_at + pid, pid * BN + at)
