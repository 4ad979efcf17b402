"""The native CPU kernels, every build of them, against float64 loops and formulas on random shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops import brute_force
from vllm.ops.attention import AttentionParams, attend, write_kv
from vllm.ops.bitmask import apply_bitmask_and_finite, greedy_under_masks
from vllm.ops.greedy import finite_rows
from vllm.ops.norm import add_layer_norm, add_rms_norm
from vllm.ops.rotary import QKNorm, rotate_and_write_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# rounding of one result, relative
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

quick = settings(
    max_examples=min(12, settings().max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(got, expected, dtype, scale=1.0):
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * scale)


# ---- linear


@quick
@given(
    m=st.sampled_from([1, 2, 3, 7, 12, 13, 31, 97, 150]),
    n=st.integers(1, 150),
    k=st.sampled_from([1, 2, 31, 64, 515, 1030]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    wide=st.booleans(),
)
def test_linear_agrees_with_float64(native, m, n, k, dtype, biased, wide):
    gen = torch.Generator().manual_seed(m * 1000 + n * 10 + k)
    weight = torch.randn(n, k, generator=gen).to(dtype)
    x = torch.randn(m, k + 3, generator=gen).to(dtype)[:, :k]  # rows with a gap
    bias = torch.randn(n, generator=gen).to(dtype) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    got = native.linear(x, native.pack_weight(weight), bias, torch.float32 if wide else None)
    check(got, expected, torch.float32 if wide else dtype, scale=math.sqrt(k) + 1)


@pytest.mark.parametrize(("n", "k"), [(200, 2600), (33, 1027)])  # more panels than threads, and fewer
def test_linear_gives_a_row_the_same_bits_in_any_batch_and_with_any_threads(native, n, k):
    for dtype in DTYPES:
        weight, x, bias = torch.randn(n, k).to(dtype), torch.randn(230, k).to(dtype), torch.randn(n).to(dtype)
        packed = native.pack_weight(weight)
        whole = native.linear(x, packed, bias)
        for rows in (1, 2, 3, 5, 6, 8, 12, 13, 32, 100):
            assert torch.equal(native.linear(x[7 : 7 + rows], packed, bias), whole[7 : 7 + rows]), (dtype, rows)
        for count in (1, 2, 3):
            with threads(count):
                for rows in (1, 8, 25, 230):
                    assert torch.equal(native.linear(x[:rows], packed, bias), whole[:rows]), (dtype, rows, count)


def test_linear_flattens_leading_dimensions_and_accepts_no_rows(native):
    weight, x = torch.randn(40, 16), torch.randn(2, 3, 16)
    packed = native.pack_weight(weight)
    check(native.linear(x, packed), x.double() @ weight.double().T, torch.float32, 4)
    assert native.linear(x[:, :0], packed).shape == (2, 0, 40)
    assert native.linear(torch.empty(0, 16), packed).shape == (0, 40)


@quick
@given(
    m=st.sampled_from([1, 2, 5, 13, 40, 200]),
    n=st.integers(1, 150),
    k=st.sampled_from([1, 3, 4, 63, 64, 517, 2100]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
)
def test_int8_linear_agrees_with_exact_integers(native, m, n, k, dtype, biased):
    gen = torch.Generator().manual_seed(m * 1000 + n * 10 + k)
    weight = torch.randint(-128, 128, (n, k), generator=gen, dtype=torch.int8)
    scales = torch.rand(n, generator=gen) / 100
    x = torch.randn(m, k + 3, generator=gen).to(dtype)[:, :k]  # rows with a gap
    bias = torch.randn(n, generator=gen).to(dtype) if biased else None
    quantized, x_scales = native.quantize_rows(x)
    centred = quantized.long() - 128
    assert centred.abs().max() <= 127
    error = (x.double() - centred * x_scales.double()[:, None]).abs().amax(1)
    assert (error <= x_scales.double() * 0.5001).all()
    exact = (centred @ weight.long().T).double() * x_scales.double()[:, None] * scales.double()
    got = native.linear_int8(x, native.pack_int8(weight, scales), bias)
    check(got, exact + (bias.double() if biased else 0.0), dtype, scale=float(exact.abs().max()) + 1)


def test_int8_linear_gives_a_row_the_same_bits_in_any_batch_and_with_any_threads(native):
    weight, x = torch.randint(-128, 128, (200, 5000), dtype=torch.int8), torch.randn(230, 5000)
    packed = native.pack_int8(weight, torch.rand(200))
    whole = native.linear_int8(x, packed)
    for rows in (1, 2, 13, 100):
        assert torch.equal(native.linear_int8(x[7 : 7 + rows], packed), whole[7 : 7 + rows])
    with threads(2 if torch.get_num_threads() == 1 else 1):
        assert torch.equal(native.linear_int8(x, packed), whole)


def test_int8_linear_sums_the_largest_numbers_exactly_and_a_row_of_zeros_gives_the_bias(native):
    k = 65536
    packed = native.pack_int8(torch.full((3, k), -128, dtype=torch.int8), torch.ones(3))
    x = torch.ones(2, k)
    x[1] = 0.0
    bias = torch.randn(3)
    out = native.linear_int8(x, packed, bias)
    torch.testing.assert_close(out[0], torch.full((3,), -128.0 * k) + bias)
    assert torch.equal(out[1], bias)
    with pytest.raises(ValueError, match="65536"):
        native.pack_int8(torch.zeros(1, k + 1, dtype=torch.int8), torch.ones(1))


def test_linear_refuses_a_foreign_dtype_or_width(native):
    packed = native.pack_weight(torch.randn(8, 16))
    with pytest.raises(TypeError, match="the weight is torch.float32"):
        native.linear(torch.randn(2, 16, dtype=torch.bfloat16), packed)
    with pytest.raises(TypeError, match=r"\[2, 15\]"):
        native.linear(torch.randn(2, 15), packed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_packed_weights_come_back_unchanged(native, dtype):
    weight = torch.randn(100, 33).to(dtype)
    packed = native.pack_weight(weight)
    ids = torch.tensor([0, 99, 31, 32, 5, 5])
    assert torch.equal(native.embedding(ids, packed), weight[ids])
    assert torch.equal(native.embedding(ids[::2], weight), weight[ids[::2]])
    for foreign in (-1, 100):
        with pytest.raises(IndexError, match=r"\[0, 100\)"):
            native.embedding(torch.tensor([3, foreign]), packed)


# ---- attention


@st.composite
def batches(draw):
    """query and sequence lengths of 1 to 5 requests, at least one token in all."""
    requests = draw(st.integers(1, 5))
    queries = [draw(st.sampled_from([0, 1, 1, 2, 5, 33])) for _ in range(requests)]
    before = [draw(st.sampled_from([0, 1, 15, 16, 127, 140, 300])) for _ in range(requests)]
    if sum(queries) == 0:
        queries[0] = 1
    return queries, [max(1, m + b) for m, b in zip(queries, before, strict=True)]


@quick
@given(
    batch=batches(),
    shape=st.sampled_from([(1, 1), (4, 2), (7, 1), (14, 2), (71, 1)]),
    head_dim=st.sampled_from([1, 12, 64, 80, 96]),
    block_size=st.sampled_from([1, 4, 16, 24]),
    dtypes=st.sampled_from(
        [(d, d) for d in DTYPES]
        + [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
        + [(torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float8_e5m2)]
    ),
    window=st.sampled_from([None, 1, 17, 150]),
    softcap=st.sampled_from([None, 3.0]),
    alibi=st.booleans(),
)
def test_attend_agrees_with_the_reference(native, batch, shape, head_dim, block_size, dtypes, window, softcap, alibi):
    (heads, kv_heads), (dtype, cache_dtype) = shape, dtypes
    query_lens, seq_lens = batch
    kv_cache, step, group = brute_force.mixed_batch(query_lens, seq_lens, kv_heads, head_dim, block_size, cache_dtype)
    if window is not None:  # blocks behind every query's window are given back
        for r, (m, n) in enumerate(zip(query_lens, seq_lens, strict=True)):
            group.block_table[r, : max(0, n - m - window + 1) // block_size] = 0
    wide = torch.randn(sum(query_lens), heads + 2, head_dim).to(dtype)
    slopes = torch.rand(heads) if alibi else None
    params = AttentionParams(head_dim**-0.5, window, softcap, slopes, k_scale=0.5, v_scale=2.0)
    got = native.attend(wide[:, :heads], kv_cache, params, step, group)
    expected = attend.reference(wide[:, :heads].double().float(), kv_cache.float(), params, step, group)
    tolerance = max(TOLERANCE[dtype], TOLERANCE.get(cache_dtype, 0.0))
    assert got.dtype == dtype and got.shape == (sum(query_lens), heads, head_dim)
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_over_a_long_context(native, head_dim, dtype):
    """Beyond 32k keys: many segments, split over threads, with one new token and with a chunk."""
    kv_cache, step, group = long_batch([33_000, 9_000], [1, 70], 1, head_dim, dtype)
    q = torch.randn(71, 2, head_dim).to(dtype)
    params = AttentionParams(head_dim**-0.5)
    got = native.attend(q, kv_cache, params, step, group)
    expected = attend.reference(q.float(), kv_cache.float(), params, step, group)
    torch.testing.assert_close(got.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 200])
def test_a_token_attends_to_the_same_bits_however_it_is_scheduled(native, dtype, window):
    """One prompt at once, in chunks, token by token at its end, in company, on one thread or two: identical."""
    heads, kv_heads, head_dim, block_size, length = 6, 2, 40, 16, 2600
    kv_cache, step, group = long_batch([length], [length], kv_heads, head_dim, dtype, block_size)
    q = torch.randn(length, heads, head_dim).to(dtype)
    params = AttentionParams(head_dim**-0.5, window)
    whole = native.attend(q, kv_cache, params, step, group)
    for begin, end in [(0, 100), (100, 1500), (1500, 2599), (2599, 2600), (1023, 1025)]:
        part = batch_over(group.block_table, [end], [end - begin])
        assert torch.equal(native.attend(q[begin:end], kv_cache, params, *part), whole[begin:end])
    table = group.block_table.expand(3, -1).contiguous()
    part = batch_over(table, [2000, 7, 2600], [1, 3, 2])
    rows = torch.tensor([1999, 4, 5, 6, 2598, 2599])
    assert torch.equal(native.attend(q[rows], kv_cache, params, *part), whole[rows])
    with threads(2 if torch.get_num_threads() == 1 else 1):
        assert torch.equal(native.attend(q, kv_cache, params, step, group), whole)
        assert torch.equal(native.attend(q[rows], kv_cache, params, *part), whole[rows])


@quick
@given(data=st.data())
def test_any_part_of_a_prompt_gives_the_same_bits_as_the_whole(native, data):
    draw = data.draw
    length, head_dim = draw(st.integers(1, 1300)), draw(st.sampled_from([12, 40, 64]))
    kv_heads, group = draw(st.sampled_from([(1, 7), (2, 1), (2, 3)]))
    dtype, window = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([None, 1, 100, 200]))
    softcap, alibi = draw(st.sampled_from([None, 5.0])), draw(st.booleans())
    block_size = draw(st.sampled_from([8, 16, 24]))
    torch.manual_seed(length)
    kv_cache, step, tables = long_batch([length], [length], kv_heads, head_dim, dtype, block_size)
    q = torch.randn(length, kv_heads * group, head_dim).to(dtype)
    slopes = torch.rand(kv_heads * group) if alibi else None
    params = AttentionParams(head_dim**-0.5, window, softcap, slopes)
    whole = native.attend(q, kv_cache, params, step, tables)
    for _ in range(8):
        end = draw(st.integers(1, length))
        begin = draw(st.integers(max(0, end - draw(st.sampled_from([1, 2, 30, 700]))), end - 1))
        part = batch_over(tables.block_table, [end], [end - begin])
        assert torch.equal(native.attend(q[begin:end], kv_cache, params, *part), whole[begin:end])


@quick
@given(data=st.data())
def test_tokens_before_one_that_is_no_number_have_the_same_bits(native, data):
    """NaN or infinities in a key and value reach the queries that see it, no others: zero times NaN would be NaN."""
    draw = data.draw
    length, head_dim = draw(st.integers(2, 300)), draw(st.sampled_from([12, 40, 64]))
    kv_heads, group = draw(st.sampled_from([(1, 7), (2, 1), (2, 3)]))
    dtype, window = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([None, 1, 9, 100]))
    torch.manual_seed(length)
    kv_cache, step, tables = long_batch([length], [length], kv_heads, head_dim, dtype)
    q = torch.randn(length, kv_heads * group, head_dim).to(dtype)
    params = AttentionParams(head_dim**-0.5, window)
    clean = native.attend(q, kv_cache, params, step, tables)
    at, number = draw(st.integers(0, length - 1)), draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    block, slot = int(tables.block_table[0, at // 16]), at % 16
    kv_cache[block, :, :, slot, draw(st.integers(0, head_dim - 1))] = number
    got = native.attend(q, kv_cache, params, step, tables)
    seen = slice(at, length if window is None else min(length, at + window))
    assert not torch.isfinite(got[seen]).all(-1).any()
    got[seen] = clean[seen]
    assert torch.equal(got, clean)


# ---- norms, activations, rotation


@quick
@given(
    rows=st.sampled_from([1, 3, 40]),
    dim=st.sampled_from([1, 7, 16, 80, 896, 1000]),
    dtype=st.sampled_from(DTYPES),
    offset=st.sampled_from([0.0, 1.0]),
    weighted=st.booleans(),
)
def test_norms_agree_with_the_references(native, rows, dim, dtype, offset, weighted):
    x, residual = torch.randn(rows, dim).to(dtype), torch.randn(rows, dim).to(dtype)
    weight = torch.randn(dim).to(dtype) if weighted else None
    bias = torch.randn(dim).to(dtype) if weighted else None
    total = (x + residual).double()
    expected, _ = add_rms_norm.reference(total, torch.zeros_like(total), weight, 1e-6, offset)
    got, summed = native.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6, offset)
    check(got, expected.double(), dtype, 2)
    assert torch.equal(summed, x + residual)
    check(native.rms_norm(x + residual, weight, 1e-6, offset), expected.double(), dtype, 2)
    # a constant row has no deviation to normalise by; fp32 cannot tell it from rounding
    if dim > 1:
        expected, _ = add_layer_norm.reference(total, torch.zeros_like(total), weight, bias, 1e-3, offset)
        got, summed = native.add_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-3, offset)
        check(got, expected.double(), dtype, 8)
        assert torch.equal(summed, x + residual)
        check(native.layer_norm(x + residual, weight, bias, 1e-3, offset), expected.double(), dtype, 8)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_follow_their_formulas(native, kind, dtype):
    x = torch.cat((torch.randn(5, 2 * 2100) * 4, torch.linspace(-100, 100, 2 * 2100)[None])).to(dtype)
    gate, up = x.chunk(2, -1)
    check(native.activate(x, kind), brute_force.activation(x, kind), dtype, 0.1)
    rounded = brute_force.activation(gate, kind).to(dtype).double()
    check(native.activate_gated(x, kind), rounded * up.double(), dtype, 0.1)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float8_cache_holds_the_same_bits_as_the_reference(native, dtype, cache_dtype):
    k, v = (torch.randn(37, 2, 21) * 10.0 ** torch.randint(-6, 6, (37, 2, 21)) for _ in range(2))
    k[3, 1, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    k, v = k.to(dtype), v.to(dtype)
    got, want = (torch.zeros(5, 2, 2, 16, 21, dtype=cache_dtype) for _ in range(2))
    slots = torch.randperm(80)[:37]
    native.write_kv(k, v, got, slots, 0.37, 2.1)
    write_kv.reference(k, v, want, slots, 0.37, 2.1)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    cos_sin = torch.ones(40, 20)
    qkv = torch.randn(37, 6 * 21).to(dtype)
    arguments = (2, torch.arange(37), cos_sin, False)
    native.rotate_and_write_kv(qkv.clone(), *arguments, got, slots, 0.37, 2.1)
    rotate_and_write_kv.reference(qkv.clone(), *arguments, want, slots, 0.37, 2.1)
    torch.testing.assert_close(got.float(), want.float(), rtol=0.13, atol=0.02)


@quick
@given(
    query_lens=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dims=st.sampled_from([(12, 12), (64, 32), (80, 80), (96, 96), (7, 4), (40, 6)]),
    block_size=st.sampled_from([1, 5, 16]),
    dtypes=st.sampled_from([(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float16)]),
    interleaved=st.booleans(),
    normed=st.sampled_from(["none", "each", "joint"]),
)
def test_rotation_and_cache_write_agree_with_the_reference(
    native, query_lens, dims, block_size, dtypes, interleaved, normed
):
    heads, kv_heads, (head_dim, rotary_dim), (dtype, cache_dtype) = 6, 2, dims, dtypes
    tokens = sum(query_lens)
    kv_cache, step, group = brute_force.mixed_batch(
        query_lens, [m + 10 for m in query_lens], kv_heads, head_dim, block_size, cache_dtype
    )
    other = kv_cache.clone()
    angles = torch.rand(32, rotary_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    norm = None
    if normed != "none":
        sizes = (heads * head_dim, kv_heads * head_dim) if normed == "joint" else (head_dim, head_dim)
        norm = QKNorm(*(torch.randn(n).to(dtype) for n in sizes), 1e-5, 0.5, joint=normed == "joint")
    arguments = (heads, step.positions, cos_sin, interleaved)
    expected, _ = rotate_and_write_kv.reference(qkv.clone(), *arguments, other, group.slot_mapping, qk_norm=norm)
    got, _ = native.rotate_and_write_kv(qkv.clone(), *arguments, kv_cache, group.slot_mapping, qk_norm=norm)
    check(got, expected.double(), dtype, 4)
    tolerance = 4 * max(TOLERANCE[dtype], TOLERANCE[cache_dtype])
    torch.testing.assert_close(kv_cache.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    q = qkv.view(tokens, -1, head_dim)[:, :heads]
    check(native.rotate(q.clone(), *arguments[1:]), brute_force.rotate(q, *arguments[1:]), dtype, 4)
    k, v = qkv.view(tokens, -1, head_dim)[:, heads:].split(kv_heads, 1)
    native.write_kv(k, v, kv_cache, group.slot_mapping)
    for t, slot in enumerate(group.slot_mapping.tolist()):
        assert torch.equal(kv_cache[slot // block_size, 0, :, slot % block_size], k[t].to(cache_dtype))
        assert torch.equal(kv_cache[slot // block_size, 1, :, slot % block_size], v[t].to(cache_dtype))


# ---- sampling


@quick
@given(rows=st.integers(1, 4), vocab=st.integers(1, 5000), ties=st.booleans())
def test_greedy_takes_the_lowest_index_of_the_maximum(native, rows, vocab, ties):
    logits = torch.randn(rows, vocab + 3)
    logits = (logits.round() if ties else logits)[:, :vocab]  # rows with a gap
    expected = [min(i for i in range(vocab) if row[i] == max(row)) for row in logits.tolist()]
    assert native.greedy(logits).tolist() == expected
    logits[-1, -1] = math.inf
    ids, finite = native.greedy_and_finite(logits)
    assert ids.tolist() == [*expected[:-1], vocab - 1]
    assert finite.tolist() == [True] * (rows - 1) + [False]


def test_rows_without_a_finite_maximum_still_give_an_id(native):
    logits = torch.full((2, 3000), float("-inf"))
    logits[1] = float("nan")
    assert all(0 <= i < 3000 for i in native.greedy(logits).tolist())


@quick
@given(vocab=st.integers(1, 3000), bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]), data=st.data())
def test_finite_rows_finds_one_number_that_is_none(native, vocab, bad, data):
    logits = torch.randn(3, vocab) * 100
    logits[1, data.draw(st.integers(0, vocab - 1))] = bad
    barred = bad == float("-inf") and vocab > 1  # a token that a model bars is no damage
    assert native.finite_rows(logits).tolist() == [True, barred, True] == finite_rows.reference(logits).tolist()


@quick
@given(vocab=st.integers(2, 3000), data=st.data())
def test_tokens_that_a_model_bars_are_no_damage(native, vocab, data):
    logits = torch.randn(3, vocab)
    kept = data.draw(st.integers(0, vocab - 1))
    logits[0], logits[1], logits[2] = torch.finfo(torch.float32).min, -math.inf, -math.inf
    logits[:2, kept] = 1.0
    ids, finite = native.greedy_and_finite(logits)
    assert ids[:2].tolist() == [kept, kept]
    assert finite.tolist() == [True, True, False] == finite_rows.reference(logits).tolist()


@quick
@given(rows=st.integers(1, 5), vocab=st.integers(1, 3000), data=st.data())
def test_masks_are_those_of_the_reference(native, rows, vocab, data):
    wide = torch.randn(rows, vocab + 3)
    wide[0, data.draw(st.integers(0, vocab - 1))] = data.draw(st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
    which = torch.tensor(data.draw(st.permutations(range(rows)))[: data.draw(st.integers(0, rows))], dtype=torch.int64)
    bits = torch.randint(-(2**31), 2**31, (len(which), (vocab + 31) // 32), dtype=torch.int64).to(torch.int32)
    expected, plain = wide.clone(), wide.clone()
    finite = apply_bitmask_and_finite.reference(expected[:, :vocab], which, bits)
    native.apply_bitmask(plain[:, :vocab], which, bits)
    assert native.apply_bitmask_and_finite(wide[:, :vocab], which, bits).tolist() == finite.tolist()
    for found in (wide, plain):  # rows with a gap, which stays as it is
        assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@quick
@given(rows=st.integers(1, 40), vocab=st.integers(1, 3000), data=st.data())
def test_greedy_under_masks_is_the_best_token_that_is_left(native, rows, vocab, data):
    wide = torch.randn(rows, vocab + 3)
    wide[0, data.draw(st.integers(0, vocab - 1))] = data.draw(st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
    which = torch.randperm(rows)[: data.draw(st.integers(0, rows))]
    bits = torch.randint(-(2**31), 2**31, (len(which), (vocab + 31) // 32), dtype=torch.int64).to(torch.int32)
    bits[: data.draw(st.integers(0, 1))] = 0
    expected = greedy_under_masks.reference(wide.clone()[:, :vocab], which, bits)
    ids, finite, possible = native.greedy_under_masks(wide[:, :vocab], which, bits)
    assert torch.equal(finite, expected[1])
    assert torch.equal(possible[finite], expected[2][finite])
    assert torch.equal(ids[finite & possible], expected[0][finite & possible])
    assert ((ids >= 0) & (ids < vocab)).all()


# ---- helpers


class threads:
    """Run with another number of threads."""

    def __init__(self, count: int) -> None:
        self.count, self.before = count, torch.get_num_threads()

    def __enter__(self) -> None:
        torch.set_num_threads(self.count)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


def batch_over(table, seq_lens, query_lens):
    """A step and its group over existing block tables."""
    import numpy as np

    from vllm.step.inputs import GroupInputs, StepInputs

    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.array(seq_lens, np.int32)
    none = torch.zeros(0, dtype=torch.int64)
    group = GroupInputs(none, table)
    step = StepInputs.of(
        token_ids=none, positions=none, query_starts=torch.from_numpy(starts), seq_lens=torch.from_numpy(lens),
        logits_rows=none, groups=(group,),
        host_query_starts=starts, host_seq_lens=lens,
    )  # fmt: skip
    return step, group


def long_batch(seq_lens, query_lens, kv_heads, head_dim, dtype, block_size=16):
    """A cache filled with noise, its blocks shuffled."""
    blocks = [-(-n // block_size) for n in seq_lens]
    kv_cache = torch.randn(sum(blocks) + 1, 2, kv_heads, block_size, head_dim).to(dtype)
    ids = (torch.randperm(sum(blocks)) + 1).to(torch.int32)
    table = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    for r, part in enumerate(ids.split(blocks)):
        table[r, : len(part)] = part
    return kv_cache, *batch_over(table, seq_lens, query_lens)
