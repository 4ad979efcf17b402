"""Products with quantized weights against their numbers, in both regimes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from vllm.ops.quantized import DenseWeight
from vllm.ops.quantized_weights import GroupedWeight, InputQuant, round_to_fp8, round_to_groups
from vllm.ops.triton import quantized as kernels
from vllm.ops.triton.decode_linear import GATED, RESIDUAL, Product, Stream, run_product
from vllm.ops.triton.decode_parts import Tiling
from vllm.ops.triton.float8 import Float8Weight, round_rows
from vllm.ops.triton.packed_linear import PackedWords, WidePacked, wide_packed_product


def error(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.parametrize("rows", [1, 5, 17, 64, 70])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 128, True), (4, 32, False), (8, 16, True), (8, -1, False), (4, 96, True)]
)
def test_products_match_the_numbers(rows, bits, group, symmetric):
    weight = round_to_groups(torch.randn(100, 384), bits, group, symmetric=symmetric)
    x, bias = torch.randn(rows, 387)[:, :384].half(), torch.randn(100).half()
    packed = kernels.pack(weight, torch.float16)
    assert type(packed) is kernels.PackedWords
    want = x.float() @ weight.dequantize().T
    assert error(kernels.multiply(x, packed), want) < 2e-3
    wide = kernels.multiply(x, packed, bias, torch.float32)
    assert wide.dtype == torch.float32
    assert error(wide, want + bias.float()) < 2e-3


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 128, True), (4, 32, False), (8, 16, True), (8, -1, False), (0, 0, True)]
)
@pytest.mark.parametrize(
    "t", [Tiling(False, 32, 16, 4, 2), Tiling(True, 32, 8, 2, 1), Tiling(True, 16, 16, 2, 2)], ids=str
)
def test_what_follows_a_product(bits, group, symmetric, t):
    rows, hidden, inner = 3, 224, 96

    def rounded(n, k):
        dense = torch.randn(n, k) * k**-0.5
        return round_to_fp8(dense, "channel") if bits == 0 else round_to_groups(dense, bits, group, symmetric=symmetric)

    up, down, x, h, norm = rounded(2 * inner, hidden), rounded(hidden, inner), *torch.randn(3, rows, hidden)
    best, mlp = torch.empty(rows, 16), torch.empty(rows, inner)
    arrived = torch.zeros(16, dtype=torch.int32)
    part = torch.empty(8 * 16 * 2 * hidden)
    s = Stream(rows, hidden, h.clone(), torch.empty_like(h), torch.empty(rows, 16), part, arrived, best, best, best)
    bias = torch.randn(2 * inner)
    run_product(Product(PackedWords(up), bias, GATED, t, "silu"), s, x, mlp)
    gate, part = F.linear(x, up.dequantize(), bias).chunk(2, 1)
    torch.testing.assert_close(mlp, F.silu(gate) * part, rtol=1e-4, atol=1e-4)
    run_product(Product(PackedWords(down), None, RESIDUAL, t), s, mlp, s.h, norm[0])
    want = h + F.linear(mlp, down.dequantize())
    torch.testing.assert_close(s.h, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(s.scaled, want * norm[0], rtol=1e-4, atol=1e-4)
    assert not s.arrived.any()


def test_the_weight_as_numbers_is_exact():
    weight = round_to_groups(torch.randn(70, 256), 4, 64, symmetric=False)
    packed = kernels.pack(weight, torch.float32)
    torch.testing.assert_close(kernels.dequantize(packed, torch.float32), weight.dequantize(), rtol=1e-6, atol=1e-6)


def test_inputs_in_another_order():
    plain = round_to_groups(torch.randn(40, 128), 4, 32)
    weight = GroupedWeight(plain.codes, plain.scales, 32, 4, plain.zero, order=torch.randperm(128))
    x = torch.randn(2, 3, 128).half()
    got = kernels.multiply(x, kernels.pack(weight, torch.float16))
    assert got.shape == (2, 3, 40)
    assert error(got, x.float() @ weight.dequantize().T) < 2e-3


def test_a_row_has_the_same_bits_in_any_small_batch():
    packed = kernels.pack(round_to_groups(torch.randn(80, 512), 4, 128), torch.float16)
    x = torch.randn(40, 512).half()
    whole = kernels.multiply(x, packed)
    for count in (1, 3, 16, 20):
        assert torch.equal(kernels.multiply(x[:count], packed), whole[:count])


def test_what_the_kernel_does_not_know_becomes_numbers():
    dense, x = torch.randn(40, 96), torch.randn(3, 96).half()
    for weight in (round_to_fp8(dense, "tensor"), round_to_groups(dense, 4, 8)):  # 40 outputs
        packed = kernels.pack(weight, torch.float16)
        assert type(packed) is DenseWeight
        assert error(kernels.multiply(x, packed), x.float() @ weight.dequantize().T) < 2e-3


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 128, True), (4, 32, False), (8, 16, True), (8, -1, False), (4, 96, True)]
)
def test_products_of_many_rows_take_packed_weights(bits, group, symmetric, split):
    weight = round_to_groups(torch.randn(75, 384) + 0.5, bits, group, symmetric=symmetric)
    x, bias = torch.randn(70, 384).half(), torch.randn(75).half()
    packed = kernels.pack(weight, torch.float16)
    t = WidePacked(32, 32, 16, 4, split, 2)
    got = wide_packed_product(x, packed, bias, torch.float32, t)
    assert error(got, x.float() @ weight.dequantize().T + bias.float()) < 2e-3
    assert torch.equal(got, wide_packed_product(x, packed, bias, torch.float32, t))


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("rows", [1, 70])
def test_products_with_float8_weights(per, rows):
    weight = round_to_fp8(torch.randn(40, 200), per)
    x = torch.randn(rows, 200).half()
    packed = PackedWords(weight)
    assert error(kernels.multiply(x, packed), x.float() @ weight.dequantize().T) < 2e-3
    torch.testing.assert_close(kernels.dequantize(packed, torch.float32), weight.dequantize(), rtol=1e-6, atol=1e-6)


def float8_weight(kind, n, k, inputs=None):
    """A weight in 8-bit floats with a scale for all or for each output."""
    return round_to_fp8(torch.randn(n, k) * torch.rand(n, 1) * k**-0.5, kind, inputs)


@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_products_with_float8_weights_of_few_rows(kind):
    weight = float8_weight(kind, 256, 384)
    packed = kernels.pack(weight, torch.float16)
    assert type(packed) is Float8Weight
    torch.testing.assert_close(packed.numbers(torch.float32), weight.dequantize())
    bias = torch.randn(256).half()
    for rows in (0, 1, 5, 33):
        x = torch.randn(rows, 387)[:, :384].half()
        got = kernels.multiply(x, packed, bias, torch.float32)
        assert got.dtype == torch.float32 and got.shape == (rows, 256)
        if rows:
            assert error(got, x.float() @ weight.dequantize().T + bias.float()) < 2e-3


def test_many_rows_whose_format_rounds_nothing_are_multiplied_by_the_numbers():
    weight = float8_weight("channel", 64, 128)
    x = torch.randn(70, 128).half()
    assert error(kernels.multiply(x, kernels.pack(weight, torch.float16)), x.float() @ weight.dequantize().T) < 2e-3


@pytest.mark.parametrize("inputs", [InputQuant("fp8"), InputQuant("fp8", "tensor", 0.02), InputQuant("fp8", limit=1.0)])
@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_many_rows_are_rounded_as_the_format_says(kind, inputs):
    weight = float8_weight(kind, 64, 256, inputs)
    x = (torch.randn(70, 256) * torch.rand(70, 1) * 4).bfloat16()
    scale = x.float().abs().amax(1, keepdim=True).clamp(max=inputs.limit or math.inf) / 448
    if inputs.scale is not None:
        scale = torch.tensor(inputs.scale)
    rounded = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    got = kernels.multiply(x, kernels.pack(weight, torch.bfloat16), torch.ones(64).bfloat16())
    assert error(got, rounded @ weight.dequantize().T + 1) < 0.07  # the interpreter cuts where the device rounds


def test_rows_have_scales_of_their_own():
    x = (torch.randn(5, 384) * 10.0 ** torch.arange(-2, 3)[:, None]).bfloat16()
    codes, scales = round_rows(x)
    assert scales.shape == (5, 1)
    back = codes.float().view(5, 3, 64, 2).transpose(2, 3).reshape(5, 384) * scales
    assert error(back, x) < 0.08  # the interpreter cuts off what does not fit


def test_what_follows_a_product_with_a_float8_weight():
    rows, hidden, inner = 3, 128, 256
    up, down = float8_weight("channel", 2 * inner, hidden), float8_weight("channel", hidden, inner)
    x, h, norm = torch.randn(3, rows, hidden)
    best, mlp = torch.empty(rows, 16), torch.empty(rows, inner)
    s = Stream(
        rows, hidden, h.clone(), torch.empty_like(h), torch.empty(rows, 64), torch.empty(8 * 16 * 2 * hidden),
        torch.zeros(16, dtype=torch.int32), best, best, best,
    )  # fmt: skip
    tilings = [Tiling(False, 32, 128, 4, 1, 2), Tiling(True, 32, 64, 4)]
    for t in tilings:
        one = 1 if t.vector else rows
        s = replace(s, rows=one, h=h[:one].clone())
        run_product(Product(kernels.pack(up, torch.float16), None, GATED, t, "silu"), s, x[:one], mlp[:one])
        gate, part = F.linear(x[:one], up.dequantize()).chunk(2, 1)
        torch.testing.assert_close(mlp[:one], F.silu(gate) * part, rtol=1e-4, atol=1e-4)
        t = t if t.vector else replace(t, split=2)
        run_product(Product(kernels.pack(down, torch.float16), None, RESIDUAL, t), s, mlp[:one], s.h, norm[0])
        want = h[:one] + F.linear(mlp[:one], down.dequantize())
        torch.testing.assert_close(s.h, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(s.scaled[:one], want * norm[0], rtol=1e-4, atol=1e-4)
