"""The message from core to worker: a frozen plan of one step."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from operator import attrgetter, is_
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import NODEFAULT
from msgspec.structs import fields

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

Int32 = np.ndarray  # one-dimensional, dtype int32
Bool = np.ndarray  # one-dimensional, dtype bool
UInt32 = np.ndarray  # dtype uint32


class SlotInit(NamedTuple):
    """All a slot's row needs; sent when a request enters a slot, also when it returns after preemption.

    `token_ids` are the prompt and every output token known so far; `num_prompt_tokens` says where the output begins.
    `num_computed` tokens are already in the cache (prefix hit or fork). `block_ids[g]` is the block table of group g.
    `seed` is the request's resolved 64-bit seed; a token's random number depends on (seed, position) only.
    `params` of a request that is pooled are `PoolingParams`. `columns` holds the row's value of each declared `Column`,
    in their order; () stands for all neutral. `encoder_tokens` is the length of its
    encoder's output, for cross attention. `virtual` are the embeddings of its first tokens, float32, of a prompt
    adapter. `parts` are the prompts that it consists of, as `CoreRequest` says.
    """

    request_id: str
    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: tuple[list[int], ...]
    params: SamplingParams | PoolingParams
    seed: int
    stop_token_ids: tuple[int, ...]  # eos and stop tokens, suppressed until min_tokens
    lora_id: int = 0
    columns: tuple[int, ...] = ()
    encoder_tokens: int = 0
    virtual: bytes = b""
    parts: tuple[tuple[int, int], ...] = ()


class Column(NamedTuple):
    """A number that every slot has, for a capability that declares it: `dtype` is numpy's name ("int32"), `neutral`
    the value of requests that do not use the capability.
    """

    name: str
    dtype: str
    neutral: int


class AdapterLoad(NamedTuple):
    """Copy an adapter from host memory to slot `slot` of those on the device."""

    slot: int
    adapter_id: int


class BlockAppend(NamedTuple):
    """Write `block_ids` to row `slot` of group `group`'s block table, from column `start` on."""

    slot: int
    group: int
    start: int
    block_ids: list[int]


class TransferKind(IntEnum):
    """What is done with a block: copied to another one, cleared, saved to the lower tier, loaded from it."""

    COPY = 0
    ZERO = 1
    SAVE = 2
    LOAD = 3


class Transfer(NamedTuple):
    """One block's move in every layer. pool: 0 for token pages, 1 for recurrent states; src, dst: blocks of that pool,
    or places in the lower tier.

    All of a plan's read what was there before it: whoever runs them reads everything first, or saves, then copies, then
    clears, then loads, each kind in one go. No block is written twice.
    """

    kind: TransferKind
    pool: int
    src: int
    dst: int


class TokenWrite(NamedTuple):
    """Tokens that the host knows, written to row `slot` from position `start` on before the forward pass. The slot's
    length on the device becomes at least their end.
    """

    slot: int
    start: int
    token_ids: list[int]


class RowMasks(msgspec.Struct, frozen=True):
    """Which tokens some rows may sample.

    rows: [masked] int32 rows of the plan, each at most once.
    bits: [masked, ceil(vocab / 32)] uint32; token t is allowed if bit t % 32 of word t // 32 is set.
    """

    rows: Int32
    bits: UInt32


class StepPlan(msgspec.Struct, frozen=True):
    """What one step computes.

    `slots`, `num_tokens` (1 or more), `num_computed` and `sample` are parallel arrays, one entry per request.

    Order of effects in the worker: `freed`, `new`, `blocks`, `transfers`, `writes`, `adapters`, then the forward pass.

    What follows `sample` is neutral by default. Per row: `drafts` is the number of draft tokens behind the last known
    token (the row samples drafts + 1 tokens), None for none; `exact` whether `num_computed` is the truth, None for all
    (the others take position and length from the device); `late` whether the row's mask comes with `complete`, None for
    none; `pooled` whether its hidden states are pooled, None for none (such a row never samples). `masks` holds the
    masks known now. Where copies of the engine share experts, `exchanged` is the most tokens that a copy has in this
    step, of which none may have any.
    """

    step_id: int
    freed: tuple[int, ...]
    new: tuple[SlotInit, ...]
    blocks: tuple[BlockAppend, ...]
    slots: Int32
    num_tokens: Int32
    num_computed: Int32
    sample: Bool
    transfers: tuple[Transfer, ...] = ()
    writes: tuple[TokenWrite, ...] = ()
    drafts: Int32 | None = None
    exact: Bool | None = None
    late: Bool | None = None
    masks: RowMasks | None = None
    pooled: Bool | None = None
    adapters: tuple[AdapterLoad, ...] = ()
    exchanged: int = 0


_NEUTRAL = tuple((field.name, field.default) for field in fields(StepPlan) if field.default is not NODEFAULT)
_VALUES, _DEFAULTS = attrgetter(*(name for name, _ in _NEUTRAL)), tuple(neutral for _, neutral in _NEUTRAL)
_NOTHING: frozenset[str] = frozenset()


def used_fields(plan: StepPlan) -> frozenset[str]:
    """The fields, of those that are neutral by default, that the plan uses."""
    values = _VALUES(plan)
    if all(map(is_, values, _DEFAULTS)):
        return _NOTHING
    pairs = zip(_NEUTRAL, values, strict=True)
    return frozenset(
        name for (name, neutral), value in pairs if value is not neutral and (neutral is None or value != neutral)
    )


def require_known(plan: StepPlan, known: Collection[str], who: str) -> None:
    """Raise NotImplementedError, by name, if the plan uses a field that is neutral by default and not in `known`.

    who: the one that cannot do it, for the message.
    """
    for name in used_fields(plan):
        if name not in known:
            raise NotImplementedError(f"{who} cannot run a plan with {name!r}.")
