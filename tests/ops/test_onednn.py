"""Linear layers through oneDNN's packed weights."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vllm.ops.cpu import onednn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
def test_packed_linear_agrees_with_the_plain_one(dtype, rows):
    weight, bias, x = torch.randn(700, 390).to(dtype), torch.randn(700).to(dtype), torch.randn(rows, 390).to(dtype)
    packed = onednn._pack(weight)
    assert packed.shape == weight.shape and packed.dtype == dtype
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    got = onednn._linear(x, packed, bias)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [10, 700])
def test_a_packed_table_can_be_looked_up_and_multiplied(rows):
    table, ids, x = torch.randn(rows, 390), torch.tensor([3, 0, 9]), torch.randn(2, 390)
    packed = onednn._pack_table(table)
    assert torch.equal(onednn._embedding(ids, packed), table[ids])
    torch.testing.assert_close(onednn._linear(x, packed), x @ table.T, rtol=1e-4, atol=1e-4)


def test_a_processor_without_bf16_products_takes_the_plain_path():
    # oneDNN reads the variable once, as it is loaded.
    program = (
        "import torch\n"
        "from vllm.ops.cpu import onednn\n"
        "weight, x = torch.randn(700, 390).bfloat16(), torch.randn(3, 390).bfloat16()\n"
        "torch.testing.assert_close(onednn._linear(x, onednn._pack(weight)), x @ weight.T)\n"
        "table = onednn._pack_table(weight)\n"
        "assert torch.equal(onednn._embedding(torch.tensor([3, 0]), table), weight[[3, 0]])\n"
    )
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", program], env=limited, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
