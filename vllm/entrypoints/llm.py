"""`LLM`: a model in one object, for offline use. Prompts in, outputs in the same order."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from vllm.beam_search import BeamSearchOutput, BeamSearchSequence
from vllm.config.model import CAPTURED
from vllm.config.model_source import copy_small_files
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.input_processor import needs_generation
from vllm.engine.llm_engine import LLMEngine
from vllm.engine.processed import RequestInput
from vllm.engine.prompts import listed, tokenization_options
from vllm.entrypoints import pooling
from vllm.entrypoints.chat_utils import form_begins, last_text, tokenize_chat
from vllm.entrypoints.interrupt import deferred_interrupt
from vllm.entrypoints.llm_forms import (
    CHAT_OPTIONS,
    as_list,
    check_chat_options,
    check_path_of_template,
    final_only,
    merge_legacy,
    raise_if_failed,
)
from vllm.entrypoints.progress import Progress, ProgressBar
from vllm.entrypoints.turn import Turn
from vllm.exceptions import GenerationError
from vllm.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from vllm.reasoning import think_format
from vllm.reasoning.think import Begins
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils import Counter
from vllm.utils.collector import what_exists_frozen

if TYPE_CHECKING:
    from torch import nn

    from vllm.config import ModelConfig
    from vllm.entrypoints.chat_utils import ChatCompletionMessageParam, ContentFormatOption
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.guided_decoding.guided_fields import GuidedDecodingRequest, LLMGuidedOptions
    from vllm.pooling_params import PoolingParams
    from vllm.prompt_adapter.request import PromptAdapterRequest
    from vllm.v1.metrics.reader import Metric

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def _init_by_keyword(init: Callable[_Params, None]) -> Callable[_Params, None]:
    """Warn of positional arguments behind the model: their order differs between versions."""

    @functools.wraps(init)
    def wrapped(*args: _Params.args, **kwargs: _Params.kwargs) -> None:
        if len(args) > 2 and LLM.DEPRECATE_INIT_POSARGS:
            warnings.warn(
                "Positional arguments of LLM(...) behind the model are deprecated; name them.",
                DeprecationWarning,
                stacklevel=2,
            )
        init(*args, **kwargs)

    return wrapped


class LLM:
    """A language model with its tokenizer and its KV cache.

    Batches what it is given by itself: for the best speed, pass all prompts in one call; calls from several threads
    run one after another. Takes every argument of `EngineArgs` as a keyword. Use it as a context manager, or delete it,
    to free its memory and processes.
    """

    DEPRECATE_LEGACY: ClassVar[bool] = True
    DEPRECATE_INIT_POSARGS: ClassVar[bool] = True

    @_init_by_keyword
    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        allowed_local_media_path: str = "",
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 4,
        cpu_offload_gb: float = 0,
        enforce_eager: bool | None = None,
        max_seq_len_to_capture: int = CAPTURED,
        disable_custom_all_reduce: bool = False,
        disable_async_output_proc: bool = False,
        hf_overrides: dict[str, Any] | Callable[[Any], Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        task: str = "auto",
        override_pooler_config: Any = None,
        compilation_config: int | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Who runs a batch waits for its result, and has a progress bar instead of statistics.
        kwargs.setdefault("disable_log_stats", True)
        self._chat_template: Path | str | None = kwargs.pop("chat_template", None)
        check_path_of_template(self._chat_template)
        arguments = EngineArgs(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            allowed_local_media_path=allowed_local_media_path,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            swap_space=swap_space,
            cpu_offload_gb=cpu_offload_gb,
            enforce_eager=enforce_eager,
            max_seq_len_to_capture=max_seq_len_to_capture,
            disable_custom_all_reduce=disable_custom_all_reduce,
            disable_async_output_proc=disable_async_output_proc,
            hf_overrides=hf_overrides,
            mm_processor_kwargs=mm_processor_kwargs,
            task=task,
            override_pooler_config=override_pooler_config,
            compilation_config=compilation_config,
            **kwargs,
        )
        self.llm_engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        self.request_counter = Counter()
        self._turn = Turn()
        self._queued: list[str] = []  # ids of enqueue(), in order
        self._finished: dict[str, Any] = {}  # outputs that nobody has taken yet

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        return cls(**vars(engine_args))

    @classmethod
    @contextmanager
    def deprecate_legacy_api(cls) -> Iterator[None]:
        """In this context, warn of the older arguments of `generate` and `encode`."""
        before, cls.DEPRECATE_LEGACY = cls.DEPRECATE_LEGACY, True
        try:
            yield
        finally:
            cls.DEPRECATE_LEGACY = before

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.llm_engine.shutdown()

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        guided_options_request: LLMGuidedOptions | GuidedDecodingRequest | None = None,
        priority: list[int] | None = None,
        *,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt.

        prompts: one or several; text, token ids, or dictionaries (`TextPrompt`, `TokensPrompt`).
        sampling_params: for all prompts, or one per prompt; None takes the model's own defaults.
        priority: one number per prompt, smaller runs first; needs scheduling_policy="priority".
        tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens`.

        Returns the outputs in the order of the prompts. Raises ValueError or TypeError, with nothing started, if
        anything about any prompt is wrong; GenerationError if the engine could not finish a request.
        """
        _refuse_processor_options(mm_processor_kwargs)
        with self._turn:
            ids = self._add(
                prompts,
                sampling_params,
                prompt_token_ids,
                lora_request,
                prompt_adapter_request,
                guided_options_request,
                priority,
                tokenization_kwargs,
            )
            return self._run(ids, use_tqdm)

    def chat(
        self,
        messages: list[ChatCompletionMessageParam] | list[list[ChatCompletionMessageParam]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequest | None = None,
        chat_template: Path | str | None = None,
        chat_template_content_format: ContentFormatOption = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        chat_template: a template, its file, or the name of one that the tokenizer has. Default: the model's.
        chat_template_content_format: contents as "string" or as parts ("openai") for the template; "auto" finds out.
        add_generation_prompt, continue_final_message: begin a new answer, or go on with the last message.
        tokenization_kwargs: as for `generate`; `add_special_tokens` is False, since templates write special tokens.
        """
        prompts, begins = self._render(
            messages,
            tokenization_kwargs,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            mm_processor_kwargs=mm_processor_kwargs,
            chat_template_kwargs=chat_template_kwargs,
        )
        with self._turn:
            ids = self._add(
                prompts, sampling_params, None, lora_request, None, None, priority, tokenization_kwargs, begins
            )
            return self._run(ids, use_tqdm)

    def beam_search(
        self,
        prompts: list[TokensPrompt | TextPrompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: ProgressBar = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, best first. Tokens and text include the prompt; tokens,
        unlike the text, also the end-of-sequence token of a beam that it ended.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}.")
        with self._turn:
            ids = self._submit(as_list(prompts), [params], lora_request)
            outputs = self._run(ids, use_tqdm)
        tokenizer = self.llm_engine.input_processor.tokenizer
        found = []
        for output in outputs:
            sequences = []
            for beam in output.outputs:
                tokens = [*(output.prompt_token_ids or ()), *beam.token_ids]
                hides_end = beam.finish_reason == "stop" and not params.include_stop_str_in_output
                shown = tokens[:-1] if hides_end else tokens
                sequences.append(
                    BeamSearchSequence(
                        tokens=tokens,
                        logprobs=beam.logprobs or [],
                        cum_logprob=beam.cumulative_logprob or 0.0,
                        text=None if tokenizer is None else tokenizer.decode(shown, params.skip_special_tokens),
                        finish_reason=beam.finish_reason,
                        stop_reason=beam.stop_reason,
                        lora_request=output.lora_request,
                    )
                )
            found.append(BeamSearchOutput(sequences))
        return found

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        priority: list[int] | None = None,
        use_tqdm: ProgressBar = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts and return their request ids; `wait_for_completion` runs them, with the progress bar."""
        _refuse_processor_options(mm_processor_kwargs)
        with self._turn:
            ids = self._add(prompts, sampling_params, None, lora_request, None, None, priority, tokenization_kwargs)
            self._queued += ids
        return ids

    def enqueue_chat(
        self,
        messages: list[ChatCompletionMessageParam] | list[list[ChatCompletionMessageParam]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequest | None = None,
        priority: list[int] | None = None,
        *,
        tokenization_kwargs: dict[str, Any] | None = None,
        **chat_options: Any,
    ) -> list[str]:
        """Queue conversations; the options are those of `chat`."""
        unknown = sorted(chat_options.keys() - CHAT_OPTIONS)
        if unknown:
            raise TypeError(f"enqueue_chat has no argument {unknown[0]!r}; it takes those of chat.")
        prompts, begins = self._render(messages, tokenization_kwargs, **chat_options)
        with self._turn:
            ids = self._add(
                prompts, sampling_params, None, lora_request, None, None, priority, tokenization_kwargs, begins
            )
            self._queued += ids
        return ids

    def wait_for_completion(self, output_type: type[Any] | None = None, *, use_tqdm: ProgressBar = True) -> list[Any]:
        """Run what `enqueue` has queued. Returns the outputs in that order; TypeError if not of `output_type`."""
        with self._turn:
            ids, self._queued = self._queued, []
            outputs = self._run(ids, use_tqdm)
        for output in outputs:
            if output_type is not None and not isinstance(output, output_type):
                raise TypeError(f"Expected output of type {output_type}, but found type {type(output)}")
        return outputs

    # -- what only pooling models do -----------------------------------------------------------------------------------

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """What the model makes of each prompt, as a tensor: a vector, scores, or one of either for each token.

        pooling_params: for all prompts, or one per prompt.   pooling_task: what the answers are used for, which the
        model must be made for.   truncate_prompt_tokens: longest prompt, -1 for what the model takes; longer ones are
        cut at their ends.   tokenization_kwargs: the same setting, and `add_special_tokens`.
        """
        self._require("encode", "LLM.encode() is only enabled for pooling models")
        found = self._prompts(prompts, prompt_token_ids)
        options = _with_truncation(tokenization_kwargs, truncate_prompt_tokens)
        params = pooling.params_for(pooling_params, pooling_task)
        return self._pool(found, params, use_tqdm, lora_request, prompt_adapter_request, options)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ProgressBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding vector of each prompt. Arguments as for `encode`."""
        self._require("embed", "Embedding API is only enabled for `--task embed`")
        options = _with_truncation(tokenization_kwargs, truncate_prompt_tokens)
        params = pooling.params_for(pooling_params, "embed")
        outputs = self._pool(as_list(prompts), params, use_tqdm, lora_request, prompt_adapter_request, options)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ProgressBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The class probabilities of each prompt. Arguments as for `encode`."""
        self._require("classify", "Classification API is only enabled for `--task classify`")
        options = _with_truncation(tokenization_kwargs, truncate_prompt_tokens)
        params = pooling.params_for(pooling_params, "classify")
        outputs = self._pool(as_list(prompts), params, use_tqdm, lora_request, prompt_adapter_request, options)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ProgressBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """What a reward model makes of each prompt, as a tensor. Arguments as for `encode`."""
        self._require("reward", "Reward API is only enabled for `--task reward`")
        options = _with_truncation(tokenization_kwargs, truncate_prompt_tokens)
        params = pooling.params_for(pooling_params, "reward")
        return self._pool(as_list(prompts), params, use_tqdm, lora_request, prompt_adapter_request, options)

    def score(
        self,
        text_1: PromptType | Sequence[PromptType],
        text_2: PromptType | Sequence[PromptType],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ProgressBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """The similarity of pairs of texts: of one with one, one with each of several, or several one by one.

        A model that scores pairs reads each pair as one prompt; of a model that embeds it is the cosine of the two
        vectors.   truncate_prompt_tokens: longest prompt; texts are cut at their ends.   chat_template: with the
        messages "query" and "document", makes one prompt of a pair, as some rerankers want it.
        """
        self._require("score", "Score API is only enabled for `--task embed or --task score`")
        options = _with_truncation(tokenization_kwargs, truncate_prompt_tokens)
        firsts, seconds = pooling.pairs(as_list(text_1), as_list(text_2))
        params = pooling.params_for(pooling_params, "score")
        settings = self.model_config.pooling
        assert settings is not None  # which _require has seen to
        if settings.scores_pairs:
            engine = self.llm_engine.input_processor
            prompts = pooling.pair_prompts(engine, firsts, seconds, options, chat_template)
            outputs = self._pool(prompts, params, use_tqdm, lora_request, prompt_adapter_request)
            return [ScoringRequestOutput.from_base(output) for output in outputs]
        if chat_template is not None:
            raise ValueError("chat_template is for models that score pairs; this one embeds each text by itself.")
        texts = [*firsts, *seconds]
        vectors = self._pool(texts, params, use_tqdm, lora_request, prompt_adapter_request, options)
        pad = self.llm_engine.input_processor.pad_token_id
        return pooling.similarities(vectors[: len(firsts)], vectors[len(firsts) :], pad)

    # -- the engine ----------------------------------------------------------------------------------------------------

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """The transformers tokenizer."""
        return self.llm_engine.get_tokenizer(lora_request)

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer (a transformers object) from the next call on."""
        self.llm_engine.set_tokenizer(tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used without sampling parameters: the model's recommendation, else the neutral ones."""
        return self.llm_engine.input_processor.default_params()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of workers. There is one data-parallel rank, so `include_dp` makes no difference."""
        return self.llm_engine.get_parallel_config().world_size

    @property
    def model_config(self) -> ModelConfig:
        return self.llm_engine.model_config

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return self.model_config.supported_tasks

    def get_metrics(self) -> list[Metric]:
        """A snapshot of every metric of the server's /metrics. Needs disable_log_stats=False, else ValueError."""
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(
        self, device: Any = None, *, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; False if requests are running. There is no connector with a cache of its own."""
        if reset_running_requests and self.llm_engine.has_unfinished_requests():
            raise ValueError(
                "reset_running_requests is not available: queued requests keep their blocks. Let them finish "
                "(wait_for_completion) first."
            )
        return self.llm_engine.reset_prefix_cache(device)

    def reset_mm_cache(self) -> None:
        """Forget processed images and sounds: there are none, since the models take text only."""

    def collective_rpc(
        self,
        method: str | Callable[..., _Result],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[_Result]:
        """Call a method of every worker, by name, or a function with the worker as first argument; results by rank."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[nn.Module], _Result]) -> list[_Result]:
        """Call `func` with the model of every worker; results by rank."""
        return self.collective_rpc("apply_model", args=(func,))

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Make the folder `path` a model for load_format="sharded_state": each rank's weights as they are kept, which
        load without being renamed or cut, and all other files of the model's folder.

        pattern: of files' names, with {rank} and {part}.   max_size: bytes of a file, 5 GiB by default.
        """
        self.collective_rpc("save_sharded_state", args=(path, pattern, max_size))
        copy_small_files(self.llm_engine.model_config.path, Path(path).expanduser())

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin a torch.profiler trace in VLLM_TORCH_PROFILER_DIR."""
        if profile_prefix is not None:
            raise ValueError("profile_prefix is not available: traces are named by time and rank.")
        self.llm_engine.start_profile()

    def stop_profile(self) -> None:
        self.llm_engine.stop_profile()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the memory of weights and cache until `wake_up`."""
        self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.llm_engine.wake_up(tags)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _add(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        prompt_token_ids: Any,
        lora_request: Any,
        prompt_adapter_request: PromptAdapterRequest | None,
        guided: LLMGuidedOptions | GuidedDecodingRequest | None,
        priority: list[int] | None,
        tokenization: dict[str, Any] | None,
        begins: Sequence[Begins | None] = (),
    ) -> list[str]:
        """Check everything, then queue everything. begins: as of `RequestInput`, one per prompt; () for none."""
        if self.model_config.pooling is not None:
            raise ValueError(needs_generation(self.model_config.convert_type))
        found = self._prompts(prompts, prompt_token_ids)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        several = isinstance(sampling_params, Sequence)
        given: list[Any] = list(sampling_params) if several else [sampling_params]  # type: ignore[arg-type]
        if several and len(given) != len(found):
            raise ValueError("The lengths of prompts and params must be the same.")
        special, truncate = tokenization_options(tokenization)
        params = [final_only(p, guided, truncate) for p in given]
        return self._submit(found, params, lora_request, prompt_adapter_request, priority, special, begins)

    def _prompts(self, prompts: Any, prompt_token_ids: Any) -> list[Any]:
        """The prompts of a call, which may be of the older form."""
        if prompt_token_ids is not None:
            if self.DEPRECATE_LEGACY:
                warnings.warn(
                    "prompt_token_ids is deprecated. Pass token ids as prompts: {'prompt_token_ids': ids}.",
                    DeprecationWarning,
                    stacklevel=4,
                )
            return merge_legacy(prompts, prompt_token_ids)
        if prompts is None:
            raise ValueError("Either prompts or prompt_token_ids must be provided.")
        return as_list(prompts)

    def _require(self, task: str, message: str) -> None:
        """Raise ValueError unless the model is made for the task."""
        able = self.model_config.supported_tasks
        if task not in able:
            advice = ""
            if "generate" in able:
                advice = " Load it with task='embed' (or classify, score, reward) to pool with it."
            raise ValueError(f"{message}; this model is for: {', '.join(able)}.{advice}")

    def _pool(
        self,
        prompts: list[Any],
        params: list[PoolingParams],
        use_tqdm: ProgressBar,
        lora_request: Any,
        prompt_adapter_request: PromptAdapterRequest | None,
        tokenization: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """The answers to prompts, each of which has its parameters, or all of which have the one there is."""
        if len(params) not in (1, len(prompts)):
            raise ValueError("The lengths of prompts and params must be the same.")
        special, truncate = tokenization_options(tokenization)
        if truncate is not None:
            params = [pooling.truncated(given, truncate) for given in params]
        if not prompts:
            return []
        with self._turn:
            ids = self._submit(prompts, params, lora_request, prompt_adapter_request, None, special)
            return self._run(ids, use_tqdm)

    def _submit(
        self,
        prompts: list[Any],
        params: Sequence[SamplingParams | BeamSearchParams | PoolingParams],
        lora_request: Any = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: list[int] | None = None,
        add_special_tokens: bool = True,
        begins: Sequence[Begins | None] = (),
    ) -> list[str]:
        """`params`: one for all, or one per prompt."""
        count = len(prompts)
        if isinstance(lora_request, str):
            raise TypeError(f"lora_request must be a LoRARequest, or a list of one per prompt, got {lora_request!r}.")
        if isinstance(lora_request, Sequence) and len(lora_request) != count:
            raise ValueError("The lengths of prompts and lora_request must be the same.")
        priority = listed(priority)
        if not isinstance(priority, (Sequence, NoneType)):
            raise TypeError(f"priority must be a list with one integer per prompt, got {type(priority).__name__}.")
        if priority is not None and len(priority) != count:
            raise ValueError("The lengths of prompts and priority must be the same.")
        requests = [
            RequestInput(
                request_id=str(next(self.request_counter)),
                prompt=prompt,
                params=params[0] if len(params) == 1 else params[i],
                lora_request=lora_request[i] if isinstance(lora_request, Sequence) else lora_request,
                prompt_adapter_request=prompt_adapter_request,
                priority=0 if priority is None else priority[i],
                add_special_tokens=add_special_tokens,
                begins=begins[i] if begins else None,
            )
            for i, prompt in enumerate(prompts)
        ]
        self.llm_engine.add_requests(requests)
        return [request.request_id for request in requests]

    def _render(
        self,
        messages: Any,
        tokenization_kwargs: dict[str, Any] | None,
        *,
        chat_template: Path | str | None = None,
        chat_template_content_format: ContentFormatOption = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> tuple[list[Any], list[Begins | None]]:
        """The prompts of one or several conversations, and where the output of each begins, if it may have thoughts."""
        self._require("generate", "LLM.chat() is only supported for generative models")
        _refuse_processor_options(mm_processor_kwargs)
        check_chat_options(tools, chat_template_kwargs)
        add_special_tokens = (tokenization_kwargs or {}).get("add_special_tokens", False)
        several = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], (list, tuple))
        tokenizer = self.llm_engine.own_tokenizer
        parser = self.llm_engine.vllm_config.decoding_config.reasoning_backend
        think = think_format(parser) if parser else None
        prompts: list[Any] = []
        begins: list[Begins | None] = []
        for conversation in messages if several else [messages]:
            text, ids = tokenize_chat(
                tokenizer,
                conversation,
                chat_template=chat_template or self._chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            if add_special_tokens and not tokenizer.writes_chats:
                ids = tokenizer.encode(text, add_special_tokens=True)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
            answer = last_text(conversation) if continue_final_message else None
            found = None
            if think is not None:
                found = form_begins(think.begins(text, answer), think, tokenizer, text, conversation)
            begins.append(found)
        return prompts, begins

    def _run(self, ids: list[str], use_tqdm: ProgressBar) -> list[Any]:
        """Step until all of these requests have finished; what else finishes meanwhile is kept."""
        engine = self.llm_engine
        missing = {request_id for request_id in ids if request_id not in self._finished}
        with ExitStack() as stack:
            stack.enter_context(what_exists_frozen())
            check_interrupt = stack.enter_context(deferred_interrupt())
            progress = Progress(len(ids), use_tqdm)
            stack.callback(progress.close)
            try:
                while missing:
                    if not engine.has_unfinished_requests():
                        raise GenerationError(f"Request {min(missing, key=int)} was aborted before it had finished.")
                    for output in engine.step():
                        if output.finished:
                            self._finished[output.request_id] = output
                            missing.discard(output.request_id)
                            progress.update(output)
                    check_interrupt()
            except BaseException:
                engine.abort_request(ids)
                for request_id in ids:
                    self._finished.pop(request_id, None)
                raise
        outputs = [self._finished.pop(request_id) for request_id in ids]
        raise_if_failed(outputs)
        return outputs


def _with_truncation(tokenization_kwargs: dict[str, Any] | None, length: int | None) -> dict[str, Any]:
    options = dict(tokenization_kwargs or {})
    if length is not None:
        options["truncate_prompt_tokens"] = length
    return options


def _refuse_processor_options(mm_processor_kwargs: dict[str, Any] | None) -> None:
    if mm_processor_kwargs:
        raise ValueError("mm_processor_kwargs are for multimodal models; this model takes text only.")
