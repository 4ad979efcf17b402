"""Rotary tables of every scaling kind against Hugging Face's, and whole models beyond their original length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.rope_table import rope_table
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.families.llama import rope_of

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 77,
    "max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5e5,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn-tuned": {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3, "truncate": False},
}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}


def llama(scaling: dict[str, Any], **changes: Any) -> Any:
    return hf.LlamaConfig(**{**SIZES, **changes}, rope_parameters=dict(scaling))


def table(config: Any, positions: int) -> torch.Tensor:
    return rope_table(rope_of(HFConfig.from_dict(config.to_dict())), positions)


def angles_of(inverse_frequencies: torch.Tensor, factor: float, positions: int) -> torch.Tensor:
    angles = torch.arange(positions).float()[:, None] * inverse_frequencies
    return torch.cat((angles.cos(), angles.sin()), -1) * factor


@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_hugging_face_up_to_long_positions(name: str) -> None:
    scaling = {**SCALINGS[name]}
    if "original_max_position_embeddings" in scaling:
        scaling["original_max_position_embeddings"] = 8192
    config = llama(scaling, hidden_size=128 * 3, max_position_embeddings=32768)
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    torch.testing.assert_close(table(config, 32768), angles_of(frequencies, factor, 32768), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_model_with_scaled_rope_equals_hugging_face(name: str, tmp_path: Path) -> None:
    reference = save_random_hf_model(llama(SCALINGS[name]), tmp_path)
    prompt = torch.randint(0, 131, (57,))
    (ours,) = PagedDriver(load(tmp_path)).run([prompt], [7, 1, 13])
    with torch.inference_mode():
        assert relative_error(ours, reference(prompt[None]).logits[0]) < 1e-5


def test_dynamic_scaling_equals_hugging_face_generating_token_by_token(tmp_path: Path) -> None:
    reference = save_random_hf_model(llama(DYNAMIC), tmp_path)
    prompt = torch.randint(0, 131, (60,))
    (ours,) = PagedDriver(load(tmp_path)).run([prompt], [7, 1, 13])
    with torch.inference_mode():
        within = reference(prompt[None, :32]).logits[0]
        assert relative_error(ours[:32], within) < 1e-5
        cache = hf.DynamicCache()
        tokens = [reference(t.view(1, 1), past_key_values=cache, use_cache=True).logits[0, 0] for t in prompt]
    assert relative_error(ours, torch.stack(tokens)) < 1e-5


def longrope(**changes: Any) -> Any:
    half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(half)],
        "long_factor": [2.0 + 0.7 * i for i in range(half)],
        **changes,
    }
    return hf.Phi3Config(
        **{**SIZES, "max_position_embeddings": 128},
        original_max_position_embeddings=32,
        rope_parameters=scaling,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.mark.parametrize("changes", [{}, {"attention_factor": 1.7}], ids=["derived", "given"])
def test_longrope_equals_hugging_face_on_both_sides_of_the_switch(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = save_random_hf_model(longrope(**changes), tmp_path)
    prompt = torch.randint(0, 131, (60,))
    with torch.inference_mode():
        (short,) = PagedDriver(load(tmp_path, max_model_len=32)).run([prompt[:32]], [7, 1, 13])
        assert relative_error(short, reference(prompt[None, :32]).logits[0]) < 1e-5
        (long,) = PagedDriver(load(tmp_path, max_model_len=64)).run([prompt], [7, 1, 13])
        assert relative_error(long, reference(prompt[None]).logits[0]) < 1e-5
    assert relative_error(long[:32], short) > 1e-3


def test_longrope_with_the_wrong_number_of_factors_is_refused() -> None:
    config = longrope()
    config.rope_parameters["short_factor"] = [1.0] * 3
    with pytest.raises(ValueError, match="3 factors, expected 8"):
        table(config, 16)


@pytest.mark.parametrize("neox", [True, False], ids=["halves", "pairs"])
def test_layer_rotates_by_the_definition(neox: bool) -> None:
    layer = get_rope(10, rotary_dim=6, max_position=50, base=100.0, is_neox_style=neox)
    positions = torch.tensor([0, 49, 7])
    q, k = torch.randn(3, 4 * 10), torch.randn(3, 10)
    for x, out in zip((q, k), layer(positions, q.clone(), k.clone()), strict=True):
        heads, rotated = x.view(3, -1, 10).double(), out.view(3, -1, 10).double()
        pairs = [(i, i + 3) if neox else (2 * i, 2 * i + 1) for i in range(3)]
        for i, (a, b) in enumerate(pairs):
            angle = positions.double()[:, None] * 100.0 ** (-2 * i / 6)
            turned = torch.complex(heads[..., a], heads[..., b]) * torch.polar(torch.ones_like(angle), angle)
            torch.testing.assert_close(rotated[..., a], turned.real, atol=1e-5, rtol=0)
            torch.testing.assert_close(rotated[..., b], turned.imag, atol=1e-5, rtol=0)
        assert torch.equal(rotated[..., 6:], heads[..., 6:])


def test_get_rope_refuses_unknown_and_incomplete_scalings() -> None:
    with pytest.raises(ValueError, match="factor"):
        get_rope(8, 8, 32, rope_scaling={"rope_type": "linear"})
    with pytest.raises(ValueError, match="rope_type"):
        get_rope(8, 8, 32, rope_scaling={"rope_type": "spiral", "factor": 2.0})
