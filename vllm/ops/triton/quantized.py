"""Triton products with quantized weights: few rows dequantize in registers, many rows dequantize the weight once.

Codes lie packed along the inputs, [in / per word, out] int32, so that neighbouring outputs are neighbours in memory. A
few rows are too few programs for the whole device, so the inputs are split among several; their parts are added up in
a fixed order by a second kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.linear import linear
from vllm.ops.quantized import pack_quantized, quantized_linear
from vllm.ops.quantized_weights import GroupedWeight

_FEW_ROWS = 64  # beyond it, multiplying takes longer than writing the weight as numbers
_OUTPUTS = 128  # of a tile
_PROGRAMS = 1056  # that a product with few rows is cut into, eight times the processors of a large device
_LEAST_GROUP = 16


class PackedWords:
    """A quantized [out, in] weight: `words` int32 [in / per word, out], `scales` and `offsets` fp32 [groups, out]."""

    __slots__ = ("bits", "group", "num_bytes", "offsets", "order", "scales", "shape", "words", "zero")

    def __init__(self, weight: GroupedWeight) -> None:
        n, k = weight.shape
        per_word = 32 // weight.bits
        shifts = torch.arange(0, 32, weight.bits, device=weight.device)
        words = (weight.codes.view(n, k // per_word, per_word).long() << shifts).sum(-1)
        self.words = words.to(torch.int32).t().contiguous()
        self.scales = weight.scales.t().contiguous()
        self.offsets = None if weight.offsets is None else weight.offsets.t().contiguous()
        self.shape, self.bits, self.zero, self.order = weight.shape, weight.bits, weight.zero, weight.order
        self.group = min(weight.group, k)
        tensors = (self.words, self.scales, self.offsets)
        self.num_bytes = sum(t.numel() * t.element_size() for t in tensors if t is not None)


@triton.jit
def _weights(words, scales, offsets, k, n, N, inside, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
             HAS_OFFSETS: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The numbers of a tile [BK, outputs] fp32; all of its inputs are in one group."""
    PER: tl.constexpr = 32 // BITS
    at = (k // PER + tl.arange(0, BK // PER)).to(tl.int64)[:, None] * N + n[None, :]
    packed = tl.load(words + at, mask=inside[None, :], other=0)  # each word once
    shifts = (tl.arange(0, PER) * BITS)[None, :, None]
    codes = tl.reshape((packed[:, None, :] >> shifts) & ((1 << BITS) - 1), (BK, n.shape[0]))
    group = (k // GROUP).to(tl.int64) * N + n
    values = (codes - ZERO).to(tl.float32) * tl.load(scales + group, mask=inside, other=0.0)[None, :]
    if HAS_OFFSETS:
        values += tl.load(offsets + group, mask=inside, other=0.0)[None, :]
    return values


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(x, words, scales, offsets, parts, M, x_stride, N, K, steps, GROUP: tl.constexpr,
                     BITS: tl.constexpr, ZERO: tl.constexpr, HAS_OFFSETS: tl.constexpr, BM: tl.constexpr,
                     BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """parts[split, M, N]: the share of `steps` tiles of inputs. Grid: (tiles of outputs, splits, tiles of rows)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    inside, rows = n < N, m < M
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(steps):
        k = (split * steps + step) * BK
        if k < K:
            inputs = k + tl.arange(0, BK)
            a = tl.load(x + m.to(tl.int64)[:, None] * x_stride + inputs[None, :], mask=rows[:, None], other=0.0)
            b = _weights(words, scales, offsets, k, n, N, inside, GROUP, BITS, ZERO, HAS_OFFSETS, BK)
            acc = tl.dot(a, b.to(a.dtype), acc)
    to = (split * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(parts + to, acc, mask=rows[:, None] & inside[None, :])


@triton.jit
def _sum_kernel(parts, bias, out, total, N, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum over splits, first to last, + bias. parts: [SPLITS, total]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    acc = tl.load(parts + at, mask=inside, other=0.0)
    for split in range(1, SPLITS):
        acc += tl.load(parts + split * total + at, mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(words, scales, offsets, out, N, K, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
                       HAS_OFFSETS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out[K, N] as numbers. Grid: (tiles of outputs, tiles of inputs)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK
    inside = n < N
    values = _weights(words, scales, offsets, k, n, N, inside, GROUP, BITS, ZERO, HAS_OFFSETS, BK)
    to = (k + tl.arange(0, BK)).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + to, values.to(out.dtype.element_ty), mask=inside[None, :])


def pack(weight: GroupedWeight, dtype: torch.dtype) -> Any:
    """Integer codes with groups that are multiples of 16 stay packed; everything else becomes numbers."""
    k = weight.shape[1]
    group = k if weight.group >= k else weight.group
    depth = math.gcd(group, 128)
    if weight.codes.dtype != torch.uint8 or weight.table is not None or depth < _LEAST_GROUP or k % group:
        return pack_quantized.reference(weight, dtype)
    return PackedWords(weight)


def dequantize(weight: PackedWords, dtype: torch.dtype) -> Tensor:
    """The weight as numbers, [in, out] in the order of its columns."""
    n, k = weight.shape
    out = torch.empty(k, n, dtype=dtype, device=weight.words.device)
    depth = math.gcd(weight.group, 128)
    offsets = weight.scales if weight.offsets is None else weight.offsets
    _dequantize_kernel[(triton.cdiv(n, _OUTPUTS), k // depth)](
        weight.words, weight.scales, offsets, out, n, k, GROUP=weight.group, BITS=weight.bits, ZERO=weight.zero,
        HAS_OFFSETS=weight.offsets is not None, BN=_OUTPUTS, BK=depth,
    )  # fmt: skip
    return out


def multiply(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`quantized_linear` on CUDA."""
    if type(weight) is not PackedWords:
        out: Tensor = linear(x, weight.weight, bias, out_dtype)
        return out
    n, k = weight.shape
    flat = x.reshape(-1, k)
    if weight.order is not None:
        flat = flat.index_select(1, weight.order)
    elif flat.stride(1) != 1:
        flat = flat.contiguous()
    dtype = x.dtype if out_dtype is None else out_dtype
    if len(flat) > _FEW_ROWS:
        product = flat @ dequantize(weight, x.dtype)
        wide = product if bias is None else product + bias
        return wide.to(dtype).view(*x.shape[:-1], n)
    return _few_rows(flat, weight, bias, dtype).view(*x.shape[:-1], n)


def _few_rows(x: Tensor, weight: PackedWords, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if m == 0:
        return out
    depth = math.gcd(weight.group, 128)
    tiles, row_tiles = triton.cdiv(n, _OUTPUTS), triton.cdiv(m, 16)
    # the cut depends on the weight only, so that a row's sums do not depend on the batch
    splits = max(1, min(k // depth, _PROGRAMS // tiles, 16))
    steps = triton.cdiv(k // depth, splits)
    splits = triton.cdiv(k // depth, steps)
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    offsets = weight.scales if weight.offsets is None else weight.offsets
    _few_rows_kernel[(tiles, splits, row_tiles)](
        x, weight.words, weight.scales, offsets, parts, m, x.stride(0), n, k, steps, GROUP=weight.group,
        BITS=weight.bits, ZERO=weight.zero, HAS_OFFSETS=weight.offsets is not None, BM=16, BN=_OUTPUTS, BK=depth,
        num_warps=4,
    )  # fmt: skip
    _sum_kernel[(triton.cdiv(m * n, 1024),)](
        parts, parts if bias is None else bias, out, m * n, n, SPLITS=splits, HAS_BIAS=bias is not None, BLOCK=1024
    )
    return out


def register(device_type: str) -> None:
    """Put the kernels on the ops."""
    pack_quantized.register(device_type, pack)
    quantized_linear.register(device_type, multiply)
