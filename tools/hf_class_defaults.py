"""Writes vllm/config/hf_class_defaults.json: what transformers' configuration classes say about fields left out.

`python -m tools.hf_class_defaults`. Run it when transformers has new model types, or other defaults;
`tests/config/test_hf_defaults.py` notices.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "vllm" / "config" / "hf_class_defaults.json"

# fields of every configuration that mean something here
_GENERAL = frozenset({"tie_word_embeddings"})
# what matters to training, or to transformers itself, only
_USELESS = re.compile(
    r"initializer|dropout|pdrop|use_cache|aux_loss|z_loss|jitter|output_router|summary_|gradient|rescale_every|"
    r"pretraining_tp|transformers_version|_from_model_config|classifier|layer_drop|layerdrop|init_std|_init$|"
    r"use_mamba_kernels|scale_init|time_step|chunk_size_feed|is_decoder|init_device"
)


def class_defaults(config_class: Any) -> dict[str, Any]:
    """Field -> value of one configuration class, without fields that are None, computed or useless here."""
    from transformers import PreTrainedConfig

    general = {field.name for field in dataclasses.fields(PreTrainedConfig)} - _GENERAL
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.name in general or _USELESS.search(field.name) or field.name == "rope_parameters":
            continue
        if isinstance(field.default, bool | int | float | str):
            found[field.name] = field.default
        elif isinstance(field.default, list | tuple) and all(isinstance(x, int | float | str) for x in field.default):
            found[field.name] = list(field.default)
    return found | _rope(config_class)


def _rope(config_class: Any) -> dict[str, Any]:
    """The rotary defaults, which a class computes, in the spelling of older files."""
    try:
        parameters = config_class().rope_parameters
    except Exception:  # a class that cannot be made without arguments, or has no rotary embedding
        return {}
    if not isinstance(parameters, dict):
        return {}
    local = parameters.get("sliding_attention")
    parameters = parameters.get("full_attention", parameters) or {}
    neutral = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    found = {name: parameters[name] for name in neutral if parameters.get(name) not in (None, neutral[name])}
    if isinstance(local, dict) and local.get("rope_theta") not in (None, parameters.get("rope_theta")):
        found["rope_local_base_freq"] = local["rope_theta"]
    return found


def document() -> dict[str, dict[str, Any]]:
    """model_type -> {"architecture": .., "defaults": ..} of every causal language model of transformers."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    return {
        model_type: {"architecture": architecture, "defaults": class_defaults(CONFIG_MAPPING[model_type])}
        for model_type, architecture in types
        if model_type in CONFIG_MAPPING
    }


def main() -> None:
    """Write the file."""
    lines = [f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in document().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
