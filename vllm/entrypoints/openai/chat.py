"""POST /v1/chat/completions: a conversation in, messages out, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.chat_utils import apply_chat_template
from vllm.entrypoints.openai.completions import DONE, usage_of
from vllm.entrypoints.openai.context import ServerContext, new_id
from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.logprobs import TokenText, chat_logprobs, prompt_logprobs
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.sampling import check_sizes, resolve_max_tokens, to_sampling_params
from vllm.outputs import CompletionOutput, RequestOutput


@dataclass(slots=True)
class Chat:
    """A checked request: its generator, not started yet."""

    request: ChatCompletionRequest
    id: str
    model: str
    created: int
    generator: AsyncGenerator[RequestOutput, None]
    text_of: TokenText
    role: str
    last_content: str  # of the last message, for `echo`


async def render(context: ServerContext, request: Any, tools: list[Any] | None) -> str:
    """The conversation as the model's prompt. Templates run beside the event loop, in a sandbox with limits."""
    if len(request.messages) > context.limits.max_messages:
        raise bad_request(f"A conversation may have at most {context.limits.max_messages} messages.", "messages")
    template = context.chat_template
    extra = dict(request.chat_template_kwargs or {})
    if not context.trust_request_template:
        if request.chat_template is not None:
            raise bad_request(
                "chat_template in a request is refused; start the server with --trust-request-chat-template to allow "
                "it.",
                "chat_template",
            )
        if extra:
            raise bad_request(
                "chat_template_kwargs in a request is refused; start the server with --trust-request-chat-template to "
                "allow it.",
                "chat_template_kwargs",
            )
    elif request.chat_template is not None:
        template = request.chat_template
    documents = getattr(request, "documents", None)
    return await context.in_pool(
        lambda: apply_chat_template(
            context.tokenizer,
            request.messages,
            chat_template=template,
            content_format=context.content_format,  # type: ignore[arg-type]
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            tools=tools,
            documents=documents,
            **extra,
        )
    )


async def prepare(context: ServerContext, request: ChatCompletionRequest, request_id: str | None) -> Chat:
    """Check everything that can be checked before the engine is asked."""
    model = context.check_model(request.model)
    request.refuse_later_features()
    check_sizes(request, context.limits)
    if (request.n or 1) > context.limits.max_sequences:
        raise bad_request(f"n may be at most {context.limits.max_sequences}.", "n")
    prompt = await render(context, request, request.tools if request.tool_choice != "none" else None)
    limit = request.truncate_prompt_tokens
    ids = await context.encode(prompt, request.add_special_tokens, truncated=limit is not None)
    if limit is not None and limit >= 1:
        ids = ids[-limit:]
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    params = to_sampling_params(
        request,
        default=context.default_sampling,
        max_tokens=resolve_max_tokens(asked, len(ids), context.max_model_len, context.default_sampling),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    context.engine.check_admission(request.n or 1, len(ids))
    name = new_id("chatcmpl", request.request_id or request_id)
    item: dict[str, Any] = {"prompt": prompt, "prompt_token_ids": ids}
    if request.cache_salt is not None:
        item["cache_salt"] = request.cache_salt
    context.log_request(name, prompt, len(ids), params)
    generator = context.engine.generate(
        item,  # type: ignore[arg-type]
        params,
        name,
        priority=request.priority,
        timeout=context.request_timeout,
    )
    as_ids = request.return_tokens_as_token_ids
    text_of = TokenText(context.tokenizer, context.return_token_ids_as_text if as_ids is None else as_ids)
    role, last = _roles(context, request)
    return Chat(request, name, model, int(time.time()), generator, text_of, role, last)


def _roles(context: ServerContext, request: ChatCompletionRequest) -> tuple[str, str]:
    """The role of the answer, and what `echo` puts before it."""
    last = request.messages[-1]
    role = context.response_role if request.add_generation_prompt else last.get("role", context.response_role)
    content = last.get("content") if request.echo and last.get("role") == role else None
    return role, content if isinstance(content, str) else ""


# -- whole -------------------------------------------------------------------------------------------------------------


async def complete(context: ServerContext, work: Chat) -> dict[str, Any]:
    """The answer as one JSON object."""
    final: RequestOutput | None = None
    try:
        async for output in work.generator:
            final = output
    finally:
        await work.generator.aclose()
    if final is None:
        raise bad_request("The request was aborted.")
    prompt_tokens = len(final.prompt_token_ids or ())
    completion_tokens = sum(len(output.token_ids) for output in final.outputs)
    return {
        "id": work.id,
        "object": "chat.completion",
        "created": work.created,
        "model": work.model,
        "choices": [_choice(work, output) for output in final.outputs],
        "usage": usage_of(prompt_tokens, completion_tokens, context.cached_tokens([final])),
        "prompt_logprobs": prompt_logprobs(final.prompt_logprobs),
    }


def _choice(work: Chat, output: CompletionOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "message": {
            "role": work.role,
            "reasoning_content": None,
            "content": work.last_content + output.text,
            "tool_calls": [],
        },
        "logprobs": _logprobs(work, output),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _logprobs(work: Chat, output: CompletionOutput) -> dict[str, Any] | None:
    if not work.request.logprobs or output.logprobs is None:
        return None
    return chat_logprobs(output.token_ids, output.logprobs, work.request.top_logprobs or 0, work.text_of)


# -- streamed ----------------------------------------------------------------------------------------------------------


async def stream(context: ServerContext, work: Chat) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events: a role chunk per choice, content chunks, a last one with the finish reason."""
    request = work.request
    fixed = {"id": work.id, "object": "chat.completion.chunk", "created": work.created, "model": work.model}
    head = b"data: " + json.dumps(fixed).encode()[:-1] + b', "choices":'
    always = request.wants_usage_always
    sent: dict[int, int] = {}
    prompt_tokens = 0
    cached: int | None = None

    def chunk(choice: dict[str, Any]) -> bytes:
        usage = b""
        if always:
            usage = b', "usage":' + json.dumps(_usage(prompt_tokens, sent.get(choice["index"], 0))).encode()
        return head + json.dumps([choice]).encode() + usage + b"}\n\n"

    def content(index: int, text: str, **rest: Any) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None, **rest}

    try:
        async for result in work.generator:
            prompt_tokens = len(result.prompt_token_ids or ())
            cached = context.cached_tokens([result])
            if not sent:  # after the first output, so that early errors are plain HTTP errors
                for index in range(request.n or 1):
                    sent[index] = 0
                    delta = {"role": work.role, "content": ""}
                    yield chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
                    if work.last_content:
                        yield chunk(content(index, work.last_content))
            for output in result.outputs:
                sent[output.index] = sent.get(output.index, 0) + len(output.token_ids)
                logprobs = _logprobs(work, output)
                if output.finish_reason is not None:
                    yield chunk(
                        content(
                            output.index,
                            output.text,
                            logprobs=logprobs,
                            finish_reason=output.finish_reason,
                            stop_reason=output.stop_reason,
                        )
                    )
                elif output.text or logprobs:
                    yield chunk(content(output.index, output.text, logprobs=logprobs))
    finally:
        await work.generator.aclose()
    if request.wants_usage:
        total = {k: v for k, v in usage_of(prompt_tokens, sum(sent.values()), cached).items() if v is not None}
        usage = json.dumps(total).encode()
        yield head + b'[], "usage":' + usage + b"}\n\n"
    yield DONE


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
