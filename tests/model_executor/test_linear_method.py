"""The interface for quantization formats: a format of its own is built, loaded strictly, sharded and used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.harness import PagedDriver, engine_config, relative_error, save_random_hf_model
from vllm.distributed import TensorParallel
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.linear_method import LinearMethod, LinearShape, weight_spec
from vllm.model_executor.layers.sharding import REPLICATED, ShardedParameter, ShardSpec
from vllm.model_executor.model_loader import load_model


class Int8Rows(LinearMethod):
    """int8 weights with one scale for each output row: `qweight` [out, in], `scales` [out]."""

    def create_weights(self, layer: LinearBase, shape: LinearShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        full = (shape.out_features, shape.in_features)
        layer.qweight = ShardedParameter.empty(full, weight_spec(shape), tp.rank, tp.world, torch.int8)
        spec, world = (ShardSpec(0, shape.outputs), tp.world) if shape.split == "out" else (REPLICATED, 1)
        if shape.split == "none":
            spec = ShardSpec(0, shape.outputs)
        layer.scales = ShardedParameter.empty(full[:1], spec, tp.rank if world > 1 else 0, world, torch.float32)
        layer.was_processed = False

    def process_after_load(self, layer: LinearBase) -> None:
        layer.was_processed = True

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        assert layer.was_processed
        return F.linear(x, layer.qweight.float() * layer.scales[:, None], bias)


class Int8Config:
    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        return None if prefix.endswith("router") or not prefix else Int8Rows()


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_own_format_loads_strictly_and_computes(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 77,
        "max_position_embeddings": 64,
    }
    make = {"llama": hf.LlamaConfig, "phi3": hf.Phi3Config}[family]
    reference = save_random_hf_model(make(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    quantized, rounded = {}, {}
    for name, tensor in state.items():
        if "_proj" in name:
            q, scales = quantize(tensor)
            quantized[name.replace(".weight", ".qweight")], quantized[name.replace(".weight", ".scales")] = q, scales
            rounded[name] = q.float() * scales[:, None]
        else:
            quantized[name] = rounded[name] = tensor
    reference.load_state_dict(rounded, strict=False)
    save_file(quantized, tmp_path / "model.safetensors")
    config = engine_config(tmp_path, max_model_len=64)
    config.quant_config = Int8Config()
    prompt = torch.arange(3, 33)
    (ours,) = PagedDriver(load_model(config, "cpu")).run([prompt], [7])
    with torch.inference_mode():
        assert relative_error(ours, reference(prompt[None]).logits[0]) < 1e-5
    quantized.pop(next(name for name in quantized if name.endswith(".scales")))
    save_file(quantized, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing '.*\.scales'"):
        load_model(config, "cpu")


def test_own_format_is_cut_like_the_layer_it_is_in() -> None:
    tp = TensorParallel(1, 2)
    qkv = QKVParallelLinear(8, 4, 4, 2, bias=False, quant_config=Int8Config(), prefix="qkv", tp=tp)
    assert tuple(qkv.qweight.shape) == (16, 8)
    assert tuple(qkv.scales.shape) == (16,)
    row = RowParallelLinear(8, 6, bias=False, linear_method=Int8Rows(), tp=tp)
    assert tuple(row.qweight.shape) == (6, 4)
    assert tuple(row.scales.shape) == (6,)
