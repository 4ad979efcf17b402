"""The routes as objects: for programs that put an HTTP server of their own in front of the engine.

Each call does what the route of the same purpose does, and answers with the types of `response_models`; a request that
fails is answered with an `ErrorResponse`, as over HTTP. `init_app_state` makes all of them at once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from vllm.entrypoints.logger import RequestLogger
from vllm.entrypoints.openai import chat, completions, pooling, response_models
from vllm.entrypoints.openai.adapters import ServedAdapters
from vllm.entrypoints.openai.context import Prompt, ServerContext, as_api_error, merge
from vllm.entrypoints.openai.errors import APIError, bad_request
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoRAAdapterRequest,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
    _Pooling,
)
from vllm.entrypoints.openai.response_models import ErrorResponse
from vllm.entrypoints.openai.sse import Events

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.lora.request import LoRARequest

_Answer = TypeVar("_Answer", bound=BaseModel)


@dataclass(frozen=True)
class BaseModelPath:
    """A name under which the model is served, and where it is from."""

    name: str
    model_path: str


def _refusal(error: APIError) -> ErrorResponse:
    return ErrorResponse(**{name: error.body[name] for name in ("message", "type", "param", "code")})


def _context_of(engine_client: Any, options: dict[str, Any]) -> ServerContext:
    """What routes need, as the server's flags with these values would make it. Raises TypeError for other options."""
    from vllm.entrypoints.openai.api_server import make_context
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse import FlexibleArgumentParser

    if not hasattr(engine_client, "open"):
        raise TypeError(
            f"A serving class needs this package's AsyncLLMEngine (or AsyncLLM), got {type(engine_client).__name__}."
        )
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in options.items():
        if not hasattr(args, name):
            raise TypeError(f"Serving classes have no option {name!r}.")
        setattr(args, name, value)
    args.disable_log_requests = True
    context: ServerContext = make_context(args, engine_client)
    return context


class OpenAIServingModels:
    """The names of the model and of its adapters. base_model_paths: default: those of the engine's configuration."""

    def __init__(
        self,
        engine_client: Any,
        model_config: ModelConfig | None = None,
        base_model_paths: Sequence[BaseModelPath] | None = None,
        *,
        lora_modules: Sequence[str] | None = None,
        context: ServerContext | None = None,
    ) -> None:
        """context: of a server that is there already; nothing else is looked at then."""
        if context is None:
            context = _context_of(engine_client, {"lora_modules": list(lora_modules or ())})
            if base_model_paths:
                context.served_names = tuple(path.name for path in base_model_paths)
        self.context = context
        self._pending = [] if context.adapters is None else context.adapters.all()

    @property
    def base_model_paths(self) -> list[BaseModelPath]:
        return [BaseModelPath(name, self.context.model_path) for name in self.context.served_names]

    @property
    def lora_requests(self) -> dict[str, LoRARequest]:
        """The adapters by name."""
        found = [] if self.context.adapters is None else self.context.adapters.all()
        return {request.lora_name: request for request in found}

    def is_base_model(self, model_name: str) -> bool:
        return model_name in self.context.served_names

    def model_name(self, lora_request: LoRARequest | None = None) -> str:
        """What answers are signed with."""
        return self.context.served_names[0] if lora_request is None else lora_request.lora_name

    async def init_static_loras(self) -> None:
        """Load the adapters of `lora_modules`. Raises ValueError for one that cannot be used."""
        for request in self._pending:
            await self.context.engine.add_lora(request)
        self._pending = []

    async def show_available_models(self) -> response_models.ModelList:
        """GET /v1/models."""
        from vllm.entrypoints.openai.routes import model_cards

        return response_models.ModelList(data=[response_models.ModelCard(**c) for c in model_cards(self.context)])

    async def load_lora_adapter(self, request: LoadLoRAAdapterRequest) -> ErrorResponse | str:
        """POST /v1/load_lora_adapter."""
        return await self._change(
            lambda adapters: adapters.load(request.lora_name, request.lora_path, self.context.fixed_names),
            f"Success: LoRA adapter '{request.lora_name}' added successfully.",
        )

    async def unload_lora_adapter(self, request: UnloadLoRAAdapterRequest) -> ErrorResponse | str:
        """POST /v1/unload_lora_adapter."""
        return await self._change(
            lambda adapters: adapters.unload(request.lora_name),
            f"Success: LoRA adapter '{request.lora_name}' removed successfully.",
        )

    async def _change(self, change: Callable[[ServedAdapters], Awaitable[None]], done: str) -> ErrorResponse | str:
        try:
            if self.context.adapters is None:
                raise bad_request("LoRA is not enabled. Set enable_lora=True.")
            await change(self.context.adapters)
        except APIError as error:
            return _refusal(error)
        return done


class OpenAIServing:
    """What the serving classes have in common. `options` are flags of the server, by name.

    model_config: that of the engine is meant, whatever is given.   request_logger: what logs requests, if they are.
    """

    def __init__(
        self, engine_client: Any, model_config: ModelConfig | None, models: OpenAIServingModels, **options: Any
    ) -> None:
        if not isinstance(models, OpenAIServingModels):
            raise TypeError(f"models must be an OpenAIServingModels, got {type(models).__name__}.")
        request_logger = options.pop("request_logger", None)
        if not isinstance(request_logger, RequestLogger | None):
            raise TypeError(f"request_logger must be a RequestLogger, got {type(request_logger).__name__}.")
        if options:
            self.context = _context_of(engine_client, options)
            self.context.served_names, self.context.adapters = models.context.served_names, models.context.adapters
            self.context.prompt_adapters = models.context.prompt_adapters
        else:
            self.context = models.context
        if request_logger is not None:
            self.context = replace(self.context, request_logger=request_logger)
        self._take(models, self.context)

    @classmethod
    def of(cls, models: OpenAIServingModels) -> OpenAIServing:
        """With the settings that `models` has: those of the server it was made for."""
        made = cls.__new__(cls)
        made._take(models, models.context)
        return made

    def _take(self, models: OpenAIServingModels, context: ServerContext) -> None:
        self.models, self.context = models, context
        self.engine_client = context.engine
        self.model_config: ModelConfig = context.engine.vllm_config.model_config

    def create_error_response(
        self, message: str | Exception, err_type: str = "BadRequestError", status_code: int = 400
    ) -> ErrorResponse:
        """What a request that fails so is answered with."""
        if isinstance(message, Exception):
            return _refusal(as_api_error(message))
        return _refusal(APIError(int(status_code), message, err_type))

    async def _events(self, prompts: Sequence[Prompt], events: Events) -> AsyncGenerator[str, None]:
        """Server-sent events as the server writes them. Closing the generator aborts the request."""
        async with aclosing(merge(prompts)) as outputs:
            try:
                async for index, output in outputs:
                    if piece := events.feed(index, output):
                        yield piece.decode()
                yield events.end().decode()
            except Exception as error:
                yield events.failure(as_api_error(error)).decode()

    async def _answer(
        self, kind: type[_Answer], work: Callable[[], Awaitable[dict[str, Any]]]
    ) -> _Answer | ErrorResponse:
        try:
            return kind.model_validate(await work())
        except Exception as error:
            return _refusal(as_api_error(error))


def _header_id(raw_request: Any) -> str | None:
    return None if raw_request is None else raw_request.headers.get("x-request-id")


class OpenAIServingChat(OpenAIServing):
    """POST /v1/chat/completions."""

    def __init__(
        self,
        engine_client: Any,
        model_config: ModelConfig | None,
        models: OpenAIServingModels,
        response_role: str = "assistant",
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        enable_auto_tools: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            engine_client,
            model_config,
            models,
            response_role=response_role,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            enable_auto_tool_choice=enable_auto_tools,
            tool_call_parser=tool_parser,
            reasoning_parser=reasoning_parser or None,
            **options,
        )

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[str, None] | response_models.ChatCompletionResponse | ErrorResponse:
        """The answer, or its events if `request.stream`."""
        try:
            work = await chat.prepare(self.context, request, _header_id(raw_request))
        except Exception as error:
            return _refusal(as_api_error(error))
        if request.stream:
            return self._events([work.prompt], chat.ChatEvents(self.context, work))
        return await self._answer(response_models.ChatCompletionResponse, lambda: chat.complete(self.context, work))


class OpenAIServingCompletion(OpenAIServing):
    """POST /v1/completions."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[str, None] | response_models.CompletionResponse | ErrorResponse:
        """The answer, or its events if `request.stream`."""
        try:
            work = await completions.prepare(self.context, request, _header_id(raw_request))
        except Exception as error:
            return _refusal(as_api_error(error))
        if request.stream:
            kind = completions.WholeEvents if request.is_decided_at_end else completions.CompletionEvents
            return self._events(work.prompts, kind(self.context, work))
        return await self._answer(response_models.CompletionResponse, lambda: completions.complete(self.context, work))


class _Pools(OpenAIServing):
    """A route of models that pool."""

    async def _pooled(
        self, path: str, kind: type[_Answer], request: _Pooling, raw_request: Any
    ) -> _Answer | ErrorResponse:
        async def work() -> dict[str, Any]:
            found = pooling.find(self.context, path)
            request.refuse_later_features()
            return await (await found.prepare(self.context, request, _header_id(raw_request)))(self.context)

        return await self._answer(kind, work)


class OpenAIServingEmbedding(_Pools):
    """POST /v1/embeddings."""

    async def create_embedding(
        self, request: Any, raw_request: Any = None
    ) -> response_models.EmbeddingResponse | ErrorResponse:
        return await self._pooled("/v1/embeddings", response_models.EmbeddingResponse, request, raw_request)


class OpenAIServingPooling(_Pools):
    """POST /pooling."""

    async def create_pooling(
        self, request: Any, raw_request: Any = None
    ) -> response_models.PoolingResponse | ErrorResponse:
        return await self._pooled("/pooling", response_models.PoolingResponse, request, raw_request)


class ServingClassification(_Pools):
    """POST /classify."""

    async def create_classify(
        self, request: Any, raw_request: Any = None
    ) -> response_models.ClassificationResponse | ErrorResponse:
        return await self._pooled("/classify", response_models.ClassificationResponse, request, raw_request)


class ServingScores(_Pools):
    """POST /score and /rerank."""

    async def create_score(
        self, request: Any, raw_request: Any = None
    ) -> response_models.ScoreResponse | ErrorResponse:
        return await self._pooled("/score", response_models.ScoreResponse, request, raw_request)

    async def do_rerank(self, request: Any, raw_request: Any = None) -> response_models.RerankResponse | ErrorResponse:
        return await self._pooled("/rerank", response_models.RerankResponse, request, raw_request)


async def _read(answer: Awaitable[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await answer)
    return found


class OpenAIServingTokenization(OpenAIServing):
    """POST /tokenize and /detokenize."""

    async def create_tokenize(
        self, request: TokenizeRequest, raw_request: Any = None
    ) -> response_models.TokenizeResponse | ErrorResponse:
        from vllm.entrypoints.openai.routes import tokenized

        return await self._answer(response_models.TokenizeResponse, partial(_read, tokenized(self.context, request)))

    async def create_detokenize(
        self, request: DetokenizeRequest, raw_request: Any = None
    ) -> response_models.DetokenizeResponse | ErrorResponse:
        from vllm.entrypoints.openai.routes import detokenized

        return await self._answer(
            response_models.DetokenizeResponse, partial(_read, detokenized(self.context, request))
        )


class OpenAIServingTranscription(OpenAIServing):
    """Transcriptions, which no model of this version makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("Transcriptions are not supported by this version: no model takes audio.")
