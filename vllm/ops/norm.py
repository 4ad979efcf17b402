"""Normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.registry import op


@op
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension, in fp32, returned in x's dtype. x: [..., dim]."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        h = h * (weight.float() + offset)
    return h.to(x.dtype)


@op
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the norm reads the sum rounded to x's dtype. May update in place."""
    residual = x + residual
    return rms_norm.reference(residual, weight, eps, offset), residual


@op
def add_branch(
    y: Tensor, residual: Tensor, branch: Tensor | None, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) of total = residual + rms_norm(y), whose weight is `branch`; each is rounded to y's
    dtype. May update in place.
    """
    return add_rms_norm(rms_norm(y, branch, eps, offset), residual, weight, eps, offset)


@op
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """(x - mean) / std * (weight + offset) + bias over the last dimension, in fp32, in x's dtype. x: [..., dim]."""
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        h = h * (weight.float() + offset)
    if bias is not None:
        h = h + bias.float()
    return h.to(x.dtype)


@op
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual). May update in place."""
    residual = x + residual
    return layer_norm.reference(residual, weight, bias, eps, offset), residual
