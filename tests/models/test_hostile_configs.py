"""A config.json whose values make no model is refused with a ValueError before anything is allocated."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.models.test_against_hugging_face import CASES
from vllm.config.hf import HFConfig
from vllm.distributed import TensorParallel
from vllm.model_executor.model_loader.loader import build_decoder
from vllm.model_executor.models.registry import ModelRegistry

HOSTILE: list[tuple[str, str, dict[str, Any]]] = [
    ("llama4", "Llama4ForCausalLM", {"moe_layers": 0}),
    ("llama4", "Llama4ForCausalLM", {"moe_layers": [[1]]}),
    ("llama4", "Llama4ForCausalLM", {"num_local_experts": 10**18}),
    ("llama4", "Llama4ForCausalLM", {"layer_types": ["sliding_attention"] * 5}),
    ("llama4", "Llama4ForCausalLM", {"num_experts_per_tok": 6}),
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {"moe_k": 6}),
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.5}),
    ("phimoe", "PhimoeForCausalLM", {"num_experts_per_tok": 3}),
    ("hunyuan_moe", "HunYuanMoEV1ForCausalLM", {"moe_topk": 6}),
    ("hunyuan_moe", "HunYuanMoEV1ForCausalLM", {"num_experts": 10**18}),
    ("hunyuan_moe", "HunYuanMoEV1ForCausalLM", {"num_experts": [[1], -1]}),
    ("mixtral", "MixtralForCausalLM", {"num_local_experts": 2**31 - 1, "intermediate_size": 2**31 - 1}),
    ("phimoe-longrope", "PhimoeForCausalLM", {"original_max_position_embeddings": 1}),
    ("deepseek_v2", "DeepseekV2ForCausalLM", {"kv_lora_rank": -1}),
]


@pytest.mark.parametrize(("case", "architecture", "changes"), HOSTILE)
def test_values_that_make_no_model_are_refused(case: str, architecture: str, changes: dict[str, Any]) -> None:
    raw = {**json.loads(json.dumps(CASES[case]().to_dict())), "architectures": [architecture]}

    def build(raw: dict[str, Any]) -> None:
        hf = HFConfig.from_dict(raw)
        family: Any = ModelRegistry.resolve(hf.architectures)
        args = (torch.float32, 64, torch.device("meta"), TensorParallel(), None, family.modules)
        build_decoder(family.decoder(hf), *args)

    build(raw)
    with pytest.raises(ValueError):
        build({**raw, **changes})


WINDOWLESS = [
    ("mistral", "MistralForCausalLM", {"sliding_window": None}, "Set `sliding_window`, or"),
    ("qwen2-window", "Qwen2ForCausalLM", {"use_sliding_window": False}, "`use_sliding_window` true"),
    ("gemma2", "Gemma2ForCausalLM", {"sliding_window": None}, "Set `sliding_window`, or"),
]


@pytest.mark.parametrize(("case", "architecture", "changes", "remedy"), WINDOWLESS)
def test_layers_with_a_window_of_no_size_are_refused(
    case: str, architecture: str, changes: dict[str, Any], remedy: str
) -> None:
    raw = {**json.loads(json.dumps(CASES[case]().to_dict())), "architectures": [architecture]}
    layers = raw["num_hidden_layers"]
    family: Any = ModelRegistry.resolve([architecture])

    def windows(kinds: list[str] | None) -> list[int | None]:
        hf = HFConfig.from_dict({**raw, **changes, "layer_types": kinds})
        return [block.attn.window for block in family.decoder(hf).blocks]

    mixed = ["full_attention"] * (layers - 1) + ["sliding_attention"]
    with pytest.raises(
        ValueError, match="`layer_types` has layers of type 'sliding_attention', but .*`sliding_window`.*"
    ) as error:
        windows(mixed)
    assert remedy in str(error.value)
    assert windows(["full_attention"] * layers) == windows(None) == [None] * layers
