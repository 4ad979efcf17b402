"""Triton kernel of a decode step that takes what a branch computed back to the residual stream and normalises it, where
no product does that in its epilogue: norms of branches, layer norms, experts' outputs, many rows, several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.triton.float8 import Rounded, round_row


@dataclass(frozen=True, slots=True)
class NormWeights:
    """An RMS norm, or with `center` a layer norm. weight (offset included), bias: [width] or None."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    center: bool

    @property
    def folds(self) -> bool:
        """Whether products can take it into their epilogues."""
        return self.weight is not None and self.bias is None and not self.center


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rows of several experts: what is joined is each token's sum of its experts' rows, in order.

    weights: [rows, top_k] fp32.   home: [rows * top_k], where the outputs stand.
    """

    weights: Tensor
    home: Tensor

    @property
    def top_k(self) -> int:
        return self.weights.shape[1]


@triton.jit
def _normalized(x, weight, bias, c, eps, DIM: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr,
                BIAS: tl.constexpr):  # fmt: skip
    """x: one row in fp32, zeros beyond DIM."""
    keep = c < DIM
    if CENTER:
        x = tl.where(keep, x - tl.sum(x, 0) / DIM, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    if WEIGHT:
        x = x * tl.load(weight + c, mask=keep, other=0.0).to(tl.float32)
    if BIAS:
        x = x + tl.load(bias + c, mask=keep, other=0.0).to(tl.float32)
    return x


@triton.jit
def _join_kernel(
    y, h, out, first_weight, first_bias, second_weight, second_bias, expert_weights, home, first_eps, second_eps, scale,
    DIM: tl.constexpr, DP: tl.constexpr, ADD: tl.constexpr, TOP_K: tl.constexpr,
    FIRST: tl.constexpr, FIRST_CENTER: tl.constexpr, FIRST_WEIGHT: tl.constexpr, FIRST_BIAS: tl.constexpr,
    SECOND: tl.constexpr, SECOND_CENTER: tl.constexpr, SECOND_WEIGHT: tl.constexpr, SECOND_BIAS: tl.constexpr,
    PDL: tl.constexpr, scales, ROUND: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). What is rounded to the model's dtype here is rounded there where operations are apart."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, DP)
    keep = c < DIM
    dtype = h.dtype.element_ty
    total = tl.load(h + row * DIM + c, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        if TOP_K > 0:
            part = tl.zeros([DP], tl.float32)
            for j in tl.static_range(TOP_K):
                at = tl.load(home + row * TOP_K + j).to(tl.int64) * DIM
                part += tl.load(y + at + c, mask=keep, other=0.0).to(tl.float32) * tl.load(
                    expert_weights + row * TOP_K + j
                )
            part = part.to(dtype).to(tl.float32)
        else:
            part = tl.load(y + row * DIM + c, mask=keep, other=0.0).to(tl.float32)
        if FIRST:
            part = _normalized(
                part, first_weight, first_bias, c, first_eps, DIM, FIRST_CENTER, FIRST_WEIGHT, FIRST_BIAS
            )
            part = part.to(dtype).to(tl.float32)
        rounded = (total + part * scale).to(dtype)
        tl.store(h + row * DIM + c, rounded, mask=keep)
        total = rounded.to(tl.float32)
    if SECOND:
        total = _normalized(
            total, second_weight, second_bias, c, second_eps, DIM, SECOND_CENTER, SECOND_WEIGHT, SECOND_BIAS
        )
        if ROUND:
            total = total.to(dtype).to(tl.float32)
            round_row(total, tl.program_id(0), out, scales, scales, float("inf"), DIM, DP, False)
        else:
            tl.store(out + row * DIM + c, total.to(dtype), mask=keep)


def join_rows(
    h: Tensor, out: Tensor | Rounded, y: Tensor | None = None, chosen: Chosen | None = None,
    branch: NormWeights | None = None, after: NormWeights | None = None, scale: float = 1.0, pdl: bool = False,
) -> None:  # fmt: skip
    """h += branch(y) * scale, then out = after(h); a norm that is None is left out, and so is `out` without `after`.

    h, out: [rows, width]; out may be h, or rounded rows.   y: [rows, width], or the rows of `chosen`; None adds
    nothing.
    """
    width = h.shape[1]
    none = NormWeights(None, None, 0.0, False)
    first, second = (none if norm is None else norm for norm in (branch, after))
    norms = (h if t is None else t for t in (first.weight, first.bias, second.weight, second.bias))
    codes, scales = out if isinstance(out, Rounded) else (out, None)
    experts = (h, h) if chosen is None else (chosen.weights, chosen.home)
    _join_kernel[(h.shape[0],)](
        h if y is None else y, h, codes, *norms, *experts, first.eps, second.eps, scale,
        DIM=width, DP=triton.next_power_of_2(width), ADD=y is not None, TOP_K=0 if chosen is None else chosen.top_k,
        FIRST=branch is not None, FIRST_CENTER=first.center, FIRST_WEIGHT=first.weight is not None,
        FIRST_BIAS=first.bias is not None, SECOND=after is not None, SECOND_CENTER=second.center,
        SECOND_WEIGHT=second.weight is not None, SECOND_BIAS=second.bias is not None, PDL=pdl,
        scales=scales, ROUND=isinstance(out, Rounded),
        num_warps=4 if width <= 2048 else 8, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
