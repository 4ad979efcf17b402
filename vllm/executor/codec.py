"""What travels between the first rank and the others."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import msgspec
from msgspec.structs import replace

from vllm.ipc import codec, frames
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.step.known import Known
from vllm.step.plan import StepPlan


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """Load your share of the model as worker number `index`. `config` is `VllmConfig.to_dict()`.

    The workers meet at `host`:`port`.   device: of this host's devices, the worker's.   local: see `Ranks`.
    """

    config: dict[str, Any]
    index: int
    host: str
    port: int
    timeout: int
    device: int
    local: tuple[int, int]


class Start(msgspec.Struct, array_like=True, tag="start"):
    """Allocate a cache of `num_blocks` blocks."""

    num_blocks: int


class Step(msgspec.Struct, array_like=True, tag="step"):
    """Execute a plan. known, told: of a pipeline, see `StageRunner.execute`."""

    plan: StepPlan
    known: Known | None = None
    told: int = 0


class Call(msgspec.Struct, array_like=True, tag="call"):
    """Run a public method of the worker, or a function with it, and answer with a `Result` of the same id."""

    call_id: int
    method: Any  # a name, or a function as `ipc.functions` sends it
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

decode_to_rank: Callable[[bytes], ToRank] = codec.decoder(ToRank).decode
decode_from_rank: Callable[[bytes], FromRank] = codec.decoder(FromRank).decode


def frame(message: ToRank | FromRank) -> bytes:
    """The message as it is sent. Raises TypeError for values that msgpack cannot hold."""
    return frames.frame(codec.encode(message))


def step_message(plan: StepPlan, known: Known | None = None, told: int = 0) -> Step:
    """The plan as a message. Logits processors and masks stay behind: only the first rank samples."""
    if plan.masks is not None or plan.late is not None:
        plan = replace(plan, masks=None, late=None)
    if any(isinstance(init.params, SamplingParams) and init.params.logits_processors for init in plan.new):
        plan = replace(plan, new=tuple(init._replace(params=_without_functions(init.params)) for init in plan.new))
    return Step(plan, known, told)


def _without_functions(params: SamplingParams | PoolingParams) -> SamplingParams | PoolingParams:
    if isinstance(params, PoolingParams) or params.logits_processors is None:
        return params
    params = copy(params)
    params.logits_processors = None
    return params
