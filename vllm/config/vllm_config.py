"""The whole configuration of an engine: resolved, frozen, printable; a JSON document on its way to other processes."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config.cache import GIB, CacheConfig
from vllm.config.compilation import CompilationConfig
from vllm.config.decoding import DecodingConfig
from vllm.config.device import DeviceConfig
from vllm.config.hf import HFConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig, PromptAdapterConfig
from vllm.config.model import ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig


@dataclass(frozen=True)
class VllmConfig:
    """Everything that is configured, resolved. `explanation` says for each derived value where it comes from.

    The configs of features that are not in use are None.
    """

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    lora_config: LoRAConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    decoding_config: DecodingConfig = field(default_factory=DecodingConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    prompt_adapter_config: PromptAdapterConfig | None = None
    multimodal_config: MultiModalConfig | None = None
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    quant_config: None = None
    additional_config: dict[str, Any] = field(default_factory=dict)
    explanation: dict[str, str] = field(default_factory=dict)

    @property
    def overlap_steps(self) -> bool:
        """Whether a step may be planned while the device still runs the one before."""
        return self.scheduler_config.async_scheduling is not False and self.model_config.use_async_output_proc

    @property
    def kv_offloading_bytes(self) -> int:
        """Host memory of each rank for blocks of the KV cache; 0: there is none."""
        return int((self.cache_config.kv_offloading_size or 0.0) * GIB) // self.parallel_config.world_size

    @property
    def num_slots(self) -> int:
        """Requests that run at once: `max_num_seqs` in each of the steps that a pipeline has in flight."""
        return self.scheduler_config.max_num_seqs * self.parallel_config.pipeline_parallel_size

    def explain(self) -> str:
        """Every derived value and why it is so, one per line."""
        width = max((len(name) for name in self.explanation), default=0)
        return "\n".join(f"{name:<{width}}  {reason}" for name, reason in self.explanation.items())

    def to_dict(self) -> dict[str, Any]:
        """A JSON document that `from_dict` turns back into an equal config."""
        document = _to_plain(self, "config")
        if callable(self.model_config.hf_overrides):  # its effect is in the config that travels
            document["model_config"]["hf_overrides"] = {}
        return typing.cast(dict[str, Any], document)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> VllmConfig:
        """The config of a document made by `to_dict`. Nothing is resolved again, no file is read."""
        return typing.cast(VllmConfig, _from_plain(cls, document))

    def __str__(self) -> str:
        model, scheduler, cache = self.model_config, self.scheduler_config, self.cache_config
        parts = {
            "model": model.model,
            "tokenizer": model.tokenizer,
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "seed": model.seed,
            "device": self.device_config.device,
            "load_format": self.load_config.load_format,
            "revision": model.revision,
            "tensor_parallel_size": self.parallel_config.tensor_parallel_size,
            "kv_cache_dtype": cache.cache_dtype,
            "block_size": cache.block_size,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "enforce_eager": model.enforce_eager,
            "served_model_name": model.served_model_name,
        }
        return ", ".join(f"{name}={value!r}" for name, value in parts.items())


def _to_plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: _to_plain(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item, where) for item in value]
    if callable(value) and where.endswith(".hf_overrides"):
        return None
    raise ValueError(f"{where} holds a {type(value).__name__}, which cannot be sent to another process as JSON.")


def _from_plain(kind: Any, value: Any) -> Any:
    """`value` as the annotated type `kind`, as far as JSON has lost it: dataclasses, tuples, paths."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if dataclasses.is_dataclass(option)]
        return _from_plain(options[0], value) if options and value is not None else value
    if kind is Path:
        return Path(value)
    if kind is HFConfig:
        return HFConfig.from_dict(value["raw"], Path(value["path"]))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _from_plain(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    return tuple(value) if typing.get_origin(kind) is tuple else value
