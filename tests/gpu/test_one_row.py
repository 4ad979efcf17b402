"""Products of one row on a Hopper GPU, by its shared memory, against fp32."""

import pytest
import torch
import torch.nn.functional as F

from vllm.ops.quantized_weights import round_to_fp8, round_to_groups
from vllm.ops.triton.decode_linear import (
    ARGMAX,
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
from vllm.ops.triton.quantized import pack

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="cut for Hopper GPUs")
KINDS = {  # and how many inputs a block has
    "plain": (None, 64),
    "float8": (lambda w: round_to_fp8(w, "channel"), 128),
    "int4": (lambda w: round_to_groups(w, 4, 128), 256),
    "int4 with zeros": (lambda w: round_to_groups(w, 4, 128, symmetric=False), 256),
    "int4 by 512": (lambda w: round_to_groups(w, 4, 512), 256),
}
DTYPES = [torch.bfloat16, torch.float16]
CUTS = [  # warps, blocks under way, blocks: warps without any, uneven shares, more asked for than there are
    (4, 3, 1), (2, 1, 7), (4, 2, 13), (8, 2, 8), (2, 6, 5), (8, 4, 27), (16, 3, 30), (4, 4, 40),
]  # fmt: skip


def error(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


def weights(kind, outputs, inputs, dtype):
    """A weight as the kernel takes it, and the same in fp32."""
    numbers, make = torch.randn(outputs, inputs, device="cuda"), KINDS[kind][0]
    if make is None:
        return numbers.to(dtype), numbers.to(dtype).float()
    return pack(make(numbers), dtype), make(numbers).dequantize()


def check(kind, mode, tiling, outputs, inputs, dtype):
    """Without and with a bias and the norms in front and behind."""
    x = torch.randn(1, inputs, device="cuda", dtype=dtype) * inputs**-0.5
    squares, norm = torch.rand(1, 70, device="cuda") * inputs / 35, torch.rand(outputs, device="cuda", dtype=dtype)
    factor, residual = (squares.sum() / inputs + 1e-5).rsqrt(), mode == RESIDUAL
    weight, numbers = weights(kind, (2 if mode == GATED else 1) * outputs, inputs, dtype)
    bias, best = torch.randn(len(numbers), device="cuda", dtype=dtype), torch.empty(1, 256, device="cuda")
    for ends in (False, True):
        h, out = torch.randn(1, outputs, device="cuda", dtype=dtype), torch.full((1, outputs), float("nan")).cuda()
        out = out.to(dtype)
        s = Stream(
            1, outputs if residual else inputs, h.clone(), torch.empty_like(h), torch.full((256,), float("nan")).cuda(),
            best, best.int(), best, best.int(), best,
        )  # fmt: skip
        product = Product(weight, bias if ends else None, mode, tiling, "silu" if mode == GATED else None)
        folds, follows = ends and not residual, ends and residual
        rows = Folded(x, squares, 70, 1e-5) if folds else x
        run_product(product, s, rows, s.h if residual else out, norm if follows else None, pdl=ends)
        want = x.float() @ numbers.T * (factor if folds else 1.0)
        want = want + bias.float() if ends else want
        if mode == GATED:
            gate, up = want.chunk(2, 1)
            want = F.silu(gate) * up
        want = want + h.float() if residual else want
        assert error(s.h if residual else out, want) < 8e-3, ends
        if follows:
            assert error(s.scaled, want * norm.float()) < 8e-3
            assert error(s.squares[: product.tiles].sum(), want.square().sum()) < 8e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(CUTS)))
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut(kind, number, dtype):
    warps, stages, blocks = CUTS[number]
    mode, units = (STORE, GATED, RESIDUAL)[(number + (dtype == torch.float16)) % 3], 1 + number % 2
    blocks += blocks % 2 if "512" in kind else 0
    tiling = Tiling(True, units * (8 if mode == GATED else 16), 1, warps, stages=stages, registers=80, late=number % 3)
    check(kind, mode, tiling, 192, KINDS[kind][1] * blocks, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mode", "outputs", "inputs"), [(STORE, 6144, 4096), (GATED, 8192, 2304), (RESIDUAL, 2048, 2048)]
)
def test_what_is_chosen(kind, mode, outputs, inputs):
    inputs -= inputs % (512 if "512" in kind else 256)
    weight, _ = weights(kind, (2 if mode == GATED else 1) * outputs, inputs, torch.bfloat16)
    tiling = choose_product_tiling(1, weight, mode)
    assert tiling.registers
    check(kind, mode, tiling, outputs, inputs, torch.bfloat16)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("vocabulary", "width"), [(5008, 1024), (128256, 4096)])
def test_the_best_token(vocabulary, width, masked):
    weight, numbers = weights("plain", vocabulary, width, torch.bfloat16)
    weight[vocabulary - 3] = weight[7]  # of equals the first
    numbers = weight.float()
    tiling = choose_product_tiling(1, weight, ARGMAX)
    assert tiling.registers
    product = Product(weight, None, ARGMAX, tiling)
    x = (numbers[7:8] * width**-0.5).to(torch.bfloat16)
    best, sums = (torch.full((1, product.tiles), float("nan"), device="cuda") for _ in range(2))
    best_at = torch.full((1, product.tiles), -1, dtype=torch.int32, device="cuda")
    s = Stream(1, width, x, x, best, best, best_at, best, best_at, sums)
    bits, masks = torch.full((2, -(-vocabulary // 32)), -1, dtype=torch.int32, device="cuda"), None
    if masked:
        bits[1, 0] = ~(1 << 7)
        bits[1, 2:4] = 0
        masks = torch.ones(1, dtype=torch.int32, device="cuda"), bits[1:]
    logits = (x.float() @ numbers.T)[0]
    run_product(product, s, x, x, masks=masks)
    assert error(sums.sum(), logits.sum()) < 1e-2
    if masked:
        logits[7] = logits[64:128] = -float("inf")
    tile = best[0].argmax().item()
    assert best_at[0, tile].item() == logits.argmax().item() == (vocabulary - 3 if masked else 7)
    of_tiles = F.pad(logits, (0, -vocabulary % tiling.rows), value=-float("inf")).view(-1, tiling.rows).amax(1)
    torch.testing.assert_close(best[0], of_tiles, rtol=1e-3, atol=1e-3)
    allowed = logits[best_at[0].long()]
    torch.testing.assert_close(allowed, of_tiles, rtol=1e-3, atol=1e-3)
