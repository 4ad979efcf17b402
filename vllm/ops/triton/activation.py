"""Triton kernels of the feed-forward activations."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import activation as ops

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "quick_gelu": 5}
_BLOCK = 1024


@triton.jit
def apply_activation(x, KIND: tl.constexpr):
    """The activation numbered KIND, on fp32."""
    if KIND == 0:
        x = x * tl.sigmoid(x)
    elif KIND == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        # 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == 3:
        x = tl.maximum(x, 0.0)
    elif KIND == 5:
        x = x * tl.sigmoid(1.702 * x)
    else:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit
def gated(gate, up, limit, KIND: tl.constexpr, LIMITED: tl.constexpr):
    """activation(gate) * up, both of the model's dtype; the activation is rounded before it meets `up`, as in two
    operations.
    """
    dtype = up.dtype
    gate = gate.to(tl.float32)
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = (tl.minimum(tl.maximum(up.to(tl.float32), -limit), limit) + 1.0).to(dtype)
    return apply_activation(gate, KIND).to(dtype) * up


@triton.jit(do_not_specialize=["size"])
def _activate_kernel(x_ptr, out_ptr, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, apply_activation(x, KIND).to(out_ptr.dtype.element_ty), mask=i < size)


@triton.jit
def _gated_kernel(
    x_ptr, out_ptr, stride, limit, DIM: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * stride + i, mask=i < DIM, other=0.0)
    up = tl.load(x_ptr + row * stride + DIM + i, mask=i < DIM, other=0.0)
    tl.store(out_ptr + row * DIM + i, gated(gate, up, limit, KIND, LIMITED), mask=i < DIM)


def activate(x: Tensor, kind: str) -> Tensor:
    """`vllm.ops.activation.activate` for CUDA."""
    if kind not in KINDS:
        return ops.activate.reference(x, kind)
    x = x.contiguous()
    out = x.new_empty(x.shape)
    if x.numel():
        grid = (triton.cdiv(x.numel(), _BLOCK),)
        _activate_kernel[grid](x, out, x.numel(), KIND=KINDS[kind], BLOCK=_BLOCK, num_warps=4)
    return out


def activate_gated(x: Tensor, kind: str, limit: float | None = None) -> Tensor:
    """`vllm.ops.activation.activate_gated` for CUDA."""
    if kind not in KINDS:
        return ops.activate_gated.reference(x, kind, limit)
    dim = x.shape[-1] // 2
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], dim))
    rows = x.numel() // (2 * dim)
    if rows:
        grid = (rows, triton.cdiv(dim, _BLOCK))
        _gated_kernel[grid](
            x, out, 2 * dim, limit or 0.0, DIM=dim, KIND=KINDS[kind], LIMITED=limit is not None, BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip
    return out


def register(device_type: str) -> None:
    ops.activate.register(device_type, activate)
    ops.activate_gated.register(device_type, activate_gated)
