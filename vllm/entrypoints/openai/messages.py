"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as a translation of the chat route."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from vllm.entrypoints.openai import chat
from vllm.entrypoints.openai.context import ServerContext, as_api_error, merge
from vllm.entrypoints.openai.errors import APIError, bad_request, safe_text
from vllm.entrypoints.openai.events import AnswerEvents, prompt_length
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ListOf, Texts, _Request, checked
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tool_parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

MIN_BUDGET = 1024  # of thinking, in tokens
BILLING_HEADER = "x-anthropic-billing-header"  # a text that differs every time: it would defeat the prefix cache
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class CountTokensRequest(_Request):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # older clients' spelling of output_config.format


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    metadata: Texts | None = None
    stop_sequences: ListOf[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class MessagesError(APIError):
    """An error in the form that Anthropic's clients read."""

    def __init__(self, error: APIError) -> None:
        super().__init__(error.status, error.message, error.type, error.param, error.headers)

    @property
    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": safe_text(self.message)}
        return {"type": "error", "error": error, "request_id": f"req_{uuid.uuid4().hex}"}


# -- from messages to a chat -------------------------------------------------------------------------------------------


def to_chat(context: ServerContext, request: CountTokensRequest) -> ChatCompletionRequest:
    """The chat that a request comes down to. Raises a 400 for what cannot be translated."""
    messages = _messages(request)
    is_begun = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    choice, one_call = _tool_choice(request.tool_choice)
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "tools": _tools(request.tools),
        "tool_choice": choice if request.tools else None,
        "parallel_tool_calls": False if one_call else None,
        # An answer that the client has begun is gone on with.
        "add_generation_prompt": not is_begun,
        "continue_final_message": is_begun,
    }
    variables = _thinking(context, request)
    if variables is not None:
        fields["chat_template_kwargs"] = variables
    output = request.output_config or {}
    if output.get("effort") is not None:
        fields["reasoning_effort"] = output["effort"]
    form = output["format"] if output.get("format") is not None else request.output_format
    if form is not None:
        if not isinstance(form, Mapping) or form.get("type") != "json_schema" or "schema" not in form:
            raise bad_request('output_config.format must look like {"type": "json_schema", "schema": {...}}.')
        fields["response_format"] = {
            "type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"], "strict": True},
        }  # fmt: skip
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_completion_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
    return checked(ChatCompletionRequest, fields, request.size)


def _thinking(context: ServerContext, request: CountTokensRequest) -> dict[str, Any] | None:
    """Variables of the template that switch thinking on or off; how long it may take is up to the model."""
    thinking = request.thinking
    if thinking is None:
        return None
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad_request("thinking.type must be enabled, disabled or adaptive.", "thinking")
    if kind == "enabled":
        budget = thinking.get("budget_tokens")
        most = request.max_tokens if isinstance(request, MessagesRequest) else None
        if not isinstance(budget, int) or budget < MIN_BUDGET or (most is not None and budget >= most):
            raise bad_request(
                f"thinking.budget_tokens must be at least {MIN_BUDGET} and less than max_tokens.", "thinking"
            )
        context.log_unknown_fields(["thinking.budget_tokens"])
    return {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"}


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = _system(request.system)
    if system:
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(request.messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"messages[{i}].role must be user, assistant or system.", "messages")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            raise bad_request(f"messages[{i}].content must be a text or a list of blocks.", "messages")
        if role == "system":
            messages.append({"role": "system", "content": _system(blocks, f"messages[{i}].content")})
        else:
            messages += _of_user(blocks, i) if role == "user" else [_of_assistant(blocks, i)]
    return messages


def _system(system: str | list[Any] | None, where: str = "system") -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(block, where) for block in system]
    return "\n".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _text(block: Any, where: str) -> str:
    text = block.get("text") if isinstance(block, Mapping) and block.get("type") == "text" else None
    if not isinstance(text, str):
        raise bad_request(f"{where} may hold blocks of type text only, with a text.", where.partition("[")[0])
    return text


def _of_user(blocks: Sequence[Mapping[str, Any]], i: int) -> list[dict[str, Any]]:
    """Results of tools first, each a message of its own; then the rest."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            text, images = _result(block, i)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            parts += images
        elif kind == "image":
            parts.append(_image(block, i))
        else:
            parts.append({"type": "text", "text": _text(block, f"messages[{i}].content")})
    return [*results, {"role": "user", "content": parts}] if parts or not results else results


def _result(block: Mapping[str, Any], i: int) -> tuple[str, list[dict[str, Any]]]:
    content = block.get("content") or ""
    if not isinstance(block.get("tool_use_id"), str) or not isinstance(content, (str, list)):
        raise bad_request(f"messages[{i}]: a tool_result has a tool_use_id and a content.", "messages")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    images = [_image(part, i) for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]
    texts = [
        _text(part, f"messages[{i}].content")
        for part in parts
        if not (isinstance(part, Mapping) and part.get("type") == "image")
    ]
    return ("Error: " if block.get("is_error") else "") + "\n".join(texts), images


def _image(block: Mapping[str, Any], i: int) -> dict[str, Any]:
    source = block.get("source")
    if isinstance(source, Mapping) and source.get("type") == "url" and isinstance(source.get("url"), str):
        return {"type": "image_url", "image_url": {"url": source["url"]}}
    if isinstance(source, Mapping) and source.get("type") == "base64":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"},
        }
    raise bad_request(f"messages[{i}]: an image has a source of type base64 or url.", "messages")


def _of_assistant(blocks: Sequence[Mapping[str, Any]], i: int) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            name, given = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(given, (Mapping, type(None))):
                raise bad_request(f"messages[{i}]: a tool_use has a name and an input, an object.", "messages")
            function = {"name": name, "arguments": given or {}}  # as the template wants it
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text(block, f"messages[{i}].content"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tools(tools: Sequence[Any] | None) -> list[Any] | None:
    if not tools:
        return None
    found = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise bad_request(f"tools[{i}] must have a name and an input_schema.", "tools")
        if tool.get("type") not in (None, "custom"):
            raise bad_request(
                f"tools[{i}] has the type {str(tool['type'])[:40]!r}, which is not available: this server calls no "
                "tools itself.",
                "tools",
            )
        function = {"name": tool["name"], "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """The choice as chats have it, and whether there may be only one call."""
    if choice is None:
        return None, False
    kind = choice.get("type")
    one_call = bool(choice.get("disable_parallel_tool_use"))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, one_call
    names = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in names:
        raise bad_request("tool_choice.type must be auto, any, tool or none.", "tool_choice")
    return names[kind], one_call


async def prepare(context: ServerContext, request: MessagesRequest, request_id: str | None) -> chat.Chat:
    """Check everything that can be checked before the engine is asked."""
    work = await chat.prepare(context, to_chat(context, request), request_id)
    work.id = f"msg_{uuid.uuid4().hex}"
    return work


async def count_tokens(context: ServerContext, request: CountTokensRequest) -> dict[str, int]:
    """How many tokens the prompt has."""
    await context.discover_adapter(request.model)
    context.check_model(request.model)
    body = to_chat(context, request)
    _, ids = await chat.prompt_of(context, body, None)
    return {"input_tokens": len(ids)}


# -- from the answer to blocks -----------------------------------------------------------------------------------------


def _usage(context: ServerContext, result: RequestOutput, output_tokens: int) -> dict[str, int]:
    cached = context.cached_tokens([result]) or 0
    return {
        "input_tokens": prompt_length(result) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
    }


def _stop(output: CompletionOutput, has_calls: bool) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`."""
    if output.finish_reason == "length":
        return "max_tokens", None
    if isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    return ("tool_use" if has_calls else "end_turn"), None


async def complete(context: ServerContext, work: chat.Chat) -> dict[str, Any]:
    """The answer as one JSON object."""
    final: RequestOutput | None = None
    async for _, output in merge([work.prompt]):
        final = output
    if final is None:
        raise bad_request("The request was aborted.")
    answer = final.outputs[0]
    deltas: Sequence[Delta] = [Content(answer.text)] if answer.text else []
    if work.parsing is not None:
        deltas = work.parsing.whole_deltas(answer)
    blocks = _blocks(work, deltas)
    reason, sequence = _stop(answer, any(block["type"] == "tool_use" for block in blocks))
    return {
        "id": work.id,
        "type": "message",
        "role": "assistant",
        "model": work.model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(context, final, len(answer.token_ids)),
    }


def _blocks(work: chat.Chat, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for delta in deltas:
        last: dict[str, Any] = blocks[-1] if blocks else {"type": None}
        if isinstance(delta, CallStart):
            blocks.append({"type": "tool_use", "id": delta.id, "name": delta.name, "input": ""})
        elif isinstance(delta, CallArguments):
            last["input"] += delta.text
        elif isinstance(delta, Reasoning):
            if last["type"] != "thinking":
                last = {"type": "thinking", "thinking": "", "signature": _signature(work)}
                blocks.append(last)
            last["thinking"] += delta.text
        else:
            if last["type"] != "text":
                last = {"type": "text", "text": ""}
                blocks.append(last)
            last["text"] += delta.text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _input(block["input"])
    return blocks


def _input(arguments: str) -> Any:
    """Arguments as data. Those that were cut off are left out: the reason of the end says so."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _signature(work: chat.Chat) -> str:
    """Clients want one behind thoughts and send it back; nothing is signed here."""
    return work.id.removeprefix("msg_")


class MessageEvents(AnswerEvents):
    """The answer as events: blocks one after the other, each begun, filled and ended."""

    def __init__(self, context: ServerContext, work: chat.Chat) -> None:
        super().__init__(1, 1, False, None if work.parsing is None else work.parsing.deltas)
        self._context = context
        self._work = work
        self._index = -1
        self._kind: type | None = None
        self._has_calls = False

    def _opening(self, result: RequestOutput) -> str:
        message: dict[str, Any] = {
            "id": self._work.id, "type": "message", "role": "assistant", "model": self._work.model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": _usage(self._context, result, 0),
        }  # fmt: skip
        return _event("message_start", message=message)

    def _events(self, choice: int, result: RequestOutput, output: CompletionOutput, deltas: Sequence[Delta]) -> str:
        parts = []
        for delta in deltas:
            kind = CallStart if isinstance(delta, CallArguments) else type(delta)
            if kind is not self._kind or isinstance(delta, CallStart):
                parts.append(self._end_block())
                self._kind = kind
                self._index += 1
                parts.append(_event("content_block_start", index=self._index, content_block=_empty_block(delta)))
            if isinstance(delta, CallStart):
                self._has_calls = True
            elif isinstance(delta, CallArguments):
                parts.append(self._piece({"type": "input_json_delta", "partial_json": delta.text}))
            elif isinstance(delta, Reasoning):
                parts.append(self._piece({"type": "thinking_delta", "thinking": delta.text}))
            else:
                parts.append(self._piece({"type": "text_delta", "text": delta.text}))
        return "".join(parts)

    def _piece(self, delta: dict[str, str]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end_block(self) -> str:
        if self._kind is None:
            return ""
        signature = ""
        if self._kind is Reasoning:
            signature = self._piece({"type": "signature_delta", "signature": _signature(self._work)})
        return signature + _event("content_block_stop", index=self._index)

    def end(self) -> bytes:
        """The events after the last output."""
        last = self._last[0]
        reason, sequence = _stop(last.outputs[0], self._has_calls)
        ending = _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=_usage(self._context, last, self._sent[0]),
        )
        return (self._end_block() + ending + _event("message_stop")).encode()

    def failure(self, error: APIError) -> bytes:
        body = MessagesError(error).body
        return f"event: error\ndata: {json.dumps(body)}\n\n".encode()


def _empty_block(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, CallStart):
        return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
    if isinstance(delta, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def in_this_form(error: Exception) -> MessagesError:
    """Any error of a route, as Anthropic's clients read it."""
    return MessagesError(as_api_error(error))
