"""Checkpoints that other people's libraries write: compressed-tensors, bitsandbytes, torchao."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torchao.quantization as ao
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme
from torch import Tensor, nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from transformers import TorchAoConfig

from tests.quantization.harness import assert_same_logits, is_projection, plain_model, quantize_folder
from vllm.model_executor.layers.quantization.auto_round import AutoRound
from vllm.model_executor.layers.quantization.bitsandbytes import NF4, round_to_table
from vllm.model_executor.layers.quantization.compressed_tensors import CompressedTensors


def compress(model: nn.Module, schemes: list[QuantizationScheme], folder: Path, ignore: list[str]) -> nn.Module:
    """Compress a Hugging Face model with schemes of llm-compressor, save it; the model with the same numbers."""
    groups: dict[str, Any] = {f"group_{i}": scheme for i, scheme in enumerate(schemes)}
    apply_quantization_config(
        model,
        QuantizationConfig(config_groups=groups, ignore=["lm_head", *ignore], quantization_status="initialized"),
    )
    for module in model.modules():
        found = getattr(module, "quantization_scheme", None)
        if found is not None and found.weights is not None:
            args, weight = found.weights, module.weight.data
            options = {}
            if args.strategy == "tensor_group":
                options["global_scale"] = generate_gparam(weight.min(), weight.max())
                module.weight_global_scale.data.copy_(options["global_scale"])
            if args.strategy in ("group", "tensor_group"):
                view, dims = weight.unflatten(1, (-1, args.group_size)), -1
            elif args.strategy == "block":
                rows, columns = args.block_structure
                view, dims = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)), (1, 3)
            else:
                view, dims = weight, (0, 1) if args.strategy == "tensor" else 1
            scale, zero = calculate_qparams(view.amin(dims), view.amax(dims), args, **options)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.05)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    numbers = copy.deepcopy(model)
    compressor.decompress_model(numbers)
    return numbers


PRESETS = [
    "W4A16",
    "W4A16_ASYM",
    "W8A16",
    "W8A8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "W4A8",
    "W4AFP8",
    "MXFP8",
    "MXFP6A16",
    "MXFP4",
    "NVFP4A16",
]


@pytest.mark.parametrize("preset", PRESETS)
def test_compressed_tensors(preset: str, tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path, num_hidden_layers=1, num_key_value_heads=4)
    ignore = ["re:.*k_proj"] if preset == "W4A16" else []
    check(reference, state, [preset_name_to_scheme(preset, ["Linear"])], tmp_path, ignore)


# Integers in the ways that no preset has.
INTEGERS: dict[str, dict[str, Any]] = {
    "blocks": {"num_bits": 4, "strategy": "block", "block_structure": [64, 32]},
    "blocks with zero points": {"num_bits": 4, "symmetric": False, "strategy": "block", "block_structure": [64, 32]},
    "one zero point": {"num_bits": 4, "symmetric": False, "strategy": "tensor"},
    "unpacked, one zero point": {"num_bits": 8, "symmetric": False, "strategy": "tensor"},
    "unpacked, a zero point for each output": {"num_bits": 8, "symmetric": False, "strategy": "channel"},
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_of_compressed_tensors(kind: str, tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path, num_hidden_layers=1, num_key_value_heads=4)
    layout = "int-quantized" if kind.startswith("unpacked") else "pack-quantized"
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**INTEGERS[kind]), format=layout)
    check(reference, state, [scheme], tmp_path, [])


def test_embedding_of_compressed_tensors_that_its_class_names(tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path, num_hidden_layers=1)
    schemes = [
        QuantizationScheme(targets=[target], weights=QuantizationArgs(num_bits=bits, strategy="channel"), format=layout)
        for target, bits, layout in (("Embedding", 8, "int-quantized"), ("Linear", 4, "pack-quantized"))
    ]
    check(reference, state, schemes, tmp_path, [])


def check(
    reference: Any,
    state: dict[str, Tensor],
    schemes: list[QuantizationScheme],
    folder: Path,
    ignore: list[str],
    described: dict[str, Any] | None = None,
) -> None:
    """The engine computes what the library says is stored; described: the quantization config, if not the library's."""
    numbers = compress(copy.deepcopy(reference), schemes, folder, ignore)
    if described is not None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = json.dumps({**config, "quantization_config": described})
        (folder / "config.json").write_text(text, encoding="utf-8")
    values = {name: tensor.float() for name, tensor in numbers.state_dict().items() if name in state}
    assert set(values) == set(state)
    reference.load_state_dict(values)
    # of NVFP4 the library itself makes bfloat16
    assert_same_logits(folder, reference, 2e-2 if schemes[0].weights.strategy == "tensor_group" else 1e-3)


# What AutoRound says of floats that it stores as the preset does.
AUTO_ROUND: dict[str, dict[str, Any]] = {
    "MXFP4": {"data_type": "mx_fp", "bits": 4, "group_size": 32, "act_bits": 4, "act_data_type": "mx_fp"},
    "MXFP8": {"data_type": "mx_fp", "bits": 8, "group_size": 32, "act_bits": 8, "act_data_type": "mx_fp"},
    "NVFP4A16": {"data_type": "nv_fp", "bits": 4, "group_size": 16},
    "FP8_BLOCK": {"data_type": "fp", "bits": 8, "group_size": [128, 128], "act_bits": 8, "act_group_size": 128},
    "FP8_DYNAMIC": {"data_type": "fp", "bits": 8, "group_size": -1, "act_bits": 8, "act_group_size": -1},
    "FP8": {"data_type": "fp", "bits": 8, "group_size": 0, "act_bits": 8, "act_group_size": 0},
}


@pytest.mark.parametrize("preset", AUTO_ROUND)
def test_floats_of_auto_round(preset: str, tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path, num_hidden_layers=1, num_key_value_heads=4)
    described = {"quant_method": "auto-round", "block_name_to_quantize": "model.layers", **AUTO_ROUND[preset]}
    check(reference, state, [preset_name_to_scheme(preset, ["Linear"])], tmp_path, [], described)


def test_floats_of_auto_round_that_are_not_known() -> None:
    settings = {"bits": 4, "data_type": "fp", "group_size": 32}
    with pytest.raises(ValueError, match="`data_type` is 'fp' of 4 bits, expected int, fp of 8"):
        AutoRound(settings).reader(["model.layers.0.mlp.up_proj"])


@pytest.mark.parametrize("place", ["input", "output", "q_attn"])
def test_rotations_of_activations_are_refused_by_name(place: str) -> None:
    """llm-compressor writes those of weights (SpinQuant's R1 and R2) into the weights, where nobody need know them."""

    def settings(*places: str) -> dict[str, Any]:
        apply = [TransformArgs(targets=["Linear"], location=place) for place in places]
        config = TransformConfig(config_groups={"R": TransformScheme(type="hadamard", apply=apply)})
        return {"format": "dense", "transform_config": config.model_dump(mode="json")}

    CompressedTensors(settings("weight_input", "weight_output"))
    with pytest.raises(ValueError, match=f"'R', at '{place}'"):
        CompressedTensors(settings("weight_input", place))


@pytest.mark.parametrize("skipped", [[], ["self_attn"]])  # which transformers 5 does not take for parts of names
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_in_4_bits(kind: str, nested: bool, skipped: list[str], tmp_path: Path) -> None:
    def write(module: str, weight: Tensor) -> Any:
        if not is_projection(module):
            return None
        codes, state = bnb.functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        leaves = {f"weight.{leaf}": value for leaf, value in state.as_dict(packed=True).items()}
        return {"weight": codes, **leaves}, bnb.functional.dequantize_4bit(codes, state)

    reference, state = plain_model(tmp_path)
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "llm_int8_skip_modules": skipped,
    }
    quantize_folder(tmp_path, reference, state, write, settings)
    assert_same_logits(tmp_path, reference)


def test_bitsandbytes_in_8_bits(tmp_path: Path) -> None:
    def write(module: str, weight: Tensor) -> Any:
        if not is_projection(module):
            return None
        codes, largest, _ = bnb.functional.int8_vectorwise_quant(weight)
        tensors = {"weight": codes, "SCB": largest.float(), "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * largest.float()[:, None] / 127

    reference, state = plain_model(tmp_path)
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    quantize_folder(tmp_path, reference, state, write, settings)
    assert_same_logits(tmp_path, reference)


def test_bitsandbytes_in_flight_is_the_librarys_nf4(tmp_path: Path) -> None:
    def write(module: str, weight: Tensor) -> Any:
        if is_projection(module):
            codes, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
            return {"weight": weight}, bnb.functional.dequantize_4bit(codes, state)
        return None

    reference, state = plain_model(tmp_path)
    quantize_folder(tmp_path, reference, state, write, None)
    assert_same_logits(tmp_path, reference, quantization="bitsandbytes")


def test_bitsandbytes_blocks_that_go_over_the_end_of_a_row() -> None:
    """The library's CPU kernels are wrong there (version 0.50), so by the definition: flat blocks of 64."""
    weight = torch.randn(6, 96)
    blocks = weight.flatten().view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / largest)[..., None] - torch.tensor(NF4)).abs().argmin(-1)
    assert torch.equal(round_to_table(weight, "nf4").dequantize(), (torch.tensor(NF4)[nearest] * largest).view(6, 96))


def test_fp8_in_flight(tmp_path: Path) -> None:
    def write(module: str, weight: Tensor) -> Any:
        if not is_projection(module):
            return None
        scale = weight.abs().max() / 448
        return {"weight": weight}, (weight / scale).to(torch.float8_e4m3fn).float() * scale

    reference, state = plain_model(tmp_path)
    quantize_folder(tmp_path, reference, state, write, None)
    assert_same_logits(tmp_path, reference, quantization="fp8")


AO: dict[str, Any] = {
    "int8": ao.Int8WeightOnlyConfig(version=2),
    "int8 activations": ao.Int8DynamicActivationInt8WeightConfig(version=2),
    "int4 in groups": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    "int6": ao.IntxWeightOnlyConfig(weight_dtype=torch.int6, granularity=ao.PerAxis(0)),
    "int4 with zero points": ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=ao.PerGroup(64), mapping_type=ao.MappingType.ASYMMETRIC
    ),
    "float8": ao.Float8WeightOnlyConfig(),
}


def by_torchao(weight: Tensor, kind: str) -> Any:
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model[0].weight.data = weight.clone()
    ao.quantize_(model, AO[kind])
    tensors, _ = flatten_tensor_state_dict(model.state_dict())
    numbers: Any = model[0].weight
    return {name.removeprefix("0."): tensor for name, tensor in tensors.items()}, numbers.dequantize().float()


@pytest.mark.parametrize("kind", AO)
def test_torchao(kind: str, tmp_path: Path) -> None:
    def write(module: str, weight: Tensor) -> Any:
        return by_torchao(weight, kind) if is_projection(module) and not module.endswith("v_proj") else None

    reference, state = plain_model(tmp_path)
    settings = {**TorchAoConfig(AO[kind]).to_dict(), "modules_to_not_convert": ["self_attn.v_proj"]}
    quantize_folder(tmp_path, reference, state, write, settings)
    assert_same_logits(tmp_path, reference)


def test_rules_of_torchao_for_parameters(tmp_path: Path) -> None:
    names = {"model.layers.0.self_attn.q_proj": "int8", "model.layers.1.mlp.up_proj": "int4 in groups"}
    reference, state = plain_model(tmp_path)
    rules = ao.FqnToConfig(
        {
            "model.layers.0.self_attn.q_proj.weight": AO["int8"],
            r"re:.*\.1\.mlp\.\w+\.weight": AO["int4 in groups"],
            "re:.*1.mlp.up_proj": AO["int6"],  # rules for parameters come first
        }
    )
    settings = TorchAoConfig(rules).to_dict()
    quantize_folder(
        tmp_path, reference, state, lambda name, weight: by_torchao(weight, names[name]) if name in names else None,
        settings,
    )  # fmt: skip
    assert_same_logits(tmp_path, reference)


def test_a_list_of_torchao_that_transformers_does_not_heed(tmp_path: Path) -> None:
    """Release 5 compares a list with the names of parameters, so that the end of a module's name is none of these."""
    reference, state = plain_model(tmp_path)
    settings = {**TorchAoConfig(AO["int8"]).to_dict(), "modules_to_not_convert": ["q_proj"]}
    quantize_folder(
        tmp_path, reference, state, lambda name, weight: by_torchao(weight, "int8") if is_projection(name) else None,
        settings,
    )  # fmt: skip
    assert_same_logits(tmp_path, reference)


def test_configurations_of_torchao_that_are_not_known(tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path)
    settings = TorchAoConfig(ao.Int4WeightOnlyConfig(group_size=32)).to_dict()
    quantize_folder(tmp_path, reference, state, lambda module, weight: None, settings)
    with pytest.raises(ValueError, match="'Int4WeightOnlyConfig' is not supported"):
        assert_same_logits(tmp_path, reference)
