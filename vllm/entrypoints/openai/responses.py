"""POST /v1/responses, for text: an input in, an output message out, whole or as a stream of typed events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as json_text
from typing import Any

from vllm.entrypoints.openai import chat
from vllm.entrypoints.openai.context import ServerContext, merge, new_id
from vllm.entrypoints.openai.errors import APIError, bad_request
from vllm.entrypoints.openai.events import AnswerEvents, prompt_length
from vllm.entrypoints.openai.guided import responses_format
from vllm.entrypoints.openai.logprobs import chat_logprobs
from vllm.entrypoints.openai.protocol import SHARED_WITH_CHAT, ChatCompletionRequest, ResponsesRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tool_parsers.deltas import Delta

# What the chat that a response comes down to calls otherwise.
OWN_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
EMPTY_TEXT: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": None}


@dataclass(slots=True)
class Work:
    """A checked request: the chat it comes down to."""

    request: ResponsesRequest
    id: str
    message_id: str
    chat: chat.Chat


async def prepare(context: ServerContext, request: ResponsesRequest, request_id: str | None) -> Work:
    """Check the request and turn it into a conversation."""
    request.refuse_later_features()
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise bad_request(
            f"max_output_tokens must be at least 1, got {request.max_output_tokens}.", "max_output_tokens"
        )
    shared = {name: getattr(request, name) for name in SHARED_WITH_CHAT & request.model_fields_set}
    form = responses_format(request.text)
    if form is not None and form["type"] != "text":
        if request.response_format is not None:
            raise bad_request("Give the form of the answer once, as text.format.", "response_format")
        shared["response_format"] = form
    body = ChatCompletionRequest(
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        logprobs=request.wants_logprobs,
        top_logprobs=request.top_logprobs or 0,
        **shared,
    )
    body._size = request.size
    try:
        work = await chat.prepare(context, body, None)
    except APIError as error:
        error.param = OWN_NAMES.get(error.param or "", error.param)
        raise
    response_id, _ = new_id("resp", request.request_id or request_id, "_")
    return Work(request, response_id, new_id("msg", None, "_")[0], work)


def _messages(request: ResponsesRequest) -> list[Any]:
    messages: list[Any] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise bad_request("input must hold at least one message.", "input")
    for i, item in enumerate(request.input):
        if not isinstance(item, dict):
            raise bad_request(f"input[{i}] must be an object with role and content.", "input")
        if item.get("type", "message") != "message":
            raise bad_request(f"input[{i}] has a type that is not available in this version.", "input")
        messages.append({"role": item.get("role"), "content": item.get("content")})
    return messages


def _body(work: Work, status: str, usage: dict[str, Any] | None = None, **answer: Any) -> dict[str, Any]:
    """The response as an object. `answer` has the `text` and `logprobs` of its message and the `reason` of its end, and
    is empty before anything is known.
    """
    request, params = work.request, work.chat.prompt.params
    reason = answer.get("reason")
    return {
        "id": work.id,
        "object": "response",
        "created_at": work.chat.created,
        "status": status,
        "model": work.chat.model,
        "output": [_message(work, answer["text"], answer["logprobs"], status)] if answer else [],
        "usage": usage,
        "error": None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": request.top_logprobs,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
        "store": False,
        "background": False,
        "user": request.user,
    }


def _message(work: Work, text: str, logprobs: list[Any] | None, status: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
    return {"id": work.message_id, "type": "message", "role": work.chat.role, "status": status, "content": content}


def _logprobs(work: Work, answer: CompletionOutput) -> list[Any] | None:
    """What is known of each token, or None if it was not asked for."""
    if not work.request.wants_logprobs or answer.logprobs is None:
        return None
    content: list[Any] = chat_logprobs(
        answer.token_ids, answer.logprobs, work.request.top_logprobs or 0, work.chat.text_of
    )["content"]
    return content


def _usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached or 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _ending(finish_reason: str | None) -> tuple[str, str | None]:
    return ("incomplete", "max_output_tokens") if finish_reason == "length" else ("completed", None)


async def complete(context: ServerContext, work: Work) -> dict[str, Any]:
    """The answer as one JSON object."""
    final: RequestOutput | None = None
    async for _, output in merge([work.chat.prompt.generate()]):
        final = output
    if final is None:
        raise bad_request("The request was aborted.")
    answer = final.outputs[0]
    status, reason = _ending(answer.finish_reason)
    usage = _usage(len(final.prompt_token_ids or ()), len(answer.token_ids), final.num_cached_tokens)
    return _body(work, status, usage, text=answer.text, logprobs=_logprobs(work, answer), reason=reason)


class ResponseEvents(AnswerEvents):
    """The answer as events, in the order clients expect them."""

    _after = ', "logprobs": []}\n\n'

    def __init__(self, work: Work) -> None:
        super().__init__(1, 1, not work.request.wants_logprobs)
        self._work = work
        self._number = -1
        self._place = {"item_id": work.message_id, "output_index": 0, "content_index": 0}
        self._plain_place = json.dumps(self._place)[1:-1]
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []

    def _opening(self, result: RequestOutput) -> str:
        item = {**_message(self._work, "", None, "in_progress"), "content": []}
        return "".join(
            [
                self._event("response.created", response=_body(self._work, "in_progress")),
                self._event("response.in_progress", response=_body(self._work, "in_progress")),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place, part=EMPTY_TEXT),
            ]
        )

    def _plain(self, prompt: int, result: RequestOutput, output: CompletionOutput) -> str:
        self._sent[0] += len(output.token_ids)
        text = output.text
        if not text:
            return ""
        self._pieces.append(text)
        self._number += 1
        return (
            f'event: response.output_text.delta\ndata: {{"type": "response.output_text.delta", "sequence_number": '
            f'{self._number}, {self._plain_place}, "delta": {json_text(text)}{self._after}'
        )

    def _events(self, choice: int, result: RequestOutput, output: CompletionOutput, deltas: Sequence[Delta]) -> str:
        logprobs = _logprobs(self._work, output) or []
        if not output.text and not logprobs:
            return ""
        self._pieces.append(output.text)
        self._logprobs += logprobs
        text = {"delta": output.text, "logprobs": logprobs}
        return self._event("response.output_text.delta", **self._place, **text)

    def end(self) -> bytes:
        """The events after the last output."""
        work, text, last = self._work, "".join(self._pieces), self._last[0]
        logprobs = self._logprobs if work.request.wants_logprobs else None
        status, why = _ending(last.outputs[0].finish_reason)
        usage = _usage(prompt_length(last), self._sent[0], last.num_cached_tokens)
        body = _body(work, status, usage, text=text, logprobs=logprobs, reason=why)
        part = {**EMPTY_TEXT, "text": text, "logprobs": logprobs}
        item = _message(work, text, logprobs, status)
        return "".join(
            [
                self._event("response.output_text.done", **self._place, text=text, logprobs=self._logprobs),
                self._event("response.content_part.done", **self._place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{status}", response=body),
            ]
        ).encode()

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        data = json.dumps({"type": kind, "sequence_number": self._number, **fields})
        return f"event: {kind}\ndata: {data}\n\n"
