"""Triton products of a decode step for more rows than `decode_linear` takes, where something after them can be folded
in: act(gate) * up, and the first half of an argmax over the vocabulary.

Everywhere else cuBLAS multiplies faster. Both operands come through TMA; grid (tiles of outputs, tiles of rows), rows
first, so that programs that run together read the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.ops.triton.activation import KINDS, apply_activation


@dataclass(frozen=True, slots=True)
class WideTiling:
    """Rows, outputs (of each half, for a gated product) and inputs of a tile; warps, and tiles under way."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["M", "tiles", "words"])
def _wide_kernel(
    x, w, out, best, best_at, sums, index, bits, words, M, tiles, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of outputs. x: [M, K], w: [N or 2 N, K], both as descriptors. GATED: out = act(x gate^T) * (x up^T)
    with the weight's first N rows as gate; else per row and tile the maximum, its index and the sum. MASKED: the
    maximum of what the row's mask allows."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row_tiles = tl.cdiv(M, BM)
    first = (tl.program_id(0) % row_tiles) * BM
    tile = tl.program_id(0) // row_tiles
    acc = tl.zeros([BM, BN], tl.float32)
    if GATED:
        up = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        a = x.load([first, k])
        acc = tl.dot(a, w.load([tile * BN, k]).T, acc)
        if GATED:
            up = tl.dot(a, w.load([N + tile * BN, k]).T, up)
    m = first + tl.arange(0, BM)
    n = tile * BN + tl.arange(0, BN)
    if GATED:
        y = (apply_activation(acc, ACT) * up).to(out.dtype.element_ty)
        tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])
    else:
        here = (n < N)[None, :]
        allowed = here
        if MASKED:
            mask = tl.load(index + m, mask=m < M, other=-1)
            j = tile * (BN // 32) + tl.arange(0, BN // 32)
            where = bits + mask.to(tl.int64)[:, None] * words + j[None, :]
            word = tl.load(where, mask=(mask >= 0)[:, None] & (j < words)[None, :], other=-1)
            bit = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
            allowed = here & (tl.reshape(bit, [BM, BN]) != 0)
        top, at = tl.max(tl.where(allowed, acc, -float("inf")), 1, return_indices=True)
        place = m.to(tl.int64) * tiles + tile
        tl.store(sums + place, tl.sum(tl.where(here, acc, 0.0), 1), mask=m < M)
        tl.store(best + place, top, mask=m < M)
        tl.store(best_at + place, tile * BN + at, mask=m < M)


def _launch(
    x: Tensor, weight: Tensor, t: WideTiling, outputs: int, out: Tensor, best: Tensor, best_at: Tensor, sums: Tensor,
    act: str | None, pdl: bool, masks: tuple[Tensor, Tensor] | None = None,
) -> int:  # fmt: skip
    rows, inputs = x.shape
    tiles = triton.cdiv(outputs, t.outputs)
    index, bits, words = (None, None, None) if masks is None else (*masks, masks[1].shape[1])
    _wide_kernel[(tiles * triton.cdiv(rows, t.rows),)](
        TensorDescriptor(x, [rows, inputs], [inputs, 1], [t.rows, t.depth]),
        TensorDescriptor(weight, list(weight.shape), [inputs, 1], [t.outputs, t.depth]),
        out, best, best_at, sums, index, bits, words, rows, tiles, N=outputs, K=inputs, BM=t.rows, BN=t.outputs,
        BK=t.depth, STAGES=t.stages, GATED=act is not None, ACT=-1 if act is None else KINDS[act],
        MASKED=masks is not None, PDL=pdl, num_warps=t.warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return tiles


def gated_product(x: Tensor, weight: Tensor, out: Tensor, act: str, t: WideTiling, pdl: bool = False) -> None:
    """out [rows, n] = act(x @ gate^T) * (x @ up^T), act as in `ops.activation`. x: [rows, inputs]; weight: [2 n,
    inputs], gate first; n is a multiple of the tile's outputs. All contiguous, of one dtype; sums and activation are
    fp32."""
    outputs = weight.shape[0] // 2
    if outputs % t.outputs:
        raise ValueError(f"{outputs} outputs are not a multiple of the tile's {t.outputs}.")
    _launch(x, weight, t, outputs, out, out, out, out, act, pdl)


def argmax_product(
    x: Tensor, weight: Tensor, best: Tensor, best_at: Tensor, sums: Tensor, t: WideTiling, pdl: bool = False,
    masks: tuple[Tensor, Tensor] | None = None,
) -> int:  # fmt: skip
    """`argmax_tiles` of x @ weight^T, which is not stored. Returns the number of tiles, the outputs' second dimension.

    x: [rows, inputs]; weight: [vocab, inputs].   best, sums: fp32, best_at: int32, room for rows * tiles.
    masks: as for `argmax_tiles`.
    """
    return _launch(x, weight, t, weight.shape[0], best, best, best_at, sums, None, pdl, masks)


def choose_wide_gate(rows: int, outputs: int, inputs: int) -> WideTiling | None:
    """The tiling of a gated product of `outputs` (both halves) and `inputs`, from whole-step times on an H200; None if
    no tiling fits well.
    """
    if outputs // 2 % 128 or inputs % 64:
        return None
    if inputs <= 2048:
        return WideTiling(128, 64, 64, 4, 4 if rows <= 256 else 3)
    if rows > 128 and 0 < rows % 128 <= 64:  # the last tile of rows is half empty at least
        return None
    return WideTiling(128, 128, 64, 8, 3 if rows <= 256 else 4)


def choose_wide_head(rows: int) -> WideTiling:
    """The tiling of the product whose maxima are wanted."""
    return WideTiling(128, 256, 64, 8, 3)
