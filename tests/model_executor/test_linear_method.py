"""The interfaces for formats: one of its own is built, loaded strictly, sharded and used, in every kind of layer."""

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
from tests.models.kernels import kernels
from vllm.distributed import TensorParallel
from vllm.model_executor.layers.embedding_method import EmbeddingMethod
from vllm.model_executor.layers.expert_method import ExpertMethod, ExpertShape, UnquantizedExpertMethod
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.linear_method import LinearMethod, LinearShape, QuantizationConfig, weight_spec
from vllm.model_executor.layers.sharding import REPLICATED, Part, ShardedParameter, ShardSpec
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.models.blocks import Experts
from vllm.ops.moe import expert_mlp


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


class Int8Config(QuantizationConfig):
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


class Int8Table(EmbeddingMethod):
    """int8 rows with a scale each: `rows` [vocabulary, dim], `row_scales` [vocabulary]."""

    def create_weights(
        self, layer: VocabParallelEmbedding, rows: Part, dim: int, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        spec = ShardSpec(0, (rows,))
        layer.rows = ShardedParameter.empty((rows.size, dim), spec, tp.rank, tp.world, torch.int8)
        layer.row_scales = ShardedParameter.empty((rows.size,), spec, tp.rank, tp.world, torch.float32)

    def embed(self, layer: VocabParallelEmbedding, rows: Tensor) -> Tensor:
        return layer.rows[rows].float() * layer.row_scales[rows, None]

    def project(self, layer: VocabParallelEmbedding, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(hidden, layer.rows.float() * layer.row_scales[:, None], bias)


class HalvedExperts(ExpertMethod):
    """Weights stored in bfloat16, whatever the model's dtype is."""

    def create_weights(self, layer: Experts, shape: ExpertShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        UnquantizedExpertMethod().create_weights(layer, shape, torch.bfloat16, tp)

    def process_after_load(self, layer: Experts) -> None:
        layer.was_processed = True

    def compute(self, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        assert layer.was_processed
        return expert_mlp(x, weights, experts, layer.gate_up.float(), layer.down.float(), layer.shape.act)


class Chosen(QuantizationConfig):
    """Formats for the kinds of layers that are named."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        return None

    def get_expert_method(self, layer: nn.Module, prefix: str) -> ExpertMethod | None:
        return HalvedExperts() if "experts" in self.kinds and prefix.endswith(".experts") else None

    def get_embedding_method(self, layer: nn.Module, prefix: str) -> EmbeddingMethod | None:
        return Int8Table() if "embedding" in self.kinds and prefix == "embed" else None

    def get_head_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        return Int8Rows() if "head" in self.kinds and prefix == "head" else None


SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kinds", [("embedding",), ("head",), ("embedding", "head"), ("experts",)])
def test_embedding_head_and_experts_take_a_format(kinds: tuple[str, ...], tied: bool, tmp_path: Path) -> None:
    """A tied head follows its embedding's format; a head with a format of its own has weights of its own."""
    config = hf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=tied)
    reference = save_random_hf_model(config, tmp_path)
    table, head = reference.model.embed_tokens.weight, reference.lm_head.weight
    if tied and "head" in kinds:  # which is quantized apart, from other numbers here
        head = torch.nn.Parameter(torch.randn_like(head))
        reference.lm_head.weight = head
    state = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for kind, name, weight, names in [
            ("embedding", "model.embed_tokens", table, ("rows", "row_scales")),
            ("head", "lm_head", head, ("qweight", "scales")),
        ]:
            if kind in kinds:
                q, scales = quantize(weight)
                state.pop(f"{name}.weight", None)
                state |= {f"{name}.{names[0]}": q, f"{name}.{names[1]}": scales}
                weight.copy_(q.float() * scales[:, None])
        if "experts" in kinds:
            for layer in reference.model.layers:
                for parameter in layer.mlp.experts.parameters():
                    parameter.copy_(parameter.bfloat16().float())
    save_file(state, tmp_path / "model.safetensors")
    engine = engine_config(tmp_path, max_model_len=64)
    engine.quant_config = Chosen(*kinds)
    prompt = torch.arange(3, 33)
    with kernels("reference"):
        model = load_model(engine, "cpu")
        assert model.head.plain == (not {"embedding", "head"} & set(kinds) or (kinds == ("embedding",) and not tied))
        (ours,) = PagedDriver(model).run([prompt], [7])
    with torch.inference_mode():
        assert relative_error(ours, reference(prompt[None]).logits[0]) < 1e-5


def test_head_and_embedding_formats_are_cut_by_rows() -> None:
    tp = TensorParallel(1, 2)
    options: dict[str, Any] = {"quant_config": Chosen("embedding", "head"), "padding_size": 8, "tp": tp}
    embed = VocabParallelEmbedding(30, 12, torch.float32, prefix="embed", **options)
    assert tuple(embed.rows.shape) == (16, 12)
    head = ParallelLMHead(30, 12, False, torch.float32, prefix="head", **options)
    assert (tuple(head.qweight.shape), tuple(head.scales.shape)) == ((16, 12), (16,))
