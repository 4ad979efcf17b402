"""`EngineClient`: what a server needs of an engine that runs in the background."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from vllm.config import DecodingConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.inputs import PromptType
    from vllm.lora.request import LoRARequest
    from vllm.outputs import PoolingRequestOutput, RequestOutput
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams


@runtime_checkable
class EngineClient(Protocol):
    """Requests in, outputs as they come. `AsyncLLMEngine` is one; `isinstance` tests for the methods."""

    @property
    def is_running(self) -> bool: ...

    @property
    def is_stopped(self) -> bool: ...

    @property
    def errored(self) -> bool: ...

    @property
    def dead_error(self) -> BaseException: ...

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come."""

    def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """Pooled hidden states of one request."""

    async def abort(self, request_id: str) -> None: ...

    async def get_vllm_config(self) -> VllmConfig: ...

    async def get_model_config(self) -> ModelConfig: ...

    async def get_decoding_config(self) -> DecodingConfig: ...

    async def get_parallel_config(self) -> ParallelConfig: ...

    async def get_scheduler_config(self) -> SchedulerConfig: ...

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any: ...

    async def is_tracing_enabled(self) -> bool: ...

    async def do_log_stats(self, scheduler_outputs: Any = None, model_output: Any = None) -> None: ...

    async def check_health(self) -> None: ...

    async def start_profile(self) -> None: ...

    async def stop_profile(self) -> None: ...

    async def reset_prefix_cache(self, device: Any = None) -> bool: ...

    async def add_lora(self, lora_request: LoRARequest) -> bool: ...
