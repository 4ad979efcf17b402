"""Weights in 8-bit floats on a GPU, as torch's products of 8-bit floats take them, and inputs rounded for those.

Within each block of 128 inputs, input j and input 64 + j are neighbours: two codes make an element of 16 bits, so that
the kernels for few rows, which make wider numbers of them, need not take them apart. Rounded inputs are put into the
same order.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.quantized_weights import FP8_MAX, GroupedWeight, InputQuant
from vllm.ops.triton.activation import KINDS, gated

BLOCK = 128  # outputs and inputs of a block that has one scale
ASSEMBLY = os.environ.get("TRITON_INTERPRET") != "1"  # the interpreter knows none
_MOST_INPUTS = 65536  # one program holds a whole row


class Rounded(NamedTuple):
    """Inputs rounded for these products: codes float8_e4m3fn [rows, in], in a weight's order, scales fp32 [rows, 1]."""

    codes: Tensor
    scales: Tensor


class Float8Weight:
    """A weight [out, in] of which each output has a scale.

    codes: float8_e4m3fn [out, in], in the order said above.   scales: fp32 [out].
    inputs: how the format wants inputs rounded; None: not at all.   fixed: [1], the scale of inputs if it is fixed.
    one_scale: [1], of all outputs, None if they differ.
    """

    __slots__ = ("codes", "fixed", "inputs", "num_bytes", "one_scale", "scales")

    def __init__(self, codes: Tensor, scales: Tensor, inputs: InputQuant | None) -> None:
        n, k = codes.shape
        pairs = codes.view(torch.uint8).view(n, k // BLOCK, 2, BLOCK // 2).transpose(2, 3)
        self.codes = pairs.reshape(n, k).view(torch.float8_e4m3fn)
        self.scales, self.inputs = scales.contiguous(), inputs
        self.one_scale = self.fixed = None
        if inputs is not None and inputs.scale is not None:
            self.fixed = torch.full((1,), inputs.scale, dtype=torch.float32, device=codes.device)
        if scales.device.type != "meta" and bool((scales == scales[0]).all()):
            self.one_scale = scales[:1].clone()
        self.num_bytes = codes.numel() + 4 * scales.numel()

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The weight as numbers, [out, in]."""
        n, k = self.shape
        codes = self.codes.view(torch.uint8).view(n, k // BLOCK, BLOCK // 2, 2).transpose(2, 3).reshape(n, k)
        return (codes.view(torch.float8_e4m3fn).float() * self.scales[:, None]).to(dtype)


def float8_weight(weight: GroupedWeight) -> Float8Weight | None:
    """`weight` for these products; None if they do not take it: codes of another kind, other groups, odd sizes."""
    n, k = weight.shape
    plain = weight.table is None and weight.order is None and weight.offsets is None and weight.zero == 0
    if weight.codes.dtype != torch.float8_e4m3fn or not plain or n % 64 or k % BLOCK or k > _MOST_INPUTS:
        return None
    if weight.group < k or (weight.inputs is not None and weight.inputs.kind != "fp8"):
        return None
    return Float8Weight(weight.codes, weight.scales[:, 0], weight.inputs)


@triton.constexpr_function
def _assembly(half, code):
    """Instructions that make two numbers, in float16 if `half`, else in bfloat16, of the lower (code 0) or upper codes
    of two neighbouring elements: their bits are those of a wider float but for the exponent's bias, which a product
    mends. The machine's own conversion to bfloat16 is several times slower.
    """
    mask, factor = ("0x3F803F80", "0x5C005C00") if half else ("0x07F007F0", "0x7B807B80")
    fma = "fma.rn.f16x2" if half else "fma.rn.bf16x2"
    up = (7 if half else 4) - 8 * code
    move = f"shl.b32 t, $1, {up}; " if up > 0 else f"shr.b32 t, $1, {-up}; "
    signs = "mov.b32 u, $1; " if code else "shl.b32 u, $1, 8; "
    text = "{ .reg .b32 t, u, v, w; mov.b32 v, " + factor + "; mov.b32 w, 0x80008000; "
    text += f"{move}and.b32 t, t, {mask}; {signs}lop3.b32 t, u, 0x80008000, t, 0xEA; {fma} $0, t, v, w; "
    return text + "}"


@triton.jit
def float8_numbers(pairs, CODE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The lower or upper codes of elements of 16 bits, as numbers in float16 or bfloat16."""
    if ASM:
        HALF: tl.constexpr = DTYPE == tl.float16  # noqa: SIM300
        TEXT: tl.constexpr = _assembly(HALF, CODE)
        if HALF:
            numbers = tl.inline_asm_elementwise(TEXT, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
        else:
            numbers = tl.inline_asm_elementwise(TEXT, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        code = (pairs.to(tl.int32) >> (8 * CODE)) & 255
        size = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
        numbers = tl.where(code > 127, -size, size).to(DTYPE)
    return numbers


@triton.jit
def float8_floats(pairs, ASM: tl.constexpr):
    """The lower and the upper codes of elements of 16 bits, as fp32."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; cvt.rn.f16x2.e4m3x2 t, $2; mov.b32 {a, b}, t; cvt.f32.f16 $0, a; "
            "cvt.f32.f16 $1, b; }",
            "=r,=r,h",
            [pairs],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        low = float8_numbers(pairs, 0, tl.float32, False)
        high = float8_numbers(pairs, 1, tl.float32, False)
    return low, high


@triton.jit
def round_row(v, row, out, scales, given, limit, K: tl.constexpr, KP: tl.constexpr, GIVEN: tl.constexpr):
    """Codes of a row v [KP] in fp32, zeros beyond K, with a scale of its own or the one given."""
    c = tl.arange(0, KP)
    size = tl.minimum(tl.max(tl.abs(v), 0), limit)
    size = tl.maximum(tl.div_rn(size, 448.0), 1e-12)
    if GIVEN:
        size = tl.load(given)
    tl.store(scales + row, size)
    codes = tl.div_rn(v, tl.broadcast_to(size, [KP]))  # ties are many among numbers of few bits
    codes = tl.reshape(tl.minimum(tl.maximum(codes, -448.0), 448.0), [KP // 128, 2, 64])
    codes = tl.reshape(tl.permute(codes, (0, 2, 1)), [KP])
    tl.store(out + row.to(tl.int64) * K + c, codes.to(tl.float8e4nv), mask=c < K)


@triton.jit
def _round_kernel(
    x, out, scales, given, limit, stride, K: tl.constexpr, KP: tl.constexpr, KIND: tl.constexpr, GIVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). KIND: of the activation, where x are the two halves of a gated product, else -1."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    c = tl.arange(0, KP)
    at = x + row.to(tl.int64) * stride + c
    v = tl.load(at, mask=c < K, other=0.0)
    if KIND >= 0:
        v = gated(v, tl.load(at + K, mask=c < K, other=0.0), 0.0, KIND, False)
    round_row(v.to(tl.float32), row, out, scales, given, limit, K, KP, GIVEN)


def round_rows(
    x: Tensor, limit: float | None = None, given: Tensor | None = None, pdl: bool = False, act: str | None = None
) -> Rounded:
    """Rows with a scale for each.

    x: [rows, in], rows may lie apart.   limit: the largest magnitude that counts.   given: [1], a scale that all rows
    have.   act: x are the halves of a gated product, and act(first) * second is rounded.
    """
    rows, k = x.shape
    k = k if act is None else k // 2
    out = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(k)
    _round_kernel[(rows,)](
        x, out, scales, scales if given is None else given, float("inf") if limit is None else limit, x.stride(0),
        K=k, KP=width, KIND=-1 if act is None else KINDS[act], GIVEN=given is not None, PDL=pdl,
        num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return Rounded(out, scales)


def rounded_product(
    x: Tensor | Rounded, weight: Float8Weight, bias: Tensor | None, dtype: torch.dtype, pdl: bool = False
) -> Tensor:
    """x [rows, in] @ weight.T + bias, inputs rounded as the weight's format wants; results pass through bfloat16.

    A format with one scale for a tensor of inputs gets one for each row, which is finer, unless it fixes the scale.
    """
    if weight.inputs is None:
        raise ValueError("This weight's format does not round inputs.")
    given = weight.fixed
    codes, scales = x if isinstance(x, Rounded) else round_rows(x, weight.inputs.limit, given, pdl)
    theirs = weight.scales[None]
    if given is not None and weight.one_scale is not None:
        scales, theirs = given, weight.one_scale
    out: Tensor = torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales,
        scale_b=theirs,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    if bias is not None:
        out = out + bias
    return out.to(dtype)


assert FP8_MAX == 448.0  # as the kernel says
