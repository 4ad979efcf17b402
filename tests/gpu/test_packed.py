"""Products with packed weights on a GPU, where inline assembly makes numbers of the codes, against fp32."""

import pytest
import torch
import torch.nn.functional as F

from vllm.ops import moe
from vllm.ops.quantized_weights import InputQuant, round_to_fp8, round_to_groups
from vllm.ops.triton import moe as moe_kernels
from vllm.ops.triton.decode_experts import ChosenExperts, choose_by_logits, fall, rise
from vllm.ops.triton.decode_linear import (
    GATED,
    RESIDUAL,
    STORE,
    Folded,
    Product,
    Stream,
    choose_product_tiling,
    run_product,
)
from vllm.ops.triton.decode_parts import Tiling
from vllm.ops.triton.float8 import Float8Weight
from vllm.ops.triton.packed_experts import pack_experts
from vllm.ops.triton.packed_linear import PackedWords, WidePacked, dequantize, wide_packed_product
from vllm.ops.triton.packed_many import ManyTiling, many_rows_product, takes
from vllm.ops.triton.quantized import gated_rows, multiply, pack

KINDS = {
    "int4": lambda w: round_to_groups(w, 4, 128),
    "int4 with zeros": lambda w: round_to_groups(w, 4, 128, symmetric=False),
    "int4 by 32": lambda w: round_to_groups(w, 4, 32, symmetric=False),
    "int8": lambda w: round_to_groups(w, 8, 128, symmetric=False),
    "fp8": lambda w: round_to_fp8(w, "channel"),
    "int4 by 256": lambda w: round_to_groups(w, 4, 256),
    "float8": lambda w: round_to_fp8(w, "channel"),
}
PACKED = [kind for kind in KINDS if kind not in ("int4 by 256", "float8")]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}


def error(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", PACKED)
def test_products_match_the_numbers(kind, dtype):
    weight = KINDS[kind](torch.randn(1500, 1120, device="cuda"))
    numbers, packed = weight.dequantize(), PackedWords(weight)
    assert torch.equal(dequantize(packed, dtype), numbers.to(dtype)) or kind not in ("int4", "fp8")
    assert error(dequantize(packed, dtype), numbers) < TOLERANCE[dtype]
    for rows in (1, 3, 20, 64, 65, 200, 300):
        x = torch.randn(rows, 1120, device="cuda", dtype=dtype)
        assert error(multiply(x, packed), x.float() @ numbers.T) < TOLERANCE[dtype], rows


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(
    ("rows", "tiling"),
    [
        (1, Tiling(True, 32, 8, 4, 1, 3, ahead=4)),
        (20, Tiling(True, 32, 32, 4, 2, 2, ahead=4)),
        (1, Tiling(False, 32, 16, 2, 4, 3, ahead=2)),
        (1, Tiling(False, 64, 16, 2, 4, 4, ahead=2)),
        (33, Tiling(False, 64, 64, 4, 1, 4, ahead=2)),
        (33, Tiling(False, 64, 64, 2, 4, 4)),
        (20, Tiling(False, 32, 32, 1, 2, 3)),
    ],
    ids=str,
)
def test_what_follows_a_product(kind, rows, tiling):
    check_what_follows(PackedWords, kind, rows, torch.bfloat16, lambda *_: tiling)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="cut for Hopper GPUs")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 9, 32, 50])
@pytest.mark.parametrize("kind", ["int4", "int4 with zeros", "int4 by 256", "float8"])
def test_what_follows_a_product_on_hopper(kind, rows, dtype):
    def choose(weight, mode):
        tiling = choose_product_tiling(rows, weight, mode)
        assert bool(tiling.registers) == (rows == 1)
        assert rows == 1 or tiling.whole == (kind != "int4 with zeros")
        return tiling

    check_what_follows(lambda w: pack(w, dtype), kind, rows, dtype, choose)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="cut for Hopper GPUs")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [2, 32, 50])
def test_what_follows_a_product_with_plain_weights_on_hopper(rows, dtype):
    def choose(_, mode):
        split, late = (4 if rows == 2 else 5, 2) if mode == RESIDUAL else (1, {2: 0, 32: 1, 50: 3}[rows])
        outputs = 32 if mode == GATED and rows != 32 else 64
        return Tiling(False, outputs, 128, 4, split, stages=2, whole=True, late=late)

    check_what_follows(lambda w: w.dequantize().to(dtype), "float8", rows, dtype, choose)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="cut for Hopper GPUs")
@pytest.mark.parametrize("tiling", [(64, 4, 2, 3), (64, 4, 4, 2), (128, 8, 4, 2), (128, 8, 2, 3)], ids=str)
@pytest.mark.parametrize("kind", ["int4", "int4 by 256", "float8"])
def test_shares_of_several_rows_on_hopper(kind, tiling):
    outputs, warps, split, stages = tiling

    def choose(weight, mode):
        return Tiling(False, outputs, 32, warps, 1 if mode == GATED else split, stages, whole=True)

    check_what_follows(lambda w: pack(w, torch.bfloat16), kind, 20, torch.bfloat16, choose)


def check_what_follows(packs, kind, rows, dtype, choose):
    """Gate and up, then down with the residual stream and the next norm, against fp32. choose: (weight, mode) ->
    tiling.
    """
    hidden, inner = 1024, 1536
    up = KINDS[kind](torch.randn(2 * inner, hidden, device="cuda") * hidden**-0.5)
    down = KINDS[kind](torch.randn(hidden, inner, device="cuda") * inner**-0.5)
    bias = torch.randn(2 * inner, device="cuda", dtype=dtype)
    x, h = (torch.randn(rows, hidden, device="cuda", dtype=dtype) for _ in range(2))
    norm, mlp = torch.rand(hidden, device="cuda", dtype=dtype), torch.full((rows, inner), float("nan")).cuda().to(dtype)
    best = torch.empty(rows, 256, device="cuda")
    s = Stream(
        rows, hidden, h.clone(), torch.empty_like(h), torch.empty(rows * 256, device="cuda"),
        torch.full((4 * 64 * 2 * inner,), float("nan"), device="cuda"),
        torch.zeros(256, dtype=torch.int32, device="cuda"), best, best.int(), best,
    )  # fmt: skip
    squares = torch.rand(rows, 70, device="cuda") * hidden / 35
    folded = Folded(x, squares, 70, 1e-5)
    factor = (squares.sum(1, keepdim=True) / hidden + 1e-5).rsqrt()
    for pdl in (False, True):
        s.h.copy_(h)
        first, second = packs(up), packs(down)
        run_product(Product(first, bias, GATED, choose(first, GATED), "silu"), s, folded, mlp, pdl=pdl)
        gate, part = (x.float() @ up.dequantize().T * factor + bias.float()).chunk(2, 1)
        assert error(mlp, F.silu(gate) * part) < 8e-3
        back = Product(second, None, RESIDUAL, choose(second, RESIDUAL))
        run_product(back, s, mlp, s.h, norm, pdl)
        want = h.float() + mlp.float() @ down.dequantize().T
        assert error(s.h, want) < 4e-3
        assert error(s.scaled, want * norm.float()) < 6e-3
        squared = s.squares[: rows * back.tiles].view(rows, -1).sum(1)
        assert error(squared, want.square().sum(1)) < 6e-3
        qkv = Product(second, None, STORE, choose(second, STORE))
        out = torch.full((rows, hidden), float("nan")).cuda().to(dtype)
        run_product(qkv, s, mlp, out, pdl=pdl)
        assert error(out, mlp.float() @ down.dequantize().T) < 4e-3
    assert not s.arrived.any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["int4", "int4 by 32", "int8"])
def test_products_of_many_rows(kind, dtype):
    weight = KINDS[kind](torch.randn(1536, 2048, device="cuda") + 0.2)
    packed, numbers = PackedWords(weight), weight.dequantize()
    for rows, t in (
        (65, WidePacked(128, 128, 32, 8, 1, 3)), (200, WidePacked(128, 128, 16, 4, 4, 2)),
        (256, WidePacked(256, 128, 32, 8, 2, 2)), (300, WidePacked(128, 64, 64, 4, 1, 2)),
    ):  # fmt: skip
        x = torch.randn(rows, 2048, device="cuda", dtype=dtype)
        assert error(wide_packed_product(x, packed, None, dtype, t), x.float() @ numbers.T) < TOLERANCE[dtype], t


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="cut for Hopper GPUs")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_of_many_rows_on_hopper(dtype):
    weight = round_to_groups(torch.randn(1536, 1024, device="cuda"), 4, 128)
    numbers, packed = weight.dequantize(), PackedWords(weight)
    assert takes(packed, dtype)
    arrived = torch.zeros(64, dtype=torch.int32, device="cuda")
    for tiling in (
        None, ManyTiling(256, 128, 8), ManyTiling(256, 64, 4), ManyTiling(128, 64, 4), ManyTiling(128, 128, 8, split=2),
        ManyTiling(128, 64, 4, split=4),
    ):  # fmt: skip
        for rows in (1, 65, 200, 256, 300):
            x = torch.randn(rows, 1024, device="cuda", dtype=dtype)
            found = many_rows_product(x, packed, dtype, tiling, arrived=arrived, pdl=rows > 200)
            assert error(found, x.float() @ numbers.T) < TOLERANCE[dtype], (rows, tiling)
    assert not arrived.any()


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="cut for Hopper GPUs")
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gated_products_of_many_rows_on_hopper(dtype, act):
    weight = round_to_groups(torch.randn(1536, 1024, device="cuda") / 32, 4, 128)
    numbers, packed = weight.dequantize(), PackedWords(weight)
    for rows in (65, 200, 256):
        x = torch.randn(rows, 1024, device="cuda", dtype=dtype)
        out = torch.full((rows, 768), float("nan")).cuda().to(dtype)
        assert gated_rows(x, packed, act, out, pdl=rows > 200)
        gate, up = (x.float() @ numbers.T).chunk(2, 1)
        want = (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up
        assert error(out, want) < 2 * TOLERANCE[dtype], rows


def float8(kind, n, k, inputs=None):
    return round_to_fp8(torch.randn(n, k, device="cuda") * torch.rand(n, 1, device="cuda"), kind, inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_float8_products(kind, dtype):
    weight = float8(kind, 1536, 1152, InputQuant("fp8"))
    numbers, packed = weight.dequantize(), pack(weight, dtype)
    assert type(packed) is Float8Weight
    for rows in (1, 3, 20, 64):
        x = torch.randn(rows, 1152, device="cuda", dtype=dtype)
        assert error(multiply(x, packed), x.float() @ numbers.T) < TOLERANCE[dtype], rows
    for rows in (65, 200, 1000):
        x = torch.randn(rows, 1152, device="cuda", dtype=dtype)
        x *= 0.1 + torch.rand(rows, 1, device="cuda", dtype=dtype)
        scale = x.float().abs().amax(1, keepdim=True) / 448
        rounded = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
        assert error(multiply(x, packed), rounded @ numbers.T) < 8e-3, rows


@pytest.mark.parametrize("rows", [1, 33])
def test_what_follows_a_float8_product(rows):
    hidden, inner, dtype = 1024, 1536, torch.bfloat16
    up, down = float8("channel", 2 * inner, hidden), float8("channel", hidden, inner)
    x, h = (torch.randn(rows, hidden, device="cuda", dtype=dtype) * 0.05 for _ in range(2))
    norm, mlp = torch.rand(hidden, device="cuda", dtype=dtype), torch.empty(rows, inner, device="cuda", dtype=dtype)
    best = torch.empty(rows, 2048, device="cuda")
    s = Stream(
        rows, hidden, h.clone(), torch.empty_like(h), torch.empty(rows * 2048, device="cuda"),
        torch.full((8 * 64 * 2 * inner,), float("nan"), device="cuda"),
        torch.zeros(2048, dtype=torch.int32, device="cuda"), best, best.int(), best,
    )  # fmt: skip
    for pdl in (False, True):
        s.h.copy_(h)
        first, second = pack(up, dtype), pack(down, dtype)
        tiling = choose_product_tiling(rows, first, GATED)
        run_product(Product(first, None, GATED, tiling, "silu"), s, x, mlp, pdl=pdl)
        gate, part = (x.float() @ up.dequantize().T).chunk(2, 1)
        assert error(mlp, F.silu(gate) * part) < 8e-3
        run_product(
            Product(second, None, RESIDUAL, choose_product_tiling(rows, second, RESIDUAL)), s, mlp, s.h, norm, pdl
        )
        assert error(s.h, h.float() + mlp.float() @ down.dequantize().T) < 4e-3
    assert not s.arrived.any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", PACKED)
def test_experts(kind, dtype):
    hidden, inner, experts, top_k = 512, 1280, 6, 2
    up = [KINDS[kind](torch.randn(2 * inner, hidden, device="cuda") * hidden**-0.5) for _ in range(experts)]
    down = [KINDS[kind](torch.randn(hidden, inner, device="cuda") * inner**-0.5) for _ in range(experts)]
    packed = [pack_experts(weights, up[0].device, dtype) for weights in (up, down)]
    numbers = [torch.stack([w.dequantize() for w in weights]) for weights in (up, down)]
    for tokens in (1, 3, 50, 200, 300, 1500):
        x, logits = (torch.randn(tokens, size, device="cuda", dtype=dtype) for size in (hidden, experts))
        weights, chosen = moe.route(logits, top_k, True)
        want = moe.expert_mlp.reference(x.float(), weights, chosen, *numbers, "silu")
        y, weights, home = moe_kernels.routed_mlp(x, logits, *packed, top_k, True, "silu", pdl=True)
        assert error(moe_kernels.sum_chosen(y, weights, home), want) < 3 * TOLERANCE[dtype], tokens
        assert error(moe.expert_mlp(x, weights, chosen, *packed, "silu"), want) < 3 * TOLERANCE[dtype], tokens
        if tokens > 1:  # a choice that is another rank's
            chosen[::3, 0], weights[::3, 0] = experts, 0.0
            want = moe.expert_mlp.reference(x.float(), weights, chosen % experts, *numbers, "silu")
            assert error(moe.expert_mlp(x, weights, chosen, *packed, "silu"), want) < 3 * TOLERANCE[dtype], tokens
        if tokens == 1:
            none = torch.zeros(1, device="cuda")
            s = Stream(1, hidden, x.clone(), x.clone(), torch.zeros(1, hidden, device="cuda"), *(none,) * 5)
            room = ChosenExperts.of(experts, top_k, top_k * inner, dtype, x.device, packed[1])
            choose_by_logits(logits, room, True, True)
            rise(x, packed[0], None, "silu", room, True)
            norm = torch.rand(hidden, device="cuda", dtype=dtype)
            parts = fall(packed[1], None, room, s, next_weight=norm, pdl=True)
            assert error(s.h, x.float() + want) < 3 * TOLERANCE[dtype]
            assert error(s.scaled, s.h.float() * norm.float()) < TOLERANCE[dtype]
            assert error(s.squares[0, :parts].sum(), s.h.float().square().sum()) < 1e-4
            out = torch.empty_like(x)
            fall(packed[1], None, room, s, out, pdl=True)
            assert error(out, want) < 3 * TOLERANCE[dtype]
