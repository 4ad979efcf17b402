"""What can be configured, and how defaults are resolved. `VllmConfig` is the whole; each part has a file of its own."""

from __future__ import annotations

from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig
from vllm.config.decoding import DecodingConfig
from vllm.config.device import DeviceConfig
from vllm.config.fields import UnsupportedSettingError
from vllm.config.hf import HFConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig, PromptAdapterConfig
from vllm.config.model import ConfigFormat, HfOverrides, ModelConfig, ModelDType, TaskOption, TokenizerMode
from vllm.config.multimodal import MultiModalConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.pooler import PoolerConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.vllm_config import VllmConfig

__all__ = [
    "CacheConfig",
    "CompilationConfig",
    "ConfigFormat",
    "DecodingConfig",
    "DeviceConfig",
    "HFConfig",
    "HfOverrides",
    "LoRAConfig",
    "LoadConfig",
    "ModelConfig",
    "ModelDType",
    "MultiModalConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PoolerConfig",
    "PromptAdapterConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "TaskOption",
    "TokenizerMode",
    "UnsupportedSettingError",
    "VllmConfig",
]
