"""POST /v1/completions: prompts in, choices out, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.engine.processed import CheckedParams
from vllm.entrypoints.openai.answers import (
    INLINE_ENTRIES,
    Part,
    Repeated,
    count_entries,
    count_steps,
    encode_at_once,
    is_small,
    listed,
    pieces,
)
from vllm.entrypoints.openai.context import Prompt, ServerContext, merge, new_id
from vllm.entrypoints.openai.errors import APIError, bad_request
from vllm.entrypoints.openai.events import DONE, AnswerEvents, failed, prompt_length
from vllm.entrypoints.openai.logprobs import TokenText, completion_logprobs, prompt_logprobs
from vllm.entrypoints.openai.protocol import CompletionRequest
from vllm.entrypoints.openai.sampling import (
    check_sizes,
    entries_of,
    kept_tokens,
    resolve_max_tokens,
    to_sampling_params,
)
from vllm.entrypoints.openai.sse import Events
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers.deltas import Delta

PLAIN_END = ', "logprobs": null, "finish_reason": null, "stop_reason": null}],"usage":null}\n\n'


@dataclass(slots=True)
class Completion:
    """A checked request; nothing of it has begun."""

    request: CompletionRequest
    id: str
    model: str
    created: int
    prompts: list[Prompt]
    text_of: TokenText

    @property
    def echo(self) -> bool:
        return bool(self.request.echo)

    @property
    def count(self) -> int:
        return self.prompts[0].params.n

    def entries(self, finals: Sequence[RequestOutput]) -> int:
        """How many log probabilities the whole answer shows."""
        times = shown_of_prompts(self.request)
        again = sum(count_steps(final.prompt_logprobs) * (times * len(final.outputs) - 1) for final in finals)
        return count_entries(finals) + again


def shown_of_prompts(request: CompletionRequest) -> int:
    """How often each choice of a whole answer shows the log probabilities of its prompt."""
    return (request.prompt_logprobs is not None) + bool(request.echo and request.logprobs is not None)


async def prepare(context: ServerContext, request: CompletionRequest, request_id: str | None) -> Completion:
    """Check everything that can be checked before the engine is asked."""
    await context.discover_adapter(request.model)
    model = context.check_model(request.model)
    context.require_generation("Completions API")
    if request.suffix is not None:
        raise bad_request("suffix is not currently supported", "suffix")
    request.refuse_later_features()
    prompts = _prompts(request, context)
    check_sizes(request, context.limits, len(prompts))
    tokens = await _tokens(context, request, prompts)
    sequences = len(prompts) * max(request.n or 1, request.best_of or 1)
    context.engine.check_admission(sequences, sum(map(len, tokens)))
    shown, name = new_id("cmpl", request.request_id or request_id)
    work = []
    lengths = [_max_tokens(context, request, len(ids)) for ids in tokens]
    common = await context.in_lane(32 * entries_of(request), _params, context, request, max(lengths))
    _check_repeated(context, request, common, sum(map(len, tokens)))
    shown_name = name if len(prompts) > 1 else f"{name}-0"
    context.log_request(shown_name, prompts[0] if isinstance(prompts[0], str) else None, tokens, common)
    adapter = context.adapter(request.model)
    grammar = None if len(prompts) == 1 else (await context.engine.check_params(common, adapter)).grammar
    call = context.engine.turns.call()
    for i, (prompt, ids, max_tokens) in enumerate(zip(prompts, tokens, lengths, strict=True)):
        await call.next()
        params = common if max_tokens == common.max_tokens else common.with_max_tokens(max_tokens)
        item: dict[str, Any] = {"prompt_token_ids": ids}
        if isinstance(prompt, str):
            item["prompt"] = prompt
        if request.cache_salt is not None:
            item["cache_salt"] = request.cache_salt
        work.append(
            Prompt(
                context.engine,
                item,
                params,
                f"{name}-{i}",
                request.priority,
                context.request_timeout,
                account=name if len(prompts) > 1 else None,
                checked=CheckedParams(params, grammar) if len(prompts) > 1 else None,
                lora_request=adapter,
                prompt_adapter_request=context.prompt_adapter(request.model),
            )  # fmt: skip
        )
    as_ids = request.return_tokens_as_token_ids
    text_of = TokenText(
        context.engine.input_processor.tokenizer_of(adapter),
        context.return_token_ids_as_text if as_ids is None else as_ids,
    )
    return Completion(request, shown, model, int(time.time()), work, text_of)


def _prompts(request: CompletionRequest, context: ServerContext) -> list[str | list[int]]:
    prompt = request.prompt
    if prompt is None or prompt == []:
        raise bad_request("please provide at least one prompt", "prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], int)):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > context.limits.max_prompts:
        raise bad_request(f"At most {context.limits.max_prompts} prompts may be sent, got {len(prompt)}.", "prompt")
    return list(prompt)  # type: ignore[arg-type]


async def _tokens(
    context: ServerContext, request: CompletionRequest, prompts: Sequence[str | list[int]]
) -> list[list[int]]:
    """The token ids of each prompt, cut as `truncate_prompt_tokens` asks."""
    keep, adapter = kept_tokens(request, context.max_model_len, request.max_tokens), context.adapter(request.model)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        encoded = iter(await context.encode(texts, request.add_special_tokens, keep, "prompt", adapter))
    found: list[list[int]] = []
    for prompt in prompts:
        ids = next(encoded) if isinstance(prompt, str) else prompt
        if keep is not None and not isinstance(prompt, str):
            if ids:
                # also those that are cut off
                context.engine.input_processor.check_token_ids(ids, lora_request=adapter)
            ids = ids[-keep:]
        if not ids:
            raise bad_request("The decoder prompt cannot be empty", "prompt")
        found.append(ids)
    return found


def _max_tokens(context: ServerContext, request: CompletionRequest, prompt_tokens: int) -> int:
    # echo with max_tokens=0 asks for the prompt alone; the engine always generates one token, which is not shown.
    asked = 1 if request.echo and request.max_tokens == 0 else request.max_tokens
    taken = prompt_tokens + context.virtual_tokens(request.model)
    return resolve_max_tokens(asked, taken, context.max_model_len, context.default_sampling, "prompt")


def _params(context: ServerContext, request: CompletionRequest, max_tokens: int) -> SamplingParams:
    wants_prompt = request.prompt_logprobs
    if wants_prompt is None and request.echo and request.logprobs is not None:
        wants_prompt = request.logprobs
    return to_sampling_params(
        request,
        default=context.default_sampling,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=wants_prompt,
    )


def _check_repeated(context: ServerContext, request: CompletionRequest, params: SamplingParams, tokens: int) -> None:
    """Raise a 400 if a whole answer would show too many log probabilities of its prompts, which each choice repeats."""
    top, most = params.prompt_logprobs, context.engine.output_processor.most_logprobs
    if top is None or most is None or (request.stream and not request.is_decided_at_end):
        return
    if top < 0:
        top = context.engine.vllm_config.model_config.logits_width
    shown = tokens * (1 + top) * params.n * shown_of_prompts(request)
    if shown > most:
        raise bad_request(
            f"This answer would have {shown} log probabilities of its prompts, which each choice repeats, and no more "
            f"than {most} can be kept for one that is given as a whole. Ask for fewer: less logprobs, prompt_logprobs, "
            "n or prompts; or stream them.",
            "logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
        )


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """The usage block; `cached_tokens` of the prompt if they are to be shown and there are any."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens} if cached_tokens else None,
    }


# -- whole -------------------------------------------------------------------------------------------------------------


async def complete(context: ServerContext, work: Completion) -> dict[str, Any]:
    """The answer as one JSON object."""
    finals = await _finals(work)
    if (entries := work.entries(finals)) > INLINE_ENTRIES:
        return await context.engine.lanes.write(_listed, context, work, finals, size=entries)
    return _listed(context, work, finals)


async def encoded(context: ServerContext, work: Completion) -> bytes | dict[str, Any]:
    """The answer as JSON already, unless it is of middling size: then its lists are iterators, since a thousand choices
    take too long for one turn of the event loop. A large one is written beside that.
    """
    finals = await _finals(work)
    if is_small(finals):
        return json.dumps(_listed(context, work, finals)).encode()
    if (entries := work.entries(finals)) > INLINE_ENTRIES:
        return await context.engine.lanes.join(pieces(_answer(context, work, finals)), entries)
    return _answer(context, work, finals)


async def _finals(work: Completion) -> list[RequestOutput]:
    finals: list[RequestOutput | None] = [None] * len(work.prompts)
    async for i, result in merge(work.prompts):
        finals[i] = result
    found = [final for final in finals if final is not None]
    if len(found) < len(finals):
        raise bad_request("The request was aborted.")
    return found


def _listed(context: ServerContext, work: Completion, finals: Sequence[RequestOutput]) -> dict[str, Any]:
    found: dict[str, Any] = listed(_answer(context, work, finals))
    return found


def _answer(context: ServerContext, work: Completion, finals: Sequence[RequestOutput]) -> dict[str, Any]:
    """The answer, whose lists are iterators."""
    prompt_tokens = sum(len(final.prompt_token_ids or ()) for final in finals)
    completion_tokens = sum(len(output.token_ids) for final in finals for output in final.outputs)
    choices = (
        _choice(work, output, i * work.count + output.index, echo, steps)
        for i, final in enumerate(finals)
        for echo in (Echo.of(context, work, final) if work.echo else None,)
        for steps in (_prompt_steps(work, final),)
        for output in final.outputs
    )
    return {
        "id": work.id,
        "object": "text_completion",
        "created": work.created,
        "model": work.model,
        "choices": choices,
        "usage": usage_of(prompt_tokens, completion_tokens, context.cached_tokens(finals)),
    }


@dataclass(slots=True)
class Echo:
    """A prompt as each of its choices repeats it.

    logprobs: as `completion_logprobs`, if any are asked for.   length: of the texts of its tokens.
    """

    text: str
    logprobs: dict[str, Any] | None
    length: int
    _encoded: dict[str, str] | None = None

    @classmethod
    def of(cls, context: ServerContext, work: Completion, result: RequestOutput) -> Echo:
        top, steps, ids = work.request.logprobs, result.prompt_logprobs, result.prompt_token_ids or ()
        logprobs = None if top is None or steps is None else completion_logprobs(ids, steps, top, work.text_of)
        length = 0 if logprobs is None else sum(map(len, logprobs["tokens"]))
        return cls(_prompt_text(context, work, result), logprobs, length)

    def before(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """The prompt's log probabilities, and those of an answer, whose offsets begin at `length`."""
        if logprobs is None or self.logprobs is None:
            return logprobs
        return {name: found + logprobs[name] for name, found in self.logprobs.items()}

    def before_encoded(self, logprobs: dict[str, Any] | None) -> str:
        """The same as JSON, in which the prompt's are encoded once for all choices."""
        if logprobs is None or self.logprobs is None:
            return json.dumps(logprobs)
        if self._encoded is None:
            self._encoded = {name: _encoded_items(found) for name, found in self.logprobs.items()}
        lists = ((name, filter(None, (text, _encoded_items(logprobs[name])))) for name, text in self._encoded.items())
        return "{" + ", ".join(f'"{name}": [{", ".join(texts)}]' for name, texts in lists) + "}"


def _encoded_items(values: list[Any]) -> str:
    return encode_at_once(values)[1:-1].decode()


class _Echoed(Part):
    """`Echo.before`, or `Echo.before_encoded`."""

    def __init__(self, echo: Echo, logprobs: dict[str, Any] | None) -> None:
        self._echo, self._logprobs = echo, logprobs

    def pieces(self) -> list[bytes]:
        return [self._echo.before_encoded(self._logprobs).encode()]

    def listed(self) -> dict[str, Any] | None:
        return self._echo.before(self._logprobs)


def _prompt_steps(work: Completion, final: RequestOutput) -> Repeated | None:
    """The `prompt_logprobs` of each of a prompt's choices."""
    steps = prompt_logprobs(final.prompt_logprobs if work.request.prompt_logprobs is not None else None)
    return None if steps is None else Repeated(steps)


def _choice(
    work: Completion, output: CompletionOutput, index: int, echo: Echo | None, prompt_steps: Repeated | None
) -> dict[str, Any]:
    text, token_ids, steps, top = output.text, output.token_ids, output.logprobs, work.request.logprobs
    if echo is not None and work.request.max_tokens == 0:
        text, token_ids, steps = "", [], []
    logprobs = None
    if top is not None and steps is not None:
        logprobs = completion_logprobs(token_ids, steps, top, work.text_of, echo.length if echo else 0)
    return {
        "index": index,
        "text": text if echo is None else echo.text + text,
        "logprobs": logprobs if echo is None else _Echoed(echo, logprobs),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "prompt_logprobs": prompt_steps,
    }


def _prompt_text(context: ServerContext, work: Completion, final: RequestOutput) -> str:
    """The prompt as text; decoded if it came as token ids."""
    if final.prompt is not None:
        return final.prompt
    # With its special tokens: they are among the tokens that logprobs are told of, and count in their offsets.
    tokenizer = context.tokenizer_of(work.request.model)
    return tokenizer.decode(list(final.prompt_token_ids or ()), skip_special_tokens=False)


# -- streamed ----------------------------------------------------------------------------------------------------------


class CompletionEvents(AnswerEvents):
    """The answer as server-sent events: a chunk per output, the last one of a choice with the finish reason."""

    _after = PLAIN_END
    _writes_empty = True

    def __init__(self, context: ServerContext, work: Completion) -> None:
        self._context = context
        self._work = work
        fixed = {"id": work.id, "object": "text_completion", "created": work.created, "model": work.model}
        self._head = "data: " + json.dumps(fixed)[:-1] + ', "choices":'
        request = work.request
        self._always = request.wants_usage_always
        is_plain = request.logprobs is None and not work.echo and not self._always
        super().__init__(len(work.prompts), work.count, is_plain)
        self._offsets: dict[int, int] = {}
        self._echoed: set[int] = set()
        self._echoes: dict[int, Echo] = {}  # of each prompt: its log probabilities come once, with the first output

    def entries(self, index: int, output: RequestOutput) -> int:
        """Also those of the prompt, which each choice repeats with its first output."""
        shown, top = super().entries(index, output), self._work.request.logprobs
        if not self._work.echo or top is None:
            return shown
        first = sum(index * self._count + choice.index not in self._echoed for choice in output.outputs)
        return shown + first * prompt_length(output) * (1 + top)

    def _before(self, choice: int) -> str:
        return f'{self._head}[{{"index": {choice}, "text": '

    def _events(self, choice: int, result: RequestOutput, output: CompletionOutput, deltas: Sequence[Delta]) -> str:
        work, request = self._work, self._work.request
        text, token_ids, steps, echo = output.text, output.token_ids, output.logprobs, None
        if work.echo and request.max_tokens == 0:
            text, token_ids, steps = "", [], []
        if work.echo and choice not in self._echoed:
            self._echoed.add(choice)
            prompt = choice // self._count
            echo = self._echoes.get(prompt)
            if echo is None:
                echo = self._echoes[prompt] = Echo.of(self._context, work, result)
            text = echo.text + text
        elif not text and not token_ids and output.finish_reason is None:
            return ""
        logprobs = None
        if request.logprobs is not None and steps is not None:
            offset = echo.length if echo else self._offsets.get(choice, 0)
            logprobs = completion_logprobs(token_ids, steps, request.logprobs, work.text_of, offset)
            self._offsets[choice] = offset + sum(map(len, logprobs["tokens"]))
        shown = json.dumps(logprobs) if echo is None else echo.before_encoded(logprobs)
        start = json.dumps({"index": choice, "text": text})[:-1]
        end = json.dumps({"finish_reason": output.finish_reason, "stop_reason": output.stop_reason})[1:]
        usage = usage_of(prompt_length(result), self._sent[choice]) if self._always else None
        return f'{self._head}[{start}, "logprobs": {shown}, {end}],"usage":{json.dumps(usage)}}}\n\n'

    def end(self) -> bytes:
        """The events after the last output: the usage, if it was asked for, and the end mark."""
        if not self._work.request.wants_usage:
            return DONE
        cached = self._context.cached_tokens(self._last.values())
        whole = usage_of(sum(map(prompt_length, self._last.values())), sum(self._sent), cached)
        total = {k: v for k, v in whole.items() if v is not None}
        return f'{self._head}[],"usage":{json.dumps(total)}}}\n\n'.encode() + DONE


class WholeEvents(Events):
    """One event with the whole answer, for requests whose choices are known only at the end."""

    def __init__(self, context: ServerContext, work: Completion) -> None:
        self._context = context
        self._work = work
        self._finals: dict[int, RequestOutput] = {}

    def feed(self, index: int, result: RequestOutput) -> bytes:
        self._finals[index] = result
        return b""

    def end(self) -> bytes:
        finals = [self._finals[i] for i in range(len(self._work.prompts))]
        return whole_stream(encode_at_once(_answer(self._context, self._work, finals)))

    def failure(self, error: APIError) -> bytes:
        return failed(error)


def whole_stream(answer: bytes) -> bytes:
    """A stream whose only event is an encoded answer."""
    return b"data: " + answer + b"\n\n" + DONE
