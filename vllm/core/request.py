"""One sequence inside the core: its tokens, how many are computed, and where its blocks are."""

from __future__ import annotations

from copy import copy
from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.step.block_hash import token_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from vllm.step.messages import CoreRequest
    from vllm.step.result import TokenLogprobs

_EXTRA = Struct("<qqq")  # where the block begins in the content, the content's length, the key's
ENDLESS = 1 << 62
_BLOCKS_ENCODED = 64  # at once: more costs time that a miss wastes


class Status(IntEnum):
    """Life of a request. A preempted request is WAITING again; a BLOCKED one waits for something outside the core."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    BLOCKED = 3


class Request:
    """A token list and `num_computed`. Only the scheduler and the KV manager change it.

    tokens:        prompt and every output token the host knows.
    num_computed:  tokens whose keys and values are in the cache, or will be once the steps in flight are done, if they
                   accept every draft: len(tokens) + num_pending - 1 for a request that decodes.
    num_pending:   tokens sampled by steps in flight, whose ids only the device knows. They follow `tokens`.
    max_pending:   with more of these it is left out of further steps.
    proposal:      drafts behind the last token, known here, to be verified by its next step.
    entered_with:  tokens that it had when it got its slot.
    epoch:         number of its residency: what a step of an earlier one computed says nothing about this one.
    unwritten:     position of the first of its last tokens which the device does not know, since the host found them;
                   0: it knows all.
    num_drafted:   drafts among the tokens in flight: so many of `num_computed` may turn out not to be.
    capacity:      length at which a KV group must act next: tokens that the blocks held now have room for, or where a
                   snapshot is due.
    starts_from:   snapshot of recurrent states that the first step copies.
    rests_since:   when it was left out of a step for those that will be forked from it; 0.0: never.
    blocked:       what it waits for outside the core, by name.
    """

    __slots__ = (
        "id", "tokens", "num_prompt_tokens", "params", "seed", "eos_token_id", "stop_token_ids", "arrival_time",
        "priority", "lora_id", "lora_key", "columns", "cache_salt", "fork_of", "account", "sequence_number",
        "status", "blocked", "slot", "num_computed", "num_pending", "max_len", "min_len", "reads_cache",
        "capacity", "tables", "starts_from", "num_drafted", "proposal", "epoch", "entered_with", "pooled",
        "max_pending", "unwritten", "encoder_tokens", "encoder_key", "content_keys", "virtual", "parts",
        "hashes", "num_registered", "freed_behind_window", "shares_tail",
        "plan_step", "plan_tokens", "num_cached_tokens", "suspected", "doubtful", "cached_reported", "fetched",
        "num_prompt_logprobs", "num_preemptions", "lends",
        "rests_since", "first_scheduled_time",
    )  # fmt: skip

    def __init__(
        self,
        message: CoreRequest,
        max_model_len: int,
        num_groups: int,
        sequence_number: int,
        max_pending: int = ENDLESS,
    ) -> None:
        params = message.params
        self.id = message.request_id
        self.tokens: list[int] = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.params = params
        self.seed = message.seed
        self.eos_token_id = message.eos_token_id
        self.stop_token_ids = frozenset(message.stop_token_ids)
        self.arrival_time = message.arrival_time
        self.priority = message.priority
        self.lora_id = message.lora_id
        self.lora_key = b""  # the adapter's digest, known when it has been read
        self.columns: tuple[int, ...] = ()  # of its slot, as policies set them
        self.cache_salt = message.cache_salt
        self.fork_of = message.fork_of
        self.account = message.account
        self.encoder_tokens = message.encoder_tokens
        self.encoder_key = message.encoder_key
        self.content_keys = message.content_keys
        self.virtual = message.virtual
        self.parts = message.parts
        self.sequence_number = sequence_number

        self.status = Status.WAITING
        self.blocked: set[str] = set()
        self.slot = -1
        self.num_computed = 0
        self.num_pending = 0
        self.num_drafted = 0
        self.unwritten = 0
        self.proposal: list[int] = []
        self.epoch = self.entered_with = 0
        self.pooled = isinstance(params, PoolingParams)
        if isinstance(params, PoolingParams):
            self.max_len = self.min_len = self.num_prompt_tokens
            self.max_pending, self.reads_cache = max_pending, False  # pooling may need every token's hidden state
        else:
            max_tokens = params.max_tokens if params.max_tokens is not None else max_model_len
            self.max_len = min(self.num_prompt_tokens + max_tokens, max_model_len)
            self.min_len = self.num_prompt_tokens + params.min_tokens
            # Logits processors and grammars read the tokens so far: the next step may not start before they are known.
            self.max_pending = 0 if params.logits_processors or message.grammar is not None else max_pending
            # Prompt logprobs need the logits of every prompt position, which a cached prefix does not compute.
            self.reads_cache = params.prompt_logprobs is None

        self.capacity = 0
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.hashes: list[bytes] = []
        self.num_registered = 0
        self.freed_behind_window = [0] * num_groups
        self.starts_from = 0
        self.shares_tail = False

        self.plan_step = -1
        self.plan_tokens = 0
        self.num_cached_tokens = 0
        self.suspected = False  # was in a step that failed, and has been tried alone since
        self.doubtful = 0  # tokens that it then computes alone: as many as that step would have left it with
        self.cached_reported = False
        self.fetched = False  # the lower tier was asked for its prefix
        self.num_prompt_logprobs = 0
        self.num_preemptions = 0
        self.first_scheduled_time = 0.0
        self.lends = message.lends
        self.rests_since = 0.0

    def end_at(self, token_ids: Collection[int]) -> None:
        """Before its first step: these end it, the first of them as its end-of-sequence token."""
        self.stop_token_ids = frozenset(token_ids)
        self.eos_token_id = next(iter(token_ids), None)

    def forget_min_tokens(self) -> None:
        """Before its first step: it may end after any token, since somebody else sees to that."""
        self.params = params = copy(self.params)
        assert isinstance(params, SamplingParams)
        params.min_tokens = 0
        self.min_len = self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def order(self) -> tuple[int, float, int]:
        """Sort key of the priority policy: smaller runs first."""
        return (self.priority, self.arrival_time, self.sequence_number)

    def same_content(self, other: Request) -> bool:
        """Whether equal tokens of both mean the same: encoder input, and what stands behind placeholders."""
        mine = (self.encoder_key, self.encoder_tokens, self.content_keys)
        return mine == (other.encoder_key, other.encoder_tokens, other.content_keys)

    def unseen_prompt_logprobs(self, start: int, chunk: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """The part of a chunk that begins at prompt position `start + 1` which was not reported before a preemption."""
        fresh = chunk[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, start + len(chunk))
        return fresh

    def block_contents(self, start: int, end: int, size: int) -> Iterator[tuple[int, bytes]]:
        """Index and content of the blocks [start, end) of `size` tokens, as `block_hash.token_bytes` says it."""
        width = 8 * size
        for first in range(start, end, _BLOCKS_ENCODED):
            last = min(first + _BLOCKS_ENCODED, end)
            data = token_bytes(self.tokens[first * size : last * size])
            for i in range(first, last):
                content = data[(i - first) * width : (i - first + 1) * width]
                yield i, content if not self.content_keys else content + self._extra_keys(i * size, (i + 1) * size)

    def _extra_keys(self, start: int, end: int) -> bytes:
        """What else the keys of tokens [start, end) depend on: which part of which content."""
        return b"".join(
            _EXTRA.pack(start - first, length, len(key)) + key
            for first, length, key in self.content_keys
            if first < end and start < first + length
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, "
            f"computed={self.num_computed}, pending={self.num_pending}, slot={self.slot})"
        )
