"""The scales of a float8 cache: what each source of them says, that layers use them, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quantization.harness import plain_model
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.cache_scales import CheckpointScales
from vllm.worker.cache_scales import read_scales
from vllm.worker.worker import Worker

PROMPT = list(range(3, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose keys and values are far beyond what 8 bits hold."""
    folder = tmp_path_factory.mktemp("model")
    _, state = plain_model(folder, max_position_embeddings=128)
    for name in state:
        if ".k_proj." in name or ".v_proj." in name:
            state[name] = state[name] * 2000
        if ".q_proj." in name or ".o_proj." in name:
            state[name] = state[name] / 2000
    save_file(state, folder / "model.safetensors")
    return folder


def run(folder, **options):
    """(log probabilities of a prompt's tokens, what the layers' scales are); single tokens follow."""
    llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=128, **options)
    params = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0, detokenize=False)
    output = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]
    entries = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    layers = llm.apply_model(lambda model: model.paged_attention())[0]
    return torch.tensor(entries), {i: (layer.params.k_scale, layer.params.v_scale) for i, layer in layers.items()}


def with_scales(folder, target, tensors):
    """A copy of the model's folder whose checkpoint has these tensors too."""
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    scales = {name: torch.tensor(value) for name, value in tensors.items()}
    save_file({**load_file(folder / "model.safetensors"), **scales}, target / "model.safetensors")
    return target


def test_scales_from_every_source(folder, tmp_path):
    want, _ = run(folder)
    saturated, scales = run(folder, kv_cache_dtype="fp8")
    assert scales == {0: (1.0, 1.0), 1: (1.0, 1.0)}
    assert (saturated - want).abs().mean() > 0.2
    got, scales = run(folder, kv_cache_dtype="fp8", calculate_kv_scales=True)
    assert all(s[0] > 2 and s[1] > 2 for s in scales.values())
    assert (got - want).abs().mean() < 0.1
    file = tmp_path / "scales.json"
    factors = {str(i): max(pair) for i, pair in scales.items()}
    data = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}}
    file.write_text(json.dumps(data))
    got, given = run(folder, kv_cache_dtype="fp8", quantization_param_path=str(file))
    assert given == {i: (max(pair), max(pair)) for i, pair in scales.items()}
    assert (got - want).abs().mean() < 0.1
    names = {
        0: ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        1: ("self_attn.attn.k_scale", "self_attn.v_scale"),
    }
    tensors = {f"model.layers.{i}.{name}": s for i in names for name, s in zip(names[i], scales[i], strict=True)}
    stored = with_scales(folder, tmp_path, tensors)
    got, given = run(stored, kv_cache_dtype="fp8")
    assert given == {i: pytest.approx(pair) for i, pair in scales.items()}
    assert (got - want).abs().mean() < 0.1
    plain, given = run(stored)  # a cache of another dtype has no use for them
    assert given == {0: (1.0, 1.0), 1: (1.0, 1.0)}
    assert torch.equal(plain, want)


@pytest.mark.parametrize(
    ("factors", "message"),
    [({"0": 1.0}, r"no scaling factors for the layers \[1\]"), ({"0": 1.0, "1": 1.0, "2": 1.0}, "one of 2 layers")],
)
def test_scales_of_another_model_are_refused(folder, tmp_path, factors, message):
    file = tmp_path / "scales.json"
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}
    file.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    with pytest.raises(ValueError, match=message):
        run(folder, kv_cache_dtype="fp8", quantization_param_path=str(file))


def test_a_file_that_is_not_there_is_told_before_weights_are_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Worker, "_load", lambda self: pytest.fail("The weights were read first."))
    with pytest.raises(ValueError, match="quantization_param_path: .* cannot be read"):
        run(folder, kv_cache_dtype="fp8", quantization_param_path=str(tmp_path / "none.json"))


def test_names_of_scales_in_checkpoints(tmp_path):
    scales = CheckpointScales()
    for name, value in {
        "model.layers.0.self_attn.kv_scale": 2.0,
        "model.layers.1.self_attn.k_proj.output_scale": 3.0,
        "model.layers.1.self_attn.v_proj.output_scale": 4.0,
        "model.layers.1.self_attn.q_proj.output_scale": 5.0,
        "model.layers.1.self_attn.prob_output_scale": 6.0,
        "model.layers.2.self_attn.k_scale": 7.0,
    }.items():
        assert scales.take(name, torch.tensor([value]), tmp_path)
    assert not scales.take("model.layers.0.self_attn.k_proj.weight_scale", torch.ones(1), tmp_path)
    assert scales.layers() == {0: (2.0, 2.0), 1: (3.0, 4.0), 2: (7.0, 7.0)}


@pytest.mark.parametrize("names", [("kv_scale", "k_scale"), ("k_scale", "kv_scale")])
def test_a_scale_of_keys_comes_before_one_of_both(tmp_path, names):
    scales = CheckpointScales()
    for name in names:
        value = 3.0 if name == "k_scale" else 2.0
        assert scales.take(f"model.layers.0.self_attn.{name}", torch.tensor(value), tmp_path)
    assert scales.layers() == {0: (3.0, 2.0)}


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1), torch.tensor(float("nan")), torch.tensor(-1.0), torch.ones(2), torch.tensor(1e-42),
        torch.tensor(1e300, dtype=torch.float64), torch.tensor(1j),
    ],
)  # fmt: skip
def test_what_is_no_scale_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match="expected one positive number"):
        CheckpointScales().take("model.layers.0.self_attn.k_scale", value, tmp_path)


GOOD = {"model_type": None, "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 2}}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "opt"}, "type 'opt', this one's is 'llama'"),
        ({"kv_cache": None}, "has no"),
        ({"kv_cache": {"dtype": "float8_e5m2", "scaling_factor": {}}}, "dtype 'float8_e5m2'"),
        ({"kv_cache": {**GOOD["kv_cache"], "scaling_factor": {"0": {}, "1": {}}}}, "tensor_parallel_size=1"),
        ({"kv_cache": {**GOOD["kv_cache"], "scaling_factor": {"0": []}}}, "no layers for rank 0"),
        ({"kv_cache": {**GOOD["kv_cache"], "scaling_factor": {"0": {"0": 0}}}}, "expected a positive number"),
        ({"kv_cache": {**GOOD["kv_cache"], "scaling_factor": {"0": {"x": 1.0}}}}, "layer 'x'"),
        ({"kv_cache": {**GOOD["kv_cache"], "scaling_factor": {"0": {"0": True}}}}, "has True"),
        ({"kv_cache": {**GOOD["kv_cache"], "scaling_factor": {"0": {"0": 1e-320}}}}, "expected a positive number"),
        ({"kv_cache": {**GOOD["kv_cache"], "scaling_factor": {"0": {"0": 10**400}}}}, "expected a positive number"),
    ],
)
def test_files_of_scales(tmp_path, changes, message):
    file = tmp_path / "scales.json"
    file.write_text(json.dumps(GOOD))
    assert read_scales(file, "llama", 0, 1) == {0: (0.5, 0.5), 1: (2.0, 2.0)}
    file.write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(ValueError, match=message):
        read_scales(file, "llama", 0, 1)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_what_is_no_file_of_scales(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match="quantization_param_path"):
        read_scales(tmp_path / "x.json", "llama", 0, 1)
    with pytest.raises(ValueError, match="cannot be read"):
        read_scales(tmp_path / "none.json", "llama", 0, 1)
