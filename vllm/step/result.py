"""The message from worker to core: what the device learned in one step."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class TokenLogprobs(NamedTuple):
    """Logprobs of one position: the token itself first, then the top k by rank.

    `token_ids[0]`, `logprobs[0]` belong to the sampled (or prompt) token, whose true rank (1 = most likely) is `rank`.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class Logprobs(msgspec.Struct, frozen=True, tag="logprobs", gc=False):
    """Logprobs of the tokens of row `row`, one entry per token; for results with `counts`."""

    row: int
    entries: list[TokenLogprobs]


class Pooled(msgspec.Struct, frozen=True, tag="pooled", gc=False):
    """The pooled hidden states of row `row`: an array of `shape` and `dtype` (numpy's name), in C order."""

    row: int
    data: bytes
    shape: tuple[int, ...]
    dtype: str


class Drafts(msgspec.Struct, frozen=True, tag="drafts", gc=False):
    """What a drafter proposes behind the newest token of row `row`."""

    row: int
    token_ids: list[int]


News = Logprobs | Pooled | Drafts


class StepResult(msgspec.Struct, frozen=True):
    """What the device learned in one step. Rows, also the keys of the dictionaries, are those of the plan.

    `token_ids[i]` is the token sampled for row i, -1 if the row did not sample; `logprobs[i]` are its logprobs. With
    `counts`, `token_ids` is flat: row i has the next `counts[i]` of them, and their logprobs come as `news`.
    `prompt_logprobs[i]` holds the logprobs of the prompt tokens at positions `num_computed + 1 ...` that this chunk
    predicts. `errors[i]` fails that request alone.
    """

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    forward_time_s: float = 0.0
    counts: list[int] | None = None
    news: tuple[News, ...] = ()
