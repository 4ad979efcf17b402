"""The routes of models that pool: embeddings, pooling, classify, score and rerank; whole answers, never streams."""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm.engine.texts import TooManyTokensError
from vllm.entrypoints.openai import chat
from vllm.entrypoints.openai.answers import Numbers
from vllm.entrypoints.openai.completions import usage_of
from vllm.entrypoints.openai.context import Prompt, ServerContext, merge, new_id, no_tokenizer
from vllm.entrypoints.openai.errors import bad_request, overloaded
from vllm.entrypoints.openai.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    _Pooling,
)
from vllm.entrypoints.pooling import pairs, similarities
from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams

Answer = Callable[[ServerContext], Awaitable[dict[str, Any]]]


FEW_NUMBERS = 1 << 16  # for which there is always room


class _Held:
    """The numbers that a request's answer has so far, which count among the server's as long as this lives."""

    def __init__(self, context: ServerContext) -> None:
        self._context, self._count = context, 0

    def add(self, size: int, *, alone: bool) -> None:
        """Raises a 400 where the prompts of a request, unless it is one `alone`, make an answer too large to keep; 503
        where those of all requests are.
        """
        self._count += size
        self._context.pooled_numbers += size
        most = self._context.limits.max_pooled_numbers
        if self._count > most and not alone:
            raise bad_request(f"The answer has more than {most} numbers. Send fewer or shorter texts at once.", "input")
        if FEW_NUMBERS < self._count < self._context.pooled_numbers and self._context.pooled_numbers > 2 * most:
            raise overloaded("Too many large answers are being made. Try again later.")

    def __del__(self) -> None:
        self._context.pooled_numbers -= self._count


@dataclass(frozen=True, slots=True)
class Pooled:
    """A checked request: its prompts, and what it is answered under; nothing of it has begun."""

    id: str
    model: str
    created: int
    prompts: list[Prompt]
    held: _Held

    async def outputs(self) -> list[PoolingRequestOutput[Any]]:
        """The answers to its prompts, in order. Leaving it aborts what still runs."""
        found: list[Any] = [None] * len(self.prompts)
        async with aclosing(merge(self.prompts)) as outputs:
            async for i, output in outputs:
                found[i] = output
                self.held.add(found[i].outputs.array.size, alone=len(found) == 1)
        if any(output is None for output in found):
            raise bad_request("The request was aborted.")
        return found

    def vectors(
        self, outputs: Sequence[PoolingRequestOutput[Any]], kind: str, name: str, form: str
    ) -> Iterator[dict[str, Any]]:
        """What each prompt came to, under `name`; made while it is encoded, since it may be much."""
        for i, output in enumerate(outputs):
            yield {"index": i, "object": kind, name: _numbers(output.outputs.array, form)}

    def body(self, data: list[dict[str, Any]] | Iterator[dict[str, Any]], tokens: int) -> dict[str, Any]:
        """The usual body of an answer."""
        return {
            "id": self.id, "object": "list", "created": self.created, "model": self.model, "data": data,
            "usage": usage_of(tokens, 0),
        }  # fmt: skip


def _tokens_of(outputs: Sequence[PoolingRequestOutput[Any]]) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def _truncation(request: _Pooling) -> int | None:
    kept = request.truncate_prompt_tokens
    if kept is not None and kept != -1 and kept < 1:
        raise bad_request(f"truncate_prompt_tokens must be -1 or at least 1, got {kept}.", "truncate_prompt_tokens")
    return kept


def _check_count(context: ServerContext, count: int, field: str) -> None:
    if not count:
        raise bad_request(f"{field} must not be empty.", field)
    if count > context.limits.max_inputs:
        raise bad_request(f"At most {context.limits.max_inputs} texts may be sent, got {count}.", field)


async def _token_ids(
    context: ServerContext, request: _Pooling, texts: Sequence[str], special: bool, field: str
) -> list[list[int]]:
    """The token ids of texts, cut at their ends as the request asks."""
    processor = context.engine.input_processor
    if processor.tokenizer is None:
        raise no_tokenizer()
    kept = _truncation(request)
    try:
        return await context.engine.lanes.run_each(
            sum(map(len, texts)), lambda text: processor.pooled_ids(text, special, kept), texts
        )
    except TooManyTokensError as error:
        raise bad_request(
            f"This model's maximum context length is {context.max_model_len} tokens. However, you requested "
            f"{error.at_least} or more tokens in the input. Please reduce the length of the input.",
            field,
        ) from None


async def _begin(
    context: ServerContext, request: _Pooling, items: list[dict[str, Any]], params: PoolingParams, prefix: str,
    header_id: str | None,
) -> Pooled:  # fmt: skip
    """The request with these prompts, once the queue has room for all of them."""
    await context.discover_adapter(request.model)
    model = context.check_model(request.model)
    for item in items:
        length = len(item["prompt_token_ids"])
        if length > context.max_model_len:
            raise bad_request(
                f"This model's maximum context length is {context.max_model_len} tokens. However, you requested "
                f"{length} tokens in the input. Please reduce the length of the input.",
                "input",
            )
    context.engine.check_admission(len(items), sum(len(item["prompt_token_ids"]) for item in items), short=True)
    shown, name = new_id(prefix, request.request_id or header_id)
    ids = [item["prompt_token_ids"] for item in items]
    context.log_request(name if len(items) > 1 else f"{name}-0", items[0].get("prompt"), ids, params)
    prompts, call = [], context.engine.turns.call()
    for i, item in enumerate(items):
        await call.next()
        prompts.append(
            Prompt(
                context.engine,
                item,
                params,
                f"{name}-{i}",
                request.priority,
                context.request_timeout,
                account=name if len(items) > 1 else None,
                lora_request=context.adapter(request.model),
                prompt_adapter_request=context.prompt_adapter(request.model),
            )
        )
    return Pooled(shown, model, int(time.time()), prompts, _Held(context))


async def _inputs(
    context: ServerContext, request: EmbeddingRequest | PoolingRequest | ClassifyRequest
) -> list[dict[str, Any]]:
    """The prompts of a request with `input` or `messages`."""
    request.refuse_later_features()
    given = request.input
    messages = getattr(request, "messages", None)
    if (given is None) == (messages is None):
        raise bad_request("Give either `input` or `messages`.", "input")
    special = request.add_special_tokens
    if messages is not None:
        texts = [await chat.render(context, request, None)]
        ids = await _token_ids(context, request, texts, bool(special), "messages")
        return [{"prompt": texts[0], "prompt_token_ids": ids[0]}]
    one = isinstance(given, str) or (isinstance(given, list) and bool(given) and isinstance(given[0], int))
    inputs: list[Any] = [given] if one else list(given or ())
    _check_count(context, len(inputs), "input")
    texts = [text for text in inputs if isinstance(text, str)]
    encoded = iter(await _token_ids(context, request, texts, special is not False, "input") if texts else ())
    items: list[dict[str, Any]] = []
    for item in inputs:
        if isinstance(item, str):
            items.append({"prompt": item, "prompt_token_ids": next(encoded)})
        else:
            items.append({"prompt_token_ids": _cut(context, item, _truncation(request))})
    return items


def _cut(context: ServerContext, ids: list[int], kept: int | None) -> list[int]:
    """Token ids that a client sends, cut at their end."""
    if not ids:
        raise bad_request("A prompt of token ids must not be empty.", "input")
    if kept is None:
        return ids
    context.engine.input_processor.check_token_ids(ids)  # also those that are cut off
    return ids[: context.max_model_len if kept == -1 else min(kept, context.max_model_len)]


# ---- embeddings, pooling, classify -----------------------------------------------------------------------------------


async def embed(context: ServerContext, request: EmbeddingRequest, header_id: str | None) -> Answer:
    """POST /v1/embeddings."""
    params = PoolingParams(dimensions=request.dimensions, task="embed", use_activation=request.use_activation)
    params.verify(context.engine.vllm_config.model_config)
    work = await _begin(context, request, await _inputs(context, request), params, "embd", header_id)

    async def answer(context: ServerContext) -> dict[str, Any]:
        outputs = await work.outputs()
        data = work.vectors(outputs, "embedding", "embedding", request.encoding_format)
        return work.body(data, _tokens_of(outputs))

    return answer


async def pool(context: ServerContext, request: PoolingRequest, header_id: str | None) -> Answer:
    """POST /pooling."""
    params = PoolingParams(dimensions=request.dimensions, task=request.task, use_activation=request.use_activation)
    params.verify(context.engine.vllm_config.model_config)
    work = await _begin(context, request, await _inputs(context, request), params, "pool", header_id)

    async def answer(context: ServerContext) -> dict[str, Any]:
        outputs = await work.outputs()
        data = work.vectors(outputs, "pooling", "data", request.encoding_format)
        return work.body(data, _tokens_of(outputs))

    return answer


async def classify(context: ServerContext, request: ClassifyRequest, header_id: str | None) -> Answer:
    """POST /classify: the probability of each class, and the name of the likeliest."""
    settings = context.engine.vllm_config.model_config.pooling
    if settings is not None and settings.gives_many:
        raise bad_request("This model has an answer for each token, not one for a prompt. Use /pooling.")
    params = PoolingParams(task="classify", use_activation=request.use_activation)
    work = await _begin(context, request, await _inputs(context, request), params, "classify", header_id)
    names = context.engine.vllm_config.model_config.hf.get("id2label", default={})

    async def answer(context: ServerContext) -> dict[str, Any]:
        outputs = await work.outputs()
        data = []
        for i, output in enumerate(outputs):
            found = output.outputs.array
            best = int(found.argmax())
            label = names.get(str(best), names.get(best, f"LABEL_{best}"))  # as transformers calls what has no name
            data.append({"index": i, "label": label, "probs": found.tolist(), "num_classes": len(found)})
        return work.body(data, _tokens_of(outputs))

    return answer


def _numbers(array: np.ndarray, form: str) -> Any:
    """An array as JSON has it, or as base64 of its float32 numbers, little-endian."""
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()
    return Numbers(array)


# ---- score and rerank ------------------------------------------------------------------------------------------------


async def _scores(
    context: ServerContext, request: _Pooling, firsts: list[str], seconds: list[str], prefix: str,
    header_id: str | None,
) -> tuple[Pooled, Callable[[], Awaitable[tuple[list[float], int]]]]:  # fmt: skip
    """A request that scores pairs, and what waits for their scores and the number of their tokens."""
    _check_count(context, max(len(firsts), len(seconds)), "text_2")
    pairs(firsts, seconds)
    processor = context.engine.input_processor
    settings = context.engine.vllm_config.model_config.pooling
    if processor.tokenizer is None:
        raise no_tokenizer()
    params = PoolingParams(task="score", use_activation=request.use_activation)
    kept = _truncation(request)
    if settings is not None and settings.scores_pairs:
        size = sum(map(len, firsts)) * (len(seconds) if len(firsts) == 1 else 1) + sum(map(len, seconds))

        def prompts() -> list[dict[str, Any]]:
            if len(firsts) == 1:
                return processor.pairs(firsts[0], seconds, truncate=kept, most=context.limits.max_pair_tokens)
            return [processor.pair(a, b, truncate=kept) for a, b in zip(firsts, seconds, strict=True)]

        items = await context.in_lane(size, prompts)
        work = await _begin(context, request, items, params, prefix, header_id)

        async def of_pairs() -> tuple[list[float], int]:
            outputs = await work.outputs()
            return [float(output.outputs.array.squeeze()) for output in outputs], _tokens_of(outputs)

        return work, of_pairs
    texts = [*firsts, *seconds]
    ids = await _token_ids(context, request, texts, True, "text_2")
    items = [{"prompt": text, "prompt_token_ids": found} for text, found in zip(texts, ids, strict=True)]
    work = await _begin(context, request, items, params, prefix, header_id)

    async def of_vectors() -> tuple[list[float], int]:
        outputs = await work.outputs()
        found = similarities(outputs[: len(firsts)], outputs[len(firsts) :], None)
        return [output.outputs.score for output in found], _tokens_of(outputs)

    return work, of_vectors


async def score(context: ServerContext, request: ScoreRequest, header_id: str | None) -> Answer:
    """POST /score: of one text with one or several, or of several with as many."""
    firsts = [request.text_1] if isinstance(request.text_1, str) else list(request.text_1)
    seconds = [request.text_2] if isinstance(request.text_2, str) else list(request.text_2)
    work, scores = await _scores(context, request, firsts, seconds, "embd", header_id)

    async def answer(context: ServerContext) -> dict[str, Any]:
        found, tokens = await scores()
        return work.body([{"index": i, "object": "score", "score": s} for i, s in enumerate(found)], tokens)

    return answer


async def rerank(context: ServerContext, request: RerankRequest, header_id: str | None) -> Answer:
    """POST /rerank: documents by their score for a query, the best first."""
    if request.top_n < 0:
        raise bad_request(f"top_n must be 0 (all) or more, got {request.top_n}.", "top_n")
    documents = [text if isinstance(text, str) else text.text for text in request.documents]
    work, scores = await _scores(context, request, [request.query], documents, "rerank", header_id)

    async def answer(context: ServerContext) -> dict[str, Any]:
        found, tokens = await scores()
        order = sorted(range(len(found)), key=lambda i: (-found[i], i))[: request.top_n or None]
        results = [{"index": i, "document": {"text": documents[i]}, "relevance_score": found[i]} for i in order]
        return {"id": work.id, "model": work.model, "usage": {"total_tokens": tokens}, "results": results}

    return answer


class Route(NamedTuple):
    """request: the model of its body.   prepare: checks everything that can be checked before the engine is asked, and
    returns what waits for the answer.   task, name: what the model must be made for, and what that API is called.
    """

    request: type[_Pooling]
    prepare: Callable[[ServerContext, Any, str | None], Awaitable[Answer]]
    task: str
    name: str


_SCORE = Route(ScoreRequest, score, "score", "Score API")
_RERANK = Route(RerankRequest, rerank, "score", "Rerank (Score) API")
ROUTES = {
    "/v1/embeddings": Route(EmbeddingRequest, embed, "embed", "Embeddings API"),
    "/pooling": Route(PoolingRequest, pool, "encode", "Pooling API"),
    "/classify": Route(ClassifyRequest, classify, "classify", "Classification API"),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
}


def find(context: ServerContext, path: str) -> Route:
    """The route at a path. Raises a 400 unless the model is made for it."""
    route = ROUTES[path]
    context.require_task(route.task, route.name)
    return route
