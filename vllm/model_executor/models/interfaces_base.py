"""What every model class from outside the tree has, as protocols; and how a class says that it pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from vllm.config.pooler import POOLING_TYPES

DEFAULT_POOLING_TYPE = "default_pooling_type"  # the attribute in which a class keeps it
Class = TypeVar("Class", bound=type[nn.Module])


@runtime_checkable
class VllmModel(Protocol):
    """A model: tokens and positions in, hidden states out."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor: ...


@runtime_checkable
class VllmModelForTextGeneration(VllmModel, Protocol):
    """One that makes logits of hidden states."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None: ...


@runtime_checkable
class VllmModelForPooling(VllmModel, Protocol):
    """One that pools by itself: `pooler(hidden_states, pooling_metadata)`, see `layers/pooler.py`."""

    is_pooling_model: ClassVar[Literal[True]] = True
    pooler: Any


def is_text_generation_model(model: object) -> bool:
    """Whether a model or class makes logits."""
    return callable(getattr(model, "compute_logits", None))


def is_pooling_model(model: object) -> bool:
    """Whether a model or class pools by itself."""
    return getattr(model, "is_pooling_model", False) is True or hasattr(model, "pooler")


def default_pooling_type(
    pooling_type: str | None = None, *, seq_pooling_type: str | None = None, tok_pooling_type: str | None = None
) -> Callable[[Class], Class]:
    """A decorator of model classes: how they pool where neither the user nor the model's files say it.

    tok_pooling_type: of answers with a row per token, where only ALL is usual, so that it counts alone.
    """
    kind = pooling_type or seq_pooling_type or tok_pooling_type
    if kind is None or kind.upper() not in POOLING_TYPES:
        raise ValueError(f"default_pooling_type must be one of {', '.join(POOLING_TYPES)}, got {kind!r}.")

    def mark(cls: Class) -> Class:
        setattr(cls, DEFAULT_POOLING_TYPE, kind.upper())
        return cls

    return mark


def get_default_seq_pooling_type(model: object) -> str:
    """What a model or class says, LAST where it says nothing."""
    found: str = getattr(model, DEFAULT_POOLING_TYPE, "LAST")
    return found
