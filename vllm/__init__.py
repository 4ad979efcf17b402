"""The public names of the package, each imported when first used: `import vllm` by itself loads next to nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.version import __version__, __version_tuple__

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.engine.llm_engine import LLMEngine
    from vllm.entrypoints.llm import LLM
    from vllm.executor.ray_utils import initialize_ray_cluster
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.model_executor.models import ModelRegistry
    from vllm.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

_HOME_OF = {
    "LLM": "vllm.entrypoints.llm",
    "ModelRegistry": "vllm.model_executor.models",
    "PromptType": "vllm.inputs",
    "TextPrompt": "vllm.inputs",
    "TokensPrompt": "vllm.inputs",
    "SamplingParams": "vllm.sampling_params",
    "RequestOutput": "vllm.outputs",
    "CompletionOutput": "vllm.outputs",
    "PoolingOutput": "vllm.outputs",
    "PoolingRequestOutput": "vllm.outputs",
    "EmbeddingOutput": "vllm.outputs",
    "EmbeddingRequestOutput": "vllm.outputs",
    "ClassificationOutput": "vllm.outputs",
    "ClassificationRequestOutput": "vllm.outputs",
    "ScoringOutput": "vllm.outputs",
    "ScoringRequestOutput": "vllm.outputs",
    "LLMEngine": "vllm.engine.llm_engine",
    "EngineArgs": "vllm.engine.arg_utils",
    "AsyncLLMEngine": "vllm.engine.async_llm_engine",
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "initialize_ray_cluster": "vllm.executor.ray_utils",
    "PoolingParams": "vllm.pooling_params",
}

__all__ = [
    "__version__",
    "__version_tuple__",
    "LLM",
    "ModelRegistry",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "LLMEngine",
    "EngineArgs",
    "AsyncLLMEngine",
    "AsyncEngineArgs",
    "initialize_ray_cluster",
    "PoolingParams",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
