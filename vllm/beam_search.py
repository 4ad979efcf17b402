"""Beams of a beam search and their score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.inputs import MultiModalDataDict
from vllm.lora.request import LoRARequest
from vllm.sequence import Logprob


@dataclass
class BeamSearchSequence:
    """One beam: the tokens of prompt and output, and the log probability of each output token."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    multi_modal_data: MultiModalDataDict | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    lora_request: LoRARequest | None = None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def get_beam_search_score(
    tokens: list[int], cumulative_logprob: float, eos_token_id: int, length_penalty: float = 1.0
) -> float:
    """The cumulative log probability divided by length ** length_penalty; a final end-of-sequence token is not counted.

    `tokens` holds prompt and output, as in Hugging Face's beam scorer.
    """
    length = len(tokens)
    if tokens and tokens[-1] == eos_token_id:
        length -= 1
    # A sequence of nothing but its end has no length to divide by.
    return float(cumulative_logprob / max(length, 1) ** length_penalty)


def create_sort_beams_key_function(eos_token_id: int, length_penalty: float) -> Callable[[BeamSearchSequence], float]:
    """The key by which beams are sorted: their score, higher is better."""

    def score(beam: BeamSearchSequence) -> float:
        return get_beam_search_score(beam.tokens, beam.cum_logprob, eos_token_id, length_penalty)

    return score
