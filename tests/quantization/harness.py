"""Tiny random models, quantized by a writer, beside the same model with the numbers that the codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.harness import PagedDriver, engine_config, relative_error, save_random_hf_model
from vllm.model_executor.model_loader import load_model

Write = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": hf.LlamaConfig,
    "qwen2": hf.Qwen2Config,
    "phi3": hf.Phi3Config,
    "mixtral": hf.MixtralConfig,
    "gpt_neox": hf.GPTNeoXConfig,
    "deepseek_v3": hf.DeepseekV3Config,
    "gpt_oss": hf.GptOssConfig,
}
PROMPT = torch.arange(3, 40)


def plain_model(folder: Path, family: str = "llama", **changes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """(Hugging Face's model, its weights by name), saved to `folder`."""
    sizes = {**SIZES, **changes}
    if family == "gpt_neox":
        sizes.pop("num_key_value_heads")
    if family == "mixtral":
        sizes.update(num_local_experts=4, num_experts_per_tok=2)
    model = save_random_hf_model(CONFIGS[family](**sizes), folder)
    return model, load_file(folder / "model.safetensors")


def quantize_folder(
    folder: Path, reference: nn.Module, state: Mapping[str, Tensor], write: Write, settings: dict[str, Any] | None
) -> dict[str, Tensor]:
    """Quantize what `write(module, weight)` takes; the reference gets the same numbers. Returns the stored tensors."""
    stored: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        written = write(module, tensor) if name.endswith(".weight") and tensor.dim() == 2 else None
        if written is None:
            stored[name] = rounded[name] = tensor
            continue
        tensors, rounded[name] = written
        stored.update({f"{module}.{leaf}": value.contiguous() for leaf, value in tensors.items()})
    _load(reference, rounded)
    save_file(stored, folder / "model.safetensors")
    if settings is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return stored


def _load(reference: nn.Module, state: dict[str, Tensor]) -> None:
    """Names of experts are those of files, which only the library's own loader knows."""
    own = reference.state_dict()
    if all(name in own for name in state):
        reference.load_state_dict(state, strict=False)
        return
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    loaded = type(reference).from_pretrained(None, config=reference.config, state_dict=state, **options)
    reference.load_state_dict(loaded.state_dict())


def is_projection(module: str) -> bool:
    return "_proj" in module or "dense" in module or "query_key_value" in module or ".w" in module


def assert_same_logits(folder: Path, reference: nn.Module, limit: float = 1e-3, **config: Any) -> None:
    """Our logits of every position beside the reference's, and, where these are exact, the same most likely tokens."""
    (ours,) = PagedDriver(load_model(engine_config(folder, max_model_len=64, **config), "cpu")).run([PROMPT], [7])
    with torch.inference_mode():
        theirs = reference(PROMPT[None]).logits[0]
    error = relative_error(ours, theirs)
    assert error < limit, error
    assert limit > 1e-3 or torch.equal(ours.argmax(-1), theirs.argmax(-1))
