"""New values for the weights of a loaded model: logits are then those of Hugging Face with these values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.models.harness import PagedDriver, load, on_ranks, relative_error, save_random_hf_model
from tests.tiny_llama import llm, model_folder  # noqa: F401 - fixtures
from vllm import SamplingParams
from vllm.model_executor.model_loader import live_weights
from vllm.model_executor.models import ModelRegistry

PROMPT = torch.arange(3, 24)
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
         "intermediate_size": 78, "vocab_size": 131, "max_position_embeddings": 64}  # fmt: skip
CONFIGS = {
    "llama": hf.LlamaConfig(**SIZES),
    "tied": hf.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "biases": hf.Qwen2Config(**SIZES),
    "experts": hf.MixtralConfig(**SIZES, num_local_experts=3),
    "states": hf.MambaConfig(hidden_size=48, num_hidden_layers=2, vocab_size=131, state_size=8),
    "heads of states": hf.Mamba2Config(
        hidden_size=48, num_hidden_layers=2, vocab_size=131, state_size=8, num_heads=12, head_dim=8, n_groups=2
    ),
    "turned": hf.GPT2Config(n_embd=48, n_layer=2, n_head=6, vocab_size=131, n_positions=64),
}


def ours(model) -> torch.Tensor:
    return PagedDriver(model).run([PROMPT], [5, 1])[0]


def theirs(model) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT[None]).logits[0]


def published(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def two_checkpoints(tmp_path: Path, config) -> tuple[Path, dict[str, torch.Tensor], torch.nn.Module]:
    """A folder to load, and the tensors of another model of its shape, with that model."""
    save_random_hf_model(config, tmp_path / "old", seed=1)
    other = save_random_hf_model(config, tmp_path / "new", seed=2)
    return tmp_path / "old", published(tmp_path / "new"), other


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_loaded_model_takes_another_checkpoint_tensor_by_tensor(tmp_path, kind):
    folder, tensors, other = two_checkpoints(tmp_path, CONFIGS[kind])
    model = load(folder)
    assert relative_error(ours(model), theirs(other)) > 0.1
    for name, tensor in tensors.items():
        assert model.load_weights([(name, tensor)]) == {name}
    assert relative_error(ours(model), theirs(other)) < 1e-5


def test_ranks_take_their_shares_of_new_weights(tmp_path):
    folder, tensors, other = two_checkpoints(tmp_path, CONFIGS["llama"])

    def work(tp):
        model = load(folder, tp=tp)
        model.load_weights(tensors.items())
        return ours(model)

    assert all(relative_error(out, theirs(other)) < 1e-5 for out in on_ranks(2, work))


def test_a_part_of_a_fused_weight_changes_alone(tmp_path):
    folder, tensors, other = two_checkpoints(tmp_path, CONFIGS["llama"])
    old = hf.AutoModelForCausalLM.from_pretrained(folder)
    model = load(folder)
    names = ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    model.load_weights((name, tensors[name].to(torch.bfloat16)) for name in names)
    old.load_state_dict({name: tensors[name].to(torch.bfloat16).float() for name in names}, strict=False)
    assert relative_error(ours(model), theirs(old)) < 1e-5


@pytest.mark.parametrize("impl", ["derived", "transformers"])
def test_models_that_are_no_plain_family_take_new_weights(tmp_path, monkeypatch, impl):
    folder, tensors, other = two_checkpoints(tmp_path, CONFIGS["llama"])
    if impl == "derived":
        from vllm.model_executor.models.llama import LlamaForCausalLM

        monkeypatch.setattr(ModelRegistry, "_registered", {})
        ModelRegistry.register_model("LlamaForCausalLM", type("Mine", (LlamaForCausalLM,), {}))
    model = load(folder, model_impl="vllm" if impl == "derived" else "transformers")
    for name, tensor in tensors.items():
        model.load_weights([(name, tensor)])
    assert relative_error(ours(model), theirs(other)) < 1e-5


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path):
    save_random_hf_model(CONFIGS["llama"], tmp_path)
    model = load(tmp_path)
    before = ours(model)
    with pytest.raises(ValueError, match=r"'model.norm.weight' has the shape \[47\]"):
        model.load_weights([("model.norm.weight", torch.ones(47))])
    with pytest.raises(ValueError, match="'model.nothing.weight' cannot be loaded"):
        model.load_weights([("model.nothing.weight", torch.ones(48))])
    assert torch.equal(ours(model), before)


def test_only_what_changes_is_unpacked(tmp_path, monkeypatch):
    folder, tensors, _ = two_checkpoints(tmp_path, CONFIGS["llama"])
    model = load(folder)
    touched = []
    real = live_weights.unpacked
    monkeypatch.setattr(live_weights, "unpacked", lambda modules: real(touched.append(m) or m for m in modules))
    model.load_weights([(name, tensors[name]) for name in tensors if "layers.0.self_attn.q_proj" in name])
    assert [type(module).__name__ for module in touched] == ["QKVParallelLinear"]


def test_a_training_loop_updates_a_live_engine(llm, model_folder):  # noqa: F811
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    assert llm.llm_engine.model_executor.driver_worker.worker.model_runner.model is model
    policy = hf.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    old = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    prompt = [50, 60, 70]

    def generate() -> list[int]:
        llm.reset_prefix_cache()
        return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)

    def expected() -> list[int]:
        out = policy.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
        return out[0, 3:].tolist()

    before = generate()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter + parameter.std() * torch.randn_like(parameter))
            model.load_weights([(name, parameter.data)])
    changed = generate()
    assert changed == expected() != before
    model.load_weights(old.items())
    assert generate() == before
