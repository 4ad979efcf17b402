"""Log probabilities of tokens and the times of a request, as users receive them; what models and stages hand on."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Logprob:
    """The log probability of one token at one position.

    `rank` counts from 1 (most likely). `decoded_token` is None when detokenization is off.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dictionary per prompt position (None for the first): token id -> Logprob, the prompt's own token first.
PromptLogprobs = list[Optional[dict[int, Logprob]]]  # noqa: UP045 (evaluated at run time on Python 3.10)

# One dictionary per generated token: token id -> Logprob, the sampled token first.
SampleLogprobs = list[dict[int, Logprob]]


@dataclass
class RequestMetrics:
    """When things happened to a request: points in time in seconds since the epoch, durations in seconds."""

    arrival_time: float
    last_token_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    time_in_queue: float | None
    finished_time: float | None = None
    scheduler_time: float | None = None
    model_forward_time: float | None = None
    model_execute_time: float | None = None
    spec_token_acceptance_counts: list[int] | None = None
    num_generation_tokens: int = 0  # of all sequences, once the request has finished

    # The same moments by the names of later releases.

    @property
    def queued_ts(self) -> float:
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float:
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        return self.last_token_time


@dataclass
class IntermediateTensors:
    """What one pipeline stage hands to the next, by name. Models name it in their signatures."""

    tensors: dict[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.tensors[key] = value

    def items(self) -> ItemsView[str, Tensor]:
        """(name, tensor) pairs."""
        return self.tensors.items()

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass
class PoolingSequenceGroupOutput:
    """What was pooled of one prompt."""

    data: Any


@dataclass
class EmbeddingSequenceGroupOutput:
    """The same, by its older name."""

    embeddings: Any

    @property
    def data(self) -> Any:
        return self.embeddings


class PoolerOutput(list[Any]):
    """What a pooler makes of prompts: a tensor for each. `outputs` has them as older poolers return them."""

    def __init__(self, outputs: Iterable[Any] = ()) -> None:
        kinds = PoolingSequenceGroupOutput | EmbeddingSequenceGroupOutput
        super().__init__(output.data if isinstance(output, kinds) else output for output in outputs)

    @property
    def outputs(self) -> list[PoolingSequenceGroupOutput]:
        return [PoolingSequenceGroupOutput(data) for data in self]
