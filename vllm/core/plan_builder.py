"""A plan while it is being made: its rows, what they bring, and the tokens and blocks that it promises them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm.core.kv_manager import KVManager, resolve
from vllm.core.request import ENDLESS, Request
from vllm.core.tier import Moves
from vllm.step.plan import AdapterLoad, BlockAppend, SlotInit, StepPlan, TokenWrite, Transfer

_NO_MOVES = Moves()  # where there is no lower tier


class PlanBuilder:
    """The rows of one plan, in order. `take` and `verify` add one, and note in the request what the plan promises it.

    budget: tokens that may still be added.   room: rows that there may be.   left: tokens of requests in the plan that
        must be computed before these sample.
    drafted: row -> drafts that it verifies, epoch of its request.
    inexact: rows whose `num_computed` is an upper bound.
    moves: to and from the lower tier.   express: a step of newcomers, in which all others wait.
    """

    __slots__ = (
        "step_id", "budget", "kv", "room", "new", "blocks", "transfers", "requests", "num_tokens", "num_computed",
        "sample", "prompt_tokens", "left", "writes", "drafted", "moves", "express", "inexact",
    )  # fmt: skip

    def __init__(self, step_id: int, budget: int, kv: KVManager) -> None:
        self.step_id, self.budget, self.kv = step_id, budget, kv
        self.room = ENDLESS
        self.new: list[SlotInit] = []
        self.blocks: list[BlockAppend] = []
        self.transfers: list[Transfer] = []
        self.requests: list[Request] = []
        self.num_tokens: list[int] = []
        self.num_computed: list[int] = []
        self.sample: list[bool] = []
        self.prompt_tokens = self.left = 0
        self.writes: list[TokenWrite] = []
        self.drafted: dict[int, tuple[int, int]] = {}
        self.moves = _NO_MOVES if kv.tier is None else Moves()
        self.express = False
        self.inexact: list[int] = []

    @property
    def is_full(self) -> bool:
        """Whether there is room for no further row."""
        return len(self.requests) >= self.room

    def enter(self, request: Request) -> None:
        """The request gets a slot with this plan, which tells the worker all that the row needs."""
        self.new.append(
            SlotInit(
                request_id=request.id,
                slot=request.slot,
                token_ids=list(request.tokens),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed=request.num_computed,
                block_ids=tuple(list(t) for t in request.tables),
                params=request.params,
                seed=request.seed,
                stop_token_ids=tuple(request.stop_token_ids),
                lora_id=request.lora_id,
                columns=request.columns,
                encoder_tokens=request.encoder_tokens,
                virtual=request.virtual,
                parts=request.parts,
            )
        )

    def take(self, request: Request, count: int) -> None:
        """Add `count` tokens of a request; it samples if these are its last."""
        start = request.num_computed
        end = start + count
        left = len(request.tokens) + request.num_pending - end
        samples = left == 0
        self.left += left
        if start < request.num_prompt_tokens:
            self.prompt_tokens += min(end, request.num_prompt_tokens) - start
        request.num_computed = end
        request.plan_step = self.step_id
        request.plan_tokens = count
        if samples:
            if request.pooled:
                samples = False
            else:
                request.num_pending += 1
        if count > 1:
            # Prompt chunks are findable at once, also by the next request of this plan: in every layer a mixed batch
            # writes all its keys before any query reads. Blocks that single tokens complete are registered when the
            # result is there.
            self.kv.register_full_blocks(request, min(end, len(request.tokens)))
        if request.unwritten:
            self.writes.append(TokenWrite(request.slot, request.unwritten, request.tokens[request.unwritten :]))
            request.unwritten = 0
        self.requests.append(request)
        self.num_tokens.append(count)
        self.num_computed.append(start)
        self.sample.append(samples)

    def verify(self, request: Request, drafts: int) -> None:
        """Add the last token of a request and the drafts behind it. If an earlier step has drafts in flight, only the
        device knows where they begin.
        """
        row, start = len(self.requests), request.num_computed
        if request.num_drafted:
            self.inexact.append(row)
        if request.proposal:
            if drafts and not request.num_pending:
                self.writes.append(TokenWrite(request.slot, len(request.tokens), request.proposal[:drafts]))
            request.proposal = []
        if drafts:
            self.drafted[row] = (drafts, request.epoch)
        request.num_computed += 1 + drafts
        request.num_pending += 1 + drafts
        request.num_drafted += drafts
        request.plan_step, request.plan_tokens = self.step_id, 1 + drafts
        self.requests.append(request)
        self.num_tokens.append(1 + drafts)
        self.num_computed.append(start)
        self.sample.append(True)

    def build(
        self,
        freed: Iterable[int],
        adapters: tuple[AdapterLoad, ...],
        plain: bool,
        said: Mapping[str, Any] = MappingProxyType({}),
    ) -> StepPlan:
        """The plan. plain: no row can have drafts or be pooled, or tokens to be written.   said: other fields of it."""
        return StepPlan(
            step_id=self.step_id,
            freed=tuple(freed),
            new=tuple(self.new),
            blocks=tuple(self.blocks),
            slots=np.array([r.slot for r in self.requests], dtype=np.int32),
            num_tokens=np.array(self.num_tokens, dtype=np.int32),
            num_computed=np.array(self.num_computed, dtype=np.int32),
            sample=np.array(self.sample, dtype=bool),
            transfers=resolve(self.transfers) if self.transfers else (),
            adapters=adapters,
            **({} if plain else self._features()),
            **said,
        )

    def _features(self) -> dict[str, Any]:
        """What a plan has beyond its rows, where it is not neutral."""
        found: dict[str, Any] = {}
        if self.drafted:
            found["drafts"] = np.zeros(len(self.requests), np.int32)
            for row, (count, _) in self.drafted.items():
                found["drafts"][row] = count
        if self.inexact:
            found["exact"] = np.ones(len(self.requests), bool)
            found["exact"][self.inexact] = False
        if self.writes:
            found["writes"] = tuple(self.writes)
        if any(r.pooled for r in self.requests):
            found["pooled"] = np.array([r.pooled for r in self.requests])
        return found
