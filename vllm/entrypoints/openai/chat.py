"""POST /v1/chat/completions: a conversation in, messages out, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.engine.texts import INLINE_CHARACTERS
from vllm.entrypoints.chat_template import RESERVED_VARIABLES
from vllm.entrypoints.chat_utils import apply_chat_template, tokenize_chat
from vllm.entrypoints.openai.answers import INLINE_ENTRIES, count_entries, is_small, listed, pieces
from vllm.entrypoints.openai.completions import usage_of
from vllm.entrypoints.openai.context import Prompt, ServerContext, merge, new_id
from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.events import DONE, AnswerEvents, prompt_length
from vllm.entrypoints.openai.logprobs import TokenText, chat_logprobs, prompt_logprobs
from vllm.entrypoints.openai.message import AnswerParsing, Call, check_tool_choice, wanted_of
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.sampling import (
    check_sizes,
    entries_of,
    kept_tokens,
    resolve_max_tokens,
    to_sampling_params,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers.deltas import CallStart, Content, Delta, Reasoning

PLAIN_END = '}, "logprobs": null, "finish_reason": null}]}\n\n'


@dataclass(slots=True)
class Chat:
    """A checked request; nothing of it has begun."""

    request: ChatCompletionRequest
    id: str
    model: str
    created: int
    prompt: Prompt
    text_of: TokenText
    role: str
    last_content: str  # of the last message, for `echo`
    parsing: AnswerParsing | None = None  # reads the answer, unless all of it is content


async def render(context: ServerContext, request: Any, tools: list[Any] | None) -> str:
    """The conversation as the model's prompt. The server's own template runs in a sandbox, beside the event loop if
    there is much to render; a template of the request in a process of its own.
    """
    limits = context.limits
    documents = getattr(request, "documents", None)
    for name, given, most in (
        ("messages", request.messages, limits.max_messages),
        ("tools", tools, limits.max_tools),
        ("documents", documents, limits.max_documents),
    ):
        if given is not None and len(given) > most:
            raise bad_request(f"A conversation may have at most {most} {name}, got {len(given)}.", name)
    extra = dict(request.chat_template_kwargs or {})
    effort = getattr(request, "reasoning_effort", None)
    if effort is not None:
        extra.setdefault("reasoning_effort", effort)
        extra.setdefault("enable_thinking", effort != "none")
    if reserved := sorted(RESERVED_VARIABLES.intersection(extra)):
        raise bad_request(
            f"chat_template_kwargs is for the template's own variables; {reserved[0]} is none of them.",
            "chat_template_kwargs",
        )
    tokenizer = context.tokenizer
    arguments: dict[str, Any] = {
        "chat_template": context.chat_template if request.chat_template is None else request.chat_template,
        "content_format": context.content_format,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "tools": tools,
        "documents": documents,
        "is_literal": True,  # no client may name a file of this machine
        **context.template_defaults,
        **extra,
    }
    if request.chat_template is not None:
        if not context.trust_request_template:
            raise bad_request(
                "chat_template in a request is refused; start the server with --trust-request-chat-template to allow "
                "it.",
                "chat_template",
            )
        own = tokenizer.chat_template
        if not (isinstance(own, dict) and request.chat_template in own):  # else it is the name of one of the model's
            special = dict(tokenizer.special_tokens)
            return await context.in_stranger_lane(
                lambda: context.strangers.render(messages=request.messages, special_tokens=special, **arguments)
            )
    # What a template does with a variable of the client's is not known.
    size = request.size if not extra else max(request.size, INLINE_CHARACTERS + 1)
    return await context.in_lane(size, lambda: apply_chat_template(tokenizer, request.messages, **arguments))


async def prompt_of(context: ServerContext, request: ChatCompletionRequest, keep: int | None) -> tuple[str, list[int]]:
    """The prompt of a conversation as text and token ids, of these the last `keep` if that is a number."""
    tokenizer = context.tokenizer
    if not tokenizer.writes_chats:
        text = await render(context, request, request.tools)
        adapter = context.adapter(request.model)
        (ids,) = await context.encode([text], request.add_special_tokens, keep, adapter=adapter)
        return text, ids
    for name in ("chat_template", "chat_template_kwargs", "documents"):
        if getattr(request, name):
            raise bad_request(f"The tokenizer (mistral_common) writes chats by its own rules; remove {name}.", name)
    if len(request.messages) > context.limits.max_messages:
        raise bad_request(f"A conversation may have at most {context.limits.max_messages} messages.", "messages")
    text, ids = await context.in_lane(
        max(request.size, INLINE_CHARACTERS + 1),
        lambda: tokenize_chat(
            tokenizer,
            request.messages,
            tools=request.tools,
            continue_final_message=request.continue_final_message,
        ),
    )
    return text, ids if keep is None else ids[-keep:]


async def prepare(context: ServerContext, request: ChatCompletionRequest, request_id: str | None) -> Chat:
    """Check everything that can be checked before the engine is asked."""
    await context.discover_adapter(request.model)
    model = context.check_model(request.model)
    context.require_generation("Chat Completions API")
    check_tool_choice(context.parsing, request)
    request.refuse_later_features()
    check_sizes(request, context.limits)
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    limit = kept_tokens(request, context.max_model_len, asked)
    prompt, ids = await prompt_of(context, request, limit)
    wanted = wanted_of(context.parsing, context.tokenizer, request, prompt)
    if wanted.shows_special:
        request.skip_special_tokens = False
    if wanted.stop_token_ids:
        request.stop_token_ids = [*(request.stop_token_ids or ()), *wanted.stop_token_ids]
    taken = len(ids) + context.virtual_tokens(request.model)
    max_tokens = resolve_max_tokens(asked, taken, context.max_model_len, context.default_sampling)
    context.engine.check_admission(max(request.n or 1, request.best_of or 1), len(ids))
    params = await context.in_lane(32 * entries_of(request), _params, context, request, max_tokens)
    if wanted.form is not None:
        params.guided_decoding, params.structured_outputs = None, wanted.form
    shown, name = new_id("chatcmpl", request.request_id or request_id)
    item: dict[str, Any] = {"prompt": prompt, "prompt_token_ids": ids}
    if request.cache_salt is not None:
        item["cache_salt"] = request.cache_salt
    context.log_request(name, prompt, [ids], params)
    as_ids = request.return_tokens_as_token_ids
    timeout, adapter = context.request_timeout, context.adapter(request.model)
    own = context.engine.input_processor.tokenizer_of(adapter)
    text_of = TokenText(own, context.return_token_ids_as_text if as_ids is None else as_ids)
    role, last = _roles(context, request)
    work = Prompt(
        context.engine, item, params, name, request.priority, timeout, lora_request=adapter,
        prompt_adapter_request=context.prompt_adapter(request.model), begins=wanted.begins,
    )  # fmt: skip
    return Chat(request, shown, model, int(time.time()), work, text_of, role, last, wanted.parsing)


def _params(context: ServerContext, request: ChatCompletionRequest, max_tokens: int) -> SamplingParams:
    return to_sampling_params(
        request,
        default=context.default_sampling,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )


def _roles(context: ServerContext, request: ChatCompletionRequest) -> tuple[str, str]:
    """The role of the answer, and what `echo` puts before it."""
    last = request.messages[-1]
    role = context.response_role if request.add_generation_prompt else last.get("role", context.response_role)
    content = last.get("content") if request.echo and last.get("role") == role else None
    return role, content if isinstance(content, str) else ""


# -- whole -------------------------------------------------------------------------------------------------------------


async def complete(context: ServerContext, work: Chat) -> dict[str, Any]:
    """The answer as one JSON object."""
    final = await _final(work)
    if (entries := count_entries([final])) > INLINE_ENTRIES:
        return await context.engine.lanes.write(_listed, context, work, final, size=entries)
    return _listed(context, work, final)


async def encoded(context: ServerContext, work: Chat) -> bytes | dict[str, Any]:
    """The answer as JSON already, unless it is of middling size: then its lists are iterators, see completions."""
    final = await _final(work)
    if is_small([final]):
        return json.dumps(_listed(context, work, final)).encode()
    if (entries := count_entries([final])) > INLINE_ENTRIES:
        return await context.engine.lanes.join(pieces(_answer(context, work, final)), entries)
    return _answer(context, work, final)


async def _final(work: Chat) -> RequestOutput:
    final: RequestOutput | None = None
    async for _, output in merge([work.prompt]):
        final = output
    if final is None:
        raise bad_request("The request was aborted.")
    return final


def _listed(context: ServerContext, work: Chat, final: RequestOutput) -> dict[str, Any]:
    found: dict[str, Any] = listed(_answer(context, work, final))
    return found


def _answer(context: ServerContext, work: Chat, final: RequestOutput) -> dict[str, Any]:
    """The answer, whose lists are iterators."""
    prompt_tokens = len(final.prompt_token_ids or ())
    completion_tokens = sum(len(output.token_ids) for output in final.outputs)
    return {
        "id": work.id,
        "object": "chat.completion",
        "created": work.created,
        "model": work.model,
        "choices": (_choice(work, output) for output in final.outputs),
        "usage": usage_of(prompt_tokens, completion_tokens, context.cached_tokens([final])),
        "prompt_logprobs": prompt_logprobs(final.prompt_logprobs),
    }


def _choice(work: Chat, output: CompletionOutput) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": work.role,
        "reasoning_content": None,
        "content": work.last_content + output.text,
        "tool_calls": [],
    }
    reason = output.finish_reason
    if work.parsing is not None:
        found = work.parsing.whole(output)
        reason = work.parsing.reason_of(reason, len(found.calls))
        content = work.last_content + (found.content or "")
        message["content"] = content if content or not (found.calls or found.reasoning) else None
        message["tool_calls"] = [_call(call) for call in found.calls]
        # Both names: of the API's older and newer clients.
        message["reasoning_content"] = message["reasoning"] = found.reasoning
    return {
        "index": output.index,
        "message": message,
        "logprobs": _logprobs(work, output),
        "finish_reason": reason,
        "stop_reason": output.stop_reason,
    }


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(work: Chat, output: CompletionOutput) -> dict[str, Any] | None:
    if not work.request.logprobs or output.logprobs is None:
        return None
    return chat_logprobs(output.token_ids, output.logprobs, work.request.top_logprobs or 0, work.text_of)


# -- streamed ----------------------------------------------------------------------------------------------------------


class ChatEvents(AnswerEvents):
    """The answer as server-sent events: a role chunk per choice, chunks of its message, a last one with the finish
    reason.
    """

    _after = PLAIN_END

    def __init__(self, context: ServerContext, work: Chat) -> None:
        self._context = context
        self._work = work
        fixed = {"id": work.id, "object": "chat.completion.chunk", "created": work.created, "model": work.model}
        self._head = "data: " + json.dumps(fixed)[:-1] + ', "choices":'
        self._always = work.request.wants_usage_always
        is_plain = not work.request.logprobs and not self._always
        super().__init__(1, work.request.n or 1, is_plain, None if work.parsing is None else work.parsing.deltas)

    def _opening(self, result: RequestOutput) -> str:
        parts = []
        for index in range(self._count):
            delta = {"role": self._work.role, "content": ""}
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            parts.append(self._chunk(first, result))
            if self._work.last_content:
                parts.append(self._chunk(_choice_delta(index, self._work.last_content), result))
        return "".join(parts)

    def _before(self, choice: int) -> str:
        return f'{self._head}[{{"index": {choice}, "delta": {{"content": '

    def _events(self, choice: int, result: RequestOutput, output: CompletionOutput, deltas: Sequence[Delta]) -> str:
        logprobs = _logprobs(self._work, output)
        if self._work.parsing is not None:
            return self._parsed(choice, result, output, deltas, logprobs)
        if output.finish_reason is None:
            if not output.text and not logprobs:
                return ""
            return self._chunk(_choice_delta(choice, output.text, logprobs), result)
        last = _choice_delta(choice, output.text, logprobs)
        return self._chunk({**last, "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}, result)

    def _parsed(
        self,
        choice: int,
        result: RequestOutput,
        output: CompletionOutput,
        deltas: Sequence[Delta],
        logprobs: dict[str, Any] | None,
    ) -> str:
        """A chunk for each piece of the message; what is known of the tokens comes with the first."""
        assert self._work.parsing is not None
        if self._is_plain and output.finish_reason is None and len(deltas) == 1 and isinstance(deltas[0], Content):
            return self._plain_event(choice, deltas[0].text)  # the usual case: text stays text
        fields = [_fields_of(delta) for delta in deltas]
        if not fields and logprobs and output.finish_reason is None:
            fields = [{"content": ""}]
        chunks: list[dict[str, Any]] = [
            {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None} for delta in fields
        ]
        if output.finish_reason is not None:
            reason = self._work.parsing.finish_reason(choice, output.finish_reason)
            ending = {"finish_reason": reason, "stop_reason": output.stop_reason}
            chunks.append({"index": choice, "delta": {}, "logprobs": None, **ending})
        if chunks:
            chunks[0]["logprobs"] = logprobs
        return "".join(self._chunk(chunk, result) for chunk in chunks)

    def _chunk(self, choice: dict[str, Any], result: RequestOutput) -> str:
        usage = ""
        if self._always:
            usage = f', "usage":{json.dumps(_usage(prompt_length(result), self._sent[choice["index"]]))}'
        return f"{self._head}{json.dumps([choice])}{usage}}}\n\n"

    def end(self) -> bytes:
        """The events after the last output: the usage, if it was asked for, and the end mark."""
        if not self._work.request.wants_usage:
            return DONE
        cached = self._context.cached_tokens(self._last.values())
        whole = usage_of(sum(map(prompt_length, self._last.values())), sum(self._sent), cached)
        total = {k: v for k, v in whole.items() if v is not None}
        return f'{self._head}[], "usage":{json.dumps(total)}}}\n\n'.encode() + DONE


def _fields_of(delta: Delta) -> dict[str, Any]:
    """A piece of a message as the API writes it."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text, "reasoning": delta.text}
    if isinstance(delta, CallStart):
        # Clients add up the strings of all pieces, so that id, type and name may come only once.
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.number, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.number, "function": {"arguments": delta.text}}]}


def _choice_delta(index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
