"""`LLMEngine`: add requests, step, take outputs. The synchronous front end, on which `LLM` is built."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vllm.config import (
    CacheConfig,
    DecodingConfig,
    DeviceConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PromptAdapterConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.engine.adapters import LOADING, READY
from vllm.engine.client import InprocClient
from vllm.engine.input_processor import InputProcessor
from vllm.engine.joint_core import core_for
from vllm.engine.metrics import StatLoggers
from vllm.engine.output_processor import AnyOutput, OutputProcessor
from vllm.engine.processed import ProcessedRequest, RequestInput, packs
from vllm.engine.prompts import first_step, with_options
from vllm.engine.tokenizer import Tokenizer
from vllm.engine.tokenizer_files import from_transformers, load_tokenizer
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.metrics.log_line import StatsLog
from vllm.metrics.registry import EngineMetrics
from vllm.platforms import cuda_early
from vllm.usage.usage_lib import UsageContext, record_usage
from vllm.utils.collector import collector_paused
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.core import EngineCore
    from vllm.executor.base import Executor
    from vllm.inputs import PromptType
    from vllm.lora.request import LoRARequest
    from vllm.pooling_params import PoolingParams
    from vllm.prompt_adapter.request import PromptAdapterRequest
    from vllm.prompt_adapter.source import VirtualTokens
    from vllm.sampling_params import BeamSearchParams, SamplingParams
    from vllm.step.messages import CoreRequest
    from vllm.transformers_utils.tokenizer_group import TokenizerGroup
    from vllm.v1.metrics.reader import Metric

logger = init_logger(__name__)

_Output = TypeVar("_Output")
_POLL_SECONDS = 0.001
_LOOKED_AT = 512  # prompts, between two looks at what the device does
_LOOKED_AT_FIRST = 128  # with which the device begins


class LLMEngine:
    """Runs requests to their end, one step at a time, in this process (its workers may have processes of their own).

    Requests may be added and aborted in other threads than the one that steps; they wait until a step is over.
    stat_loggers: objects with a method `log`, called with a `vllm.engine.metrics.Stats` after each step; or classes, or
    their paths; by name or in a list.
    """

    DO_VALIDATE_OUTPUT: ClassVar[bool] = False

    def __init__(
        self,
        vllm_config: VllmConfig | None = None,
        executor_class: type[Any] | None = None,
        log_stats: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Mapping[str, Any] | Sequence[Any] | None = None,
        **parts: Any,
    ) -> None:
        """`parts` are the older way to give a configuration: model_config, cache_config and so on, by keyword."""
        vllm_config = _whole_config(vllm_config, parts)
        logger.info("Initializing an LLM engine (v%s) with config: %s", __version__, vllm_config)
        self._lock = threading.RLock()  # held while requests or the core change
        _refuse_copies(vllm_config.parallel_config)
        _refuse_queue_limits(vllm_config.scheduler_config)
        self.usage_context = usage_context
        self.log_stats = log_stats
        started = time.perf_counter()
        model = vllm_config.model_config
        tokenizer = None
        if not model.skip_tokenizer_init:
            tokenizer = load_tokenizer(model.tokenizer_path, model.tokenizer_mode, model.trust_remote_code)
        tokenizer_seconds = time.perf_counter() - started
        self._client = InprocClient(vllm_config, core_for(vllm_config, executor_class))
        described = self._client.describe()
        self.vllm_config = _with_blocks(vllm_config, described["num_blocks"])
        # Where nothing is kept between steps, prompts that are pooled to one row each travel together.
        self._early: list[AnyOutput] = []  # what came while requests were added
        self._packs = described["keeps_nothing"] and model.pooling is not None and not model.pooling.gives_many
        self.input_processor = InputProcessor(vllm_config, tokenizer)
        self._metrics = EngineMetrics(model.served_model_name, model.max_model_len, described)
        self._loggers = StatLoggers(stat_loggers, vllm_config, self._metrics)
        counts = self._metrics if log_stats or self._loggers else None
        self.output_processor = OutputProcessor(tokenizer, model.logits_width, model.max_model_len, counts)
        self._stats_log = StatsLog(self._metrics, "CPU" if vllm_config.device_config.device == "cpu" else "GPU")
        seconds = time.perf_counter() - started
        logger.info("Engine ready in %.2f s, of which the tokenizer took %.2f s", seconds, tokenizer_seconds)
        record_usage(vllm_config, usage_context)
        # Also at the interpreter's exit, while everything that the workers need is still there.
        self._finalizer = weakref.finalize(self, self._client.shutdown)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Mapping[str, Any] | Sequence[Any] | None = None,
        disable_log_stats: bool = False,
    ) -> LLMEngine:
        return cls(vllm_config, log_stats=not disable_log_stats, usage_context=usage_context, stat_loggers=stat_loggers)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Mapping[str, Any] | Sequence[Any] | None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """The engine for these arguments. The core runs in this process, also with `enable_multiprocessing`."""
        cuda_early.begin(engine_args.device)
        return cls(
            engine_args.create_engine_config(usage_context),
            log_stats=not engine_args.disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | None = None,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        *,
        inputs: PromptType | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue a request; `step` will run it. `inputs` is the older name of `prompt`.

        tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens`.

        Raises ValueError or TypeError, with nothing changed, if anything about the request is wrong.
        """
        if inputs is not None:
            prompt = inputs
        if prompt is None or params is None:
            raise ValueError("Both prompt and params must be provided.")
        if trace_headers:
            logger.warning("Tracing is not enabled: the trace headers of request %s are not used.", request_id)
        params, special = with_options(params, tokenization_kwargs)
        self.add_requests(
            [
                RequestInput(
                    request_id, prompt, params, arrival_time, lora_request, prompt_adapter_request, priority, special
                )
            ]
        )

    def add_requests(self, requests: Sequence[RequestInput]) -> None:
        """Queue several requests, all or none: one that is wrong fails the call and leaves nothing behind."""
        if not self._finalizer.alive:
            raise RuntimeError("This engine has been shut down (its `with` block has ended, say). Make a new one.")
        ids: set[str] = set()
        for request in requests:
            if request.request_id in ids or request.request_id in self.output_processor:
                raise ValueError(f"Request {request.request_id} already exists.")
            ids.add(request.request_id)
        with self._lock, collector_paused(), self.input_processor.all_or_none():
            try:
                if self._packs:
                    self._add_packed(requests)
                    return
                first = self._first_step(requests)
                self._add(requests[:first])
                if first < len(requests):
                    self._client.begin()
                    self._add(requests[first:])
            except BaseException:
                with suppress(EngineDeadError):  # what has gone wrong before says more
                    self.abort_request(ids)
                self._early = [output for output in self._early if output.request_id not in ids]
                raise

    def _add(self, requests: Sequence[RequestInput]) -> None:
        """Check some requests and hand them to the core. Raises ValueError or TypeError if one is wrong."""
        messages = self.input_processor.process_batch(requests)
        grammars = [message.grammar for message in messages if message.grammar is not None]
        if grammars:
            self._client.check_grammars(grammars)
        self._to_core([child for message in messages for child in self.output_processor.add(message)])

    def _add_packed(self, requests: Sequence[RequestInput]) -> None:
        """The same for prompts that are pooled, those of one step as one request; where the device works beside the
        host it begins with the first while others are looked at.
        """
        limits = self.vllm_config.scheduler_config
        ends = [*range(_LOOKED_AT_FIRST, len(requests), _LOOKED_AT)] if self._client.overlaps else []
        batches = [requests[start:end] for start, end in zip([0, *ends], [*ends, len(requests)], strict=True)]
        left: list[ProcessedRequest] = []
        for i, messages in enumerate(self.input_processor.process_batches(batches)):
            left += messages
            groups = list(packs(left, limits.max_num_batched_tokens, limits.max_num_seqs))
            is_last = i == len(batches) - 1
            left = list(groups.pop()) if i > 0 and not is_last else []
            self._to_core([self.output_processor.add_pack(group) for group in groups])
            if i == 0 and not is_last:
                self._client.begin()
            elif groups and not is_last:
                self._early += self._step()

    def _to_core(self, children: list[CoreRequest]) -> None:
        rejected = self._client.add_requests(children)
        if rejected:
            raise ValueError(rejected[0].error)

    def _first_step(self, requests: Sequence[RequestInput]) -> int:
        """How many to add first, so that the device computes while the others are looked at."""
        limits = self.vllm_config.scheduler_config
        if not self._client.overlaps or limits.policy != "fcfs" or self.has_unfinished_requests():
            return len(requests)
        block_size = self.vllm_config.cache_config.block_size
        tokens = limits.max_num_batched_tokens * self.vllm_config.parallel_config.pipeline_parallel_size
        return first_step(requests, tokens, self.vllm_config.num_slots, block_size)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Forget one or several requests; unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        with self._lock:
            core_ids, _ = self.output_processor.abort(ids)
            self._client.abort(core_ids)

    def step(self) -> list[AnyOutput]:
        """Advance by one step. Returns what became known about any request; finished ones are forgotten."""
        with self._lock:
            early, self._early = self._early, []
            return early or self._step()

    def _step(self) -> list[AnyOutput]:
        processed = self.output_processor.process(self._client.step())
        outputs = processed.outputs
        while processed.aborts or processed.follow_ups:
            if processed.aborts:
                self._client.abort(processed.aborts)
            processed = self.output_processor.process(self._client.add_requests(processed.follow_ups))
            outputs += processed.outputs
        if self.log_stats or self._loggers:
            self._log_step()
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._early) or self.output_processor.num_unfinished > 0

    def has_unfinished_requests_for_virtual_engine(self, virtual_engine: int) -> bool:
        """There is one scheduler, whatever the number of pipeline stages."""
        return self.has_unfinished_requests()

    def has_unfinished_requests_dp(self, has_unfinished: bool) -> bool:
        """With one data-parallel rank, the answer for all of them."""
        return has_unfinished

    def get_num_unfinished_requests(self) -> int:
        return self.output_processor.num_unfinished

    @classmethod
    def validate_outputs(cls, outputs: Sequence[Any], output_type: type[_Output]) -> list[_Output]:
        """The outputs; if DO_VALIDATE_OUTPUT is set, TypeError unless all are of this type."""
        for output in outputs if cls.DO_VALIDATE_OUTPUT else ():
            if not isinstance(output, output_type):
                raise TypeError(f"Expected output of type {output_type}, but found type {type(output)}")
        return list(outputs)

    # -- looking in ----------------------------------------------------------------------------------------------------

    def get_vllm_config(self) -> VllmConfig:
        return self.vllm_config

    def get_model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    def get_cache_config(self) -> CacheConfig:
        return self.vllm_config.cache_config

    def get_parallel_config(self) -> ParallelConfig:
        return self.vllm_config.parallel_config

    def get_scheduler_config(self) -> SchedulerConfig:
        return self.vllm_config.scheduler_config

    def get_device_config(self) -> DeviceConfig:
        return self.vllm_config.device_config

    def get_load_config(self) -> LoadConfig:
        return self.vllm_config.load_config

    def get_lora_config(self) -> LoRAConfig | None:
        return self.vllm_config.lora_config

    def get_speculative_config(self) -> SpeculativeConfig | None:
        return self.vllm_config.speculative_config

    def get_decoding_config(self) -> DecodingConfig:
        return self.vllm_config.decoding_config

    def get_observability_config(self) -> ObservabilityConfig:
        return self.vllm_config.observability_config

    def get_prompt_adapter_config(self) -> PromptAdapterConfig | None:
        return self.vllm_config.prompt_adapter_config

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def cache_config(self) -> CacheConfig:
        return self.vllm_config.cache_config

    @property
    def parallel_config(self) -> ParallelConfig:
        return self.vllm_config.parallel_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.vllm_config.scheduler_config

    @property
    def device_config(self) -> DeviceConfig:
        return self.vllm_config.device_config

    @property
    def load_config(self) -> LoadConfig:
        return self.vllm_config.load_config

    @property
    def lora_config(self) -> LoRAConfig | None:
        return self.vllm_config.lora_config

    @property
    def speculative_config(self) -> SpeculativeConfig | None:
        return self.vllm_config.speculative_config

    @property
    def decoding_config(self) -> DecodingConfig:
        return self.vllm_config.decoding_config

    @property
    def observability_config(self) -> ObservabilityConfig:
        return self.vllm_config.observability_config

    @property
    def prompt_adapter_config(self) -> PromptAdapterConfig | None:
        return self.vllm_config.prompt_adapter_config

    @property
    def model_executor(self) -> Executor:
        """What runs the steps; `collective_rpc` reaches its workers."""
        return self._client.core.executor

    @property
    def core(self) -> InprocClient:
        """The client of the core, for tools and tests."""
        return self._client

    # -- tokenizer -----------------------------------------------------------------------------------------------------

    @property
    def own_tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; ValueError if there is none."""
        tokenizer = self.input_processor.tokenizer
        if tokenizer is None:
            raise ValueError("Unable to get tokenizer because skip_tokenizer_init is True")
        return tokenizer

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """The transformers tokenizer."""
        return self.get_tokenizer_group().get_lora_tokenizer(lora_request)

    def get_tokenizer_group(self) -> TokenizerGroup:
        """The transformers tokenizer with the older interface around it."""
        from vllm.transformers_utils.tokenizer_group import TokenizerGroup

        return TokenizerGroup(self.own_tokenizer.hf_tokenizer, self.input_processor.tokenizer_of)

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, with the older interface as well."""
        from vllm.transformers_utils.tokenizer_group import grouped

        return grouped(self.get_tokenizer_group())

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer (a transformers object) from the next request on."""
        if not isinstance(tokenizer, Tokenizer) and not hasattr(tokenizer, "get_vocab"):
            raise TypeError(f"tokenizer must be a tokenizer of transformers, got {type(tokenizer).__name__}.")
        own = tokenizer if isinstance(tokenizer, Tokenizer) else from_transformers(tokenizer)
        self.input_processor.tokenizer = own
        self.output_processor.tokenizer = own

    # -- statistics and control ----------------------------------------------------------------------------------------

    def do_log_stats(
        self,
        scheduler_outputs: Any = None,
        model_output: Any = None,
        finished_before: list[int] | None = None,
        skip: list[int] | None = None,
    ) -> None:
        """Write the statistics line now. The arguments of older versions are not needed."""
        self._metrics.on_step(self._client.stats())
        if self.log_stats:
            self._stats_log.tick(force=True)
        self._loggers.log(self._metrics.stats)

    def get_metrics(self) -> list[Metric]:
        """A snapshot of every metric. Raises ValueError if statistics are not kept."""
        if not self.log_stats:
            raise ValueError("There are no metrics without statistics. Pass disable_log_stats=False to the engine.")
        from vllm.v1.metrics.reader import snapshot

        self._metrics.on_step(self._client.stats())
        return snapshot(self._metrics)

    def _log_step(self) -> None:
        stats = self._client.stats()
        self._metrics.on_step(stats)
        if self.log_stats:
            self._stats_log.tick()
        self._loggers.log(stats)

    @property
    def stat_loggers(self) -> dict[str, Any]:
        """Who hears of every step, by name."""
        return self._loggers.by_name

    def add_logger(self, logger_name: str, logger: Any) -> None:
        """Add an object whose `log(stats)` is called after each step. Raises KeyError if the name is in use."""
        self._loggers.add(logger_name, logger)

    def remove_logger(self, logger_name: str) -> None:
        self._loggers.remove(logger_name)

    def is_tracing_enabled(self) -> bool:
        return False

    def check_health(self) -> None:
        """Raise EngineDeadError if the workers are gone."""
        self._client.check_health()

    def reset_prefix_cache(self, device: Any = None) -> bool:
        """Forget cached prefixes; False if requests are running. There is one cache, whatever `device` says."""
        return self._client.reset_prefix_cache()

    def start_profile(self) -> None:
        """Begin a torch.profiler trace in VLLM_TORCH_PROFILER_DIR."""
        self._client.start_profile()

    def stop_profile(self) -> None:
        self._client.stop_profile()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, by name, or a function with the worker as first argument; results by rank."""
        return self._client.collective_rpc(method, timeout, args, kwargs)

    def sleep(self, level: int = 1) -> None:
        raise NotImplementedError("Sleep mode is not available in this version. To free the memory, delete the engine.")

    def wake_up(self, tags: list[str] | None = None) -> None:
        raise NotImplementedError("Sleep mode is not available in this version: the engine is always awake.")

    def is_sleeping(self) -> bool:
        return False

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter into host memory; True. Raises ValueError if it cannot be used."""
        core = self._lora_core()
        core.begin_adapter(lora_request.lora_int_id, self.input_processor.lora_folder(lora_request))
        while (state := core.adapter_state(lora_request.lora_int_id)) == LOADING:
            time.sleep(_POLL_SECONDS)
        if state != READY:
            raise ValueError(f"Loading lora {lora_request.lora_name} failed: {state}")
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that use it end first. False if it is not loaded."""
        return self._lora_core().remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep a loaded adapter in host memory and on the device. Raises ValueError if that is not possible."""
        return self._lora_core().pin_lora(lora_id)

    def list_loras(self) -> set[int]:
        """The ids of the adapters in host memory."""
        return set(self._lora_core().list_loras())

    def _lora_core(self) -> EngineCore:
        if self.vllm_config.lora_config is None:
            raise ValueError("LoRA is not enabled. Set enable_lora=True.")
        return self._client.core

    def add_prompt_adapter(self, prompt_adapter_request: PromptAdapterRequest) -> bool:
        """Read a prompt adapter; True. Raises ValueError if it cannot be used."""
        self.input_processor.virtual_tokens(prompt_adapter_request)
        return True

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Forget a prompt adapter; requests that use it go on. False if it is not there."""
        adapters = self._prompt_adapters()
        found = [key for key in adapters if key[0] == prompt_adapter_id]
        for key in found:
            del adapters[key]
        return bool(found)

    def list_prompt_adapters(self) -> list[int]:
        """The ids of the prompt adapters in memory."""
        return sorted({number for number, _ in self._prompt_adapters()})

    def _prompt_adapters(self) -> dict[tuple[int, str], VirtualTokens]:
        if self.vllm_config.prompt_adapter_config is None:
            raise ValueError("Prompt adapters are not enabled. Set enable_prompt_adapter=True.")
        return self.input_processor.prompt_adapters

    def shutdown(self) -> None:
        """End the workers and free the model's memory. May be called twice."""
        if self._finalizer.alive:
            self._finalizer()
            gc.collect()  # modules and hooks refer to each other

    def __del__(self) -> None:
        if hasattr(self, "_finalizer"):
            self.shutdown()


def _whole_config(config: VllmConfig | None, parts: dict[str, Any]) -> VllmConfig:
    """The configuration of `LLMEngine(config)` or of `LLMEngine(model_config=..., ...)`. Raises TypeError."""
    known = {field.name for field in fields(VllmConfig)}
    unknown = sorted(parts.keys() - known - {"input_registry"})
    if unknown:
        raise TypeError(f"LLMEngine has no argument {unknown[0]!r}; the parts of a configuration are {sorted(known)}.")
    if config is not None:
        if parts:
            raise TypeError(f"LLMEngine takes either vllm_config or its parts, got both ({', '.join(sorted(parts))}).")
        return config
    if parts.get("model_config") is None:
        raise TypeError("LLMEngine needs vllm_config or model_config; LLMEngine.from_engine_args() makes both.")
    return VllmConfig(**{name: part for name, part in parts.items() if name != "input_registry" and part is not None})


def _refuse_copies(config: ParallelConfig) -> None:
    if config.local_replicas > 1:
        if config.distributed_executor_backend == "external_launcher":
            raise ValueError(
                f"data_parallel_size={config.data_parallel_size}: leave it out. Each tensor_parallel_size processes of "
                "the launcher are one engine, so that there are as many as it starts processes for."
            )
        raise ValueError(
            f"data_parallel_size={config.data_parallel_size}: LLM and LLMEngine run one engine in this process. Start "
            "one for each copy, with its data_parallel_rank, as examples/offline_inference_data_parallel.py does, or a "
            "server: vllm serve --data-parallel-size."
        )


def _refuse_queue_limits(scheduler: SchedulerConfig) -> None:
    """What waits here was given to us by the caller, who waits too: there is nobody to be refused."""
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        value = getattr(scheduler, name)
        if value is not None:
            raise ValueError(
                f"{name}={value} bounds the queue of a server (vllm serve, AsyncLLMEngine). LLM and LLMEngine take "
                f"every request that they are given; leave {name} unset."
            )


def _with_blocks(config: VllmConfig, num_blocks: int) -> VllmConfig:
    """`config`, with what is known about the cache now."""
    cache = replace(config.cache_config, num_gpu_blocks=num_blocks, num_cpu_blocks=0)
    return replace(config, cache_config=cache)
