"""What travels between the first rank and the others: msgpack with a schema, nothing that could run code."""

from __future__ import annotations

import struct
from copy import copy
from typing import Any

import msgspec
import numpy as np

from vllm.core.plan import BlockAppend, BlockCopy, SlotInit, StepPlan
from vllm.sampling_params import SamplingParams

_HEADER = struct.Struct("<I")


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """Load your share of the model. `config` is `VllmConfig.to_dict()`; the ranks meet at 127.0.0.1:`port`."""

    config: dict[str, Any]
    rank: int
    world: int
    port: int
    timeout: int


class Start(msgspec.Struct, array_like=True, tag="start"):
    """Allocate a cache of `num_blocks` blocks."""

    num_blocks: int


class _Slot(msgspec.Struct, array_like=True):
    """`SlotInit` with types that can be checked."""

    request_id: str
    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: tuple[list[int], ...]
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]
    lora_id: int


class Step(msgspec.Struct, array_like=True, tag="step"):
    """A plan; `rows` holds slots, num_tokens, num_computed (int32 each), then sample (one byte each)."""

    step_id: int
    freed: tuple[int, ...]
    new: list[_Slot]
    blocks: list[tuple[int, int, int, list[int]]]
    copies: list[tuple[int, int]]
    rows: bytes


class Call(msgspec.Struct, array_like=True, tag="call"):
    """Run a public method of the worker and answer with a `Result` of the same id."""

    call_id: int
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """A stage is done; `value` is what it brought."""

    value: int = 0


class Result(msgspec.Struct, array_like=True, tag="result"):
    """Answer to `Call`: `value`, or `error` if the method raised."""

    call_id: int
    value: Any = None
    error: str | None = None


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The rank ends because of this error; `is_value_error`: the user's input is at fault."""

    error: str
    is_value_error: bool = False


ToRank = Begin | Start | Step | Call
FromRank = Ready | Result | Failed

_encoder = msgspec.msgpack.Encoder()
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


def frame(message: ToRank | FromRank) -> bytes:
    """4 bytes of length, then the message. Raises TypeError for values that msgpack cannot hold."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def pack_plan(plan: StepPlan) -> Step:
    """The plan as a message. Logits processors stay behind: they are functions, and only the first rank samples."""
    if plan.extras is not None:
        raise NotImplementedError(
            "Plans with drafts, grammar masks or encoder inputs cannot be sent to other ranks yet."
        )
    rows = b"".join(
        np.ascontiguousarray(a, np.int32).tobytes() for a in (plan.slots, plan.num_tokens, plan.num_computed)
    )
    return Step(
        plan.step_id,
        plan.freed,
        [_Slot(*init._replace(params=_without_functions(init.params))) for init in plan.new],
        list(plan.blocks),
        list(plan.copies),
        rows + plan.sample.astype(np.uint8).tobytes(),
    )


def _without_functions(params: SamplingParams) -> SamplingParams:
    if params.logits_processors is None:
        return params
    params = copy(params)
    params.logits_processors = None
    return params


def unpack_plan(message: Step) -> StepPlan:
    """The plan that `pack_plan` was given."""
    count = len(message.rows) // 13
    slots, num_tokens, num_computed = np.frombuffer(message.rows, np.int32, 3 * count).reshape(3, count)
    return StepPlan(
        step_id=message.step_id,
        freed=message.freed,
        new=tuple(SlotInit(*(getattr(slot, name) for name in SlotInit._fields)) for slot in message.new),
        blocks=tuple(BlockAppend(*append) for append in message.blocks),
        copies=tuple(BlockCopy(*copy) for copy in message.copies),
        slots=slots,
        num_tokens=num_tokens,
        num_computed=num_computed,
        sample=np.frombuffer(message.rows, np.uint8, count, 12 * count).astype(bool),
    )
