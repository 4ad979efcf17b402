"""POST /v1/responses: an input in, items out (thoughts, messages, calls), whole or as a stream of typed events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as json_text
from typing import Any

from vllm.engine.texts import INLINE_CHARACTERS
from vllm.entrypoints.openai import chat
from vllm.entrypoints.openai.answers import INLINE_ENTRIES, count_entries, encode_at_once
from vllm.entrypoints.openai.context import ServerContext, as_api_error, merge, new_id
from vllm.entrypoints.openai.errors import APIError, bad_request
from vllm.entrypoints.openai.events import AnswerEvents, prompt_length
from vllm.entrypoints.openai.guided import responses_format
from vllm.entrypoints.openai.logprobs import chat_logprobs
from vllm.entrypoints.openai.protocol import SHARED_WITH_CHAT, ChatCompletionRequest, ResponsesRequest
from vllm.entrypoints.openai.response_items import Event, OutputItems, to_chat_choice, to_chat_tools, to_messages
from vllm.entrypoints.openai.response_store import Stored
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tool_parsers.deltas import Content, Delta

# What the chat that a response comes down to calls otherwise.
OWN_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
EMPTY_TEXT: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": None}


@dataclass(slots=True)
class Work:
    """A checked request: the chat it comes down to.

    conversation: the messages before the answer, without instructions; input_items: those of this request.
    """

    request: ResponsesRequest
    id: str
    message_id: str
    chat: chat.Chat
    conversation: list[Any] = field(default_factory=list)
    input_items: list[Any] = field(default_factory=list)
    is_stored: bool = False


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
    is_stored = _is_stored(context, request)
    items = _input_items(request)
    conversation = to_messages(items)
    if request.previous_response_id is not None:
        context.responses.check("previous_response_id")
        conversation = [*context.responses.get(request.previous_response_id).messages, *conversation]
    instructions = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    body = ChatCompletionRequest(
        messages=[*instructions, *conversation],
        max_completion_tokens=request.max_output_tokens,
        logprobs=request.wants_logprobs,
        top_logprobs=request.top_logprobs or 0,
        tools=to_chat_tools(request.tools),
        tool_choice=to_chat_choice(request.tool_choice) if request.tools else None,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=(request.reasoning or {}).get("effort"),
        **shared,
    )
    # A conversation that goes on is longer than what came now: it is not for the event loop.
    body._size = request.size + (INLINE_CHARACTERS if request.previous_response_id is not None else 0)
    try:
        work = await chat.prepare(context, body, None)
    except APIError as error:
        error.param = OWN_NAMES.get(error.param or "", error.param)
        raise
    # Whoever knows the id of a stored response may read it, so that no part of it is the client's.
    wanted = None if is_stored else request.request_id or request_id
    response_id, _ = new_id("resp", wanted, "_")
    return Work(request, response_id, new_id("msg", None, "_")[0], work, conversation, items, is_stored)


def _is_stored(context: ServerContext, request: ResponsesRequest) -> bool:
    if request.store:
        context.responses.check("store")
    if request.background:
        context.responses.check("background")
        if request.store is False:
            raise bad_request("background needs store: the response could not be retrieved.", "background")
        if request.stream:
            raise bad_request(
                "background does not go with stream in this version; retrieve the response.", "background"
            )
        context.responses.check_running()
    return context.responses.enabled and request.store is not False


def _input_items(request: ResponsesRequest) -> list[Any]:
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    if not request.input:
        raise bad_request("input must hold at least one message.", "input")
    return request.input


def _body(
    work: Work,
    status: str,
    usage: dict[str, Any] | None = None,
    output: Sequence[Any] = (),
    reason: str | None = None,
) -> dict[str, Any]:
    """The response as an object. `reason`: why it is not complete."""
    request, params = work.request, work.chat.prompt.params
    body = {
        "id": work.id,
        "object": "response",
        "created_at": work.chat.created,
        "status": status,
        "model": work.chat.model,
        "output": list(output),
        "usage": usage,
        "error": None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": bool(request.tools) and request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": request.top_logprobs,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": (request.tool_choice or "auto") if request.tools else "none",
        "tools": request.tools or [],
        "truncation": "disabled",
        "store": work.is_stored,
        "background": bool(request.background),
        "user": request.user,
    }
    if request.reasoning is not None:
        body["reasoning"] = {"effort": None, "summary": None, **request.reasoning}
    return body


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


def _usage(prompt: int, completion: int, cached: int | None, thoughts: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached or 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": prompt + completion,
    }


def _ending(finish_reason: str | None) -> tuple[str, str | None]:
    return ("incomplete", "max_output_tokens") if finish_reason == "length" else ("completed", None)


def _keep(context: ServerContext, work: Work, body: dict[str, Any], task: asyncio.Task[None] | None = None) -> None:
    """Store the response, if it is to be stored, with the conversation as the next one will see it."""
    if work.is_stored:
        messages = [*work.conversation, *to_messages(body["output"])]
        context.responses.put(work.id, Stored(body, messages, work.input_items, task))


# -- whole -------------------------------------------------------------------------------------------------------------


async def complete(context: ServerContext, work: Work) -> bytes | dict[str, Any]:
    """The answer as one JSON object, encoded already if it is large."""
    final = await _final(work)
    if count_entries([final]) > INLINE_ENTRIES:
        return await context.engine.lanes.write(_finish, context, work, final)
    body = _answer(work, final)
    _keep(context, work, body)
    return body


def _finish(context: ServerContext, work: Work, final: RequestOutput) -> bytes:
    body = _answer(work, final)
    _keep(context, work, body)
    return encode_at_once(body)


async def _compute(work: Work) -> dict[str, Any]:
    final = await _final(work)
    if count_entries([final]) > INLINE_ENTRIES:
        return await work.chat.prompt.engine.lanes.write(_answer, work, final)
    return _answer(work, final)


async def _final(work: Work) -> RequestOutput:
    final: RequestOutput | None = None
    async for _, output in merge([work.chat.prompt.generate()]):
        final = output
    if final is None:
        raise bad_request("The request was aborted.")
    return final


def _answer(work: Work, final: RequestOutput) -> dict[str, Any]:
    answer = final.outputs[0]
    status, reason = _ending(answer.finish_reason)
    parsing = work.chat.parsing
    thoughts = 0 if parsing is None else parsing.thought_tokens(answer.token_ids)
    usage = _usage(len(final.prompt_token_ids or ()), len(answer.token_ids), final.num_cached_tokens, thoughts)
    if parsing is None:
        output_items = [_message(work, answer.text, _logprobs(work, answer), status)]
    else:
        items = _items(work)
        for delta in parsing.whole_deltas(answer):
            _ = list(items.add(delta, (_logprobs(work, answer) or ()) if isinstance(delta, Content) else ()))
        _ = list(items.close(status))
        output_items = items.items
    return _body(work, status, usage, output_items, reason)


def _items(work: Work) -> OutputItems:
    return OutputItems(work.message_id, work.chat.role, work.request.wants_logprobs)


def begin(context: ServerContext, work: Work) -> dict[str, Any]:
    """Compute the answer in the background; returns the response as it is now."""

    async def run() -> None:
        entry = context.responses.get(work.id)
        entry.update({**entry.body, "status": "in_progress"})
        try:
            body = await _compute(work)
        except Exception as error:
            problem = as_api_error(error)
            message = problem.body["message"]
            body = {**_body(work, "failed"), "error": {"code": "server_error", "message": message}}
        if entry.status != "cancelled":
            _keep(context, work, body, entry.task)

    body = _body(work, "queued")
    _keep(context, work, body)
    context.responses.get(work.id).task = asyncio.ensure_future(run())
    return body


# -- streamed ----------------------------------------------------------------------------------------------------------


class ResponseEvents(AnswerEvents):
    """The answer as events, in the order clients expect them."""

    _after = ', "logprobs": []}\n\n'

    def __init__(self, work: Work, context: ServerContext | None = None) -> None:
        parsing = work.chat.parsing
        super().__init__(1, 1, not work.request.wants_logprobs, None if parsing is None else parsing.deltas)
        self._work = work
        self._context = context
        self._number = -1
        self._place = {"item_id": work.message_id, "output_index": 0, "content_index": 0}
        self._plain_place = json.dumps(self._place)[1:-1]
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []
        self._items = None if parsing is None else _items(work)
        self._token_ids: list[int] = []

    def _opening(self, result: RequestOutput) -> str:
        created: list[Event] = [("response.created", {"response": _body(self._work, "in_progress")})]
        created.append(("response.in_progress", {"response": _body(self._work, "in_progress")}))
        if self._items is None:  # nothing but a message can come
            item = {**_message(self._work, "", None, "in_progress"), "content": []}
            created.append(("response.output_item.added", {"output_index": 0, "item": item}))
            created.append(("response.content_part.added", {**self._place, "part": EMPTY_TEXT}))
        return self._all(created)

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
        if self._items is not None:
            self._token_ids += output.token_ids
            events: list[Event] = []
            for delta in deltas:
                events += self._items.add(delta, logprobs if isinstance(delta, Content) else ())
                logprobs = [] if isinstance(delta, Content) else logprobs
            return self._all(events)
        if not output.text and not logprobs:
            return ""
        self._pieces.append(output.text)
        self._logprobs += logprobs
        text = {"delta": output.text, "logprobs": logprobs}
        return self._event("response.output_text.delta", **self._place, **text)

    def end(self) -> bytes:
        """The events after the last output."""
        work, last = self._work, self._last[0]
        status, why = _ending(last.outputs[0].finish_reason)
        thoughts = 0 if work.chat.parsing is None else work.chat.parsing.thought_tokens(self._token_ids)
        usage = _usage(prompt_length(last), self._sent[0], last.num_cached_tokens, thoughts)
        if self._items is not None:
            events: list[Event] = list(self._items.close(status))
            output = self._items.items
        else:
            text = "".join(self._pieces)
            logprobs = self._logprobs if work.request.wants_logprobs else None
            part = {**EMPTY_TEXT, "text": text, "logprobs": logprobs}
            output = [_message(work, text, logprobs, status)]
            events = [
                ("response.output_text.done", {**self._place, "text": text, "logprobs": self._logprobs}),
                ("response.content_part.done", {**self._place, "part": part}),
                ("response.output_item.done", {"output_index": 0, "item": output[0]}),
            ]
        body = _body(work, status, usage, output, why)
        if self._context is not None:
            _keep(self._context, work, body)
        return (self._all(events) + self._event(f"response.{status}", response=body)).encode()

    def _all(self, events: Iterable[Event]) -> str:
        return "".join([self._event(kind, **fields) for kind, fields in events])

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        data = {"type": kind, "sequence_number": self._number, **fields}
        text = encode_at_once(data).decode() if self._logprobs else json.dumps(data)
        return f"event: {kind}\ndata: {text}\n\n"
