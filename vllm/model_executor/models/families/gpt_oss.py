"""gpt-oss: attention sinks, windows on every second layer, experts with biases and a limited gate."""

from __future__ import annotations

from vllm.config.facts import Facts
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.models.families.llama import NAMES, attention_bias, llama_like, windows_of
from vllm.model_executor.models.families.moe import experts_of
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Decoder


def gpt_oss(hf: HFConfig) -> Decoder:
    """gpt-oss: its experts' activation is x * sigmoid(1.702 x), within `swiglu_limit`."""
    alpha = hf.get_float("swiglu_alpha", default=1.702)
    if alpha != 1.702:
        raise ValueError(f"{hf.file}: swiglu_alpha={alpha} is not supported, expected 1.702.")
    limit = hf.get_float("swiglu_limit", default=7.0, minimum=0)
    experts = experts_of(hf, act="quick_gelu", bias=True, limit=limit)
    return llama_like(hf, attn={**attention_bias(hf), "sinks": True}, ffn=experts, windows=windows_of(hf))


_MLP = "model.layers.{i}.mlp"
GPT_OSS_NAMES = (
    renames(
        {
            "model.layers.{i}.self_attn.sinks": "blocks.{i}.attn.sinks",
            f"{_MLP}.router.{{p}}": "blocks.{i}.ffn.router.{p}",
            f"{_MLP}.experts.down_proj_bias": "blocks.{i}.ffn.experts.down_bias",
        }
    )
    + renames({f"{_MLP}.experts.gate_up_proj_bias": "blocks.{i}.ffn.experts.gate_up_bias"}, WeightLayout.EXPERTS_PAIRS)
    + renames({f"{_MLP}.experts.gate_up_proj": "blocks.{i}.ffn.experts.gate_up"}, WeightLayout.EXPERTS_TRANSPOSED_PAIRS)
    + renames({f"{_MLP}.experts.down_proj": "blocks.{i}.ffn.experts.down"}, WeightLayout.EXPERTS_TRANSPOSED)
)
# what transformers' class computes for a config without any rope settings
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_FACTS = Facts(window_pattern=2, defaults={"rope_parameters": _ROPE})
GPT_OSS = Family(gpt_oss, GPT_OSS_NAMES + NAMES, facts=_FACTS)
