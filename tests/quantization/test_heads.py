"""Output heads, whatever a checkpoint calls them: plain unless the checkpoint says otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.harness import PagedDriver, engine_config, relative_error
from tests.models.test_against_references import CASES as REFERENCES
from tests.models.test_against_references import save_config
from tests.quantization import writers
from tests.quantization.harness import PROMPT
from vllm.config.quantization import IN_FLIGHT
from vllm.model_executor.layers.embedding_method import UnquantizedEmbeddingMethod
from vllm.model_executor.layers.quantization.method import QuantizedLinearMethod
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.models.families.remote import EXAONE
from vllm.model_executor.models.registry import ModelRegistry

# case -> the tensors that its embedding and its head are in
HEADS = {
    "xverse": ("model.embed_tokens.weight", "lm_head.weight"),
    "internlm2": ("model.tok_embeddings.weight", "output.weight"),
    "glm4-9b": ("transformer.embedding.word_embeddings.weight", "transformer.output_layer.weight"),
    "exaone-tied": ("transformer.wte.weight", "transformer.wte.weight"),
    "sea-lion-7b": ("transformer.wte.weight", "transformer.wte.weight"),
    "minicpm": ("model.embed_tokens.weight", "model.embed_tokens.weight"),
}
# a family whose head has no name at all
NAMELESS = replace(EXAONE, names=tuple(name for name in EXAONE.names if not name.target.startswith("head.")))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def load(folder: Path, **config: Any) -> Any:
    return load_model(engine_config(folder, max_model_len=64, **config), "cpu")


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("name", IN_FLIGHT)
def test_head_and_embedding_stay_plain_where_weights_are_quantized_in_flight(
    name: str, case: str, tmp_path: Path
) -> None:
    weights = save_config(*REFERENCES[case], tmp_path)
    table, head = (weights[tensor] for tensor in HEADS[case])
    model = load(tmp_path, quantization=name)
    assert_plain_ends(model, table, head)
    assert is_quantized(model) == (name != "experts_int8")


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_a_tied_head_that_no_checkpoint_names_stays_plain(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not NAMELESS.checkpoint_names("head.weight")
    monkeypatch.setattr(
        ModelRegistry, "_families", {**ModelRegistry._families, "OwnForCausalLM": f"{__name__}:NAMELESS"}
    )
    _, kind, reference, config = REFERENCES["exaone-tied"]
    weights = save_config("OwnForCausalLM", kind, reference, config, tmp_path)
    table = weights["transformer.wte.weight"]
    model = load(tmp_path, quantization=name)
    assert_plain_ends(model, table, table)
    assert is_quantized(model) == (name != "experts_int8")


def is_quantized(model: Any) -> bool:
    return any(isinstance(getattr(module, "method", None), QuantizedLinearMethod) for module in model.modules())


def assert_plain_ends(model: Any, table: Tensor, head: Tensor) -> None:
    """The embedding and the head compute with these, and are one where these are."""
    assert type(model.embed.method) is type(model.head.method) is UnquantizedEmbeddingMethod
    assert model.head.tied == (table is head)
    x = torch.randn(3, head.shape[1])
    torch.testing.assert_close(model.head.project(x)[:, : len(head)], x @ head.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.embed(torch.arange(len(table))), table)


def internlm2(folder: Path, settings: dict[str, Any], stored: Any) -> Tensor:
    """An InternLM2 whose head alone is quantized, by `stored`; the logits of its numbers."""
    architecture, kind, reference, config = REFERENCES["internlm2"]
    config = {**config, "vocab_size": 136, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    weights = save_config(architecture, kind, reference, config, folder)
    tensors, numbers = stored(weights["output.weight"])
    file = folder / "model.safetensors"
    plain = {name: tensor for name, tensor in load_file(file).items() if name != "output.weight"}
    save_file({**plain, **{f"output.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}}, file)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "quantization_config": settings}))
    return reference.logits(config, {**weights, "output.weight": numbers}, PROMPT)


def assert_logits(model: Any, expected: Tensor) -> None:
    (ours,) = PagedDriver(model).run([PROMPT], [7])
    assert relative_error(ours, expected) < 1e-3
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def by_name(layout: str, target: str) -> dict[str, Any]:
    groups = {"group_0": {"targets": [target], "weights": FLOATS}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": []}


DECLARED: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": ({**GPTQ, "lm_head": True}, writers.gptq),
    "gptq with a rule": ({**GPTQ, "lm_head": True, "dynamic": {"output$": {"group_size": 64}}},
                         lambda weight: writers.gptq(weight, group=64)),
    "awq": ({**AWQ, "lm_head": True}, writers.awq),
    "auto-round": ({"quant_method": "auto-round", "bits": 16, "extra_config": {"output": {"bits": 4, "group_size": 32}},
                    "packing_format": "auto_round:auto_gptq"}, writers.gptq),
    "compressed-tensors": (by_name("float-quantized", "re:^output$"),
                           lambda weight: writers.fp8(weight, scales="channel")),
    "modelopt": ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
                 lambda weight: writers.fp8(weight)),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLARED)
def test_a_checkpoint_that_says_so_has_a_quantized_head(name: str, tmp_path: Path) -> None:
    settings, stored = DECLARED[name]
    expected = internlm2(tmp_path, settings, stored)
    model = load(tmp_path)
    assert isinstance(model.head.method.method, QuantizedLinearMethod)
    assert_logits(model, expected)


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        (GPTQ, writers.gptq),
        (FP8, writers.fp8),
        (by_name("float-quantized", "Linear"), lambda weight: writers.fp8(weight, scales="channel")),
    ],
)
def test_a_head_that_is_quantized_without_a_word_is_read_as_it_is_stored(
    settings: dict[str, Any], stored: Any, tmp_path: Path
) -> None:
    expected = internlm2(tmp_path, settings, stored)
    model = load(tmp_path)
    assert type(model.head.method) is UnquantizedEmbeddingMethod
    assert_logits(model, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {**GPTQ, "lm_head": True, "dynamic": {"-:output$": {}}},
        {**AWQ, "lm_head": True, "modules_to_not_convert": ["output"]},
        {**by_name("float-quantized", "re:output"), "ignore": ["output"]},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["out*"]}},
        {**FP8, "ignored_layers": ["output"]},
        GPTQ,
        FP8,
    ],
)
def test_lists_leave_a_head_plain_by_the_checkpoints_name_of_it(settings: dict[str, Any], tmp_path: Path) -> None:
    expected = internlm2(tmp_path, settings, lambda weight: ({"weight": weight}, weight))
    model = load(tmp_path)
    assert type(model.head.method) is UnquantizedEmbeddingMethod
    assert_logits(model, expected)
