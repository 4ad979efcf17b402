"""`PoolingParams`: what a pooling request (embedding, classification, score, reward) asks for."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import msgspec

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.validation import INT32_MAX, Check, flag, instance_of, integer, integer_in, not_yet, plain_data, show

TASKS = ("encode", "embed", "classify", "score", "reward")


class MatryoshkaModel(Protocol):
    """What `verify` needs to know about a model (a `ModelConfig`)."""

    @property
    def served_model_name(self) -> Any: ...

    @property
    def is_matryoshka(self) -> bool: ...

    @property
    def matryoshka_dimensions(self) -> list[int] | None: ...

    @property
    def embedding_width(self) -> int | None: ...


def _dimensions(name: str, value: Any) -> int:
    number = integer(name, value)
    if number < 1:
        raise VLLMValidationError("Dimensions must be greater than 0", parameter=name, value=value)
    if number > INT32_MAX:
        raise VLLMValidationError(f"{name} must be at most {INT32_MAX}, got {show(number)}.", parameter=name)
    return number


def _task(name: str, value: Any) -> str:
    if value not in TASKS:
        raise VLLMValidationError(
            f"{name} must be one of {', '.join(TASKS)}, got {show(value)}.", parameter=name, value=value
        )
    return str(value)


class PoolingParams(msgspec.Struct, omit_defaults=True, tag="pooling"):
    """Parameters of a pooling request.

    dimensions: shorten embeddings to this size, for models trained for it (Matryoshka).
    additional_data: plain data that is handed to the model's pooler.
    use_cross_encoder: the prompt is a pair of texts for a cross encoder.
    use_activation: False leaves out what the model does last: the normalisation, softmax or sigmoid.
    task: what the answer is used for; a model that is not made for it refuses.
    second_from: the position where the second text of a pair begins; the engine finds it.
    """

    dimensions: int | None = None
    additional_data: Any | None = None
    use_cross_encoder: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any | None = None
    extra_kwargs: dict[str, Any] | None = None
    late_chunking_params: Any | None = None
    truncate_prompt_tokens: int | None = None
    second_from: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, check(name, value))
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise VLLMValidationError(
                f"output_kind of a pooling request must be FINAL_ONLY, got {self.output_kind.name}; "
                "its result comes in one piece.",
                parameter="output_kind",
                value=self.output_kind,
            )

    def clone(self) -> PoolingParams:
        """An independent copy."""
        made = copy.copy(self)
        for name in _MUTABLE:
            value = getattr(made, name)
            if value is not None:
                setattr(made, name, copy.deepcopy(value))
        return made

    def verify(self, model_config: MatryoshkaModel) -> None:
        """Check what depends on the model. Raises ValueError if it cannot return embeddings of this size."""
        if self.dimensions is None:
            return
        if not model_config.is_matryoshka:
            raise VLLMValidationError(
                f'Model "{model_config.served_model_name}" does not support matryoshka representation, '
                "changing output dimensions will lead to poor results. Leave dimensions unset or, if the model was "
                "trained for it, load it with is_matryoshka true in hf_overrides.",
                parameter="dimensions",
                value=self.dimensions,
            )
        supported = model_config.matryoshka_dimensions
        if supported is not None and self.dimensions not in supported:
            raise VLLMValidationError(
                f'Model "{model_config.served_model_name}" only supports {supported} matryoshka dimensions, '
                "use other output dimensions will lead to poor results.",
                parameter="dimensions",
                value=self.dimensions,
            )
        width = model_config.embedding_width
        if width is not None and self.dimensions > width:
            raise VLLMValidationError(
                f'Model "{model_config.served_model_name}" has embeddings of {width} dimensions, '
                f"got dimensions={self.dimensions}.",
                parameter="dimensions",
                value=self.dimensions,
            )


# Fields whose values may be changed in place.
_MUTABLE = ("additional_data", "returned_token_ids", "late_interaction_params", "extra_kwargs", "late_chunking_params")
_CHECKS: dict[str, Check] = {
    "dimensions": _dimensions,
    "additional_data": plain_data,
    "use_cross_encoder": flag,
    "output_kind": instance_of(RequestOutputKind),
    "use_activation": flag,
    "step_tag_id": not_yet(None),
    "returned_token_ids": not_yet(None),
    "task": _task,
    "requires_token_ids": not_yet(False),
    "skip_reading_prefix_cache": not_yet(None),
    "late_interaction_params": not_yet(None),
    "extra_kwargs": not_yet(None),
    "late_chunking_params": not_yet(None),
    "truncate_prompt_tokens": integer_in(-1, INT32_MAX, "must be -1 or a number of tokens from 1 on"),
    "second_from": integer_in(0, INT32_MAX),
}
