"""LoRA kernels on the device against the reference, over sizes of real layers."""

import pytest
import torch

from tests.ops.triton.test_lora import mixed, views
from vllm.ops import lora as ops
from vllm.ops.triton import lora as kernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 3, 32, 100, 513])
@pytest.mark.parametrize(("inputs", "parts"), [(4096, ((0, 4096), (4096, 1024), (5120, 1024))), (14336, ((0, 4096),))])
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_adapters_add_what_the_reference_adds(dtype, rows, inputs, parts, rank):
    adapters = mixed(rows, 5)
    outputs = sum(size for _, size in parts)
    x = torch.randn(rows, inputs, dtype=dtype)
    a = (torch.randn(5, len(parts) * rank, inputs) / inputs**0.5).to(dtype)
    b = (torch.randn(5, outputs, rank) / rank**0.5).to(dtype)
    want = torch.zeros(rows, outputs)
    ops.add_lora.reference(want, x.float(), a.float(), b.float(), parts, views(adapters)[1])
    for view in views(adapters):
        view = type(view)(view.adapters.cuda(), tuple(type(s)(s.slot, s.rows.cuda()) for s in view.segments))
        got = torch.zeros(rows, outputs, dtype=dtype, device="cuda")
        kernels.add_lora(got, x.cuda(), a.cuda(), b.cuda(), parts, view)
        torch.testing.assert_close(got.cpu().float(), want, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])
