"""A request as a user passes it, as it is once it was checked, and the messages that the core gets of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, overload

from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.rope import prompt_stage
from vllm.pooling_params import PoolingParams
from vllm.prompt_adapter.source import VirtualTokens
from vllm.reasoning.think import Begins
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.step.messages import CoreRequest
from vllm.structured_output.spec import GrammarSpec

if TYPE_CHECKING:
    from vllm.engine.tokenizer import Tokenizer
    from vllm.prompt_adapter.request import PromptAdapterRequest

SEED_BITS = 64
SEED_MASK = (1 << SEED_BITS) - 1


class CheckedParams(NamedTuple):
    """Parameters that were checked against the model, and the form of the output that they had asked for."""

    params: SamplingParams
    grammar: GrammarSpec | None


class RequestInput(NamedTuple):
    """One request as a user passes it.

    owns_params: the parameters were made, and so checked, for this request alone, and nobody else has them.
    checked: what `InputProcessor.check` has made of the parameters, which several requests of one call share.
    account: the name that all requests of one call of a user have in common, if there are several.
    begins: where the output begins, which whoever has made a prompt of a chat knows; None if its tokens are to tell.
    """

    request_id: str
    prompt: PromptType
    params: SamplingParams | PoolingParams | BeamSearchParams
    arrival_time: float | None = None
    lora_request: LoRARequest | None = None
    prompt_adapter_request: PromptAdapterRequest | None = None
    priority: int = 0
    add_special_tokens: bool = True  # bos, where the tokenizer adds one; chat templates write their own
    owns_params: bool = False
    account: str | None = None
    begins: Begins | None = None
    checked: CheckedParams | None = None


class ProcessedRequest(NamedTuple):
    """A request that is in order. `params` is our own copy; `children` has one message per sequence, none for beams.

    `returned` of the children are given to the user; if there are more (best_of), the most likely ones.
    `account` is common to everything that one call of a user asks for, None if that is one sequence.
    `grammar` is what became of the parameters' guided_decoding or structured_outputs, which they keep no more.
    `pooled` are the parameters of a request that is pooled, which others of its batch may have in common with it;
    `params` are neutral ones then, and `children` empty. `second_from` is where the second text of a pair begins.
    `tokenizer` is that of the request's adapter, if it has one.
    `known_prompt` is as of `Facts`, None where no prompt can be longer. `begins` is as of `RequestInput`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: Sequence[CoreRequest]
    returned: int
    arrival_time: float
    priority: int
    cache_salt: str | None = None
    beams: BeamSearchParams | None = None
    account: str | None = None
    grammar: GrammarSpec | None = None
    lora_request: LoRARequest | None = None
    lora_folder: str = ""
    pooled: PoolingParams | None = None
    second_from: int | None = None
    virtual: VirtualTokens | None = None
    tokenizer: Tokenizer | None = None
    known_prompt: int | None = None
    begins: Begins | None = None


class Children(Sequence[CoreRequest]):
    """The messages of a request's sequences, each made when it is asked for: there may be thousands.

    The first has the request's own seed, so that n = 1 gives the first of n = 4.
    """

    def __init__(self, request: ProcessedRequest, first: SamplingParams, others: SamplingParams, seed: int) -> None:
        self._request = request
        self._first, self._others = first, others
        self._seed = seed
        self._count = request.params.num_candidates

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> CoreRequest: ...

    @overload
    def __getitem__(self, index: slice) -> list[CoreRequest]: ...

    def __getitem__(self, index: int | slice) -> CoreRequest | list[CoreRequest]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        name = self._request.request_id
        return core_request(
            self._request,
            request_id=name if self._count == 1 else f"{index}_{name}",
            params=self._others if index else self._first,
            seed=child_seed(self._seed, index),
            fork_of=f"0_{name}" if index else None,
        )


def core_request(
    request: ProcessedRequest,
    request_id: str,
    params: SamplingParams | PoolingParams,
    seed: int = 0,
    fork_of: str | None = None,
    token_ids: list[int] | None = None,
    lends: bool = False,
) -> CoreRequest:
    """The message for one sequence of `request`."""
    eos: int | None = None
    stop: tuple[int, ...] = ()
    if isinstance(params, SamplingParams):
        eos, stop = params.eos_token_id, tuple(params.stop_token_ids or ())
    ids, virtual = request.prompt_token_ids if token_ids is None else token_ids, request.virtual
    if virtual is not None:  # a token that the prompt has anyway holds their places, so that no penalty sees others
        ids = [ids[0]] * virtual.count + ids
    keys = () if virtual is None else ((0, virtual.count, virtual.key),)
    if request.known_prompt is not None and len(ids) > request.known_prompt:
        keys = (*keys, (0, 1, b"prompt stage %d" % prompt_stage(len(ids), request.known_prompt)))
    return CoreRequest(
        request_id=request_id,
        prompt_token_ids=ids,
        params=params,
        seed=seed,
        eos_token_id=eos,
        stop_token_ids=stop if eos is None else (eos, *stop),
        arrival_time=request.arrival_time,
        priority=request.priority,
        cache_salt=request.cache_salt,
        fork_of=fork_of,
        account=request.account,
        grammar=request.grammar,
        lora_id=0 if request.lora_request is None else request.lora_request.lora_int_id,
        lora_path=request.lora_folder,
        content_keys=keys,
        virtual=b"" if virtual is None else virtual.embeddings,
        lends=lends,
        begins=request.begins,
    )


def pooled_request(request: ProcessedRequest) -> CoreRequest:
    """The message for a request that is pooled."""
    assert request.pooled is not None
    params = request.pooled
    if request.second_from is not None:
        params = params.clone()
        params.second_from = request.second_from
    return core_request(request, request.request_id, params)


def packed_request(requests: Sequence[ProcessedRequest]) -> CoreRequest:
    """One message for several requests that are pooled alike, which has the id of the first."""
    first = requests[0]
    assert first.pooled is not None
    ids = list(chain.from_iterable([request.prompt_token_ids for request in requests]))
    made = core_request(first, first.request_id, first.pooled, token_ids=ids)
    made.parts = tuple([(len(r.prompt_token_ids), -1 if r.second_from is None else r.second_from) for r in requests])
    return made


def packs(
    requests: Sequence[ProcessedRequest], max_tokens: int, max_requests: int
) -> Iterator[Sequence[ProcessedRequest]]:
    """Divide requests, in order, into those that are pooled alike and fit together into one step."""
    first = tokens = 0
    for i, request in enumerate(requests):
        length, head = len(request.prompt_token_ids), requests[first]
        alike = (
            request.pooled is not None
            and (request.pooled is head.pooled or request.pooled == head.pooled)
            and request.lora_request is head.lora_request is None
            and request.priority == head.priority
            and request.account == head.account
        )
        if i > first and not (alike and tokens + length <= max_tokens and i - first < max_requests):
            yield requests[first:i]
            first, tokens = i, 0
        tokens += length
    if requests:
        yield requests[first:]


def child_seed(seed: int, index: int) -> int:
    """The seed of the index-th sequence of a request; the first keeps the request's. SplitMix64's output function."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & SEED_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & SEED_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & SEED_MASK
    return z ^ (z >> 31)
