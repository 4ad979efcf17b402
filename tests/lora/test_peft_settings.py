"""Every way in which peft writes an adapter, against its own forward pass in fp32; what differs is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from tests.lora.test_families import AdaptedDriver, base_of, read, with_adapters
from tests.models.harness import load, relative_error

HEADS = r".*(embed_tokens|wte|lm_head)$"
TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "scales by layer": ("llama", {"alpha_pattern": {"q_proj": 40, "layers.1.mlp.up_proj": 1}, "use_rslora": True}),
    "ranks by layer": (
        "llama", {"rank_pattern": {"layers.0.self_attn.q_proj": 3, "q_proj": 4, "^model.layers.1.mlp.up_proj": 16}}
    ),
    "ranks by patterns of whole names": (
        "llama", {"rank_pattern": {r"^model\.layers\.0\.self_attn\.q_proj$": 3, r".*\.up_proj$": 4, "down_proj": 5}}
    ),
    "ranks by joined layer": ("phi3", {"rank_pattern": {"qkv_proj": 5}, "alpha_pattern": {"gate_up_proj": 2}}),
    "a pattern of targets": ("llama", {"target_modules": r".*layers\.0\..*(q|v)_proj"}),
    "some layers": ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "all but some": ("llama", {"exclude_modules": ["q_proj"]}),
    "transposed weights": ("gpt2", {"use_rslora": True}),
    "embedding and head": ("llama", {"target_modules": HEADS}),
    "embedding and head, tied": ("llama-tied-biased", {"target_modules": HEADS, "ensure_weight_tying": True}),
    "embedding, tied": ("gpt2", {"target_modules": ["wte", "c_attn"]}),
    "a head with biases": ("gptj", {"target_modules": ["wte", "lm_head"]}),
    "gaussian": ("llama", {"init_lora_weights": "gaussian"}),
    "orthogonal": ("llama", {"init_lora_weights": "orthogonal"}),
    "of the least components": ("llama", {"init_lora_weights": "mica"}),
    "dropped inputs": ("llama", {"lora_dropout": 0.5}),
    "activations held in few dimensions": ("llama", {"velora_config": {"num_groups": 4}}),
    "sampled in training": ("llama", {"monteclora_config": peft.tuners.lora.config.MontecloraConfig()}),
    "a weight as a parameter": ("llama", {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]}),
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, r"DoRA"),
    "KaSA": ({"kasa_config": peft.tuners.lora.config.KasaConfig()}, "KaSA"),
    "block-diagonal": (
        {"target_modules": ["q_proj"], "use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 2}}, "BD-LoRA"
    ),
    "at an invocation": ({"alora_invocation_tokens": [3, 4]}, "aLoRA"),
    "retrained head": ({"modules_to_save": ["lm_head"]}, "retrained modules"),
    "retrained tokens": ({"trainable_token_indices": [3, 5]}, "retrained tokens"),
    "biases": ({"bias": "all"}, "biases"),
    "biases of adapted layers": ({"bias": "lora_only"}, "biases"),
    "biases of adapters": ({"lora_bias": True}, "biases"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "changes the weights of the base model"),
    "PiSSA, quickly": ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the base model"),
    "OLoRA": ({"init_lora_weights": "olora"}, "changes the weights of the base model"),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, "changes the weights of the base model"),
    "replicated layers": ({"layer_replication": [[0, 1], [0, 2]]}, "replicated layers"),
}  # fmt: skip


def written(case: str, folder: Path, settings: dict[str, Any]) -> Any:
    """peft's model of a tiny base in folder/base with a random adapter, which is saved in folder/adapter."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 8, "lora_alpha": 12, "target_modules": "all-linear", **settings})
    adapted = peft.get_peft_model(base_of(case, folder), config).eval()
    randomize(adapted)
    adapted.save_pretrained(folder / "adapter")
    return adapted


def randomize(adapted: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)


def compare(adapted: Any, base: Path, adapter: Path) -> None:
    """Our model of `base` with the adapter computes what `adapted` does."""
    prompt = torch.randint(0, 120, (17,))
    with torch.inference_mode():
        wanted = adapted(prompt[None]).logits[0]
        with adapted.disable_adapter():
            plain = adapted(prompt[None]).logits[0]
    (found,) = AdaptedDriver(with_adapters(load(base), [read(base, adapter)]), [0]).run([prompt], [5, 7])
    assert relative_error(found, wanted) < 1e-5
    assert relative_error(wanted, plain) > 0.01, "the adapter changes hardly anything"


@pytest.mark.parametrize("what", TAKEN)
def test_an_adapter_computes_what_peft_computes(what: str, tmp_path: Path) -> None:
    case, settings = TAKEN[what]
    compare(written(case, tmp_path, settings), tmp_path / "base", tmp_path / "adapter")


def test_names_of_a_state_dict_are_those_of_a_saved_adapter(tmp_path: Path) -> None:
    """Written by a trainer's own save: the adapter's name stands in the names, of embeddings at their end."""
    adapted = written("llama", tmp_path, {"target_modules": r".*(embed_tokens|lm_head|q_proj)$"})
    state = {name: tensor.contiguous() for name, tensor in adapted.state_dict().items() if "lora_" in name}
    assert any(name.endswith("lora_embedding_A.default") for name in state)
    save_file(state, tmp_path / "adapter" / "adapter_model.safetensors")
    compare(adapted, tmp_path / "base", tmp_path / "adapter")


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_computed_otherwise_is_refused_by_name(what: str, tmp_path: Path) -> None:
    settings, message = REFUSED[what]
    written("llama", tmp_path, settings)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "base", tmp_path / "adapter")


def test_an_adapter_that_changed_its_base_is_taken_when_it_was_converted(tmp_path: Path) -> None:
    """peft's way out for PiSSA: the difference to the first state, which is of twice the rank."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights="pissa")
    adapted = peft.get_peft_model(base_of("llama", tmp_path), config).eval()
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(tmp_path / "first")
    adapted.peft_config["default"].init_lora_weights = "pissa"
    randomize(adapted)
    adapted.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=tmp_path / "first")
    prompt = torch.randint(0, 120, (17,))
    with torch.inference_mode():
        wanted = adapted(prompt[None]).logits[0]
    model = with_adapters(load(tmp_path / "base"), [read(tmp_path / "base", tmp_path / "adapter")])
    (found,) = AdaptedDriver(model, [0]).run([prompt], [5, 7])
    assert relative_error(found, wanted) < 1e-4
