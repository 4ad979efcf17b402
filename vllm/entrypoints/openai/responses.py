"""POST /v1/responses: an input in, items out (thoughts, messages, calls), whole or as a stream of typed events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as json_text
from typing import Any

from vllm.engine.texts import LONG_CHARACTERS
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
from vllm.entrypoints.openai.strict_json import MAX_VALUES, cost_of
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
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

    echoed: the fields of the response that repeat the request.   conversation: the messages before the answer, without
    instructions; input_items: those of this request. All as JSON, made once: a request may have megabytes of them.
    """

    request: ResponsesRequest
    id: str
    message_id: str
    chat: chat.Chat
    echoed: bytes
    conversation: bytes = b"[]"
    input_items: bytes = b"[]"
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
    conversation: list[Any] = to_messages(items)
    before = 0
    if request.previous_response_id is not None:
        context.responses.check("previous_response_id")
        kept = context.responses.get(request.previous_response_id).messages
        before = len(kept)
        conversation = [*await context.in_lane(before, _conversation, kept), *conversation]
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
    body._size = request.size + before
    try:
        work = await chat.prepare(context, body, None)
    except APIError as error:
        error.param = OWN_NAMES.get(error.param or "", error.param)
        raise
    # Whoever knows the id of a stored response may read it, so that no part of it is the client's.
    wanted = None if is_stored else request.request_id or request_id
    response_id, _ = new_id("resp", wanted, "_")

    def written() -> tuple[bytes, bytes, bytes]:
        kept = (encode_at_once(conversation), encode_at_once(_listed(items))) if is_stored else (b"[]", b"[]")
        return encode_at_once(_echoed(request, work.prompt.params, is_stored)), *kept

    size = request.size + before
    parts = await context.engine.lanes.write(written) if size > LONG_CHARACTERS else written()
    return Work(request, response_id, new_id("msg", None, "_")[0], work, *parts, is_stored)


def _conversation(kept: bytes) -> list[Any]:
    """The messages of a stored response. Raises a 400 if they are more than a body may have, each of which has added to
    them: no other thread runs while they are read.
    """
    if cost_of(kept) > MAX_VALUES:
        raise bad_request(
            f"The conversation has more than {MAX_VALUES} values and cannot be continued; begin another one.",
            "previous_response_id",
        )
    found: list[Any] = json.loads(kept)
    return found


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
        context.responses.check_running(request.size)
    return context.responses.enabled and request.store is not False


def _input_items(request: ResponsesRequest) -> list[Any]:
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    if not request.input:
        raise bad_request("input must hold at least one message.", "input")
    return request.input


def _listed(items: list[Any]) -> list[dict[str, Any]]:
    """Items of an input as a list of them shows them: each with a type and an id, texts as parts."""
    listed = []
    for item in items:
        item = {"type": "message", **item}
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        if item["type"] == "message" and isinstance(item.get("content"), str):
            item["content"] = [{"type": kind, "text": item["content"]}]
        listed.append({"id": new_id(_ID_PREFIXES.get(item["type"], "item"), None, "_")[0], **item})
    return listed


_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _echoed(request: ResponsesRequest, params: SamplingParams, is_stored: bool) -> dict[str, Any]:
    """The fields of a response that say what was asked for."""
    fields: dict[str, Any] = {
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
        "store": is_stored,
        "background": bool(request.background),
        "user": request.user,
    }
    if request.reasoning is not None:
        fields["reasoning"] = {"effort": None, "summary": None, **request.reasoning}
    return fields


def _body(
    work: Work,
    status: str,
    usage: dict[str, Any] | None = None,
    output: Sequence[Any] = (),
    reason: str | None = None,
    error: dict[str, Any] | None = None,
) -> bytes:
    """The response as JSON. `reason`: why it is not complete."""
    found = {
        "id": work.id,
        "object": "response",
        "created_at": work.chat.created,
        "status": status,
        "model": work.chat.model,
        "output": list(output),
        "usage": usage,
        "error": error,
        "incomplete_details": None if reason is None else {"reason": reason},
    }
    return encode_at_once(found)[:-1] + b", " + work.echoed[1:]


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


@dataclass(slots=True)
class Finished:
    """A response that has ended: its output, and all of it as JSON."""

    status: str
    output: Sequence[Any]
    body: bytes


def _keep(context: ServerContext, work: Work, done: Finished, begun: Stored | None = None) -> None:
    """Store the response, if it is to be stored, with the conversation as the next one will see it.

    begun: what is stored of it so far; if that is gone, it was deleted.
    """
    if work.is_stored:
        answer = encode_at_once(to_messages([_remembered(item) for item in done.output]))
        messages = answer if work.conversation == b"[]" else work.conversation[:-1] + b", " + answer[1:]
        if answer == b"[]":
            messages = work.conversation
        body = done.body  # and nothing else of it: objects take ten times as much
        task = None if begun is None else begun.task
        context.responses.put(work.id, Stored(done.status, lambda _: body, messages, work.input_items, task), begun)


def _remembered(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as a part of a conversation: its texts, without what else is known of their tokens."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{"type": part["type"], "text": part["text"]} for part in item["content"]]}


# -- whole -------------------------------------------------------------------------------------------------------------


async def complete(context: ServerContext, work: Work) -> bytes:
    """The answer as one JSON object."""
    done = await _finished(work, lambda done: _keep(context, work, done))
    return done.body


async def _finished(work: Work, keep: Callable[[Finished], None]) -> Finished:
    """The answer, after `keep` has seen it. What is large is written beside the event loop."""
    final = await _final(work)

    def finish() -> Finished:
        done = _answer(work, final)
        keep(done)
        return done

    entries = count_entries([final])
    return await work.chat.prompt.engine.lanes.write(finish, size=entries) if entries > INLINE_ENTRIES else finish()


async def _final(work: Work) -> RequestOutput:
    final: RequestOutput | None = None
    async for _, output in merge([work.chat.prompt]):
        final = output
    if final is None:
        raise bad_request("The request was aborted.")
    return final


def _answer(work: Work, final: RequestOutput) -> Finished:
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
    return Finished(status, output_items, _body(work, status, usage, output_items, reason))


def _items(work: Work) -> OutputItems:
    return OutputItems(work.message_id, work.chat.role, work.request.wants_logprobs)


def begin(context: ServerContext, work: Work) -> bytes:
    """Compute the answer in the background; returns the response as it is now. Raises a 503."""
    held = work.request.size + len(work.echoed)
    entry = Stored("queued", lambda status: _body(work, status), work.conversation, work.input_items, held=held)
    context.responses.check_running(entry.size)  # others may have begun since `prepare`

    def keep(done: Finished) -> None:
        _keep(context, work, done, entry)

    async def run() -> None:
        entry.set_status("in_progress")
        try:
            await _finished(work, keep)
        except Exception as error:
            message = as_api_error(error).body["message"]
            problem = {"code": "server_error", "message": message}
            keep(Finished("failed", (), _body(work, "failed", error=problem)))

    entry.task = asyncio.ensure_future(run())  # before it is kept: what is computed is counted, and not forgotten
    context.responses.put(work.id, entry)
    return entry.text


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
        body = _body(self._work, "in_progress").decode()
        begun = "".join(self._response_event(kind, body) for kind in ("response.created", "response.in_progress"))
        created: list[Event] = []
        if self._items is None:  # nothing but a message can come
            item = {**_message(self._work, "", None, "in_progress"), "content": []}
            created.append(("response.output_item.added", {"output_index": 0, "item": item}))
            created.append(("response.content_part.added", {**self._place, "part": EMPTY_TEXT}))
        return begun + self._all(created)

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
        done = Finished(status, output, _body(work, status, usage, output, why))
        if self._context is not None:
            _keep(self._context, work, done)
        return (self._all(events) + self._response_event(f"response.{status}", done.body.decode())).encode()

    def _all(self, events: Iterable[Event]) -> str:
        return "".join([self._event(kind, **fields) for kind, fields in events])

    def _response_event(self, kind: str, body: str) -> str:
        """An event that brings the whole response, as JSON."""
        self._number += 1
        data = f'"type": "{kind}", "sequence_number": {self._number}, "response": {body}'
        return f"event: {kind}\ndata: {{{data}}}\n\n"

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        data = {"type": kind, "sequence_number": self._number, **fields}
        text = encode_at_once(data).decode() if self._logprobs else json.dumps(data)
        return f"event: {kind}\ndata: {text}\n\n"
