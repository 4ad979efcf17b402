"""Sampling parameters of every slot, as vectors; a step gathers its rows from them."""

from __future__ import annotations

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.step.plan import SlotInit
from vllm.step.rng import stream_start
from vllm.worker.sample.constraints import Constraints
from vllm.worker.sample.processors import Processors

NO_LOGPROBS = -2  # -1 is the whole vocabulary
GREEDY_BELOW = 1e-5  # temperatures below this mean greedy


class Needs:
    """What a row needs beyond the maximum of its logits, as bits; 0 is plain greedy decoding.

    Plain integers: an operation on Python's flags takes a microsecond.
    """

    DRAW = 1
    LOGPROBS = 2
    REPETITION = 4
    COUNTS = 8
    CONSTRAINTS = 16
    MIN_TOKENS = 32
    PROCESSORS = 64


# Needs that change logits before temperature is applied.
CHANGES = Needs.REPETITION | Needs.COUNTS | Needs.CONSTRAINTS | Needs.MIN_TOKENS | Needs.PROCESSORS


class ParamsTable:
    """One entry per slot in each vector; `constraints`, `processors` and `stop_ids` hold only slots that need them."""

    def __init__(self, num_slots: int, vocab_size: int, added: int = 0) -> None:
        """added: tokens behind the vocabulary that adapters may add to it."""
        self.vocab_size, self._tokens = vocab_size, vocab_size + added
        self.needs: np.ndarray = np.zeros(num_slots, np.uint8)
        self.temperature: np.ndarray = np.ones(num_slots, np.float32)
        self.top_p: np.ndarray = np.ones(num_slots, np.float32)
        self.top_k: np.ndarray = np.zeros(num_slots, np.int32)
        self.min_p: np.ndarray = np.zeros(num_slots, np.float32)
        self.presence: np.ndarray = np.zeros(num_slots, np.float32)
        self.frequency: np.ndarray = np.zeros(num_slots, np.float32)
        self.repetition: np.ndarray = np.ones(num_slots, np.float32)
        self.stream: np.ndarray = np.zeros(num_slots, np.uint64)  # where that of the seed starts
        self.min_tokens: np.ndarray = np.zeros(num_slots, np.int32)
        self.logprobs: np.ndarray = np.full(num_slots, NO_LOGPROBS, np.int32)
        self.prompt_logprobs: np.ndarray = np.full(num_slots, NO_LOGPROBS, np.int32)
        self.wants_prompt: np.ndarray = np.zeros(num_slots, bool)
        self.constraints: dict[int, Constraints] = {}
        self.processors: dict[int, Processors] = {}
        self.stop_ids: dict[int, np.ndarray] = {}

    def enter(self, init: SlotInit) -> int:
        """Fill a slot's entries; returns what it needs."""
        slot, params = init.slot, init.params
        self.leave(slot)
        if not isinstance(params, SamplingParams):  # it is pooled and never samples
            return 0
        needs = 0
        if params.temperature >= GREEDY_BELOW:
            needs |= Needs.DRAW
            self.temperature[slot] = params.temperature
            self.top_p[slot] = params.top_p
            self.top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else 0
            self.min_p[slot] = params.min_p
            self.stream[slot] = stream_start(np.array([init.seed], np.uint64))[0]
        else:  # what greedy decoding is among rows that draw
            self.temperature[slot], self.top_p[slot], self.min_p[slot] = 1.0, 1.0, 0.0
            self.top_k[slot] = 1
        self.logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        if params.logprobs is not None:
            needs |= Needs.LOGPROBS
        self.wants_prompt[slot] = params.prompt_logprobs is not None
        self.prompt_logprobs[slot] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        self.presence[slot], self.frequency[slot] = params.presence_penalty, params.frequency_penalty
        if params.presence_penalty or params.frequency_penalty:
            needs |= Needs.COUNTS
        self.repetition[slot] = params.repetition_penalty
        if params.repetition_penalty != 1.0:
            needs |= Needs.REPETITION
        constraints = Constraints.of(params, self._tokens)
        if constraints is not None:
            self.constraints[slot] = constraints
            needs |= Needs.CONSTRAINTS
        self.min_tokens[slot] = params.min_tokens
        if params.min_tokens > 0 and init.stop_token_ids:
            ids = sorted(set(init.stop_token_ids))
            self.stop_ids[slot] = np.array([i for i in ids if 0 <= i < self._tokens], np.int64)
            needs |= Needs.MIN_TOKENS
        if params.logits_processors:
            self.processors[slot] = Processors(params.logits_processors)
            needs |= Needs.PROCESSORS
        self.needs[slot] = needs
        return needs

    def union(self, slots: np.ndarray) -> int:
        """What any of these slots needs, as a plain number: those of an enum cost microseconds."""
        return int(np.bitwise_or.reduce(self.needs[slots]))

    def leave(self, slot: int) -> None:
        """Forget what only some slots have."""
        self.needs[slot] = 0
        self.wants_prompt[slot] = False
        self.constraints.pop(slot, None)
        self.processors.pop(slot, None)
        self.stop_ids.pop(slot, None)
