"""Triton kernels of RMS and layer normalisation, with the residual addition before them folded in."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops import norm as ops

_MAX_DIM = 65536  # one program holds a whole row


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, residual_ptr, branch_ptr, weight_ptr, bias_ptr, out_ptr, rows, inner, stride_outer, stride_inner, eps,
    offset, DIM: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr, ADD: tl.constexpr, CENTER: tl.constexpr,
    BRANCH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RP rows a program. Row i of x starts at (i // inner) * stride_outer + (i % inner) * stride_inner; the rest is
    dense. BRANCH: x is normalised, with weights of its own, before it is added.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * RP + tl.arange(0, RP)[:, None]
    d = tl.arange(0, DP)[None, :]
    keep = (row < rows) & (d < DIM)
    h = tl.load(x_ptr + (row // inner) * stride_outer + (row % inner) * stride_inner + d, mask=keep, other=0.0)
    h = h.to(tl.float32)
    if BRANCH:
        h = h * tl.rsqrt(tl.sum(h * h, 1)[:, None] / DIM + eps)
        h = h * (tl.load(branch_ptr + d, mask=d < DIM, other=0.0).to(tl.float32) + offset)
        h = h.to(out_ptr.dtype.element_ty).to(tl.float32)
    if ADD:
        # the sum is rounded to the model's dtype before the norm reads it
        total = (h + tl.load(residual_ptr + row * DIM + d, mask=keep, other=0.0).to(tl.float32)).to(
            out_ptr.dtype.element_ty
        )
        tl.store(residual_ptr + row * DIM + d, total, mask=keep)
        h = total.to(tl.float32)
    if CENTER:
        h = tl.where(keep, h - tl.sum(h, 1)[:, None] / DIM, 0.0)
    h = h * tl.rsqrt(tl.sum(h * h, 1)[:, None] / DIM + eps)
    if WEIGHT:
        h = h * (tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32) + offset)
    if BIAS:
        h = h + tl.load(bias_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * DIM + d, h.to(out_ptr.dtype.element_ty), mask=keep)


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    center: bool,
    pdl: bool = False,
    branch: Tensor | None = None,
) -> Tensor:
    dim = x.shape[-1]
    # a view of a fused projection, [tokens, heads, head_dim], is read where it lies
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    out = x.new_empty(x.shape)
    rows = x.numel() // dim
    if rows == 0:
        return out
    inner = x.shape[1] if x.dim() == 3 else 1
    outer = x.stride(0) if x.dim() > 1 else 0
    if x.dim() > 3:
        inner, outer = 1, dim
    width = triton.next_power_of_2(dim)
    per_program = max(1, min(16, 1024 // width))
    _norm_kernel[(triton.cdiv(rows, per_program),)](
        x, residual if residual is not None else out, branch if branch is not None else out,
        weight if weight is not None else out, bias if bias is not None else out, out, rows, inner, outer,
        x.stride(1) if x.dim() == 3 else 0, eps, offset,
        DIM=dim, DP=width, RP=per_program, ADD=residual is not None, CENTER=center, BRANCH=branch is not None,
        WEIGHT=weight is not None, BIAS=bias is not None, PDL=pdl, num_warps=4 if width <= 2048 else 8,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """`vllm.ops.norm.rms_norm` for CUDA."""
    if x.shape[-1] > _MAX_DIM:
        return ops.rms_norm.reference(x, weight, eps, offset)
    return _run(x, None, weight, None, eps, offset, center=False)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """`vllm.ops.norm.layer_norm` for CUDA."""
    if x.shape[-1] > _MAX_DIM:
        return ops.layer_norm.reference(x, weight, bias, eps, offset)
    return _run(x, None, weight, bias, eps, offset, center=True)


def _fits(x: Tensor, residual: Tensor) -> bool:
    return x.shape[-1] <= _MAX_DIM and x.dtype == residual.dtype and residual.is_contiguous()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`vllm.ops.norm.add_rms_norm` for CUDA; the sum is left in `residual`.

    pdl: start before the kernel that computes x is quite done, and wait for it then (see `decode_linear`).
    """
    if not _fits(x, residual):
        return ops.add_rms_norm.reference(x, residual, weight, eps, offset)
    return _run(x, residual, weight, None, eps, offset, center=False, pdl=pdl), residual


def add_branch(
    y: Tensor, residual: Tensor, branch: Tensor | None, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`vllm.ops.norm.add_branch` for CUDA; the sum is left in `residual`."""
    if branch is None or not _fits(y, residual):
        return ops.add_branch.reference(y, residual, branch, weight, eps, offset)
    return _run(y, residual, weight, None, eps, offset, center=False, branch=branch), residual


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`vllm.ops.norm.add_layer_norm` for CUDA; the sum is left in `residual`."""
    if not _fits(x, residual):
        return ops.add_layer_norm.reference(x, residual, weight, bias, eps, offset)
    return _run(x, residual, weight, bias, eps, offset, center=True), residual


def register(device_type: str) -> None:
    ops.rms_norm.register(device_type, rms_norm)
    ops.layer_norm.register(device_type, layer_norm)
    ops.add_rms_norm.register(device_type, add_rms_norm)
    ops.add_branch.register(device_type, add_branch)
    ops.add_layer_norm.register(device_type, add_layer_norm)
