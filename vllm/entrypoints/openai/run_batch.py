"""`vllm run-batch`: a file of requests in OpenAI's batch format in, a file of answers out, without a server."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import json
import re
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import add_parsing_flags, parsing_of
from vllm.exceptions import VLLMError
from vllm.logger import init_logger
from vllm.utils.argparse import FlexibleArgumentParser

if TYPE_CHECKING:
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.entrypoints.openai.context import ServerContext
    from vllm.entrypoints.openai.message import ParsingSettings

logger = init_logger(__name__)

MAX_LINE_BYTES = 16 * 1024 * 1024
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")')
BUSY_SECONDS = 0.05  # between two attempts to hand a request to a full queue


def make_parser() -> FlexibleArgumentParser:
    """Flags of run-batch, and all of the engine's."""
    parser = FlexibleArgumentParser(
        prog="vllm run-batch", description="Run a file of requests in OpenAI's batch format."
    )
    parser.add_argument("-i", "--input-file", required=True, help="Requests, one JSON object per line; a local file.")
    parser.add_argument("-o", "--output-file", required=True, help="Where the answers go; a local file.")
    parser.add_argument("--response-role", default="assistant", help="Role of chat answers.")
    parser.add_argument("--max-in-progress", type=int, default=256, help="Requests handed to the engine at a time.")
    add_parsing_flags(parser.add_argument)
    parser.add_argument("--enable-metrics", action="store_true", help="Serve /metrics while the batch runs.")
    parser.add_argument("--url", default="0.0.0.0", help="Address of the metrics. Default: all interfaces.")
    parser.add_argument("--port", type=int, default=8000, help="Port of the metrics. Default: 8000.")
    AsyncEngineArgs.add_cli_args(parser)
    parser.set_defaults(model="demo")
    return parser


def _local_file(text: str, flag: str) -> Path:
    if "://" in text:
        raise ValueError(f"{flag} takes a local file; URLs are not fetched. Download it first.")
    return Path(text)


def read_lines(path: Path) -> list[bytes]:
    """The non-empty lines of the input, without a byte order mark before the first.

    Raises ValueError if there is no such file or a line is too long.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    with path.open("rb") as file:
        lines = [line.strip() for line in file]
    lines[:1] = [line.removeprefix(codecs.BOM_UTF8) for line in lines[:1]]
    if any(len(line) > MAX_LINE_BYTES for line in lines):
        raise ValueError(f"A line of {path} is longer than {MAX_LINE_BYTES} bytes.")
    return [line for line in lines if line]


async def answer_line(context: ServerContext, line: bytes) -> dict[str, Any]:
    """One line of output for one of input; whatever is wrong with a line is that line's own error."""
    from vllm.entrypoints.openai.context import as_api_error
    from vllm.entrypoints.openai.errors import APIError, bad_request
    from vllm.entrypoints.openai.strict_json import parse_object

    custom_id: Any = None
    try:
        try:
            item = parse_object(line)
        except ValueError:
            custom_id = _only_id(line)
            raise
        custom_id = item.get("custom_id")
        if not isinstance(custom_id, str):
            raise bad_request("custom_id must be a string: it tells the answers apart.", "custom_id")
        if item.get("method", "POST") != "POST":
            raise bad_request("method must be POST.")
        body = await _answer(context, item.get("url"), item.get("body"))
        status: int = 200
        error = None
    except Exception as problem:
        refused = problem if isinstance(problem, APIError) else as_api_error(problem)
        status, body, error = refused.status, refused.body, refused.message
    return {
        "id": f"vllm-{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"vllm-batch-{uuid.uuid4().hex}", "body": body},
        "error": error,
    }


def _only_id(line: bytes) -> str | None:
    """The custom_id of a line that is no acceptable JSON, if there is one only."""
    from vllm.entrypoints.openai.strict_json import parse_object

    found = set(_CUSTOM_ID.findall(line))
    if len(found) != 1:
        return None
    with contextlib.suppress(ValueError):
        return str(parse_object(b'{"id": %s}' % found.pop())["id"])
    return None


async def _answer(context: ServerContext, url: Any, body: Any) -> dict[str, Any]:
    """The body of the answer. A batch has time: a full queue is waited for, not reported."""
    from vllm.exceptions import QueueOverflowError

    while True:
        try:
            return await _ask(context, url, body)
        except QueueOverflowError:
            await asyncio.sleep(BUSY_SECONDS)


async def _ask(context: ServerContext, url: Any, body: Any) -> dict[str, Any]:
    from vllm.entrypoints.openai import chat, completions, pooling
    from vllm.entrypoints.openai.errors import bad_request
    from vllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, checked

    if not isinstance(body, dict):
        raise bad_request("body must be an object.")
    if body.get("stream"):
        raise bad_request("A request of a batch must not be sent in stream mode; leave stream unset.", "stream")
    if url == "/v1/chat/completions":
        chat_request = checked(ChatCompletionRequest, body)
        context.log_unknown_fields(chat_request.model_extra or ())
        return await chat.complete(context, await chat.prepare(context, chat_request, None))
    if url == "/v1/completions":
        request = checked(CompletionRequest, body)
        context.log_unknown_fields(request.model_extra or ())
        return await completions.complete(context, await completions.prepare(context, request, None))
    if isinstance(url, str) and url in pooling.ROUTES:
        route = pooling.find(context, url)
        pooled = checked(route.request, body)
        context.log_unknown_fields(pooled.model_extra or ())
        pooled.refuse_later_features()
        return await (await route.prepare(context, pooled, None))(context)
    known = ", ".join(("/v1/chat/completions", "/v1/completions", *pooling.ROUTES))
    raise bad_request(f"url must be one of {known}.")


async def run(
    engine: AsyncLLMEngine,
    lines: Sequence[bytes],
    role: str,
    width: int,
    write: Callable[[dict[str, Any]], None],
    parsing: ParsingSettings | None = None,
) -> None:
    """Pass answers to `write` in the order of the lines, each as soon as it and those before it are there; at most
    `width` are in progress.
    """
    from vllm.entrypoints.openai.context import ServerContext
    from vllm.entrypoints.openai.message import ParsingSettings

    model = engine.vllm_config.model_config
    context = ServerContext(
        engine=engine,
        served_names=tuple(model.served_model_names) or (model.served_model_name,),
        model_path=model.model,
        max_model_len=model.max_model_len,
        default_sampling=model.get_diff_sampling_param(),
        response_role=role,
        parsing=parsing or ParsingSettings(),
    )
    gate = asyncio.Semaphore(width)

    async def one(line: bytes) -> dict[str, Any]:
        async with gate:
            return await answer_line(context, line)

    tasks = [asyncio.ensure_future(one(line)) for line in lines]
    try:
        for task in tasks:
            write(await task)
    finally:
        for task in tasks:
            task.cancel()
        await engine.shutdown(0.0)


def serve_metrics(engine: AsyncLLMEngine, address: str, port: int) -> Callable[[], None]:
    """Answer GET /metrics in a thread until the returned function is called. Raises ValueError if the port is taken."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(engine.metrics)  # type: ignore[arg-type]
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise ValueError(f"Cannot serve metrics on {address}:{port}: {error.strerror or error}.") from error

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    logger.info("Metrics on http://%s:%d/metrics", address, server.server_port)
    return stop


def execute(args: argparse.Namespace) -> int:
    """Run the batch; returns the exit status."""
    from vllm.entrypoints.openai.api_server import make_engine

    source = _local_file(args.input_file, "--input-file")
    target = _local_file(args.output_file, "--output-file")
    if args.max_in_progress < 1:
        raise ValueError(f"--max-in-progress must be 1 or more, got {args.max_in_progress}.")
    lines = read_lines(source)
    if not target.parent.is_dir():
        raise ValueError(f"There is no folder {target.parent} to write {target.name} to.")
    if target.is_dir():
        raise ValueError(f"--output-file must be a file, but {target} is a folder.")
    if target.exists() and target.samefile(source):
        raise ValueError(f"--output-file is the input file, {source}, which would be lost. Name another one.")
    parsing = parsing_of(args)
    args.disable_frontend_multiprocessing = False
    with target.open("a"):  # what is not allowed is known before the model is loaded
        engine = make_engine(args)
    stop_metrics = serve_metrics(engine, args.url, args.port) if args.enable_metrics else None
    failed = nameless = 0
    with target.open("w", encoding="utf-8") as file:

        def write(item: dict[str, Any]) -> None:
            nonlocal failed, nameless
            failed += item["error"] is not None
            nameless += not isinstance(item["custom_id"], str)
            file.write(json.dumps(item) + "\n")
            file.flush()  # what was answered is kept, whatever happens to the rest

        asyncio.run(run(engine, lines, args.response_role, args.max_in_progress, write, parsing))
    logger.info("%d requests answered, %d of them with an error; the answers are in %s", len(lines), failed, target)
    if stop_metrics is not None:
        stop_metrics()
    if nameless:
        logger.error("%d lines have no custom_id: whose answers these are cannot be told.", nameless)
    return 1 if engine.errored or nameless else 0


def main(argv: Sequence[str]) -> int:
    """`argv[0]` is the command's name."""
    args = make_parser().parse_args(list(argv[1:]))
    try:
        return execute(args)
    except (VLLMError, ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"vllm run-batch: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
