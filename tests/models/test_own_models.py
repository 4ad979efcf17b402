"""A user's own model, in each age's signature, runs and agrees with Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.own_models import NewLlamaForCausalLM, OldLlamaForCausalLM
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import Registry

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
}


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(ModelRegistry._registered)
    yield
    ModelRegistry._registered.clear()
    ModelRegistry._registered.update(before)


@pytest.mark.parametrize(
    "model_cls",
    [OldLlamaForCausalLM, NewLlamaForCausalLM, "tests.models.own_models:NewLlamaForCausalLM"],
    ids=["0.6", "0.8", "by name"],
)
@pytest.mark.usefixtures("clean_registry")
def test_own_model_agrees_with_hugging_face(model_cls: type[nn.Module] | str, tmp_path: Path) -> None:
    reference = save_random_hf_model(hf.LlamaConfig(**SIZES, architectures=["MyLlama"]), tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("LlamaForCausalLM", "MyLlama"))
    with pytest.raises(ValueError, match="MyLlama"):
        load(tmp_path)
    ModelRegistry.register_model("MyLlama", model_cls)
    prompts = [torch.randint(0, 131, (length,)) for length in (21, 30)]
    ours = PagedDriver(load(tmp_path), requests=2).run(prompts, [5, 1, 7])
    with torch.inference_mode():
        for prompt, logits in zip(prompts, ours, strict=True):
            assert relative_error(logits, reference(prompt[None]).logits[0]) < 1e-5


@pytest.mark.usefixtures("clean_registry")
def test_own_mistral_gets_the_window_of_its_config(tmp_path: Path) -> None:
    reference = save_random_hf_model(hf.MistralConfig(**SIZES, sliding_window=6), tmp_path)
    ModelRegistry.register_model("MistralForCausalLM", OldLlamaForCausalLM)
    prompt = torch.randint(0, 131, (40,))
    (ours,) = PagedDriver(load(tmp_path)).run([prompt], [9])
    with torch.inference_mode():
        assert relative_error(ours, reference(prompt[None]).logits[0]) < 1e-5


@pytest.mark.usefixtures("clean_registry")
def test_parameters_that_load_weights_leaves_out_are_named(tmp_path: Path) -> None:
    class Forgetful(NewLlamaForCausalLM):
        def load_weights(self, weights):  # type: ignore[no-untyped-def]
            return super().load_weights((n, t) for n, t in weights if n != "model.norm.weight")

    save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    ModelRegistry.register_model("LlamaForCausalLM", Forgetful)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load(tmp_path)


@pytest.mark.usefixtures("clean_registry")
def test_parameters_that_a_silent_load_weights_misses_are_named(tmp_path: Path) -> None:
    class Silent(OldLlamaForCausalLM):
        left_out = ""

        def load_weights(self, weights):  # type: ignore[no-untyped-def]
            super().load_weights((n, t) for n, t in weights if n != self.left_out)

    save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    ModelRegistry.register_model("LlamaForCausalLM", Silent)
    (logits,) = PagedDriver(load(tmp_path)).run([torch.arange(20)], [7])
    assert torch.isfinite(logits).all()
    for name, named in [
        ("model.norm.weight", r": norm\.weight"),
        ("model.layers.1.self_attn.k_proj.weight", r"layers\.1\.qkv_proj\.weight"),  # a part of it
        ("lm_head.weight", r"lm_head\.weight"),
    ]:
        Silent.left_out = name
        with pytest.raises(ValueError, match=named):
            load(tmp_path)


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 3e5}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e5}]
)
def test_own_models_find_the_attributes_of_older_configs(rope: dict[str, Any], tmp_path: Path) -> None:
    """They read `rope_theta` and `rope_scaling`, which newer configs of transformers do not have."""
    reference = save_random_hf_model(hf.LlamaConfig(**SIZES, rope_parameters=rope), tmp_path)
    ModelRegistry.register_model("LlamaForCausalLM", OldLlamaForCausalLM)
    prompt = torch.randint(0, 131, (40,))
    (ours,) = PagedDriver(load(tmp_path)).run([prompt], [9])
    with torch.inference_mode():
        assert relative_error(ours, reference(prompt[None]).logits[0]) < 1e-5


@pytest.mark.usefixtures("clean_registry")
def test_a_model_type_of_its_own_gets_a_plain_config(tmp_path: Path) -> None:
    reference = save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    document |= {"model_type": "my_own", "architectures": ["MyLlama"], "my_field": [1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(document))

    class Reading(NewLlamaForCausalLM):
        def __init__(self, *, vllm_config, prefix=""):  # type: ignore[no-untyped-def]
            config = vllm_config.model_config.hf_config
            assert (config.model_type, config.my_field, config.rope_theta) == ("my_own", [1, 2], 10000.0)
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    ModelRegistry.register_model("MyLlama", Reading)
    prompt = torch.randint(0, 131, (20,))
    (ours,) = PagedDriver(load(tmp_path)).run([prompt], [9])
    with torch.inference_mode():
        assert relative_error(ours, reference(prompt[None]).logits[0]) < 1e-5


class OneCacheForAll(NewLlamaForCausalLM):
    """All layers have the same weights, and the same layer of attention."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            layer.self_attn = self.model.layers[0].self_attn

    def load_weights(self, weights: Any) -> set[str]:
        first = "model.layers.0.self_attn."
        return super().load_weights((n, t) for n, t in weights if ".self_attn." not in n or n.startswith(first))


class LastToken(NewLlamaForCausalLM):
    def forward(self, input_ids, positions, **more):  # type: ignore[no-untyped-def]
        return super().forward(input_ids, positions, **more)[-1:]


class Pair(NewLlamaForCausalLM):
    def forward(self, input_ids, positions, **more):  # type: ignore[no-untyped-def]
        return super().forward(input_ids, positions, **more), None


class TwoTokens(NewLlamaForCausalLM):
    def forward(self, input_ids, positions, **more):  # type: ignore[no-untyped-def]
        return super().forward(input_ids[:2], positions[:2], **more)


class LastLogits(NewLlamaForCausalLM):
    def compute_logits(self, hidden_states, sampling_metadata):  # type: ignore[no-untyped-def]
        return super().compute_logits(hidden_states[-1:], sampling_metadata)


class WiderLogits(OldLlamaForCausalLM):
    def compute_logits(self, hidden_states, sampling_metadata):  # type: ignore[no-untyped-def]
        return nn.functional.pad(super().compute_logits(hidden_states, sampling_metadata), (0, 5))


class NoLogits(OldLlamaForCausalLM):
    def compute_logits(self, hidden_states, sampling_metadata):  # type: ignore[no-untyped-def]
        return None


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize(
    ("model_cls", "error", "message"),
    [
        (OneCacheForAll, RuntimeError, r"layers\.0\.self_attn\.attn' was called twice in one step\. It has one cache"),
        (TwoTokens, ValueError, r"was given keys of shape \(2, 24\), expected a row for each of the step's 9 tokens"),
        (LastToken, ValueError, r"^LastToken\.forward returned a tensor of shape \(1, 48\), expected .* all 9 tokens"),
        (Pair, ValueError, r"^Pair\.forward returned a tuple, expected"),
        (LastLogits, ValueError, r"^LastLogits\.compute_logits .* of shape \(1, 131\), expected .* shape \(9, 131\)"),
        (WiderLogits, ValueError, r"^WiderLogits\.compute_logits .* of shape \(9, 136\), expected .* shape \(9, 131\)"),
        (NoLogits, ValueError, r"^NoLogits\.compute_logits returned a NoneType, expected"),
    ],
)
def test_what_would_give_wrong_tokens_is_refused(
    model_cls: type[nn.Module], error: type[Exception], message: str, tmp_path: Path
) -> None:
    save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    ModelRegistry.register_model("LlamaForCausalLM", model_cls)
    driver = PagedDriver(load(tmp_path))
    with pytest.raises(error, match=message):
        driver.run([torch.arange(20)], [9])


@pytest.mark.usefixtures("clean_registry")
def test_dummy_weights_give_finite_logits(tmp_path: Path) -> None:
    save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    ModelRegistry.register_model("LlamaForCausalLM", OldLlamaForCausalLM)
    (ours,) = PagedDriver(load(tmp_path, load_format="dummy")).run([torch.arange(20)], [7])
    assert torch.isfinite(ours).all()
    assert ours.std() > 0


def test_registry_checks_what_it_is_given() -> None:
    registry = Registry()
    with pytest.raises(ValueError, match="<module>:<class>"):
        registry.register_model("A", "no_colon")
    with pytest.raises(TypeError, match="subclass of torch.nn.Module"):
        registry.register_model("A", int)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model_arch"):
        registry.register_model(3, nn.Linear)  # type: ignore[arg-type]
    registry.register_model("A", "no.such.module:Class")
    with pytest.raises(ValueError, match=r"no\.such\.module:Class"):
        registry.resolve("A")
    registry.register_model("B", nn.Linear)
    assert registry.resolve_model_cls(["Unknown", "B"]) == (nn.Linear, "B")
    assert registry.registered() == {"A": "no.such.module:Class", "B": "torch.nn.modules.linear:Linear"}
    copy = Registry()
    copy.restore(registry.registered())
    assert copy.resolve("B") is nn.Linear
    assert {"A", "B", "LlamaForCausalLM"} <= registry.get_supported_archs()


def test_unknown_architecture_lists_the_supported_and_the_near_ones() -> None:
    with pytest.raises(ValueError, match=r"Near: Qwen2ForCausalLM.*Supported.*GPTNeoXForCausalLM"):
        ModelRegistry.resolve(["Qwen22ForCausalLM"])
    assert ModelRegistry.is_text_generation_model("LlamaForCausalLM")
    assert not ModelRegistry.is_pooling_model("LlamaForCausalLM")
    assert not ModelRegistry.is_multimodal_model(["OPTForCausalLM"])
