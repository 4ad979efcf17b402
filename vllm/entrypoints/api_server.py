"""The demonstration server of early versions: POST /generate, plain or as a stream of JSON objects with NUL between.

`vllm serve` is the server to use. This one has its process, engine, limits and flags, and one route instead of all.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.openai import completions
from vllm.entrypoints.openai.api_server import add_error_handlers, add_layers, make_context, run_process
from vllm.entrypoints.openai.context import ServerContext, as_api_error
from vllm.entrypoints.openai.errors import APIError, bad_request
from vllm.entrypoints.openai.events import failed
from vllm.entrypoints.openai.protocol import CompletionRequest
from vllm.entrypoints.openai.routes import answer, context_of, health, read, stream
from vllm.entrypoints.openai.sse import Events, EventStream

if TYPE_CHECKING:
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.entrypoints.openai.limits import App
    from vllm.outputs import RequestOutput

router = APIRouter()
router.add_api_route("/health", health, methods=["GET"])


@router.post("/generate")
async def generate(request: Request) -> Response:
    """`prompt`, `stream`, and any sampling parameter; the texts begin with the prompt."""
    context = context_of(request)
    body = await read(request, CompletionRequest)
    if not isinstance(body.prompt, str):
        raise bad_request("prompt must be a string.", "prompt")
    unknown = sorted(body.model_extra or ())
    if unknown:
        raise bad_request(f"Unexpected parameter {unknown[0]!r:.80}: expected prompt, stream or sampling parameters.")
    try:
        work = await completions.prepare(context, body, request.headers.get("x-request-id"))
    except Exception as error:
        raise as_api_error(error) from error
    if body.stream:
        return await stream(request, EventStream(work.prompts, _Texts(work, body.prompt)))
    return await answer(request, lambda: _whole(context, work, body.prompt))


async def _whole(context: ServerContext, work: completions.Completion, prompt: Any) -> dict[str, Any]:
    found = await completions.complete(context, work)
    return {"text": [prompt + choice["text"] for choice in found["choices"]]}


class _Texts(Events):
    """The texts so far, again and again."""

    def __init__(self, work: completions.Completion, prompt: str) -> None:
        self._texts = [prompt] * work.count

    def feed(self, index: int, output: RequestOutput) -> bytes:
        for choice in output.outputs:
            self._texts[choice.index] += choice.text
        return json.dumps({"text": self._texts}).encode() + b"\0"

    def end(self) -> bytes:
        return b""

    def failure(self, error: APIError) -> bytes:
        return failed(error)


def build_app(args: argparse.Namespace, engine: AsyncLLMEngine) -> App:
    """The application with its one route, behind the same layers as the large server's."""
    from fastapi import FastAPI

    app = FastAPI(title="vllm demonstration server", openapi_url=None, root_path=args.root_path or "")
    app.state.args = args
    app.state.context = make_context(args, engine)
    app.include_router(router)
    add_error_handlers(app)
    return add_layers(app, args, router, {"/generate"})


if __name__ == "__main__":
    run_process("Demonstration server with POST /generate", build_app)
