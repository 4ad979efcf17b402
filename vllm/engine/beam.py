"""Beam search over the core: every step of a beam is a short request that shares its parent's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm.engine.processed import ProcessedRequest, core_request
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.step.messages import CoreOutput, CoreRequest
from vllm.step.result import TokenLogprobs

# A parent outlives its result by this many tokens, so that its children can share its blocks; the results are not used.
# (It waits for them, but not for long; and with two steps in flight one of them is under way before they arrive.)
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
        self._length_penalty = float(params.length_penalty)
        self._temperature = params.temperature
        self._early = request.params.early_stopping is True
        self._steps = min(params.max_tokens, max_model_len - len(request.prompt_token_ids) + 1)
        self._ends = [] if params.ignore_eos else _end_tokens(request.params)
        self._eos = request.params.eos_token_id
        # With a temperature the whole distribution is needed, to normalise it again.
        wanted = max(2 * self._width, request.params.logprobs or 0)
        self._num_logprobs = min(logits_width, logits_width if self._rescales else wanted)
        self._live = [Beam([], [], 0.0)]
        self._ended: list[Beam] = []
        self._step = 0
        self._ids: list[str] = []  # of the requests of the current step, one per live beam
        self._parents: list[str] = []  # of those of the step before
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
        tokens, logprobs = self._extensions()
        totals = np.array([beam.cumulative_logprob for beam in self._live])[:, None] + logprobs
        ends = np.isin(tokens, self._ends)
        scores = self._scores(totals, self._step + np.where(ends, 0, 1))
        if self._step >= self.request.params.min_tokens:
            self._ended += [self._extend(i, j, tokens, totals, scores, "stop") for i, j in np.argwhere(ends).tolist()]
        order = np.argsort(-scores, axis=None, kind="stable")  # ties go to the better parent, then the likelier token
        order = order[~ends.ravel()[order]][: self._width]
        chosen = [divmod(place, tokens.shape[1]) for place in order.tolist()]
        self._parents = self._ids
        parents = [self._ids[i] for i, _ in chosen]
        self._live = [self._extend(i, j, tokens, totals, scores, None) for i, j in chosen]
        self._step += 1
        return [] if self._is_over() else self._requests(parents)

    def spent(self) -> list[str]:
        """The requests that are of no more use: parents of those whose results were there."""
        found = list(self.running_ids.difference(self._ids, self._parents))
        self.running_ids.difference_update(found)
        return found

    def best(self) -> list[Beam]:
        """The beams, best first, once the search is over: those that ended, and those that ran out of steps."""
        found = list(self._ended)
        if self._step >= self._steps:
            for beam in self._live:
                beam.finish_reason = "length"
            found += self._live
        return sorted(found, key=lambda beam: -beam.score)[: self._width]

    def _extensions(self) -> tuple[np.ndarray, np.ndarray]:
        """The most likely next tokens of each live beam with their log probabilities, best first: [beams, tokens]."""
        steps = [self._results[i] for i in range(len(self._live))]
        ids = np.array([step.token_ids for step in steps])
        logprobs = np.array([step.logprobs for step in steps], dtype=np.float64)
        # The first entry is the sampled token, which occurs again among the most likely ones.
        again = ids[:, 1:] == ids[:, :1]
        again[~again.any(axis=1), -1] = True
        kept = np.concatenate([np.ones((len(ids), 1), bool), ~again], axis=1)
        ids, logprobs = ids[kept].reshape(len(ids), -1), logprobs[kept].reshape(len(ids), -1)
        if self._rescales:
            logprobs = logprobs / self._temperature
            logprobs -= logprobs.max(axis=1, keepdims=True)
            logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, : 2 * self._width]
        return np.take_along_axis(ids, order, axis=1), np.take_along_axis(logprobs, order, axis=1)

    def _extend(
        self, parent: int, place: int, tokens: np.ndarray, totals: np.ndarray, scores: np.ndarray, reason: str | None
    ) -> Beam:
        """The live beam `parent` with its extension at `place`."""
        beam, token = self._live[parent], int(tokens[parent, place])
        return Beam(
            tokens=[*beam.tokens, token],
            steps=[*beam.steps, (token, self._results[parent])],
            cumulative_logprob=float(totals[parent, place]),
            finish_reason=reason,
            stop_reason=token if reason and token != self._eos else None,
            score=float(scores[parent, place]),
        )

    def _scores(self, totals: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """lengths: of the outputs."""
        found: np.ndarray = totals / (len(self.request.prompt_token_ids) + lengths) ** self._length_penalty
        return found

    def _score(self, total: float, length: int) -> float:
        return float(self._scores(np.array(total), np.array(length)))

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
                lends=not last,
            )
            for i, beam in enumerate(self._live)
        ]


def _end_tokens(params: SamplingParams) -> list[int]:
    eos = params.eos_token_id
    return [*(params.stop_token_ids or ()), *(() if eos is None else (eos,))]
