"""What the kernels in Gluon for Hopper GPUs have in common: names that newer releases of Triton have changed, tiles in
shared memory, and what follows the product of several rows, which `decode_parts` has for the kernels in Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from vllm.ops.triton.activation import apply_activation

MEMORY = 227 << 10  # shared, of a processor, in bytes
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


def tile_layout(shape: list[int], kind: Any) -> Any:
    """The layout of a tile of `kind` numbers in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(shape, kind)


@gluon.jit
def ask_squares(
    squares_in, tiles_in, M, SQUARES: gl.constexpr, BM: gl.constexpr, NORM: gl.constexpr
):  # fmt: skip
    """The parts of the rows' sums of squares, [BM, SQUARES]; without NORM anything."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    p = gl.arange(0, BM, gl.SliceLayout(1, wide))
    j = gl.arange(0, SQUARES, gl.SliceLayout(0, wide))
    parts = p
    if NORM:
        listed = (p < M)[:, None] & (j < tiles_in)[None, :]
        parts = gl.load(squares_in + p[:, None] * tiles_in + j[None, :], mask=listed, other=0.0)
    return parts


@gluon.jit
def ask_inputs(
    squares_in, tiles_in, h, n, in_n, MODE: gl.constexpr, NORM: gl.constexpr, SQUARES: gl.constexpr
):  # fmt: skip
    """`decode_parts.ask_inputs`."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    parts, before = n, n
    if NORM:
        j = gl.arange(0, SQUARES, line)
        parts = gl.load(squares_in + j, mask=j < tiles_in, other=0.0)
    if MODE == 2:
        before = gl.load(h + n, mask=in_n, other=0.0)
    return parts, before


@gluon.jit
def inverse_rms(parts, m, width, eps, NORM: gl.constexpr):
    """1 / rms of rows m of whose squares `ask_squares` has asked the parts; without NORM anything."""
    factor = m
    if NORM:
        factor = gl.convert_layout(gl.rsqrt(gl.sum(parts, 1) / width + eps), m.type.layout)
    return factor


@gluon.jit
def leave_share(
    acc, up, part, counter, at, keep, share, SIZE: gl.constexpr, SPLIT: gl.constexpr, BOTH: gl.constexpr
):  # fmt: skip
    """`decode_parts.leave_share`."""
    gl.store(part + share * SIZE + at, acc, mask=keep)
    if BOTH:
        gl.store(part + (SPLIT + share) * SIZE + at, up, mask=keep)
    barrier()
    before = gl.atomic_add(counter, 1, sem="acq_rel")
    if before == SPLIT - 1:
        gl.store(counter, 0)
    return before == SPLIT - 1


@gluon.jit
def take_shares(zero, part, at, keep, SIZE: gl.constexpr, SPLIT: gl.constexpr, BOTH: gl.constexpr):
    """`decode_parts.take_shares`."""
    acc = zero
    up = zero
    for i in gl.static_range(SPLIT):
        acc += gl.load(part + i * SIZE + at, mask=keep, other=0.0, cache_modifier=".cg")
        if BOTH:
            up += gl.load(part + (SPLIT + i) * SIZE + at, mask=keep, other=0.0, cache_modifier=".cg")
    return acc, up


@gluon.jit
def close_rows(
    acc, up, m, n, keep, at, pid, rows, tiles, first_bias, second_bias, weight, rstd, before, out, h, scaled,
    squares_out, scale: gl.constexpr, MODE: gl.constexpr, ACT: gl.constexpr, NORM: gl.constexpr, NEXT: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """acc [outputs n, rows m], and `up` of a GATED product, to where MODE says: `decode_parts.close_rows` with the
    factors of the rows. Numbers `at` those of `out`, `h` and `scaled` are kept where `keep` says.
    """
    if NORM:
        acc = acc * gl.expand_dims(rstd, 0)
        if MODE == 1:
            up = up * gl.expand_dims(rstd, 0)
    if BIAS:
        acc += gl.expand_dims(first_bias.to(gl.float32), 1)
        if MODE == 1:
            up += gl.expand_dims(second_bias.to(gl.float32), 1)
    if ACT >= 0:
        acc = apply_activation(acc, ACT)
    if MODE == 0:
        gl.store(out + at, acc.to(out.dtype.element_ty), mask=keep)
    elif MODE == 1:
        gl.store(out + at, (acc * up).to(out.dtype.element_ty), mask=keep)
    else:
        y = acc.to(h.dtype.element_ty).to(gl.float32)
        if scale != 1.0:
            y = y * scale
        y = (y + before.to(gl.float32)).to(h.dtype.element_ty)
        gl.store(h + at, y, mask=keep)
        if NEXT:
            f = y.to(gl.float32)
            gl.store(scaled + at, (f * gl.expand_dims(weight.to(gl.float32), 1)).to(scaled.dtype.element_ty), mask=keep)
            gl.store(squares_out + m * tiles + pid, gl.sum(f * f, 0), mask=m < rows)
