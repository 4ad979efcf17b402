"""Builds the application, runs the server, ends it: `python -m vllm.entrypoints.openai.api_server` and `vllm serve`."""

from __future__ import annotations

import argparse
import asyncio
import copy
import functools
import gc
import importlib
import inspect
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.core_client import check_copies
from vllm.entrypoints.logger import RequestLogger
from vllm.entrypoints.openai.adapters import parse_lora_modules, served_prompt_adapters
from vllm.entrypoints.openai.cli_args import make_arg_parser, parsing_of, validate_parsed_serve_args
from vllm.exceptions import VLLMError
from vllm.logger import DATE_FORMAT, init_logger
from vllm.usage.usage_lib import UsageContext
from vllm.utils.allocator import keep_little_freed_memory
from vllm.utils.argparse import FlexibleArgumentParser
from vllm.utils.collector import collect_when_idle, give_back_memory
from vllm.utils.event_loop import run_event_loop
from vllm.version import __version__

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI, Request

    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.entrypoints.openai.front_ends import FrontEnds
    from vllm.entrypoints.openai.limits import App

logger = init_logger("vllm.entrypoints.openai.api_server")  # also when run as __main__

# New connections that a turn of the event loop takes: libuv takes one of each socket it listens to, and turns are long
# while many requests are given up, so that clients who come and leave would keep others out.
ACCEPTED_PER_TURN = 16
# Of each connection (inherited from the listener): what a client that does not read may make the kernel hold.
SEND_BUFFER_BYTES = 128 * 1024
HEALTH_POLL_SECONDS = 0.5
GENERATING_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
# After this long, work beside the event loop (large bodies and answers) gives way to it.
SWITCH_SECONDS = 0.0005
WEB_FOLDER = Path(__file__).parent.parent / "web"
CSP = (
    "default-src 'self'; img-src 'self' data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def build_app(args: argparse.Namespace, engine: AsyncLLMEngine | None = None) -> App:
    """The application with all its layers, around a running engine. Without one, `init_app_state` with the result's
    `state` has to follow before the first request. Programs may add routes and middleware to it, as to FastAPI's.
    """
    from fastapi import FastAPI

    from vllm.entrypoints.openai.paced import Paced
    from vllm.entrypoints.openai.routes import exposition, router

    # A redirect to the same path without its slash would name a host, and the only one known is what the client says.
    root = (args.root_path or "").rstrip("/")
    app = FastAPI(title="vllm", version=__version__, root_path=root, redirect_slashes=False, openapi_url=None)
    app.state.args = args
    app.state.exposition = Paced(lambda: exposition(app.state))
    if engine is not None:
        app.state.context = make_context(args, engine)
    app.include_router(router)
    if not args.disable_fastapi_docs:
        _add_document(app)
    add_error_handlers(app)
    if not args.disable_web_ui and (WEB_FOLDER / "index.html").is_file():
        _add_page(app)
    return add_layers(app, args, router, GENERATING_ROUTES)


def _add_document(app: FastAPI) -> None:
    """/openapi.json, made by the first request for it, beside the event loop."""
    from starlette.responses import Response

    from vllm.entrypoints.openai.paced import Paced

    @functools.cache
    def made() -> bytes:
        servers = {"servers": [{"url": app.root_path}]} if app.root_path else {}
        return json.dumps({**app.openapi(), **servers}).encode()

    document = Paced(lambda: asyncio.to_thread(made))

    async def openapi(request: Request) -> Response:
        return Response(await document.get(), media_type="application/json")

    app.add_route("/openapi.json", openapi, include_in_schema=False)


def add_layers(application: FastAPI, args: argparse.Namespace, router: APIRouter, generating: Collection[str]) -> App:
    """What every request passes before a route, in this order: counting, CORS (a page must be able to read a refusal,
    too), limits and key, the operator's own middleware. Routes of the router at the paths `generating` are then called
    directly, unless there is such middleware, or a prefix to take off the path.
    """
    from starlette.middleware.cors import CORSMiddleware

    from vllm.entrypoints.openai.direct import DirectRoutes
    from vllm.entrypoints.openai.limits import KeyChecker, Limits, LimitsMiddleware, RequestIdMiddleware
    from vllm.metrics.http import HttpMetrics, HttpMetricsMiddleware

    for path in args.middleware:
        _add_middleware(application, load_middleware(path))
    keys = keys_of(args)
    open_paths = {b"/health", b"/ping", b"/version"}
    if not args.protect_metrics:  # figures, without anything that users have sent
        open_paths.add(b"/metrics")
    if not args.disable_web_ui:  # the page itself holds nothing; what it shows needs the key
        open_paths |= {b"/", b"/ui/app.js", b"/ui/markdown.js", b"/ui/style.css"}
    if args.root_path:  # proxies that leave the prefix in place
        open_paths |= {args.root_path.rstrip("/").encode() + path for path in open_paths}
    limits = Limits(max_body_bytes=args.max_body_size, body_timeout=args.body_timeout, write_timeout=args.write_timeout)
    app: App = application if args.middleware or args.root_path else DirectRoutes(application, router, generating)
    if args.enable_request_id_headers:
        app = RequestIdMiddleware(app)
    app = LimitsMiddleware(app, limits=limits, keys=KeyChecker(keys), open_paths=frozenset(open_paths))
    app = CORSMiddleware(
        app,
        allow_origins=allowed_origins(args),
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )
    application.state.http_metrics = HttpMetrics()
    return HttpMetricsMiddleware(app, metrics=application.state.http_metrics, application=application)


def keys_of(args: argparse.Namespace) -> list[str]:
    """The keys that clients may present; without any, everybody is welcome."""
    return [*(args.api_key or ()), *([envs.VLLM_API_KEY] if envs.VLLM_API_KEY else ())]


def allowed_origins(args: argparse.Namespace) -> list[str]:
    """Which pages of others may use the server from a browser. A server without a key that only this machine reaches
    is reached by every page that is open on it, too: by default none of them may use it.
    """
    if args.allowed_origins is not None:
        return list(args.allowed_origins)
    return [] if is_loopback(args.host) and not keys_of(args) else ["*"]


def is_loopback(host: str | None) -> bool:
    """Whether only this machine reaches a server at this address."""
    return host is not None and (host in ("localhost", "::1") or host.startswith("127."))


def warn_of_open_door(args: argparse.Namespace) -> None:
    """Say who can use a server without a key."""
    if not is_loopback(args.host) and not keys_of(args):
        logger.warning(
            "Without a key, everybody who reaches this machine at %s, port %d can use this server. Set --api-key or "
            "VLLM_API_KEY, or --host 127.0.0.1 for this machine only.",
            args.host or "any of its addresses",
            args.port,
        )


AppBuilder = Callable[[argparse.Namespace, "AsyncLLMEngine"], "App"]


def make_context(args: argparse.Namespace, engine: AsyncLLMEngine) -> Any:
    """What routes need, from the flags and the engine's configuration."""
    from vllm.entrypoints.chat_utils import load_chat_template
    from vllm.entrypoints.openai.adapters import ServedAdapters
    from vllm.entrypoints.openai.context import ServerContext
    from vllm.entrypoints.openai.response_store import ResponseStore

    model = engine.vllm_config.model_config
    template = args.chat_template
    tokenizer = engine.input_processor.tokenizer
    parsing = parsing_of(args)
    if tokenizer is not None and isinstance(parsing.tool_format, type):
        tokenizer.hf_tokenizer  # noqa: B018 - plug-ins get it; loading it takes seconds, which no request should wait for
    named = tokenizer is not None and isinstance(tokenizer.chat_template, dict) and template in tokenizer.chat_template
    adapters = None
    if engine.vllm_config.lora_config is not None:
        adapters = ServedAdapters(engine, parse_lora_modules(args.lora_modules), args.lora_root)
    names = tuple(model.served_model_names) or (model.served_model_name,)
    taken = [*names, *(() if adapters is None else (adapter.lora_name for adapter in adapters.all()))]
    context = ServerContext(
        adapters=adapters,
        prompt_adapters=served_prompt_adapters(engine, args.prompt_adapters, taken),
        engine=engine,
        served_names=names,
        model_path=model.model,
        max_model_len=model.max_model_len,
        default_sampling=model.get_diff_sampling_param(),
        chat_template=template if named else load_chat_template(template),
        content_format=args.chat_template_content_format,
        template_defaults=args.default_chat_template_kwargs,
        response_role=args.response_role,
        parsing=parsing,
        responses=ResponseStore(enabled=envs.VLLM_ENABLE_RESPONSES_API_STORE),
        return_token_ids_as_text=args.return_tokens_as_token_ids,
        trust_request_template=args.trust_request_chat_template,
        request_timeout=args.request_timeout,
        request_logger=None if args.disable_log_requests else RequestLogger(max_log_len=args.max_log_len),
        show_cached_tokens=args.enable_prompt_tokens_details,
    )
    longest = model.max_model_len * (1 + max(model.max_logprobs, 20))
    engine.output_processor.most_logprobs = max(context.limits.max_kept_logprobs, 2 * longest)
    return context


async def _load_adapters(args: argparse.Namespace, engine: AsyncLLMEngine) -> None:
    """Load the adapters of the flags, without holding up the loop: the first prompt adapter may bring torch with it.

    Raises ValueError for one that cannot be used.
    """
    for adapter in parse_lora_modules(getattr(args, "lora_modules", None)):
        await engine.add_lora(adapter)
    await asyncio.to_thread(served_prompt_adapters, engine, getattr(args, "prompt_adapters", None))


async def init_app_state(engine_client: AsyncLLMEngine, vllm_config: Any, state: Any, args: argparse.Namespace) -> None:
    """Give an application's `state` what the routes need of an engine, and the routes as objects (`serving.py`):
    openai_serving_models, _chat, _completion, _tokenization; of a model that pools _embedding, _pooling, _scores,
    _classification; None where the model cannot.

    vllm_config: that of the engine is meant, whatever is given.   args: as `make_arg_parser` makes them.
    """
    from vllm.entrypoints.openai import serving

    await _load_adapters(args, engine_client)
    context = make_context(args, engine_client)
    config = engine_client.vllm_config.model_config
    models = serving.OpenAIServingModels(engine_client, context=context)
    tasks = config.supported_tasks

    def made(kind: Any, *needs: str) -> Any:
        return kind.of(models) if not needs or set(needs) & set(tasks) else None

    state.args, state.context = args, context
    state.engine_client, state.vllm_config = engine_client, engine_client.vllm_config
    state.openai_serving_models = models
    state.openai_serving_chat = made(serving.OpenAIServingChat, "generate")
    state.openai_serving_completion = made(serving.OpenAIServingCompletion, "generate")
    state.openai_serving_tokenization = made(serving.OpenAIServingTokenization)
    state.openai_serving_embedding = made(serving.OpenAIServingEmbedding, "embed")
    state.openai_serving_pooling = made(serving.OpenAIServingPooling, "encode")
    state.openai_serving_scores = made(serving.ServingScores, "score")
    state.openai_serving_classification = made(serving.ServingClassification, "classify")
    state.openai_serving_transcription = None


@asynccontextmanager
async def _alive(make: Callable[[], AsyncLLMEngine]) -> AsyncIterator[AsyncLLMEngine]:
    engine = await asyncio.get_running_loop().run_in_executor(None, make)
    try:
        await engine.check_health()  # begins to listen to the core
        yield engine
    finally:
        await engine.shutdown(0.0)


@asynccontextmanager
async def build_async_engine_client(args: argparse.Namespace) -> AsyncIterator[AsyncLLMEngine]:
    """The engine that the server's flags ask for; it ends with the block."""
    async with _alive(functools.partial(make_engine, args)) as engine:
        yield engine


@asynccontextmanager
async def build_async_engine_client_from_engine_args(
    engine_args: AsyncEngineArgs, disable_frontend_multiprocessing: bool = False
) -> AsyncIterator[AsyncLLMEngine]:
    """The engine of these arguments; it ends with the block."""
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    def make() -> AsyncLLMEngine:
        return AsyncLLMEngine.from_vllm_config(
            engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER),
            usage_context=UsageContext.OPENAI_API_SERVER,
            disable_log_requests=not engine_args.log_requests,
            disable_log_stats=engine_args.disable_log_stats,
            disable_frontend_multiprocessing=disable_frontend_multiprocessing,
        )

    async with _alive(make) as engine:
        yield engine


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """For an application of somebody else's: what is there already is not collected again and again, full collections
    wait for idle moments, and memory is given back, as in our own server.
    """
    gc.freeze()

    def is_idle() -> bool:
        client = getattr(app.state, "engine_client", None)
        return client is None or client.is_idle

    housekeeping = [
        asyncio.ensure_future(collect_when_idle(is_idle)),
        asyncio.ensure_future(give_back_memory(is_idle, lambda: None)),
    ]
    try:
        yield
    finally:
        for task in housekeeping:
            task.cancel()


# Routes as functions, for applications of somebody else's whose `state` went through `init_app_state`: name -> ours.
_ROUTE_FUNCTIONS = {
    "create_completion": "/v1/completions",
    "create_chat_completion": "/v1/chat/completions",
    "create_responses": "/v1/responses",
    "create_embedding": "/v1/embeddings",
    "create_pooling": "/pooling",
    "create_classify": "/classify",
    "create_score": "/score",
    "do_rerank": "/rerank",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "show_available_models": "/v1/models",
    "show_version": "/version",
    "health": "/health",
    "load_lora_adapter": "/v1/load_lora_adapter",
    "unload_lora_adapter": "/v1/unload_lora_adapter",
}


def __getattr__(name: str) -> Any:
    """`router` and its functions, which are made when the first application is."""
    if name == "router" or name in _ROUTE_FUNCTIONS:
        from vllm.entrypoints.openai.routes import answering, router

        if name == "router":
            return router
        return answering(next(r.endpoint for r in router.routes if r.path == _ROUTE_FUNCTIONS[name]))  # type: ignore[attr-defined]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def add_error_handlers(app: FastAPI) -> None:
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse, Response

    from vllm.entrypoints.openai.direct import crash_response, error_response
    from vllm.entrypoints.openai.errors import APIError, error_body, status_phrase

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        phrase = status_phrase(error.status_code)
        kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
        body = {"detail": phrase, **error_body(phrase, kind, error.status_code)}
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    async def on_crash(request: Request, error: Exception) -> Response:
        return crash_response(error)

    app.add_exception_handler(APIError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_crash)


def _add_page(app: FastAPI) -> None:
    """The page at /, from the package's own files."""
    from starlette.responses import FileResponse, Response
    from starlette.staticfiles import StaticFiles

    headers = {"content-security-policy": CSP, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

    async def page() -> Response:
        return FileResponse(WEB_FOLDER / "index.html", headers=headers)

    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    app.mount("/ui", StaticFiles(directory=WEB_FOLDER), name="ui")


def load_middleware(path: str) -> Any:
    """What the operator names: a class, or a coroutine function for `@app.middleware("http")`. Raises ValueError."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"--middleware takes an import path such as package.module.Name, got {path!r}.")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--middleware {path}: {error}.") from error
    if not (inspect.isclass(found) or inspect.iscoroutinefunction(found)):
        raise ValueError(f"Invalid middleware {path}. Must be a function or a class.")
    return found


def _add_middleware(app: FastAPI, found: Any) -> None:
    if inspect.isclass(found):
        app.add_middleware(found)  # type: ignore[arg-type]
    else:
        app.middleware("http")(found)


def check_files(args: argparse.Namespace) -> None:
    """Raise ValueError for what a flag names and cannot be used: before the model is loaded, which may take minutes."""
    for path in args.middleware:
        load_middleware(path)
    for root in args.lora_root:
        if not root or not Path(root).expanduser().is_dir():
            raise ValueError(f"--lora-root: there is no folder {root!r}.")
    _check_chat_template(args.chat_template)
    parsing_of(args)
    if not args.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=lambda: "")  # never asks a terminal
    except OSError as error:
        raise ValueError(f"--ssl-certfile {args.ssl_certfile}, --ssl-keyfile {args.ssl_keyfile}: {error}.") from error
    try:
        if args.ssl_ca_certs:
            context.load_verify_locations(args.ssl_ca_certs)
    except OSError as error:
        raise ValueError(f"--ssl-ca-certs {args.ssl_ca_certs}: {error}.") from error


def _check_chat_template(given: str | None) -> None:
    """Raise ValueError for a file that is not there and for a template that Jinja cannot read. A mere word may be the
    name of one of the model's templates, which are not known yet.
    """
    from vllm.entrypoints.chat_template import check_template
    from vllm.entrypoints.chat_utils import load_chat_template

    if given is None or not (any(character in given for character in "/.{}\n") or Path(given).exists()):
        return
    try:
        check_template(load_chat_template(given) or "")
    except (ValueError, OSError) as error:
        raise ValueError(f"--chat-template: {error}") from error


def make_engine(args: argparse.Namespace) -> AsyncLLMEngine:
    """The engine that the flags ask for, loaded."""
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    return AsyncLLMEngine.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        disable_log_requests=True,  # the routes do it, with --max-log-len
        disable_log_stats=args.disable_log_stats,
        disable_frontend_multiprocessing=args.disable_frontend_multiprocessing,
    )


def bind(args: argparse.Namespace, shared_port: int | None = None) -> socket.socket:
    """The listening socket, bound before the model is loaded, so that a taken port is known at once.

    shared_port: in place of the one that the flags name; several sockets of this user may have it.
    """
    family = socket.AF_INET6 if args.host and ":" in args.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    port = args.port
    if shared_port is not None:
        port = shared_port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((args.host or "", port))
    except OSError as error:
        listener.close()
        raise ValueError(f"Cannot listen on {args.host}:{port}: {error.strerror or error}.") from error
    listener.setblocking(False)
    return listener


def create_server_socket(addr: tuple[str, int]) -> socket.socket:
    """`bind` for programs that give a host, which may be empty, and a port."""
    return bind(argparse.Namespace(host=addr[0], port=addr[1]))


def several(listener: socket.socket) -> list[socket.socket]:
    """The listener as `ACCEPTED_PER_TURN` sockets, itself and copies."""
    return [listener, *(listener.dup() for _ in range(ACCEPTED_PER_TURN - 1))]


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """Where clients find what listens there."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def uvicorn_logging() -> dict[str, Any] | None:
    """uvicorn's own settings of its log, with lines that look like ours: they say when. None if the operator's file
    (VLLM_LOGGING_CONFIG_PATH) has made settings for it.
    """
    from uvicorn.config import LOGGING_CONFIG

    if any(logging.getLogger(name).handlers for name in ("uvicorn", "uvicorn.access", "uvicorn.error")):
        return None
    settings = copy.deepcopy(LOGGING_CONFIG)
    start = "%(levelname)s %(asctime)s"
    lines = {
        "default": f"{start} uvicorn] %(message)s",
        "access": f'{start} access] %(client_addr)s - "%(request_line)s" %(status_code)s',
    }
    for name, line in lines.items():
        settings["formatters"][name] |= {"fmt": line, "datefmt": DATE_FORMAT}
    return settings


def uvicorn_config(app: App, args: argparse.Namespace) -> Any:
    """How uvicorn serves the application: our bounds on connections, its parser, the operator's TLS."""
    import uvicorn

    from vllm.entrypoints.openai.connection import connection_class
    from vllm.entrypoints.openai.open_files import room_for_connections

    direct = not args.middleware  # the operator's may want to see what is sent
    return uvicorn.Config(
        app,
        log_config=uvicorn_logging(),
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        http=connection_class(
            args.header_timeout,
            room_for_connections(-(-args.max_connections // args.api_server_count)),
            args.write_timeout,
            direct,
        ),
        ws="none",
        timeout_keep_alive=75,
        h11_max_incomplete_event_size=64 * 1024,
        server_header=False,
        lifespan="off",
    )


def prepare_process() -> None:
    """Settings of the interpreter for a process that serves."""
    sys.setswitchinterval(SWITCH_SECONDS)
    keep_little_freed_memory()


def bind_all(args: argparse.Namespace) -> list[socket.socket]:
    """As `bind`, a socket for each front end, among which the kernel divides connections."""
    first = bind(args)
    if args.api_server_count == 1:
        return [first]
    port = first.getsockname()[1]
    first.close()  # it had the port for itself, so that nobody else has it
    return [bind(args, port) for _ in range(args.api_server_count)]


def make_front_ends(args: argparse.Namespace, listeners: list[socket.socket]) -> tuple[AsyncLLMEngine, FrontEnds]:
    """The engine that the flags ask for, loaded, and the other front ends, one for each of `listeners`."""
    from vllm.entrypoints.openai.front_ends import FirstOfSeveral, FrontEnds

    if not listeners:
        return make_engine(args), FrontEnds()
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    front_ends = FirstOfSeveral.start(config, args, listeners)
    try:
        engine = AsyncLLMEngine(
            config,
            core=front_ends.core,
            usage_context=UsageContext.OPENAI_API_SERVER,
            log_requests=False,
            log_stats=not args.disable_log_stats,
        )
    except BaseException:
        front_ends.kill()
        raise
    engine.count_with(front_ends.tally)
    return engine, front_ends


def check_serve_args(args: argparse.Namespace) -> None:
    """Raise for flags and files with which no server could be started."""
    from vllm.entrypoints.openai.front_ends import check_front_ends

    validate_parsed_serve_args(args)
    check_files(args)
    check_front_ends(args)


async def run_server(args: argparse.Namespace, build: AppBuilder = build_app) -> int:
    """Serve until told to stop or until the engine dies; returns the exit status of the process."""
    check_serve_args(args)
    if args.api_server_count > 1 and build is not build_app:
        raise ValueError("--api-server-count: this server has one front end. Use `vllm serve` for several.")
    prepare_process()
    listeners = bind_all(args)
    warn_of_open_door(args)
    if args.prompt_adapters:
        import vllm.lora.adapter  # noqa: F401 - with torch, which takes seconds: before a core wants to be heard
    loop = asyncio.get_running_loop()
    engine, front_ends = await loop.run_in_executor(None, make_front_ends, args, listeners[1:])
    return await serve_engine(args, engine, listeners[0], front_ends, build)


async def serve_engine(
    args: argparse.Namespace, engine: AsyncLLMEngine, listener: socket.socket, front_ends: FrontEnds, build: AppBuilder
) -> int:
    """As `run_server`, with what that has made; front_ends: as this one of them sees them."""
    import uvicorn

    try:
        await _load_adapters(args, engine)
        app = build(args, engine)
    except BaseException:
        await engine.shutdown(0.0)
        raise
    _answer_others(front_ends, engine, app.state)  # type: ignore[attr-defined]
    server = uvicorn.Server(uvicorn_config(app, args))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    server.capture_signals = without_signals  # type: ignore[method-assign, assignment]
    return await _serve(args, server, engine, listener, front_ends)


def _answer_others(front_ends: FrontEnds, engine: AsyncLLMEngine, state: Any) -> None:
    """What front ends ask each other for, so that clients find the same at each."""
    from vllm.metrics.registry import of_this_process, snapshot

    async def figures() -> Any:
        return snapshot(engine.metrics, [state.http_metrics, *of_this_process()])

    async def load() -> int:
        return int(state.context.load)

    front_ends.handlers |= {"metrics": figures, "load": load}
    state.context.front_ends = front_ends


def without_signals() -> Any:
    """In place of uvicorn's own handlers."""
    import contextlib

    return contextlib.nullcontext()


async def _serve(
    args: argparse.Namespace, server: Any, engine: AsyncLLMEngine, listener: socket.socket, front_ends: FrontEnds
) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:  # asked twice: now
            server.force_exit = True
            engine.shutdown_background_loop()

    async def on_end() -> None:
        on_signal()

    if front_ends.takes_signals:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, on_signal)
    else:
        front_ends.handlers["end"] = on_end
    await front_ends.attach()
    await engine.check_health()  # begins to listen to the core
    gc.freeze()  # what start-up has made stays: collections need not look at it again and again

    def is_idle() -> bool:
        return engine.is_idle

    tokenizer = engine.input_processor.tokenizer
    drop_caches = (lambda: None) if tokenizer is None else tokenizer.drop_caches
    housekeeping = [
        asyncio.ensure_future(collect_when_idle(is_idle)),
        asyncio.ensure_future(give_back_memory(is_idle, drop_caches)),
    ]
    if args.ssl_keyfile:
        _greet_first(loop, server, args.header_timeout)
    serving = asyncio.ensure_future(server.serve(sockets=several(listener)))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.005)
    watching = asyncio.ensure_future(engine_death(engine))
    stopping = asyncio.ensure_future(stop.wait())
    losing = asyncio.ensure_future(front_ends.lost())
    ready = asyncio.ensure_future(front_ends.serving())
    ends = {serving, watching, stopping, losing}
    await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done() and ready.exception() is None:
        if front_ends.takes_signals:
            url = url_of(listener, tls=bool(args.ssl_keyfile))
            logger.info("Serving on %s", url)
            logger.info("Uvicorn running on %s (Press CTRL+C to quit)", url)  # what scripts wait for
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if losing.done() and not (stop.is_set() or engine.errored):
        status = 1
        logger.error("%s The server ends.", losing.result())
    elif watching.done() and not stop.is_set():
        status = 1
        logger.error("The engine has died; the server ends.")
        if envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(HEALTH_POLL_SECONDS)  # let the requests in flight hear of it
    else:
        logger.info("Shutting down: requests in progress get %g s.", args.shutdown_timeout)
    seconds = args.shutdown_timeout if status == 0 else 0.0
    engine.before_core_ends = functools.partial(front_ends.ended, seconds)
    front_ends.end()
    await engine.shutdown(seconds)
    server.should_exit = True
    try:
        await asyncio.wait_for(serving, 5.0)
    except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
        server.force_exit = True
        serving.cancel()
    for task in (watching, stopping, losing, ready, *housekeeping):
        task.cancel()
    return status


def _greet_first(loop: asyncio.AbstractEventLoop, server: Any, seconds: float) -> None:
    """Have connections of TLS wait among `Greetings` until they are some."""
    from vllm.entrypoints.openai.greetings import Greetings

    create = loop.create_server
    greetings: Greetings | None = None

    def create_server(make: Any, *, ssl: Any, **arguments: Any) -> Any:
        nonlocal greetings  # of all listeners
        if greetings is None:
            most = server.config.http.max_connections
            greetings = Greetings(make, ssl, server.server_state.connections, most, seconds)
        return create(greetings, **arguments)

    loop.create_server = create_server  # type: ignore[method-assign, assignment]


async def engine_death(engine: AsyncLLMEngine) -> None:
    """Return when the engine is dead."""
    while not engine.errored:
        await asyncio.sleep(HEALTH_POLL_SECONDS)


def serve(args: argparse.Namespace, build: AppBuilder = build_app) -> int:
    """Run the server with the flags in `args`; returns the process's exit status."""
    try:
        if args.explain:
            check_serve_args(args)
            config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
            check_copies(config, not args.disable_frontend_multiprocessing)
            print(config.explain())
            return 0
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it starts, Ctrl-C ends it as SIGTERM does: now
        try:
            return run_event_loop(run_server(args, build))
        finally:
            signal.signal(signal.SIGINT, before)
    except (VLLMError, ValueError, TypeError, RuntimeError, OSError) as error:
        logger.error("%s", error)
        return 1


def run_process(description: str, build: AppBuilder = build_app) -> None:
    """Parse the command line, serve, and end the process with the right status."""
    status = serve(make_arg_parser(FlexibleArgumentParser(description=description)).parse_args(), build)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status) if status else sys.exit(0)


def main() -> None:
    run_process("OpenAI-compatible API server")


if __name__ == "__main__":
    main()
