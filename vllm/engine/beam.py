"""Beam search over the core: every step of a beam is a short request that shares its parent's cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm.engine.input_processor import ProcessedRequest, core_request
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.step.messages import CoreOutput, CoreRequest
from vllm.step.result import TokenLogprobs

# A parent outlives its result by this many tokens, so that its children can share its blocks; the results are not used.
# (With two steps in flight one of them is under way before the children arrive.)
PARENT_EXTRA_TOKENS = 2


@dataclass(slots=True)
class Beam:
    """The output tokens of one hypothesis, and what was known about each: (chosen token, logprobs of the step)."""

    tokens: list[int]
    steps: list[tuple[int, TokenLogprobs]]
    cumulative_logprob: float
    finish_reason: str | None = None
    stop_reason: int | None = None
    score: float = field(default=0.0)


class _Candidate(NamedTuple):
    score: float
    parent: int
    token: int
    logprob: float


class BeamSearch:
    """The search of one prompt.

    Each live beam is extended by its 2 * beam_width most likely tokens; the beam_width best of all of them go on, those
    that end are set aside. A hypothesis scores cumulative log probability / length ** length_penalty, where the length
    counts prompt and output but not the final end-of-sequence token. The search ends after max_tokens steps, or as soon
    as nothing alive can become better than the beam_width best that have ended; with early_stopping=True as soon as
    beam_width have ended.
    """

    def __init__(self, request: ProcessedRequest, logits_width: int, max_model_len: int) -> None:
        assert request.beams is not None
        params: BeamSearchParams = request.beams
        self.request = request
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._temperature = params.temperature
        self._early = request.params.early_stopping is True
        self._steps = min(params.max_tokens, max_model_len - len(request.prompt_token_ids) + 1)
        self._ends = frozenset() if params.ignore_eos else frozenset(_end_tokens(request.params))
        self._eos = request.params.eos_token_id
        # With a temperature the whole distribution is needed, to normalise it again.
        wanted = max(2 * self._width, request.params.logprobs or 0)
        self._num_logprobs = min(logits_width, logits_width if self._rescales else wanted)
        self._live = [Beam([], [], 0.0)]
        self._ended: list[Beam] = []
        self._step = 0
        self._ids: list[str] = []  # of the requests of the current step, one per live beam
        self._waiting: dict[str, int] = {}  # those without a result yet -> index of their beam
        self._results: dict[int, TokenLogprobs] = {}
        self.running_ids: set[str] = set()  # every request the core may still have, parents included
        self.error: str | None = None

    @property
    def _rescales(self) -> bool:
        return self._temperature not in (0.0, 1.0)

    def start(self) -> list[CoreRequest]:
        """The requests of the first step."""
        return self._requests(parents=[None])

    def take(self, output: CoreOutput) -> bool:
        """Note a result. True if it completed the step: call `advance` then."""
        if output.finish_reason is not None:
            self.running_ids.discard(output.request_id)
        beam = self._waiting.get(output.request_id)
        if beam is None:
            return False  # a parent that only lends its cache
        if output.finish_reason in ("error", "abort"):
            self.error = output.error or "aborted"
            return True
        if not output.logprobs:
            return False
        self._results[beam] = output.logprobs[0]
        del self._waiting[output.request_id]
        return not self._waiting

    def advance(self) -> list[CoreRequest]:
        """Choose the next beams. Returns the requests of the next step, none if the search is over."""
        candidates: list[_Candidate] = []
        at_least = self.request.params.min_tokens
        for parent, beam in enumerate(self._live):
            for token, logprob in self._extensions(self._results[parent]):
                total = beam.cumulative_logprob + logprob
                ends = token in self._ends
                if ends and len(beam.tokens) < at_least:
                    continue
                length = len(beam.tokens) + (0 if ends else 1)
                candidate = _Candidate(self._score(total, length), parent, token, total)
                if ends:
                    self._ended.append(self._extend(candidate, "stop"))
                else:
                    candidates.append(candidate)
        candidates.sort(key=lambda c: -c.score)  # stable: ties go to the better parent, then to the likelier token
        chosen = candidates[: self._width]
        parents = [self._ids[c.parent] for c in chosen]
        self._live = [self._extend(c, None) for c in chosen]
        self._step += 1
        return [] if self._is_over() else self._requests(parents)

    def best(self) -> list[Beam]:
        """The beams, best first, once the search is over: those that ended, and those that ran out of steps."""
        found = list(self._ended)
        if self._step >= self._steps:
            for beam in self._live:
                beam.finish_reason = "length"
            found += self._live
        return sorted(found, key=lambda beam: -beam.score)[: self._width]

    def _extensions(self, step: TokenLogprobs) -> list[tuple[int, float]]:
        """The most likely next tokens with their log probabilities, best first."""
        count = 2 * self._width
        if not self._rescales:
            # The first entry is the sampled token, which occurs again among the most likely ones.
            pairs = dict(zip(step.token_ids, step.logprobs, strict=True))
            return sorted(pairs.items(), key=lambda pair: -pair[1])[:count]
        ids = np.array(step.token_ids[1:])
        scaled = np.array(step.logprobs[1:], dtype=np.float64) / self._temperature
        scaled -= scaled.max()
        scaled -= np.log(np.exp(scaled).sum())
        order = np.argsort(-scaled, kind="stable")[:count]
        return [(int(ids[i]), float(scaled[i])) for i in order]

    def _extend(self, candidate: _Candidate, finish_reason: str | None) -> Beam:
        parent = self._live[candidate.parent]
        stop_reason = candidate.token if finish_reason and candidate.token != self._eos else None
        return Beam(
            tokens=[*parent.tokens, candidate.token],
            steps=[*parent.steps, (candidate.token, self._results[candidate.parent])],
            cumulative_logprob=candidate.logprob,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            score=candidate.score,
        )

    def _score(self, cumulative_logprob: float, num_output_tokens: int) -> float:
        length = float(len(self.request.prompt_token_ids) + num_output_tokens)
        return cumulative_logprob / math.pow(length, self._length_penalty)

    def _is_over(self) -> bool:
        if self._step >= self._steps or not self._live:
            return True
        if len(self._ended) < self._width:
            return False
        if self._early:
            return True
        # Log probabilities only fall; the most that a beam can gain is by growing to the full length (with a negative
        # penalty, by ending now).
        length = self._steps if self._length_penalty > 0 else self._step
        bound = self._score(max(beam.cumulative_logprob for beam in self._live), length)
        kept = sorted((beam.score for beam in self._ended), reverse=True)[: self._width]
        return kept[-1] >= bound

    def _requests(self, parents: Sequence[str | None]) -> list[CoreRequest]:
        """One request per live beam, whose first token tells the logprobs that follow it."""
        last = self._step + 1 >= self._steps
        params = SamplingParams(
            temperature=0.0, max_tokens=1 if last else 1 + PARENT_EXTRA_TOKENS, logprobs=self._num_logprobs
        )
        self._ids = [f"{self._step}_{i}_{self.request.request_id}" for i in range(len(self._live))]
        self._waiting = {request_id: i for i, request_id in enumerate(self._ids)}
        self._results = {}
        self.running_ids.update(self._ids)
        return [
            core_request(
                self.request,
                request_id=self._ids[i],
                params=params,
                fork_of=parents[i],
                token_ids=self.request.prompt_token_ids + beam.tokens,
            )
            for i, beam in enumerate(self._live)
        ]


def _end_tokens(params: SamplingParams) -> list[int]:
    eos = params.eos_token_id
    return [*(params.stop_token_ids or ()), *(() if eos is None else (eos,))]
