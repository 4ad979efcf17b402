"""Small things that models from outside the tree import."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vllm.compilation.decorators import support_torch_compile
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.model_executor.utils import set_weight_attrs


def test_a_mapper_renames_and_drops():
    mapper = WeightsMapper(
        {".attn.": ".mixer.", "rotary": None}, {"model.": "", "lm_head.": "head."}, {".gamma": ".weight"}
    )
    names = ["model.0.attn.gamma", "lm_head.weight", "model.rotary.x", "model.model.x", "other"]
    assert [name for name, _ in mapper.apply((name, torch.ones(1)) for name in names)] == [
        "0.mixer.weight", "head.weight", "model.x", "other"
    ]  # fmt: skip


def test_a_loader_loads_what_a_mapper_renames():
    module = nn.Linear(2, 3)
    weight = torch.randn(3, 2)
    loader = AutoWeightsLoader(module)
    assert loader.load_weights([("old.weight", weight)], mapper=WeightsMapper({}, {"old.": ""})) == {"weight"}
    assert torch.equal(module.weight, weight)


def test_attributes_are_set_once():
    weight = nn.Parameter(torch.ones(1))
    set_weight_attrs(weight, None)
    set_weight_attrs(weight, {"weight_loader": print})
    assert weight.weight_loader is print
    with pytest.raises(ValueError, match="'weight_loader' already"):
        set_weight_attrs(weight, {"weight_loader": print})


def test_a_class_that_may_be_compiled_stays_what_it_is():
    class Model(nn.Module):
        def forward(self, input_ids):
            return input_ids

    assert support_torch_compile(Model) is Model
    assert support_torch_compile(dynamic_arg_dims={"input_ids": 0})(Model) is Model
    with pytest.raises(ValueError, match="Argument positions not found"):
        support_torch_compile(dynamic_arg_dims={"positions": 0})(Model)
    with pytest.raises(TypeError, match="classes of modules"):
        support_torch_compile(3)
