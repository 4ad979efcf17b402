"""What a request returns: generated completions, or pooled data (embeddings, class probabilities, scores)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.sequence import PromptLogprobs, RequestMetrics, SampleLogprobs

if TYPE_CHECKING:
    import torch

logger = init_logger(__name__)


def __getattr__(name: str) -> Any:
    """`BeamSearchOutput`, whose home imports this module."""
    if name == "BeamSearchOutput":
        from vllm.beam_search import BeamSearchOutput

        return BeamSearchOutput
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


Output = TypeVar("Output")
Form = TypeVar("Form")


@dataclass
class CompletionOutput:
    """One of the `n` sequences that a request generates.

    finish_reason: None while it runs, then "stop", "length" or "abort".
    stop_reason: the stop string or stop token id that ended it; None if it was the end-of-sequence token.
    cumulative_logprob, logprobs: None unless log probabilities were asked for.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, newer: CompletionOutput) -> None:
        """Add what `newer` brings after this output: its text and tokens are the continuation of these."""
        self.text += newer.text
        self.token_ids = [*self.token_ids, *newer.token_ids]
        if newer.logprobs:
            self.logprobs = self.logprobs + newer.logprobs if self.logprobs else newer.logprobs
        self.cumulative_logprob = newer.cumulative_logprob
        self.finish_reason = newer.finish_reason
        self.stop_reason = newer.stop_reason

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
            f"cumulative_logprob={self.cumulative_logprob}, logprobs={self.logprobs}, "
            f"finish_reason={self.finish_reason}, stop_reason={self.stop_reason})"
        )


class RequestOutput:
    """The state of a generation request: its prompt and all of its `n` outputs.

    prompt_logprobs: one entry per prompt token, the first None; each maps token ids to `Logprob`, its own first.
    num_cached_tokens: how many prompt tokens were found in the prefix cache.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestMetrics | None = None,
        lora_request: LoRARequest | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        *,
        multi_modal_placeholders: dict[str, Any] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        **later: Any,
    ) -> None:
        if later:  # of programs that are newer than this version
            logger.warning("RequestOutput: these arguments have no effect in this version: %s.", ", ".join(later))
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.multi_modal_placeholders = multi_modal_placeholders or {}
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.kv_transfer_params = kv_transfer_params

    def add(self, next_output: RequestOutput, aggregate: bool = True) -> None:
        """Merge a later output of the same request into this one.

        With `aggregate` the later output is a delta and continues this one; without, its completions replace these.
        """
        self.finished |= next_output.finished
        self.metrics = next_output.metrics or self.metrics
        self.kv_transfer_params = next_output.kv_transfer_params
        if self.num_cached_tokens is None:
            self.num_cached_tokens = next_output.num_cached_tokens
        if self.prompt_logprobs is None:
            self.prompt_logprobs = next_output.prompt_logprobs
        position_of = {output.index: i for i, output in enumerate(self.outputs)}
        for newer in next_output.outputs:
            position = position_of.get(newer.index)
            if position is None:
                self.outputs.append(newer)
            elif aggregate:
                self.outputs[position].append(newer)
            else:
                self.outputs[position] = newer

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, encoder_prompt={self.encoder_prompt!r}, "
            f"encoder_prompt_token_ids={self.encoder_prompt_token_ids}, prompt_logprobs={self.prompt_logprobs}, "
            f"outputs={self.outputs}, finished={self.finished}, metrics={self.metrics}, "
            f"lora_request={self.lora_request}, num_cached_tokens={self.num_cached_tokens}, "
            f"multi_modal_placeholders={self.multi_modal_placeholders})"
        )


class PoolingOutput:
    """The tensor that a pooling model returns. `array` holds the same numbers for numpy, without importing torch."""

    def __init__(self, data: torch.Tensor | np.ndarray) -> None:
        self._data: Any = data

    @property
    def data(self) -> torch.Tensor:
        if isinstance(self._data, np.ndarray):
            import torch

            self._data = torch.from_numpy(self._data)
        tensor: torch.Tensor = self._data
        return tensor

    @property
    def array(self) -> np.ndarray:
        found: np.ndarray = self._data if isinstance(self._data, np.ndarray) else self._data.numpy()
        return found

    @property
    def embedding(self) -> list[float]:
        """The numbers, as `encode` returned them in early versions; `embed` returns them today."""
        return _vector(self, "embedding")

    def __repr__(self) -> str:
        return f"PoolingOutput(data={self.data})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and bool((self.data == other.data).all())

    __hash__ = None  # type: ignore[assignment]  # it compares by the contents of a mutable tensor


class PoolingRequestOutput(Generic[Output]):
    """The result of a pooling request. `outputs` is its data: a `PoolingOutput` or one of the special forms below.

    error: why there is none; None for a result.
    """

    def __init__(
        self,
        request_id: str,
        outputs: Output,
        prompt_token_ids: list[int],
        finished: bool,
        num_cached_tokens: int = 0,
        error: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.error = error
        self.outputs = outputs
        self.prompt_token_ids = prompt_token_ids
        self.finished = finished
        self.num_cached_tokens = num_cached_tokens

    def _in_form(self, kind: Callable[..., Form], outputs: Any) -> Form:
        """The same result with its data in a special form; `kind` is a subclass of this class."""
        return kind(self.request_id, outputs, self.prompt_token_ids, self.finished, self.num_cached_tokens)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(request_id={self.request_id!r}, outputs={self.outputs!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, finished={self.finished})"
        )


def failure_of(output: RequestOutput | PoolingRequestOutput[Any]) -> Any:
    """Why the engine could not finish a request, None if it could (or still may)."""
    if isinstance(output, PoolingRequestOutput):
        return output.error
    return next((c.stop_reason or "no reason is known" for c in output.outputs if c.finish_reason == "error"), None)


def _vector(pooled: PoolingOutput, what: str) -> list[float]:
    """The numbers of a pooled vector."""
    data = pooled.array
    if data.ndim != 1:
        raise ValueError(f"pooled_data should be a 1-D {what} vector, got {data.ndim} dimensions")
    numbers: list[float] = data.tolist()
    return numbers


@dataclass
class EmbeddingOutput:
    """An embedding vector."""

    embedding: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> EmbeddingOutput:
        return EmbeddingOutput(_vector(pooling_output, "embedding"))

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of an embedding request."""

    @staticmethod
    def from_base(request_output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        return request_output._in_form(EmbeddingRequestOutput, EmbeddingOutput.from_base(request_output.outputs))


@dataclass
class ClassificationOutput:
    """The probability of each class."""

    probs: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ClassificationOutput:
        return ClassificationOutput(_vector(pooling_output, "probability"))

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The result of a classification request."""

    @staticmethod
    def from_base(request_output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        return request_output._in_form(
            ClassificationRequestOutput, ClassificationOutput.from_base(request_output.outputs)
        )


@dataclass
class ScoringOutput:
    """The similarity of two texts."""

    score: float

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ScoringOutput:
        data = pooling_output.array.squeeze()
        if data.ndim != 0:
            raise ValueError(f"pooled_data should be a scalar score, got shape {tuple(data.shape)}")
        return ScoringOutput(data.item())

    def __repr__(self) -> str:
        return f"ScoringOutput(score={self.score})"


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of a scoring request."""

    @staticmethod
    def from_base(request_output: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        return request_output._in_form(ScoringRequestOutput, ScoringOutput.from_base(request_output.outputs))
