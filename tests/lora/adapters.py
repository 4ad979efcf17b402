"""Random adapters, written by peft for tiny Hugging Face models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_adapter(
    model_folder: Path, folder: Path, *, targets: Any = "all-linear", rank: int = 8, seed: int = 0, **config: Any
) -> Any:
    """Save an adapter with random A and B (peft starts with B = 0); returns the peft model, in fp32."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager").eval()
    settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    adapted.save_pretrained(folder)
    return adapted
