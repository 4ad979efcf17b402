"""The native products with quantized weights, every build of them, against float64 and against their own rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.gguf.container import TYPES
from vllm.model_executor.layers.quantization.gguf_blocks import read_blocks
from vllm.ops.cpu.packed import STORED, PackedGroups
from vllm.ops.quantized import DenseWeight
from vllm.ops.quantized_weights import GroupedWeight, StoredRows, grouped, joined, round_to_fp8, round_to_groups

quick = settings(
    max_examples=min(25, settings().max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def rounded_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """x as the kernel sees it: each group of a row a multiple of its largest magnitude / 127."""
    groups = x.float().unflatten(1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    factor = torch.full_like(largest, 127.0) / largest  # a number over a tensor would be a reciprocal times it
    return ((groups * factor).round().double() * (largest / 127).double()).flatten(1)


@quick
@given(
    m=st.sampled_from([1, 2, 3, 5, 6, 7, 13, 40]),
    n=st.integers(1, 100),
    groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 64, 128]),
    bits=st.sampled_from([4, 8]),
    offsets=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    biased=st.booleans(),
    wide=st.booleans(),
)
def test_products_with_groups_agree_with_float64(native, m, n, groups, group, bits, offsets, dtype, biased, wide):
    gen = torch.Generator().manual_seed(m * 1000 + n * 10 + groups)
    k = groups * group
    codes = torch.randint(0, 2**bits, (n, k), generator=gen, dtype=torch.uint8)
    scales = torch.randn(n, groups, generator=gen) * 10.0 ** torch.randint(-9, 4, (n, 1), generator=gen)
    shift = torch.randn(n, groups, generator=gen) * scales.abs().amax(1, keepdim=True) if offsets else None
    weight = GroupedWeight(codes, scales, group, bits, zero=0 if offsets else 2 ** (bits - 1), offsets=shift)
    x = torch.randn(m, k + 3, generator=gen).to(dtype)[:, :k]
    bias = torch.randn(n, generator=gen).to(dtype) if biased else None
    packed = native.pack_quantized(weight, dtype)
    assert type(packed) is PackedGroups
    got = native.quantized_linear(x, packed, bias, torch.float32 if wide else None)
    expected = rounded_rows(x, group) @ weight.dequantize().double().T + (bias.double() if biased else 0.0)
    assert got.dtype == (torch.float32 if wide else dtype)
    # the largest possible sum of each output, to which the scales' fp16 rounding is relative
    size = x.double().abs() @ weight.dequantize().double().abs().T + 1
    step = 1e-3 if wide else {torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]
    limit = {torch.float16: 65504.0}.get(got.dtype, math.inf)
    inside = expected.abs() < limit
    assert ((got.double() - expected).abs() <= step * size)[inside].all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(native, bits):
    weight = round_to_groups(torch.randn(200, 4096), bits, 64, symmetric=False)
    packed, x = native.pack_quantized(weight, torch.bfloat16), torch.randn(230, 4096).bfloat16()
    whole = native.quantized_linear(x, packed)
    for rows in (1, 2, 5, 6, 7, 150):
        assert torch.equal(native.quantized_linear(x[7 : 7 + rows], packed), whole[7 : 7 + rows])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(native.quantized_linear(x, packed), whole)
    finally:
        torch.set_num_threads(threads)


def test_the_rounding_of_rows_is_as_small_as_said(native):
    """8 bits for each group of 32: about 0.6 % of the result's size, as in llama.cpp."""
    dense = torch.randn(256, 1024)
    weight, x = round_to_groups(dense, 8, 32), torch.randn(64, 1024).bfloat16()
    got = native.quantized_linear(x, native.pack_quantized(weight, torch.bfloat16), None, torch.float32).double()
    expected = x.double() @ weight.dequantize().double().T
    assert ((got - expected).norm() / expected.norm()).item() < 0.008


def test_one_scale_for_all_inputs_orders_of_inputs_and_tables(native):
    dense, x = torch.randn(40, 256), torch.randn(5, 256).bfloat16()
    channel = round_to_groups(dense, 8, -1)
    order = torch.randperm(256)
    ordered = GroupedWeight(channel.codes, channel.scales, 256, 8, 128, order=order)
    integers = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])
    halves = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6.0])
    codes = torch.randint(0, 16, (40, 256), dtype=torch.uint8)
    tables = [GroupedWeight(codes, torch.rand(40, 8), 32, 4, table=table) for table in (integers, halves)]
    for weight in (channel, ordered, *tables):
        packed = native.pack_quantized(weight, torch.bfloat16)
        assert type(packed) is PackedGroups
        got = native.quantized_linear(x, packed, None, torch.float32)
        expected = x.float() @ weight.dequantize().T
        assert ((got - expected).norm() / expected.norm()).item() < 0.015


@pytest.mark.parametrize("offsets", [False, True])
def test_rows_of_the_smallest_scales_are_zeros(native, offsets):
    """Microscaling formats store a row of zeros with the power of two -127."""
    codes, scales = torch.full((40, 256), 3, dtype=torch.uint8), torch.ones(40, 8)
    codes[7], scales[7] = 0, 2.0**-127
    weight = GroupedWeight(codes, scales, 32, 4, offsets=scales if offsets else None, table=torch.arange(16) / 2)
    packed = native.pack_quantized(weight, torch.bfloat16)
    assert type(packed) is PackedGroups
    got = native.quantized_linear(torch.ones(2, 256).bfloat16(), packed, None, torch.float32)
    torch.testing.assert_close(got, torch.ones(2, 256) @ weight.dequantize().T, rtol=0.01, atol=1e-30)


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("rows", [(1,), (32,), (7, 64, 30), (40, 3)])
def test_blocks_of_a_file_are_packed_as_the_codes_that_they_stand_for(native, kind, rows):
    _, values, size = next(entry for entry in TYPES.values() if entry[0] == kind)
    generator = torch.Generator().manual_seed(sum(rows))
    halves = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}.get(kind, (0,))
    pieces = []
    for count in rows:
        raw = torch.randint(0, 256, (count, 768 // values, size), generator=generator, dtype=torch.uint8)
        for at in halves:  # scales that are numbers
            scales = torch.randn(count, 768 // values, 1, generator=generator).half()
            raw[:, :, at : at + 2] = scales.view(torch.uint8)
        pieces.append(raw.view(count, -1))
    stored = StoredRows(kind, tuple(pieces), torch.Size((sum(rows), 768)), read_blocks)
    packed, expected = (native.pack_quantized(w, torch.bfloat16) for w in (stored, grouped(stored)))
    assert type(packed) is PackedGroups
    for field in ("shape", "group", "bits", "zero", "has_offsets"):
        assert getattr(packed, field) == getattr(expected, field)
    assert torch.equal(packed.memory, expected.memory)


def test_what_there_is_no_kernel_for_becomes_numbers(native):
    dense, x = torch.randn(40, 256), torch.randn(5, 256)
    for weight in (
        round_to_fp8(dense, "channel"),
        round_to_groups(dense, 4, 8),
        round_to_groups(dense[:, :250], 8, -1),
    ):
        packed = native.pack_quantized(weight, torch.bfloat16)
        assert type(packed) is DenseWeight
    exact = native.pack_quantized(round_to_groups(dense, 4, 32), torch.float32)
    expected = x @ round_to_groups(dense, 4, 32).dequantize().T
    torch.testing.assert_close(native.quantized_linear(x, exact), expected, rtol=1e-4, atol=1e-4)


def test_wrong_arguments_are_refused(native):
    packed = native.pack_quantized(round_to_groups(torch.randn(8, 64), 4, 32), torch.bfloat16)
    with pytest.raises(TypeError, match="the weight is"):
        native.quantized_linear(torch.randn(2, 63).bfloat16(), packed)
    with pytest.raises(TypeError, match="out_dtype"):
        native.quantized_linear(torch.randn(2, 64).bfloat16(), packed, None, torch.float16)
    assert native.quantized_linear(torch.randn(0, 64).bfloat16(), packed).shape == (0, 8)


@given(
    n=st.integers(1, 12),
    groups=st.integers(1, 6),
    group=st.sampled_from([8, 16, 32]),
    symmetric=st.booleans(),
    data=st.data(),
)
@quick
def test_cuts_and_joins_keep_the_numbers(n, groups, group, symmetric, data):
    k = groups * group
    weight = round_to_groups(torch.randn(n, k), 4, group, symmetric=symmetric)
    if data.draw(st.booleans()):
        order = torch.randperm(k)
        weight = GroupedWeight(weight.codes, weight.scales, group, 4, weight.zero, weight.offsets, order=order)
    numbers = weight.dequantize()
    start = data.draw(st.integers(0, k - 1))
    length = data.draw(st.integers(1, k - start))
    assert torch.equal(weight.columns(start, length).dequantize(), numbers[:, start : start + length])
    rows = torch.randperm(n)
    assert torch.equal(weight.rows(rows).dequantize(), numbers[rows])
    other = weight.rows(slice(0, max(1, n // 2)))
    assert weight.joins(other)
    assert torch.equal(joined([weight, other]).dequantize(), torch.cat([numbers, other.dequantize()]))
