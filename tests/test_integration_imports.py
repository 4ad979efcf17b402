"""Every name that published integrations import from this package exists, as far as it belongs to this API level.

`integration_imports.json`: distribution -> module -> names, read from the published packages by `ast`. Names of other
API levels, and those that patch another implementation's insides, are not in the table.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

TABLE = json.loads((Path(__file__).parent / "integration_imports.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("integration", TABLE)
def test_what_an_integration_imports_exists(integration: str) -> None:
    missing = []
    for module, names in TABLE[integration].items():
        found = import_module(module)
        for name in names:
            if not hasattr(found, name):
                try:
                    import_module(f"{module}.{name}")
                except ModuleNotFoundError:
                    missing.append(f"{module}.{name}")
    assert not missing


# What programs were found to import that read no table: names that the package lacked once.
FOUND = {
    "vllm.envs": ["is_set", "get_vllm_port"],
    "vllm.executor.executor_base": ["ExecutorBase"],
    "vllm.config": ["PoolerConfig"],
    "vllm.outputs": ["BeamSearchOutput"],
    "vllm.engine.llm_engine": ["LLMEngine"],
    "vllm.engine.metrics": [],
    "vllm.engine.protocol": ["EngineClient"],
    "vllm.entrypoints.openai.api_server": ["router", "init_app_state", "build_async_engine_client"],
    "vllm.entrypoints.openai.serving_chat": ["OpenAIServingChat"],
    "vllm.entrypoints.openai.serving_completion": ["OpenAIServingCompletion"],
    "vllm.entrypoints.openai.serving_models": ["OpenAIServingModels"],
    "vllm.entrypoints.openai.protocol": ["ChatCompletionResponse", "CompletionResponse", "ErrorResponse"],
    "vllm.entrypoints.logger": ["RequestLogger"],
    "vllm.distributed.parallel_state": [
        "GroupCoordinator",
        "get_dp_group",
        "get_ep_group",
        "get_pp_group",
        "model_parallel_is_initialized",
    ],
    "vllm.assets": [],
    "vllm.compilation.decorators": ["support_torch_compile"],
    "vllm.model_executor.layers.fused_moe": ["FusedMoE"],
    "vllm.model_executor.utils": ["set_weight_attrs"],
    "vllm.model_executor.models.utils": ["WeightsMapper"],
    "vllm.model_executor.layers.sampler": ["SamplerOutput"],
    "vllm.attention.backends.abstract": ["AttentionMetadata"],
    "vllm.model_executor": ["SamplingMetadata"],
}


@pytest.mark.parametrize("module", FOUND)
def test_what_programs_were_found_to_import_exists(module: str) -> None:
    found = import_module(module)
    assert [name for name in FOUND[module] if not hasattr(found, name)] == []
