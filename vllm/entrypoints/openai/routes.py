"""All routes. Each reads a body strictly, asks the engine, and answers; errors become bodies in `errors.py` only."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response

from vllm import envs
from vllm.config.settings import without_secrets
from vllm.entrypoints.openai import chat, completions, messages, pooling, responses
from vllm.entrypoints.openai.adapters import ServedAdapters
from vllm.entrypoints.openai.answers import encode, encode_at_once
from vllm.entrypoints.openai.context import ServerContext, as_api_error
from vllm.entrypoints.openai.direct import error_response
from vllm.entrypoints.openai.errors import APIError, bad_request, not_available, not_found, overloaded
from vllm.entrypoints.openai.paced import Paced
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoRAAdapterRequest,
    ResponsesRequest,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
    _Request,
    checked,
)
from vllm.entrypoints.openai.sse import HEADERS, EventStream, while_there
from vllm.entrypoints.openai.strict_json import parse_object
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.version import __version__

logger = init_logger(__name__)


class _PlainRoute(APIRoute):
    """A route whose function takes the request and returns the response: FastAPI need not find its arguments, nor
    look into what it returns.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if list(inspect.signature(self.endpoint).parameters) == ["request"]:
            return self.endpoint
        return super().get_route_handler()


router = APIRouter(route_class=_PlainRoute)

_Model = TypeVar("_Model", bound=_Request)
INLINE_BYTES = 64 * 1024  # larger bodies are read beside the event loop
MAX_FIELDS = 256
MAX_FIELD_NAME = 256
_WRONG_TYPE = "Unsupported Media Type: Only 'application/json' is allowed"

# Routes of the API whose feature this version does not have: path -> (name, whether it is the model that cannot).
OTHER_MODELS_ROUTES = {
    "/v1/audio/transcriptions": "Transcriptions API",
    "/v1/audio/translations": "Translations API",
}
LATER_ROUTES = {
    "/sleep": "Sleep mode",
    "/wake_up": "Sleep mode",
}


def _schema(model: type[_Request]) -> dict[str, Any]:
    """The request body in the OpenAPI document. Bodies are read by hand, so FastAPI does not know them."""
    document = model.model_json_schema()
    definitions = document.pop("$defs", {})

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolved(definitions[value["$ref"].rsplit("/", 1)[1]])
            return {key: resolved(item) for key, item in value.items()}
        return [resolved(item) for item in value] if isinstance(value, list) else value

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": resolved(document)}}}}


def _error_schema() -> dict[str, Any]:
    fields: dict[str, Any] = {"message": {"type": "string"}, "type": {"type": "string"}, "code": {"type": "integer"}}
    fields["param"] = {"type": ["string", "null"]}
    error = {"type": "object", "properties": fields}
    return {"type": "object", "properties": {"error": error, "object": {"type": "string"}, **fields}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route in the OpenAPI document."""
    body = {"content": {"application/json": {"schema": _error_schema()}}}
    return {status: {"description": HTTPStatus(status).phrase, **body} for status in statuses}


NAMED_ERRORS: dict[int | str, dict[str, Any]] = {  # of routes whose path has a name in it, which no other answer has
    **_errors(401, 404),
    "default": {**_errors(400)[400], "description": "Any other error"},
}
BODY_ERRORS = _errors(400, 401, 404, 408, 413, 415, 503)
UNWELL: dict[int | str, dict[str, Any]] = {503: {"description": "No progress, or shutting down"}}
STREAM = {"text/event-stream": {"schema": {"type": "string"}}, "application/json": {"schema": {"type": "object"}}}
GENERATING_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events if `stream` is true.", "content": STREAM},
    **BODY_ERRORS,
    **_errors(500, 504),
}


def answering(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A route for an application of somebody else's, which does not know our errors: it answers with them itself."""

    async def answered(request: Request) -> Response:
        try:
            return await route(request)
        except APIError as error:
            return error_response(error)

    answered.__name__ = route.__name__
    return answered


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


async def read(request: Request, model: type[_Model]) -> _Model:
    """The body as a `model`. Raises APIError 415 or 400."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(415, _WRONG_TYPE, "UnsupportedMediaTypeError")
    try:
        body = await request.body()
        async with while_there(request.scope, request.receive):
            if len(body) > INLINE_BYTES:
                parsed = await context_of(request).in_reader(len(body), _parse, model, body)
            else:
                await context_of(request).gate.enter()
                parsed = _parse(model, body)
    except ClientDisconnect:
        raise APIError(400, "The client left before the body was complete.") from None
    except APIError as error:
        raise _of_encoding(request, error) from None
    if parsed.model_extra:
        request.scope["unknown_fields"] = tuple(parsed.model_extra)
        context_of(request).log_unknown_fields(parsed.model_extra)
    return parsed


def _of_encoding(request: Request, error: APIError) -> APIError:
    """What to say of a body that could not be read: that it is compressed, if the client has done that."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if error.status != 400 or encoding in ("", "identity"):
        return error
    text = f"Unsupported Content-Encoding {encoding[:40]!r}: send the body as it is, without compression."
    return APIError(415, text, "UnsupportedMediaTypeError")


def _parse(model: type[_Model], body: bytes) -> _Model:
    """The body as a `model`. Raises APIError 400."""
    try:
        data = parse_object(body)
    except ValueError as error:
        raise bad_request(str(error)) from None
    if len(data) > MAX_FIELDS or any(len(name) > MAX_FIELD_NAME for name in data):
        raise bad_request(f"A body has at most {MAX_FIELDS} fields, with names of at most {MAX_FIELD_NAME} characters.")
    return checked(model, data, len(body))


async def answer(
    request: Request, work: Callable[[], Awaitable[bytes | dict[str, Any]]], as_stream: bool | None = False
) -> Response:
    """Run `work`, but give up (and so abort in the engine) as soon as the client is gone. It makes the answer, maybe
    encoded already; a client that wants a stream gets it as the only event of one.
    """
    context = context_of(request)
    task = asyncio.ensure_future(work())
    watcher = asyncio.ensure_future(_gone(request))
    context.load += 1
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return Response(status_code=499)
        found = task.result()
        body = found if isinstance(found, bytes) else await encode(found)
        if as_stream:
            return WholeStream(completions.whole_stream(body))
        return Response(body, media_type="application/json")
    except Exception as error:
        raise as_api_error(error) from error
    finally:
        context.load -= 1
        watcher.cancel()


class WholeStream(Response):
    """A stream that is there as a whole."""

    def init_headers(self, headers: Any = None) -> None:
        self.raw_headers = [*HEADERS, (b"content-length", str(len(self.body)).encode())]


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(request: Request, events: EventStream) -> Response:
    """Start a stream; errors before its first event are plain HTTP errors. A client that leaves before it is noticed
    as one that leaves later: its requests are aborted.
    """
    context = context_of(request)

    def on_close() -> None:
        context.load -= 1

    context.load += 1
    events.on_close = on_close
    try:
        await events.start(request.scope, request.receive)
    except Exception as error:
        raise as_api_error(error) from error
    return events


@router.post("/v1/completions", openapi_extra=_schema(CompletionRequest), responses=GENERATING_ANSWERS)
async def create_completion(request: Request) -> Response:
    context = context_of(request)
    body = await read(request, CompletionRequest)
    try:
        async with while_there(request.scope, request.receive):
            work = await completions.prepare(context, body, request.headers.get("x-request-id"))
    except Exception as error:
        raise as_api_error(error) from error
    if body.stream and not body.is_decided_at_end:
        return await stream(request, EventStream(work.prompts, completions.CompletionEvents(context, work)))
    return await answer(request, lambda: completions.encoded(context, work), body.stream)


@router.post("/v1/chat/completions", openapi_extra=_schema(ChatCompletionRequest), responses=GENERATING_ANSWERS)
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    body = await read(request, ChatCompletionRequest)
    try:
        work = await chat.prepare(context, body, request.headers.get("x-request-id"))
    except Exception as error:
        raise as_api_error(error) from error
    if body.stream:
        return await stream(request, EventStream([work.prompt], chat.ChatEvents(context, work)))
    return await answer(request, lambda: chat.encoded(context, work))


@router.post("/v1/responses", openapi_extra=_schema(ResponsesRequest), responses=GENERATING_ANSWERS)
async def create_response(request: Request) -> Response:
    context = context_of(request)
    body = await read(request, ResponsesRequest)
    try:
        work = await responses.prepare(context, body, request.headers.get("x-request-id"))
        if body.background:
            return Response(responses.begin(context, work), media_type="application/json")
    except Exception as error:
        raise as_api_error(error) from error
    if body.stream:
        return await stream(request, EventStream([work.chat.prompt], responses.ResponseEvents(work, context)))
    return await answer(request, lambda: responses.complete(context, work))


@router.get("/v1/responses/{response_id}", responses=NAMED_ERRORS)
async def retrieve_response(request: Request, response_id: str) -> Response:
    return Response(context_of(request).responses.get(response_id).text, media_type="application/json")


@router.delete("/v1/responses/{response_id}", responses=NAMED_ERRORS)
async def delete_response(request: Request, response_id: str) -> Response:
    context_of(request).responses.delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", responses=NAMED_ERRORS)
async def list_input_items(request: Request, response_id: str) -> Response:
    items = context_of(request).responses.get(response_id).input_items
    body = b'{"object": "list", "data": %s, "first_id": null, "last_id": null, "has_more": false}' % items
    return Response(body, media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel", responses=NAMED_ERRORS)
async def cancel_response(request: Request, response_id: str) -> Response:
    return Response(context_of(request).responses.cancel(response_id).text, media_type="application/json")


@router.post("/v1/messages", openapi_extra=_schema(messages.MessagesRequest), responses=GENERATING_ANSWERS)
async def create_message(request: Request) -> Response:
    context = context_of(request)
    try:
        body = await read(request, messages.MessagesRequest)
        work = await messages.prepare(context, body, request.headers.get("x-request-id"))
        if body.stream:
            return await stream(request, EventStream([work.prompt], messages.MessageEvents(context, work)))
        return await answer(request, lambda: messages.complete(context, work))
    except Exception as error:
        raise messages.in_this_form(error) from error


@router.post("/v1/messages/count_tokens", openapi_extra=_schema(messages.CountTokensRequest), responses=BODY_ERRORS)
async def count_tokens(request: Request) -> Response:
    try:
        body = await read(request, messages.CountTokensRequest)
        return JSONResponse(await messages.count_tokens(context_of(request), body))
    except Exception as error:
        raise messages.in_this_form(error) from error


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": model_cards(context_of(request))})


def model_cards(context: ServerContext) -> list[dict[str, Any]]:
    """Every name that may be asked for: the model's, then those of adapters."""
    cards = [_model_card(context, name) for name in context.served_names]
    if context.adapters is not None:
        cards += [_adapter_card(context, adapter) for adapter in context.adapters.all()]
    return cards + [_prompt_adapter_card(context, adapter) for adapter in context.prompt_adapters.values()]


@router.get("/v1/models/{name:path}", responses=NAMED_ERRORS)
async def retrieve_model(request: Request, name: str) -> Response:
    context = context_of(request)
    adapter = context.adapter(name)
    if adapter is not None:
        return JSONResponse(_adapter_card(context, adapter))
    prompt_adapter = context.prompt_adapter(name)
    if prompt_adapter is not None:
        return JSONResponse(_prompt_adapter_card(context, prompt_adapter))
    if name not in context.served_names:
        raise not_found(f"The model `{name[:256]}` does not exist.", "model")
    return JSONResponse(_model_card(context, name))


def _adapter_card(context: ServerContext, adapter: LoRARequest) -> dict[str, Any]:
    """An adapter as a model, whose parent is the model that it changes."""
    parent = adapter.base_model_name or context.served_names[0]
    return {**_model_card(context, adapter.lora_name), "root": adapter.lora_path, "parent": parent}


def _prompt_adapter_card(context: ServerContext, adapter: PromptAdapterRequest) -> dict[str, Any]:
    """As `_adapter_card`."""
    card = _model_card(context, adapter.prompt_adapter_name)
    return {**card, "root": adapter.prompt_adapter_local_path, "parent": context.served_names[0]}


def _model_card(context: ServerContext, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": context.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "vllm",
        "root": context.model_path,
        "parent": None,
        "max_model_len": context.max_model_len,
        "permission": [permission],
    }


@router.post("/tokenize", openapi_extra=_schema(TokenizeRequest), responses=BODY_ERRORS)
async def tokenize(request: Request) -> Response:
    found = await tokenized(context_of(request), await read(request, TokenizeRequest))
    return Response(found, media_type="application/json")


async def tokenized(context: ServerContext, body: TokenizeRequest) -> bytes:
    """The answer of /tokenize. Raises APIError."""
    await context.discover_adapter(body.model)
    context.check_model(body.model)
    body.refuse_later_features()
    try:
        tokenizer = context.tokenizer_of(body.model)
        if body.messages is not None:
            text = await chat.render(context, body, body.tools)
        elif body.prompt is not None:
            text = body.prompt
        else:
            raise bad_request("Give `prompt` or `messages`.", "prompt")
        if len(text) > context.limits.max_tokenized_characters:
            most = context.limits.max_tokenized_characters
            raise bad_request(f"At most {most} characters may be tokenized at once, got {len(text)}.", "prompt")
        special = body.add_special_tokens
        if special is None:
            special = body.messages is None
        ids = await context.in_lane(len(text), tokenizer.encode, text, special)
    except Exception as error:
        raise as_api_error(error) from error

    def encoded() -> bytes:
        strings = [tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
        found = {"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids, "token_strs": strings}
        return encode_at_once(found)

    return await context.in_lane(4 * len(ids), encoded)


@router.post("/detokenize", openapi_extra=_schema(DetokenizeRequest), responses=BODY_ERRORS)
async def detokenize(request: Request) -> Response:
    found = await detokenized(context_of(request), await read(request, DetokenizeRequest))
    return Response(found, media_type="application/json")


async def detokenized(context: ServerContext, body: DetokenizeRequest) -> bytes:
    """The answer of /detokenize. Raises APIError."""
    await context.discover_adapter(body.model)
    context.check_model(body.model)
    most = context.limits.max_detokenized
    if len(body.tokens) > most:
        raise bad_request(f"At most {most} tokens may be detokenized at once, got {len(body.tokens)}.", "tokens")
    try:
        tokenizer = context.tokenizer_of(body.model)

        def decoded() -> bytes:
            size = len(tokenizer)
            if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
                raise bad_request(f"Token ids must be between 0 and {size - 1}.", "tokens")
            return json.dumps({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}).encode()

        return await context.in_lane(4 * len(body.tokens), decoded)
    except Exception as error:
        raise as_api_error(error) from error


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    context = context_of(request)
    if not request.app.state.args.enable_tokenizer_info_endpoint:
        raise APIError(404, "Start the server with --enable-tokenizer-info-endpoint for this route.", "NotFoundError")
    tokenizer = context.tokenizer
    return JSONResponse(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "special_tokens": dict(tokenizer.special_tokens),
            "chat_template": context.chat_template or tokenizer.chat_template,
        }
    )


@router.get("/health", response_class=Response, responses=UNWELL)
async def health(request: Request) -> Response:
    """200 only while the engine makes progress and takes new requests: balancers send none where it is 503."""
    engine = context_of(request).engine
    try:
        if engine.is_draining:
            return Response(status_code=503)
        await engine.check_health()
    except Exception:
        return Response(status_code=503)
    return Response(status_code=200)


@router.get("/ping", operation_id="ping", response_class=Response, responses=UNWELL)
@router.post("/ping", operation_id="ping_by_post", response_class=Response, responses=UNWELL)
async def ping(request: Request) -> Response:
    return await health(request)


@router.get("/version")
async def version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _of_all(context: ServerContext, what: str) -> list[Any]:
    """What each front end answers. A sum that leaves one out would be wrong: then there is none for now."""
    try:
        return await context.front_ends.gather(what)
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        logger.error("Not all front ends have said their %s: %s", what, error)
        raise overloaded("One of this server's front ends does not answer.") from error


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    figures: Paced = request.app.state.exposition
    return Response(await figures.get(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def exposition(state: State) -> bytes:
    """The figures of all front ends."""
    from vllm.metrics.registry import of_this_process, render, render_all

    context: ServerContext = state.context
    if context.front_ends.count > 1:
        return render_all(await _of_all(context, "metrics"))
    return render([context.engine.metrics, state.http_metrics, *of_this_process()])


@router.get("/load")
async def load(request: Request) -> Response:
    tracked = request.app.state.args.enable_server_load_tracking
    context, found = context_of(request), 0
    if tracked:
        found = sum(await _of_all(context, "load")) if context.front_ends.count > 1 else context.load
    return JSONResponse({"server_load": found})


@router.get("/is_sleeping")
async def is_sleeping() -> Response:
    return JSONResponse({"is_sleeping": False})


def _for_developers() -> None:
    """Raise unless the operator has asked for routes that no client should have."""
    if not envs.VLLM_SERVER_DEV_MODE:
        raise APIError(404, "Set VLLM_SERVER_DEV_MODE=1 for this route.", "NotFoundError")


@router.post("/reset_prefix_cache", response_class=Response, responses=_errors(400, 404))
async def reset_prefix_cache(request: Request) -> Response:
    """What one client forgets, all others compute again."""
    _for_developers()
    await _control(request, "reset_prefix_cache")
    return Response(status_code=200)


@router.post("/start_profile", response_class=Response, responses=_errors(400))
async def start_profile(request: Request) -> Response:
    await _control(request, "start_profile")
    return Response(status_code=200)


@router.post("/stop_profile", response_class=Response, responses=_errors(400))
async def stop_profile(request: Request) -> Response:
    await _control(request, "stop_profile")
    return Response(status_code=200)


async def _control(request: Request, method: str) -> None:
    engine = context_of(request).engine
    try:
        await getattr(engine, method)()
    except RuntimeError as error:
        raise bad_request(str(error).removeprefix("RuntimeError: ")) from error


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    _for_developers()
    engine = context_of(request).engine
    settings = without_secrets(json.loads(json.dumps(engine.vllm_config.to_dict(), default=str)))
    return JSONResponse({"vllm_config": settings, "uptime": time.time() - context_of(request).created})


def _other_models_route(name: str) -> Callable[[], Awaitable[Response]]:
    async def route() -> Response:
        raise bad_request(f"The model does not support {name}")

    return route


def _pooling_route(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        context = context_of(request)
        found = pooling.find(context, path)
        body = await read(request, found.request)
        try:
            body.refuse_later_features()
            async with while_there(request.scope, request.receive):
                work = await found.prepare(context, body, request.headers.get("x-request-id"))
        except Exception as error:
            raise as_api_error(error) from error
        return await answer(request, lambda: work(context))

    return route


@router.post(
    "/v1/load_lora_adapter",
    openapi_extra=_schema(LoadLoRAAdapterRequest),
    response_class=PlainTextResponse,
    responses=BODY_ERRORS,
)
async def load_lora_adapter(request: Request) -> Response:
    adapters = _changeable_adapters(request)
    body = await read(request, LoadLoRAAdapterRequest)
    work = adapters.load(body.lora_name, body.lora_path, context_of(request).fixed_names)
    loading, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    watcher.add_done_callback(lambda _: loading.cancel())  # where the client is gone, others need not wait
    try:
        await loading
    except asyncio.CancelledError:
        if not watcher.done():
            raise
        return Response(status_code=499)
    finally:
        watcher.cancel()
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    openapi_extra=_schema(UnloadLoRAAdapterRequest),
    response_class=PlainTextResponse,
    responses=BODY_ERRORS,
)
async def unload_lora_adapter(request: Request) -> Response:
    adapters = _changeable_adapters(request)
    body = await read(request, UnloadLoRAAdapterRequest)
    await adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _changeable_adapters(request: Request) -> ServedAdapters:
    adapters = context_of(request).adapters
    if adapters is None:
        raise bad_request("LoRA is not enabled on this server: start it with --enable-lora.")
    if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        raise not_found("Adapters of this server cannot be changed: VLLM_ALLOW_RUNTIME_LORA_UPDATING is not set.")
    return adapters


def _later_route(name: str) -> Callable[[], Awaitable[Response]]:
    async def route() -> Response:
        raise not_available(name)

    return route


for _path in pooling.ROUTES:
    router.add_api_route(
        _path,
        _pooling_route(_path),
        methods=["POST"],
        name=_path,
        openapi_extra=_schema(pooling.ROUTES[_path].request),
        responses={**BODY_ERRORS, **_errors(500, 504)},
    )
for _path, _name in OTHER_MODELS_ROUTES.items():
    router.add_api_route(
        _path, _other_models_route(_name), methods=["POST"], name=_path, status_code=400, responses=_errors(400)
    )
for _path, _name in LATER_ROUTES.items():
    router.add_api_route(
        _path, _later_route(_name), methods=["POST"], name=_path, status_code=400, responses=_errors(400)
    )
