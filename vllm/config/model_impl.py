"""Whose code runs a model: a family of ours, or, generically, the modules of transformers."""

from __future__ import annotations

from typing import Any

from vllm.config.hf import HFConfig
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry

logger = init_logger(__name__)


def resolve_model_impl(wanted: str, hf: HFConfig, *, trust_remote_code: bool) -> tuple[str, HFConfig, str]:
    """("vllm" or "transformers", the config that goes with it, why).

    wanted: the setting.   Raises ValueError if nobody can run the model.
    """
    known = ModelRegistry.knows(hf.architectures)
    if wanted == "vllm" or (wanted == "auto" and known):
        ModelRegistry.check(hf.architectures)
        return "vllm", hf, "this package's own model"
    refusal = _refusal(hf, trust_remote_code=trust_remote_code)
    if refusal is not None:
        if wanted == "auto":
            ModelRegistry.check(hf.architectures)
        raise ValueError(f"model_impl='transformers': {refusal}")
    logger.warning(
        "%s runs generically, through the modules of transformers: correct, but slower than a model of this package's "
        "own, and without CUDA graphs.",
        " or ".join(hf.architectures),
    )
    return "transformers", hf.completed(trust_remote_code=trust_remote_code), "the modules of transformers, generically"


def _refusal(hf: HFConfig, *, trust_remote_code: bool) -> str | None:
    """Why neither transformers nor trusted code of the repository has a model that takes our attention; None: one does.

    What a model does with it shows when it is loaded.
    """
    auto_map: Any = hf.raw.get("auto_map")
    if trust_remote_code and isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map:
        return None
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf.model_type, ())
    names = (named,) if isinstance(named, str) else tuple(named)
    name = next((name for name in hf.architectures if name in names), None)
    if name is None and names:
        return f"only language models run so, {' or '.join(names)} here, and not {' or '.join(hf.architectures)}."
    if name is None:
        return (
            f"transformers {transformers.__version__} has no causal language model "
            f"{' or '.join(hf.architectures) or 'of this config'}. Use a newer transformers, or model_impl='auto'."
        )
    if not getattr(getattr(transformers, name), "_supports_attention_backend", False):
        return (
            f"{name}'s code takes no attention function from outside (`_supports_attention_backend`), so that it "
            "cannot use a paged cache."
        )
    return None
