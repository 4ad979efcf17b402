"""The engine for servers: requests come and go on an event loop while the core works in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.engine.adapters import LOADING, READY
from vllm.engine.admission import Admission
from vllm.engine.core_client import AsyncCoreClient, make_core_client
from vllm.engine.input_processor import InputProcessor
from vllm.engine.metrics import StatLoggers
from vllm.engine.output_processor import OutputProcessor
from vllm.engine.preparation import Preparation
from vllm.engine.processed import CheckedParams, RequestInput
from vllm.engine.prompts import with_options
from vllm.engine.request_stream import RequestStream
from vllm.engine.texts import Lanes
from vllm.engine.traffic import Traffic
from vllm.engine.turns import Turns
from vllm.exceptions import EngineDeadError
from vllm.faults import Faults
from vllm.ipc import functions
from vllm.logger import init_logger
from vllm.metrics.log_line import StatsLog
from vllm.metrics.registry import EngineMetrics
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreOutput, CoreStats
from vllm.usage.usage_lib import UsageContext, record_usage

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.engine.tally import Tally
    from vllm.engine.tokenizer import Tokenizer
    from vllm.inputs import PromptType
    from vllm.lora.request import LoRARequest
    from vllm.outputs import PoolingRequestOutput, RequestOutput
    from vllm.pooling_params import PoolingParams
    from vllm.prompt_adapter.request import PromptAdapterRequest
    from vllm.reasoning.think import Begins

logger = init_logger(__name__)

TICK_SECONDS = 0.5
LORA_POLL_SECONDS = 0.005


class AsyncEngineDeadError(EngineDeadError):
    """The background loop or the core has ended; nothing more will be generated."""


class AsyncLLMEngine:
    """Serves requests concurrently. Create it with `from_engine_args`; use it on one event loop.

    The model is loaded when the object is made. The first use on an event loop starts the background work, unless
    `start_engine_loop` is False: then `start_background_loop()` must come first. `core` is for tests, benchmarks, and
    servers with several front ends, of which all but the first have no usage_context, so that nothing counts twice.

    before_core_ends: awaited before the core is stopped, when all requests of this front end have ended.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        start_engine_loop: bool = True,
        usage_context: UsageContext | None = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Mapping[str, Any] | Sequence[Any] | None = None,
        log_requests: bool = True,
        log_stats: bool = True,
        multiprocessing: bool = True,
        core: AsyncCoreClient | None = None,
    ) -> None:
        from vllm.engine.tokenizer_files import load_tokenizer

        self.vllm_config = vllm_config
        self.log_requests = log_requests
        self._log_stats = log_stats
        self._start_automatically = start_engine_loop
        self._multiprocessing = multiprocessing
        self._core = core or make_core_client(vllm_config, multiprocessing)
        self._core.launch()
        model = vllm_config.model_config
        tokenizer: Tokenizer | None = None
        if not model.skip_tokenizer_init:
            tokenizer = load_tokenizer(model.tokenizer_path, model.tokenizer_mode, model.trust_remote_code)
        self._tokenizer = tokenizer
        self.input_processor = InputProcessor(vllm_config, tokenizer)
        device = vllm_config.device_config.device
        self.metrics = EngineMetrics(
            model_name=model.served_model_name,
            max_model_len=model.max_model_len,
            cache_info={**_cache_info(vllm_config), "num_gpu_blocks": self._core.info["num_blocks"]},
            engine=vllm_config.parallel_config.data_parallel_rank or 0,
            max_loras=0 if vllm_config.lora_config is None else vllm_config.lora_config.max_loras,
            adapter_names=self.input_processor.adapter_names,
        )
        self._log_line = StatsLog(self.metrics, "CPU" if device == "cpu" else "GPU")
        self._loggers = StatLoggers(stat_loggers, vllm_config, self.metrics)
        self.output_processor = OutputProcessor(tokenizer, model.logits_width, model.max_model_len, self.metrics)
        parallel = vllm_config.parallel_config
        self._admission = Admission(
            vllm_config.scheduler_config,
            parallel.local_replicas * parallel.pipeline_parallel_size,
            lambda: self.output_processor.num_sequences,
        )
        self._traffic = Traffic(self._core, self.output_processor, self._admission)
        self.lanes, self.turns = Lanes(), Turns()
        self._preparation = Faults.from_env().around_preparation(Preparation(self.input_processor, self.lanes))
        self._attaching: asyncio.Future[None] | None = None
        self._attached = False
        self._loop_started = False
        self._stopped = False
        self._death: BaseException | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._ticked = 0.0
        self._ending: asyncio.Task[None] | None = None  # a reference, so that it is not collected
        self.before_core_ends: Callable[[], Awaitable[None]] | None = None
        if usage_context is not None:
            record_usage(vllm_config, usage_context)

    # -- making one ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs | EngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> AsyncLLMEngine:
        """Resolve the arguments, load the model, return the engine. Raises ValueError for arguments that do not fit."""
        config = engine_args.create_engine_config(usage_context)
        return cls.from_vllm_config(
            config,
            start_engine_loop,
            usage_context,
            stat_loggers,
            disable_log_requests=not engine_args.log_requests,
            disable_log_stats=engine_args.disable_log_stats,
        )

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Mapping[str, Any] | Sequence[Any] | None = None,
        disable_log_requests: bool = False,
        disable_log_stats: bool = False,
        disable_frontend_multiprocessing: bool = False,
    ) -> AsyncLLMEngine:
        """As `from_engine_args`, from a resolved configuration."""
        return cls(
            vllm_config,
            start_engine_loop=start_engine_loop,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            log_requests=not disable_log_requests,
            log_stats=not disable_log_stats,
            multiprocessing=not disable_frontend_multiprocessing,
        )

    # -- the background ------------------------------------------------------------------------------------------------

    def start_background_loop(self) -> None:
        """Begin to serve on the running event loop (or on the first that uses the engine)."""
        if self.errored:
            raise AsyncEngineDeadError("Background loop has errored already.")
        if self._loop_started:
            raise RuntimeError("Background loop is already running.")
        self._loop_started = True

    async def _ensure_attached(self) -> None:
        if self._death is not None:
            raise self.dead_error
        if self._stopped:
            raise AsyncEngineDeadError("The engine was shut down.")
        if self._attached:
            if self._loop.is_closed():
                raise RuntimeError(
                    "The event loop that this engine was first used in is closed, as at the end of asyncio.run(). Send "
                    "all requests from one loop, or make another engine."
                )
            return
        if not self._loop_started:
            if not self._start_automatically:
                raise AsyncEngineDeadError(
                    "Background loop is not running. If it was running, inspect the output to find the stacktrace of "
                    "the error that caused the background loop to stop (AsyncEngineDeadError)."
                )
            self._loop_started = True
        if self._attaching is None:
            self._attaching = asyncio.ensure_future(self._attach())
        await asyncio.shield(self._attaching)  # several requests may come before it is done, and one may leave

    async def _attach(self) -> None:
        await self._core.attach(self._on_outputs, self._on_death)
        self._loop = asyncio.get_running_loop()
        self._attached = True
        self._ticked = time.monotonic()
        self._ticker = asyncio.create_task(self._tick(), name="engine-watch")

    async def _tick(self) -> None:
        """Write the statistics line, and give up a core that is stuck."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._excuse_core(4 * TICK_SECONDS)
            self._ticked = time.monotonic()
            if self._log_stats:
                self._log_line.tick()
            problem = self._core.stall()
            if problem is not None:
                self.set_errored(AsyncEngineDeadError(problem))
                self._core.kill()
                return

    def _excuse_core(self, seconds: float) -> None:
        """If the event loop was held up for so long, as by imports, it read no pulses of the core."""
        if time.monotonic() - self._ticked > seconds:
            self._core.excuse()

    def _on_outputs(self, outputs: list[CoreOutput], stats: CoreStats) -> None:
        """One step of the core. Runs on the event loop; wakes every consumer it has something for."""
        self.metrics.on_step(stats)
        if outputs:
            self._traffic.take(outputs)
        self._loggers.log(stats)

    # The core steps by itself, in its own process. These three are what is left of the older loop's public methods.

    async def engine_step(self, virtual_engine: int = 0) -> bool:
        """Let the event loop take in what the core has sent; True while requests are in progress."""
        await self._ensure_attached()
        await asyncio.sleep(0)
        return bool(len(self._traffic))

    def process_request_outputs(self, request_outputs: Sequence[RequestOutput]) -> bool:
        """Hand outputs to their consumers; True if all of them are finished."""
        for output in request_outputs:
            self._traffic.hand_over(output)
        return all(output.finished for output in request_outputs)

    @staticmethod
    async def run_engine_loop(engine_ref: Callable[[], AsyncLLMEngine | None]) -> None:
        """Return when the engine that `engine_ref` (a weak reference) gives has stopped or is gone."""
        while (engine := engine_ref()) is not None and not engine.is_stopped:
            del engine
            await asyncio.sleep(0.1)

    def _on_death(self, reason: str) -> None:
        self.set_errored(AsyncEngineDeadError(reason))

    def set_errored(self, exc: BaseException) -> None:
        """Declare the engine dead: every request in flight ends with this error, and so does every later one."""
        if self._death is not None:
            return
        logger.error("The engine is dead: %s", exc)
        self._death = exc
        self._traffic.end(exc)

    def shutdown_background_loop(self) -> None:
        """End the background work without waiting; requests in flight fail. `shutdown` is the gentle way."""
        self._stopped = True
        self._traffic.end(AsyncEngineDeadError("The engine was shut down."))
        if self._ticker is not None:
            self._ticker.cancel()
        self._core.kill()
        self.lanes.close()

    def shutdown(self, timeout: float | None = None) -> Awaitable[None]:
        """Refuse new requests, let running ones finish for `timeout` seconds (None: no limit), then stop.

        Await the result to know that it is done. A plain call outside of an event loop ends everything at once; inside
        one it goes on by itself.
        """
        if self._admission.closed:
            timeout = 0.0  # asked a second time: now
        self._admission.closed = True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.shutdown_background_loop()
            return _Done()
        self._ending = loop.create_task(self._shutdown(timeout), name="engine-shutdown")
        return self._ending

    async def _shutdown(self, timeout: float | None) -> None:
        try:
            await self._finish(timeout)
        except asyncio.CancelledError:  # the event loop ends before we do
            self.shutdown_background_loop()
            raise

    async def _finish(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(self._traffic) and self._death is None and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(0.02)
        self._stopped = True
        self._traffic.end(AsyncEngineDeadError("The server is shutting down."))
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None
        if self.before_core_ends is not None:
            await self.before_core_ends()
        await self._core.stop()
        while self.lanes.num_writing and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(0.02)
        self.lanes.close()

    def __del__(self) -> None:
        core = self.__dict__.get("_core")
        if core is not None:
            core.kill()

    def count_with(self, tally: Tally) -> None:
        """Share the bounds of the waiting queue with other front ends of the same core."""
        self._admission.count_with(tally)

    # -- requests ------------------------------------------------------------------------------------------------------

    def check_admission(self, sequences: int = 1, prompt_tokens: int = 0, short: bool = False) -> None:
        """Raise QueueOverflowError if the waiting queue has no room, see `Admission.check`."""
        self._admission.check(sequences, prompt_tokens, short)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType | None = None,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        *,
        inputs: PromptType | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a request and return the generator of its outputs. The arguments are those of `generate`."""
        if inputs is not None:
            prompt = inputs
        if prompt is None or params is None:
            raise ValueError("A request needs a prompt and sampling parameters.")
        _ignore_tracing(request_id, trace_headers)
        params, special = with_options(params, tokenization_kwargs)
        stream = await self._begin(
            RequestInput(
                request_id, prompt, params, arrival_time, lora_request, prompt_adapter_request, priority, special
            )
        )
        return stream.outputs()

    async def generate(
        self,
        prompt: PromptType | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        *,
        inputs: PromptType | None = None,
        arrival_time: float | None = None,
        timeout: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come. Leaving the generator aborts the request. `inputs` is an older name of
        `prompt`; tokenization_kwargs are `add_special_tokens` and `truncate_prompt_tokens`.

        Raises ValueError or TypeError for a request that is not in order, QueueOverflowError when the queue is full,
        RetryableRequestError if its grammar had to wait too long, TimeoutError `timeout` seconds after the start,
        EngineGenerateError if this request failed, EngineDeadError if the engine did.
        """
        prompt = prompt if inputs is None else inputs
        if prompt is None or sampling_params is None or request_id is None:
            raise TypeError("generate() needs a prompt, sampling_params and a request_id.")
        _ignore_tracing(request_id, trace_headers)
        params, special = with_options(sampling_params, tokenization_kwargs)
        request = RequestInput(
            request_id, prompt, params, arrival_time, lora_request, prompt_adapter_request, priority, special
        )
        stream = await self._open(request, timeout)
        try:
            async for output in stream.outputs():
                yield output
        finally:
            stream.close()  # a consumer that leaves must be noticed now, not when garbage is collected

    async def check_params(self, params: SamplingParams, lora_request: LoRARequest | None = None) -> CheckedParams:
        """Parameters that are the engine's from here on, as many requests of one call may have them (`open`), looked at
        once. Raises ValueError, QueueOverflowError.
        """
        if self._multiprocessing:
            params.verify_serializable()
        return await self._preparation.checked(params, lora_request)

    async def open(
        self,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | CheckedParams,
        request_id: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        account: str | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        begins: Begins | None = None,
    ) -> RequestStream:
        """Begin a request for a consumer that wants to be called rather than to wait; it has to close the stream.

        account: common to several requests of one call, which `check_admission` was asked for as a whole.
        begins: as of `RequestInput`.
        params: the engine's from here on, or what `check_params` has returned, which requests may share.

        Raises, here or through the stream, what `generate` raises.
        """
        checked = params if isinstance(params, CheckedParams) else None
        request = RequestInput(
            request_id,
            prompt,
            params.params if isinstance(params, CheckedParams) else params,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            priority=priority,
            owns_params=True,
            account=account,
            begins=begins,
            checked=checked,
        )
        return await self._open(request, timeout)

    async def encode(
        self,
        prompt: PromptType | None = None,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        inputs: PromptType | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """The one answer of a pooling request, as soon as it is there. Leaving the generator aborts the request.

        truncate_prompt_tokens: a longer prompt is cut to so many, -1: to as many as the model takes.
        tokenization_kwargs: the same setting, also as `truncation` and `max_length`, and `add_special_tokens`.
        `inputs` is an older name of `prompt`. Raises as `generate` does.
        """
        prompt = prompt if inputs is None else inputs
        if prompt is None or pooling_params is None or request_id is None:
            raise TypeError("encode() needs a prompt, pooling_params and a request_id.")
        _ignore_tracing(request_id, trace_headers)
        if truncate_prompt_tokens is not None:
            tokenization_kwargs = {**(tokenization_kwargs or {}), "truncate_prompt_tokens": truncate_prompt_tokens}
        pooling_params, special = with_options(pooling_params, tokenization_kwargs)
        stream = await self._open(
            RequestInput(request_id, prompt, pooling_params, None, lora_request, None, priority, special), timeout
        )
        try:
            async for output in stream.outputs():
                yield output  # type: ignore[misc]
        finally:
            stream.close()

    async def _open(self, request: RequestInput, timeout: float | None) -> RequestStream:
        """Begin a request whose stream fails `timeout` seconds from now."""
        if timeout is None:
            return await self._begin(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        stream = await self._begin(request, deadline)
        error = TimeoutError("The request was not finished before its deadline.")
        stream.expire_with(loop.call_at(deadline, stream.fail, error))
        return stream

    async def _begin(self, request: RequestInput, deadline: float | None = None) -> RequestStream:
        await self._ensure_attached()
        is_admitted = self._traffic.is_known(request.account)
        if not is_admitted:
            self.check_admission()
        if request.request_id in self.output_processor:
            raise KeyError(f"Request {request.request_id} already exists.")
        if self._multiprocessing and isinstance(request.params, SamplingParams):
            request.params.verify_serializable()
        with self._admission.arriving():
            request = await self._preparation.tokenized(request, deadline)
        if self.is_stopped:
            raise self.dead_error
        processed = await self._preparation.processed(request, deadline)
        length, sequences = len(processed.prompt_token_ids), processed.params.num_candidates
        if not is_admitted:
            self.check_admission(sequences, length)
        try:
            stream = self._traffic.begin(processed)
        except EngineDeadError as error:
            raise self.dead_error from error
        except Exception as error:
            raise ValueError(f"The request cannot be sent to the engine core: {error}") from error
        if self.log_requests:
            logger.info(
                "Received request %s: prompt: %d tokens, params: %s",
                request.request_id,
                len(processed.prompt_token_ids),
                processed.params,
            )
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their generators return after a last output with finish_reason "abort"."""
        if not self.is_running:
            raise AsyncEngineDeadError(
                "Background loop is not running. If it was running, inspect the output to find the stacktrace of the "
                "error that caused the background loop to stop (AsyncEngineDeadError)."
            )
        core_ids = self._traffic.abort([request_id] if isinstance(request_id, str) else request_id)
        if core_ids:
            self._core.abort(core_ids)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._attached and self._death is None and not self._stopped

    @property
    def is_stopped(self) -> bool:
        return self.errored or self._stopped

    @property
    def is_draining(self) -> bool:
        """Whether the engine is being shut down, and refuses new requests."""
        return self._admission.closed

    @property
    def errored(self) -> bool:
        return self._death is not None

    @property
    def dead_error(self) -> BaseException:
        return self._death or AsyncEngineDeadError("The engine is not running.")

    def get_num_unfinished_requests(self) -> int:
        return self.output_processor.num_unfinished

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, and no answer is being written: a moment for what would hold them up."""
        return self.output_processor.num_unfinished == 0 and self.lanes.num_writing == 0

    async def check_health(self) -> None:
        """Raise EngineDeadError unless the core lives and makes progress."""
        if self.is_stopped:
            raise AsyncEngineDeadError("Background loop is stopped.")
        await self._ensure_attached()
        self._excuse_core(2 * TICK_SECONDS)
        self._core.check_health()

    async def get_vllm_config(self) -> VllmConfig:
        return self.vllm_config

    async def get_model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    async def get_parallel_config(self) -> ParallelConfig:
        return self.vllm_config.parallel_config

    async def get_scheduler_config(self) -> SchedulerConfig:
        return self.vllm_config.scheduler_config

    async def get_decoding_config(self) -> Any:
        return self.vllm_config.decoding_config

    async def get_lora_config(self) -> Any:
        return self.vllm_config.lora_config

    async def get_input_preprocessor(self) -> InputProcessor:
        return self.input_processor

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """The Hugging Face tokenizer of the model, or of an adapter (loaded on the first call)."""
        found = self._tokenizer if lora_request is None else self.input_processor.tokenizer_of(lora_request)
        if found is None:
            raise ValueError("The engine has no tokenizer: `skip_tokenizer_init` is True.")
        return found.hf_tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """What `get_model_config` gives, without waiting."""
        return self.vllm_config.model_config

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, with the interface of a group as well; None if there is none."""
        from vllm.transformers_utils.tokenizer_group import TokenizerGroup, grouped

        if self._tokenizer is None:
            return None
        return grouped(TokenizerGroup(self._tokenizer.hf_tokenizer, self.input_processor.tokenizer_of))

    @property
    def limit_concurrency(self) -> int | None:
        """The number of HTTP connections that a server in front should allow: there is no such limit."""
        return None

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self, scheduler_outputs: Any = None, model_output: Any = None) -> None:
        """Write the statistics line now."""
        self._log_line.tick(force=True)

    def add_logger(self, logger_name: str, logger: Any) -> None:
        """Add an object whose `log(stats)` is called after each step. Raises KeyError if the name is in use."""
        self._loggers.add(logger_name, logger)

    def remove_logger(self, logger_name: str) -> None:
        """Forget a logger."""
        self._loggers.remove(logger_name)

    # -- control -------------------------------------------------------------------------------------------------------

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        await self._ensure_attached()
        return await self._core.call(method, *args, **kwargs)

    async def start_profile(self) -> None:
        await self._call("start_profile")

    async def stop_profile(self) -> None:
        await self._call("stop_profile")

    async def reset_prefix_cache(self, device: Any = None) -> bool:
        """Forget cached prefixes; False if requests are running."""
        return bool(await self._call("reset_prefix_cache"))

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name, or a function that is given the worker; results by rank.

        Raises TypeError for a function or an argument that cannot travel (`ipc.functions`).
        """
        sent = functions.portable([method, timeout, list(args), dict(kwargs or {})])
        return list(functions.received(await self._call("collective_rpc", *sent)))

    async def sleep(self, level: int = 1) -> None:
        raise NotImplementedError("Sleep mode comes later: sleep() is not available in this version.")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        raise NotImplementedError("Sleep mode comes later: wake_up() is not available in this version.")

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter into host memory, beside the requests in progress; True. Raises ValueError if it cannot be
        used.
        """
        folder = await asyncio.get_running_loop().run_in_executor(None, self.input_processor.lora_folder, lora_request)
        await self._call("begin_adapter", lora_request.lora_int_id, folder)
        while (state := await self._call("adapter_state", lora_request.lora_int_id)) == LOADING:
            await asyncio.sleep(LORA_POLL_SECONDS)
        if state != READY:
            raise ValueError(f"Loading lora {lora_request.lora_name} failed: {state}")
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that use it end first. False if it is not loaded."""
        self._need_lora()
        return bool(await self._call("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """The ids of the adapters in host memory."""
        self._need_lora()
        return set(await self._call("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep a loaded adapter in host memory and on the device. Raises ValueError if that is not possible."""
        self._need_lora()
        return bool(await self._call("pin_lora", lora_id))

    def _need_lora(self) -> None:
        if self.vllm_config.lora_config is None:
            raise ValueError("LoRA is not enabled. Set enable_lora=True (--enable-lora).")


def _cache_info(config: VllmConfig) -> dict[str, Any]:
    import dataclasses

    cache = config.cache_config
    found = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
    return {**found, "swap_space_bytes": cache.swap_space_bytes}


def _ignore_tracing(request_id: str, trace_headers: Mapping[str, str] | None) -> None:
    if trace_headers:
        logger.warning("Tracing is not enabled: the trace headers of request %s are not used.", request_id)


class _Done:
    """Something to await that is over already, also where there is no event loop."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield
