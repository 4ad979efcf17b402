"""What readers make of single projections: damage is refused, tensors decide where settings contradict them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchao.quantization as ao
from torch import Tensor
from transformers import TorchAoConfig

from tests.quantization import writers
from tests.quantization.test_formats import FP8, GPTQ, INT8, SPARSE_24, aqlm, compressed
from vllm.config.quantization import Quantization, method_of
from vllm.model_executor.layers.quantization import base_config, format_of
from vllm.model_executor.layers.quantization.base_config import Format
from vllm.ops.quantized_weights import GroupedWeight

NAME = "model.layers.0.self_attn.q_proj"
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}
TORCHAO: dict[str, Any] = TorchAoConfig(ao.Float8WeightOnlyConfig()).to_dict()


def format_with(settings: dict[str, Any]) -> Format:
    method = method_of(settings, Path("config.json"))
    return format_of(Quantization(method, method, settings))


def read(settings: dict[str, Any], tensors: dict[str, Tensor], n: int, k: int) -> Tensor:
    reader = format_with(settings).reader([NAME])
    assert reader is not None
    weight = reader.read(tensors, n, k)
    return weight.dequantize() if isinstance(weight, GroupedWeight) else weight


# ---- patterns and lists ------------------------------------------------------------------------------------------

RULES = {"default": TORCHAO["quant_type"]["default"]}


MODEL_OPT = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["*.lm_head"]}}


def with_pattern(kind: str, pattern: str) -> dict[str, Any]:
    if kind == "gptq":
        return {**GPTQ, "dynamic": {pattern: {}}}
    if kind == "torchao":
        table = {"_type": "ModuleFqnToConfig", "_data": {"module_fqn_to_config": {f"re:{pattern}": None}}}
        return {"quant_method": "torchao", "quant_type": {"default": table}}
    return {**compressed("int-quantized", INT8), "ignore": [f"re:{pattern}"]}


@pytest.mark.parametrize("pattern", ["(", "(" * 5000 + ")" * 5000, "a{9999999999999}", "((((a{100}){100}){100}){100})"])
@pytest.mark.parametrize("kind", ["gptq", "torchao", "compressed-tensors"])
def test_patterns_that_are_wrong_or_large_are_refused(kind: str, pattern: str) -> None:
    with pytest.raises(ValueError, match="The quantization config has the pattern"):
        format_with(with_pattern(kind, pattern))


@pytest.mark.parametrize("kind", ["gptq", "torchao", "compressed-tensors"])
def test_patterns_that_take_forever_are_given_up(kind: str) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="which takes too long for 'model"):
        format_with(with_pattern(kind, "(?:.{0,40}){0,40}[!?]")).reader([NAME])
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("kind", ["gptq", "torchao", "compressed-tensors", "modelopt"])
def test_patterns_have_a_limit_of_time_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_config, "_ALL_SECONDS", 0.1)
    monkeypatch.setattr(base_config, "_MATCH_SECONDS", 100.0)
    pattern = "(?:.{0,6}){0,6}[!?]"  # a fraction of a second for a name
    found = format_with(MODEL_OPT if kind == "modelopt" else with_pattern(kind, pattern))
    with pytest.raises(ValueError, match="The patterns of the quantization config take too long"):
        for i in range(100_000):
            found.reader([f"model.layers.{i}.self_attn.q_proj"])


def test_lists_of_names_have_a_limit() -> None:
    with pytest.raises(ValueError, match="`ignored_layers` must be a list of at most"):
        format_with({**FP8, "ignored_layers": ["x"] * 200_000})


# ---- one format after the other ----------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [{}, {"sym": True}])
def test_zero_points_of_gptq_count_whatever_its_settings_say(said: dict[str, bool]) -> None:
    tensors, numbers = writers.gptq(torch.randn(64, 128) + 0.5, symmetric=False)
    settings = {name: value for name, value in GPTQ.items() if name != "sym"}
    torch.testing.assert_close(read({**settings, **said}, tensors, 64, 128), numbers)


def test_equal_zero_points_of_gptq_that_does_not_say_whether_it_is_symmetric() -> None:
    tensors, _ = writers.gptq(torch.randn(64, 128))
    tensors["qzeros"] = torch.from_numpy(writers.words(np.full((4, 64), 2), 4))
    settings = {name: value for name, value in GPTQ.items() if name != "sym"}
    found = read({**settings, "sym": False}, tensors, 64, 128)
    assert torch.equal(read(settings, tensors, 64, 128), found)
    assert not torch.equal(read({**settings, "sym": True}, tensors, 64, 128), found)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("apart", [False, True])
def test_zero_points_of_compressed_tensors_are_packed_as_its_codes(bits: int, apart: bool) -> None:
    """apart: as up to 0.10, words hold whole codes only. Zero points of 8 outputs take as many words either way."""
    n, k = 8, 64
    codes, zeros = np.random.default_rng(0).integers(0, 2**bits, (n, k)), np.arange(n)[:, None] % 2**bits

    def packed(values: np.ndarray) -> Tensor:
        per = 32 // bits
        if not apart:
            return torch.from_numpy(writers.words(np.pad(values, ((0, 0), (0, -values.shape[1] % 32))), bits))
        whole = np.pad(values, ((0, 0), (0, -values.shape[1] % per))).reshape(len(values), -1, per)
        return torch.from_numpy((whole << bits * np.arange(per)).sum(-1).astype(np.uint32).view(np.int32))

    used = -(-n // (32 // bits)) if apart else -(-n * bits // 32)
    tensors = {
        "weight_packed": packed(codes), "weight_scale": torch.ones(n, 1),
        "weight_zero_point": packed(zeros.T)[:, :used].t().contiguous(),
    }  # fmt: skip
    settings = compressed("pack-quantized", {**INT8, "num_bits": bits, "symmetric": False})
    assert torch.equal(read(settings, tensors, n, k), torch.from_numpy(codes - zeros).float())


@pytest.mark.parametrize("kind", ["int", "float"])
def test_groups_by_index_of_weights_that_are_not_packed(kind: str) -> None:
    index, scales = torch.randperm(64).int() % 4, torch.rand(8, 4)
    codes = torch.randint(-8, 8, (8, 64)).to(torch.int8 if kind == "int" else torch.float8_e4m3fn)
    args = {**INT8, "type": kind, "strategy": "group", "group_size": 16, "actorder": "group"}
    tensors = {"weight": codes, "weight_scale": scales, "weight_g_idx": index}
    found = read(compressed(f"{kind}-quantized", args), tensors, 8, 64)
    assert torch.equal(found, codes.float() * scales[:, index.long()])


def test_groups_in_an_order_that_is_missing() -> None:
    tensors, _ = writers.gptq(torch.randn(64, 128), act_order=True)
    del tensors["g_idx"]
    with pytest.raises(ValueError, match="'g_idx' is missing"):
        read({**GPTQ, "desc_act": True}, tensors, 64, 128)
    with pytest.raises(ValueError, match="'g_idx' is missing"):
        read({**GPTQ, "dynamic": {".*": {"desc_act": True}}}, tensors, 64, 128)
    packed = {"weight_packed": torch.zeros(8, 16, dtype=torch.int32), "weight_scale": torch.ones(8, 4)}
    args = {**INT8, "strategy": "group", "group_size": 16, "actorder": "group"}
    with pytest.raises(ValueError, match="'weight_g_idx' is missing"):
        read(compressed("pack-quantized", args), packed, 8, 64)


@pytest.mark.parametrize("said", [{}, {"group_size": -1}])
def test_groups_of_qqq_of_which_its_settings_do_not_speak(said: dict[str, int]) -> None:
    tensors, _ = writers.qqq(torch.randn(64, 128), group=64)
    with pytest.raises(ValueError, match="'s_group' has the shape .*, expected none for one group"):
        read({"quant_method": "qqq", "wbits": 4, **said}, tensors, 64, 128)


def test_plain_weights_with_a_scale_are_refused() -> None:
    with pytest.raises(ValueError, match="plain numbers, with which 'weight_scale_inv' does not go"):
        read(FP8, {"weight": torch.ones(8, 16), "weight_scale_inv": torch.tensor(2.0)}, 8, 16)


def test_int8_of_bitsandbytes_in_an_order_for_older_gpus_is_refused() -> None:
    tensors = {"weight": torch.ones(8, 16, dtype=torch.int8), "SCB": torch.ones(8)}
    assert read(BNB8, {**tensors, "weight_format": torch.tensor(0, dtype=torch.uint8)}, 8, 16).shape == (8, 16)
    with pytest.raises(ValueError, match="'weight_format' is not 0"):
        read(BNB8, {**tensors, "weight_format": torch.tensor(2, dtype=torch.uint8)}, 8, 16)


def four_bits(**state: Any) -> dict[str, Tensor]:
    """A weight [16, 64] of bitsandbytes whose scales are in 8 bits, too."""
    said = {"shape": [16, 64], "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.5, **state}
    return {
        "weight": torch.randint(0, 256, (512, 1), dtype=torch.uint8), "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.absmax": torch.randint(0, 256, (16,), dtype=torch.uint8), "weight.nested_absmax": torch.ones(1),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }  # fmt: skip


def test_nested_blocks_of_bitsandbytes_may_be_larger_than_all_scales() -> None:
    tensors = four_bits()
    large = {**tensors, **{name: t for name, t in four_bits(nested_blocksize=10**15).items() if "state" in name}}
    assert torch.equal(read(BNB4, large, 16, 64), read(BNB4, tensors, 16, 64))


@pytest.mark.parametrize(
    "change",
    [
        {"weight": None}, {"weight": torch.tensor(1, dtype=torch.int16)},
        {"weight.quant_state.bitsandbytes__nf4": torch.zeros(3, 3, dtype=torch.uint8)},
    ],
)  # fmt: skip
def test_damaged_weights_of_bitsandbytes_are_refused(change: dict[str, Tensor | None]) -> None:
    tensors = {name: tensor for name, tensor in {**four_bits(), **change}.items() if tensor is not None}
    with pytest.raises(ValueError, match=r"'weight' has \d bytes|is not a text"):
        read(BNB4, tensors, 16, 64)


@pytest.mark.parametrize("axis", [0, 1])
def test_hqq_without_groups(axis: int) -> None:
    n, k = 12, 20
    codes, scale = torch.randint(0, 256, (n, k)), torch.rand((1, k) if axis == 0 else (n, 1))
    tensors = {"W_q": codes.to(torch.uint8), "scale": scale, "zero": scale * 50}
    settings = {**HQQ, "quant_config": {"weight_quant_params": {"nbits": 8, "group_size": None, "axis": axis}}}
    torch.testing.assert_close(read(settings, tensors, n, k), (codes - scale * 50) * scale)


@pytest.mark.parametrize("value", [3, "x", [1]])
@pytest.mark.parametrize("field", ["quant_config", "dynamic_config"])
def test_settings_of_hqq_that_are_no_objects_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{field}` is .*, expected an object"):
        format_with({**HQQ, field: value})


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_of_torchao_for_a_weight(shape: tuple[int, ...]) -> None:
    codes, scale = torch.randn(8, 32).to(torch.float8_e4m3fn), torch.full(shape, 0.25)
    found = read(TORCHAO, {"_weight_qdata": codes, "_weight_scale": scale}, 8, 32)
    assert torch.equal(found, codes.float() * 0.25)


@pytest.mark.parametrize("kind", [{}, []])
def test_a_class_of_torchao_that_is_no_name_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="is not supported. Supported: Float8"):
        format_with({"quant_method": "torchao", "quant_type": {"default": {"_type": kind}}})


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_of_inputs_are_positive_numbers(scale: float) -> None:
    tensors = {"weight": torch.ones(8, 16).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)}
    settings = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}
    with pytest.raises(ValueError, match="'input_scale' is .*, expected a positive number"):
        read(settings, {**tensors, "input_scale": torch.tensor(scale)}, 8, 16)


STATIC = {"input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}}


@pytest.mark.parametrize("zero", [float("inf"), float("nan"), 300.0])
def test_the_zero_point_of_inputs_has_8_bits(zero: float) -> None:
    tensors = {"weight": torch.ones(8, 16, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}
    tensors |= {"input_scale": torch.tensor(1.0), "input_zero_point": torch.tensor(zero)}
    with pytest.raises(ValueError, match="'input_zero_point' is .*, expected a number of 8 bits"):
        read(compressed("int-quantized", INT8, **STATIC), tensors, 8, 16)


def test_zero_points_of_compressed_tensors_count_whatever_its_settings_say() -> None:
    codes = torch.randint(-128, 128, (8, 64), dtype=torch.int8)
    zeros, scales = torch.randint(-128, 128, (8, 1), dtype=torch.int8), torch.rand(8, 1)
    tensors = {"weight": codes, "weight_scale": scales, "weight_zero_point": zeros}
    expected = (codes.float() - zeros) * scales
    torch.testing.assert_close(read(compressed("int-quantized", INT8), tensors, 8, 64), expected)
    del tensors["weight_zero_point"]
    with pytest.raises(ValueError, match="'weight_zero_point' is missing"):
        read(compressed("int-quantized", {**INT8, "symmetric": False}), tensors, 8, 64)

    def words(values: np.ndarray) -> Tensor:
        return torch.from_numpy(writers.words(values, 8))

    packed = {
        "weight_packed": words(codes.numpy().astype(np.int64) + 128), "weight_scale": scales,
        "weight_zero_point": words(zeros.numpy().T.astype(np.int64) + 128).t().contiguous(),
    }  # fmt: skip
    torch.testing.assert_close(read(compressed("pack-quantized", INT8), packed, 8, 64), expected)
    packed["weight_zero_point"] = zeros
    torch.testing.assert_close(read(compressed("pack-quantized", INT8), packed, 8, 64), expected)
    packed |= {"weight_zero_point": zeros[:1], "weight_scale": scales[:1]}
    found = read(compressed("pack-quantized", {**INT8, "strategy": "tensor"}), packed, 8, 64)
    torch.testing.assert_close(found, (codes.float() - zeros[0]) * scales[0])


def test_the_most_exact_target_of_compressed_tensors_decides() -> None:
    """A name before a pattern, and a pattern before a class, in whatever order the groups are."""

    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {**INT8, "num_bits": bits}}

    groups = {"a": group(2, "Linear"), "b": group(4, "re:.*self_attn.*"), "c": group(8, NAME)}
    for order in ("abc", "cba", "bca", "acb"):
        settings = {**compressed("pack-quantized", None), "config_groups": {name: groups[name] for name in order}}
        found = format_with(settings)
        names = [NAME, NAME.replace("q_proj", "o_proj"), "model.layers.0.mlp.up_proj"]
        assert [found.reader([name]).args.bits for name in names] == [8, 4, 2]  # type: ignore[union-attr]


def test_weights_without_zeros_are_numbers_or_codes() -> None:
    tensors, _ = writers.sparse(torch.randn(8, 32))
    tensors["compressed"] = tensors["compressed"].to(torch.complex64)
    with pytest.raises(ValueError, match=r"'compressed' holds torch\.complex64"):
        read(compressed("dense", None, SPARSE_24), tensors, 8, 32)


def test_codebooks_are_real_numbers() -> None:
    tensors, _ = aqlm(torch.randn(4, 16))
    settings = {"quant_method": "aqlm", "in_group_size": 8, "num_codebooks": 2, "nbits_per_codebook": 8}
    with pytest.raises(ValueError, match="'codebooks' holds complex64"):
        read(settings, {**tensors, "codebooks": tensors["codebooks"].to(torch.complex64)}, 4, 16)
