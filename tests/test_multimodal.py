"""What model classes register about images and other data, and how it is looked up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm.inputs import InputContext, InputRegistry
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY, MultiModalInputs, MultiModalPlugin, MultiModalRegistry
from vllm.multimodal.image import ImagePlugin


class PointPlugin(MultiModalPlugin):
    def get_data_key(self) -> str:
        return "point"


class OtherImagePlugin(ImagePlugin):
    pass


def config(architecture: str, **limits: int) -> Any:
    """A model configuration that knows its architecture and its limits only."""
    limit = SimpleNamespace(limit_mm_per_prompt=limits)
    return SimpleNamespace(architectures=(architecture,), get_multimodal_config=lambda: limit)


@pytest.fixture
def registry() -> MultiModalRegistry:
    """A registry with a class `SeesTest` that takes images (7 tokens each) and points (as many as its name is long)."""
    found = MultiModalRegistry()
    found.register_plugin(PointPlugin())

    @found.register_image_input_mapper(lambda ctx, data: MultiModalInputs(pixel_values=torch.tensor([data])))
    @found.register_max_image_tokens(7)
    @found.register_input_mapper("point", lambda ctx, data: MultiModalInputs(points=torch.tensor(data)))
    @found.register_max_multimodal_tokens("point", lambda ctx: len(ctx.model_config.architectures[0]))
    class SeesTest(nn.Module):
        pass

    class ReadsTest(nn.Module):
        pass

    ModelRegistry.register_model("SeesTest", SeesTest)
    ModelRegistry.register_model("ReadsTest", ReadsTest)
    return found


def test_data_become_the_models_arguments(registry: MultiModalRegistry) -> None:
    mapped = registry.create_input_mapper(config("SeesTest"))({"image": 5, "point": [3]})
    assert {key: value.tolist() for key, value in mapped.items()} == {  # type: ignore[union-attr]
        "pixel_values": [5],
        "points": [3],
    }


def test_tokens_of_a_prompt_are_bounded(registry: MultiModalRegistry) -> None:
    assert registry.get_mm_limits_per_prompt(config("SeesTest", image=3)) == {"image": 3, "point": 1}
    assert registry.get_max_multimodal_tokens(config("SeesTest", image=3)) == 3 * 7 + len("SeesTest")
    assert registry.get_max_multimodal_tokens(config("ReadsTest")) == 0
    with pytest.raises(ValueError, match=r"At most 1 point\(s\) may be provided in one request."):
        registry.map_input(config("SeesTest"), {"point": [1, 2]})
    with pytest.raises(ValueError, match="limit_mm_per_prompt names video; the model takes image, point"):
        registry.init_mm_limits_per_prompt(config("SeesTest", video=1))


def test_data_that_a_model_does_not_take_are_refused(registry: MultiModalRegistry) -> None:
    with pytest.raises(
        NotImplementedError, match="No input mapper for 'image' is registered for model class ReadsTest"
    ):
        registry.map_input(config("ReadsTest"), {"image": 1})
    with pytest.raises(NotImplementedError, match="Unknown modality 'smell'; known are image, audio, point"):
        registry.map_input(config("SeesTest"), {"smell": 1})


def test_one_plugin_per_modality(registry: MultiModalRegistry) -> None:
    with pytest.raises(ValueError, match="'image' already has a plugin, ImagePlugin"):
        registry.register_plugin(OtherImagePlugin())
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        registry.register_max_image_tokens(0)


def test_defaults_that_do_not_exist_yet_say_so() -> None:
    found = MultiModalRegistry()

    @found.register_image_input_mapper()
    class DefaultTest(nn.Module):
        pass

    ModelRegistry.register_model("DefaultTest", DefaultTest)
    with pytest.raises(NotImplementedError, match="'image' has no default input mapper yet; pass one"):
        found.map_input(config("DefaultTest"), {"image": 1})


def test_the_shared_registry_knows_images_and_audio() -> None:
    assert MULTIMODAL_REGISTRY.get_mm_limits_per_prompt(config("LlamaForCausalLM")) == {}


def test_inputs_of_one_shape_are_stacked() -> None:
    a, b, c = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(1, 3)
    same = MultiModalInputs.batch([MultiModalInputs(x=a), MultiModalInputs(x=b)])["x"]
    assert isinstance(same, torch.Tensor) and same.shape == (2, 2, 3)
    different = MultiModalInputs.batch([MultiModalInputs(x=a), MultiModalInputs(x=c)])["x"]
    assert isinstance(different, list) and different[0] is a and different[1] is c
    assert MultiModalInputs.batch([]) == {}
    with pytest.raises(ValueError, match="must have the same keys"):
        MultiModalInputs.batch([MultiModalInputs(x=a), MultiModalInputs(y=a)])


def test_profiling_uses_the_models_largest_input(registry: MultiModalRegistry) -> None:
    hooks = InputRegistry()
    see = config("SeesTest", image=2)
    inputs, data = hooks.dummy_data_for_profiling(see, 4, registry)
    assert (inputs["prompt_token_ids"], data) == ([0, 0, 0, 0], None)
    model_class, _ = ModelRegistry.resolve_model_cls("SeesTest")

    def dummy(ctx: InputContext, seq_len: int, mm_counts: Any, **kwargs: Any) -> tuple[list[int], dict[str, int]]:
        return [1] * seq_len, dict(mm_counts)

    hooks.register_dummy_data(dummy)(model_class)
    assert hooks.dummy_data_for_profiling(see, 2, registry) == ([1, 1], {"image": 2, "point": 1})


def test_input_hooks_change_prompts(registry: MultiModalRegistry) -> None:
    hooks = InputRegistry()
    see = config("SeesTest")
    assert hooks.create_input_processor(see)({"prompt_token_ids": [1]}) == {"prompt_token_ids": [1]}
    model_class, _ = ModelRegistry.resolve_model_cls("SeesTest")
    hooks.register_input_processor(lambda ctx, inputs: {"prompt_token_ids": [9, *inputs["prompt_token_ids"]]})(
        model_class
    )
    assert hooks.process_input(see, {"prompt_token_ids": [1]}) == {"prompt_token_ids": [9, 1]}
    assert hooks.create_input_processor(see)({"prompt_token_ids": [1]}) == {"prompt_token_ids": [9, 1]}
