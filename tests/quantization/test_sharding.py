"""Quantized layers on tensor-parallel ranks: the ranks' outputs together are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.quantization import writers
from tests.quantization.test_formats import AWQ, FP8, GPTQ, QQQ, SPARSE_24, compressed
from vllm.config.quantization import Quantization
from vllm.distributed import TensorParallel
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import format_of
from vllm.model_executor.layers.quantization.method import ModelQuantization, QuantizedLinearMethod
from vllm.model_executor.models.families.llama import LLAMA

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (lambda w: writers.gptq(w), GPTQ),
    "gptq 3 bits": (lambda w: writers.gptq(w, bits=3), {**GPTQ, "bits": 3}),
    "gptq act-order": (lambda w: writers.gptq(w, act_order=True, symmetric=False), {**GPTQ, "sym": False}),
    "awq with groups that the cut divides": (lambda w: writers.awq(w, group=128), {**AWQ, "group_size": 128}),
    "qqq": (lambda w: writers.qqq(w, group=64), QQQ),
    "compressed-tensors 2:4": (writers.sparse, compressed("dense", None, SPARSE_24)),
    "fp8 per tensor": (lambda w: writers.fp8(w), FP8),
    "fp8 blocks that the cut divides": (
        lambda w: writers.fp8(w, scales="block"),
        {**FP8, "weight_block_size": [128, 128]},
    ),
}


def quantized(layer: LinearBase, tensors: dict[int | None, dict[str, Tensor]]) -> LinearBase:
    assert isinstance(layer.method, QuantizedLinearMethod)
    layer.method.load(layer, tensors, torch.device("cpu"), None)
    return layer


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_together_give_what_one_gives(name: str, world: int) -> None:
    write, settings = CASES[name]
    generator = torch.Generator().manual_seed(3)
    method = ModelQuantization(format_of(Quantization(settings["quant_method"], name, settings)), LLAMA)
    k, head, heads, kv_heads = 128, 32, 4, 2

    def make(kind: Any, tp: TensorParallel) -> LinearBase:
        if kind == "qkv":
            return QKVParallelLinear(
                k, head, heads, kv_heads, bias=False, quant_config=method, prefix="blocks.0.attn.qkv", tp=tp
            )
        return RowParallelLinear(
            k, 64, bias=False, reduce_results=False, units=heads, quant_config=method, prefix="blocks.0.attn.o", tp=tp
        )

    parts = [torch.randn(n * head, k, generator=generator) for n in (heads, kv_heads, kv_heads)]
    written = [write(part) for part in parts]
    x = torch.randn(5, k, generator=generator)
    expected = [x @ numbers.T for _, numbers in written]
    tensors: dict[int | None, Any] = {i: leaves for i, (leaves, _) in enumerate(written)}
    for rank in range(world):
        out = quantized(make("qkv", TensorParallel(rank, world)), tensors).project(x)
        kv = rank * kv_heads // world
        kv_rows = slice(kv * head, (kv + max(1, kv_heads // world)) * head)
        q_rows = slice(rank * heads // world * head, (rank + 1) * heads // world * head)
        wanted = torch.cat([expected[0][:, q_rows], expected[1][:, kv_rows], expected[2][:, kv_rows]], 1)
        torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    weight = torch.randn(64, k, generator=generator)
    leaves, numbers = write(weight)
    total = sum(
        quantized(make("o", TensorParallel(rank, world)), {None: leaves}).project(x.chunk(world, 1)[rank])
        for rank in range(world)
    )
    torch.testing.assert_close(total, x @ numbers.T, atol=1e-3, rtol=1e-3)
