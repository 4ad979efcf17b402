"""The two messages between core and worker: a frozen plan of one step, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

Int32 = np.ndarray  # one-dimensional, dtype int32
Bool = np.ndarray  # one-dimensional, dtype bool


class SlotInit(NamedTuple):
    """All a slot's row needs; sent when a request enters a slot, also when it returns after preemption.

    `token_ids` are the prompt and every output token known so far; `num_prompt_tokens` says where the output begins.
    `num_computed` tokens are already in the cache (prefix hit or fork). `block_ids[g]` is the block table of group g.
    `seed` is the request's resolved 64-bit seed; a token's random number depends on (seed, position) only.
    """

    request_id: str
    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: tuple[list[int], ...]
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]  # eos and stop tokens, suppressed until min_tokens
    lora_id: int = 0


class BlockAppend(NamedTuple):
    """Write `block_ids` to row `slot` of group `group`'s block table, from column `start` on."""

    slot: int
    group: int
    start: int
    block_ids: list[int]


class BlockCopy(NamedTuple):
    """Copy block `src` to block `dst` in every layer (copy-on-write)."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class PlanExtras:
    """Optional features of a step, absent when unused: speculation, grammar masks, encoder inputs."""

    draft_token_ids: tuple[tuple[int, ...], ...] | None = None
    grammar_bitmask: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    `slots`, `num_tokens`, `num_computed` and `sample` are parallel arrays, one entry per request.

    Order of effects in the worker: `freed`, `new`, `blocks`, `copies`, then the forward pass.
    """

    step_id: int
    freed: tuple[int, ...]
    new: tuple[SlotInit, ...]
    blocks: tuple[BlockAppend, ...]
    copies: tuple[BlockCopy, ...]
    slots: Int32
    num_tokens: Int32
    num_computed: Int32
    sample: Bool
    extras: PlanExtras | None = None


class TokenLogprobs(NamedTuple):
    """Logprobs of one position: the token itself first, then the top k by rank.

    `token_ids[0]`, `logprobs[0]` belong to the sampled (or prompt) token, whose true rank (1 = most likely) is `rank`.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device learned in one step. Keys of the dictionaries are row indices of the plan.

    `token_ids[i]` is the token sampled for row i, -1 if the row did not sample. `prompt_logprobs[i]` holds the logprobs
    of the prompt tokens at positions `num_computed + 1 ...` that this chunk predicts. `errors[i]` fails that request
    alone.
    """

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    forward_time_s: float = 0.0
