"""The bounds of one step and the order of requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of one step and the order of requests.

    max_num_batched_tokens: tokens computed per step.   max_num_seqs: requests running at once (number of slots).
    chunk_threshold: a prompt gets at most this many tokens per step (0: no bound).
    account_share: the part of the slots, or of the blocks, that one account may keep while others wait.
    num_drafts: drafts that the device proposes behind every token it samples; each step of a request verifies them.
    max_pending: tokens of a request in flight with which it is still planned: 0 where its next step needs to know the
    last token on the host, 1 where it may be planned before that, as in a pipeline. None: as many as there are steps in
    flight.
    max_gap: seconds that a step may take which also computes an answer's next token, or may soon; 0 for any.
    stages: of a pipeline; a step takes so small a part of the requests that all stages have work.
    vocab_size: ids of tokens are below it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    priority: bool = False
    chunk_threshold: int = 0
    account_share: float = 0.5
    num_drafts: int = 0
    max_pending: int | None = None
    stages: int = 1
    max_gap: float = 0.0
    vocab_size: int = 1 << 31
