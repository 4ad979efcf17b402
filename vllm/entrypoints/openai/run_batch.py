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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

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
_MAX_ID_BYTES = 64 * 1024  # in a line that is looked at piece by piece
BUSY_SECONDS = 0.05  # between two attempts to hand a request to a full queue
AHEAD = 16  # times --max-in-progress: answers that may wait for one before them


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


@dataclass(frozen=True)
class LongLine:
    """What is kept of a line that is longer than MAX_LINE_BYTES: the custom_ids in it, until there are two."""

    ids: frozenset[bytes]


def read_lines(file: BinaryIO) -> Iterator[bytes | LongLine]:
    """The non-empty lines of the input, without a byte order mark before the first, as they are asked for."""
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    limit = MAX_LINE_BYTES + 2  # the end of a line
    while line := file.readline(limit):
        text = line.strip()
        if len(text) > MAX_LINE_BYTES or (len(line) == limit and not line.endswith(b"\n")):
            yield LongLine(_ids_in_long(line, file))
        elif text:
            yield text


def _ids_in_long(piece: bytes, file: BinaryIO) -> frozenset[bytes]:
    """Read a line to its end, of which `piece` is the beginning."""
    ids = set(_CUSTOM_ID.findall(piece))
    while not piece.endswith(b"\n") and (further := file.readline(MAX_LINE_BYTES)):
        piece = piece[-_MAX_ID_BYTES:] + further
        if len(ids) < 2:
            ids.update(_CUSTOM_ID.findall(piece))
    return frozenset(ids)


async def answer_line(context: ServerContext, line: bytes | LongLine) -> dict[str, Any]:
    """One line of output for one of input; whatever is wrong with a line is that line's own error."""
    from vllm.entrypoints.openai.context import as_api_error
    from vllm.entrypoints.openai.errors import APIError, bad_request
    from vllm.entrypoints.openai.strict_json import parse_object

    custom_id: Any = None
    try:
        if isinstance(line, LongLine):
            custom_id = _only_id(line.ids)
            raise APIError(413, f"The line is longer than {MAX_LINE_BYTES} bytes.", "RequestTooLargeError")
        try:
            item = parse_object(line)
        except ValueError:
            custom_id = _only_id(frozenset(_CUSTOM_ID.findall(line)))
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


def _only_id(ids: frozenset[bytes]) -> str | None:
    """The custom_id of a line that is no acceptable JSON, if there is one only."""
    from vllm.entrypoints.openai.strict_json import parse_object

    if len(ids) != 1:
        return None
    with contextlib.suppress(ValueError):
        return str(parse_object(b'{"id": %s}' % next(iter(ids)))["id"])
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
    from vllm.entrypoints.openai.answers import listed
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
        answer: dict[str, Any] = listed(await (await route.prepare(context, pooled, None))(context))
        return answer
    known = ", ".join(("/v1/chat/completions", "/v1/completions", *pooling.ROUTES))
    raise bad_request(f"url must be one of {known}.")


async def run(
    engine: AsyncLLMEngine,
    lines: Iterable[bytes | LongLine],
    role: str,
    width: int,
    write: Callable[[dict[str, Any]], None],
    parsing: ParsingSettings | None = None,
) -> None:
    """Pass answers to `write` in the order of the lines, each as soon as it and those before it are there; at most
    `width` are in progress, and a line is read when its turn has come.
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

    async def one(line: bytes | LongLine) -> dict[str, Any]:
        try:
            return await answer_line(context, line)
        finally:
            gate.release()

    tasks: deque[asyncio.Task[dict[str, Any]]] = deque()
    unread = iter(lines)
    try:
        while True:
            await gate.acquire()
            while tasks and (tasks[0].done() or len(tasks) >= AHEAD * width):
                write(await tasks.popleft())
            if (line := next(unread, None)) is None:
                break
            tasks.append(asyncio.create_task(one(line)))
        while tasks:
            write(await tasks.popleft())
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
    if not source.is_file():
        raise ValueError(f"There is no file {source}.")
    if not target.parent.is_dir():
        raise ValueError(f"There is no folder {target.parent} to write {target.name} to.")
    if target.is_dir():
        raise ValueError(f"--output-file must be a file, but {target} is a folder.")
    if target.exists() and target.samefile(source):
        raise ValueError(f"--output-file is the input file, {source}, which would be lost. Name another one.")
    parsing = parsing_of(args)
    args.disable_frontend_multiprocessing = False
    with source.open("rb"), target.open("a"):  # what is not allowed is known before the model is loaded
        engine = make_engine(args)
    stop_metrics = serve_metrics(engine, args.url, args.port) if args.enable_metrics else None
    answered = failed = nameless = 0
    with source.open("rb") as requests, target.open("w", encoding="utf-8") as file:

        def write(item: dict[str, Any]) -> None:
            nonlocal answered, failed, nameless
            answered += 1
            failed += item["error"] is not None
            nameless += not isinstance(item["custom_id"], str)
            file.write(json.dumps(item) + "\n")
            file.flush()  # what was answered is kept, whatever happens to the rest

        lines = read_lines(requests)
        asyncio.run(run(engine, lines, args.response_role, args.max_in_progress, write, parsing))
    logger.info("%d requests answered, %d of them with an error; the answers are in %s", answered, failed, target)
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
