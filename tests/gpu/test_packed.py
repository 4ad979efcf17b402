"""Products with packed weights on a GPU, where inline assembly makes numbers of the codes, against fp32."""

import pytest
import torch
import torch.nn.functional as F

from vllm.ops.quantized_weights import round_to_fp8, round_to_groups
from vllm.ops.triton.decode_linear import GATED, RESIDUAL, Product, Stream, run_product
from vllm.ops.triton.decode_parts import Tiling
from vllm.ops.triton.packed_linear import PackedWords, dequantize
from vllm.ops.triton.quantized import multiply

KINDS = {
    "int4": lambda w: round_to_groups(w, 4, 128),
    "int4 by 32": lambda w: round_to_groups(w, 4, 32, symmetric=False),
    "int8": lambda w: round_to_groups(w, 8, 128, symmetric=False),
    "fp8": lambda w: round_to_fp8(w, "channel"),
}
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}


def error(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_products_match_the_numbers(kind, dtype):
    weight = KINDS[kind](torch.randn(1500, 1120, device="cuda"))
    numbers, packed = weight.dequantize(), PackedWords(weight)
    assert torch.equal(dequantize(packed, dtype), numbers.to(dtype)) or kind == "int4 by 32" or kind == "int8"
    assert error(dequantize(packed, dtype), numbers) < TOLERANCE[dtype]
    for rows in (1, 3, 20, 64, 65, 200, 300):
        x = torch.randn(rows, 1120, device="cuda", dtype=dtype)
        assert error(multiply(x, packed), x.float() @ numbers.T) < TOLERANCE[dtype], rows


@pytest.mark.parametrize("kind", KINDS)
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
    hidden, inner, dtype = 1024, 1536, torch.bfloat16
    up = KINDS[kind](torch.randn(2 * inner, hidden, device="cuda") * hidden**-0.5)
    down = KINDS[kind](torch.randn(hidden, inner, device="cuda") * inner**-0.5)
    x, h = (torch.randn(rows, hidden, device="cuda", dtype=dtype) for _ in range(2))
    norm, mlp = torch.rand(hidden, device="cuda", dtype=dtype), torch.full((rows, inner), float("nan")).cuda().to(dtype)
    best = torch.empty(rows, 256, device="cuda")
    s = Stream(
        rows, hidden, h.clone(), torch.empty_like(h), torch.empty(rows * 256, device="cuda"),
        torch.full((4 * 64 * 2 * inner,), float("nan"), device="cuda"),
        torch.zeros(256, dtype=torch.int32, device="cuda"), best, best.int(), best,
    )  # fmt: skip
    run_product(Product(PackedWords(up), None, GATED, tiling, "silu"), s, x, mlp)
    gate, part = (x.float() @ up.dequantize().T).chunk(2, 1)
    want = F.silu(gate) * part
    assert error(mlp, want) < 8e-3
    back = Product(PackedWords(down), None, RESIDUAL, tiling)
    run_product(back, s, mlp, s.h, norm)
    want = h.float() + mlp.float() @ down.dequantize().T
    assert error(s.h, want) < 4e-3
    assert error(s.scaled, want * norm.float()) < 6e-3
    squares = s.squares[: rows * back.tiles].view(rows, -1).sum(1)
    assert error(squares, want.square().sum(1)) < 6e-3
    assert not s.arrived.any()
