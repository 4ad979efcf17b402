"""What a model class may declare about itself, by inheriting from these."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, runtime_checkable

from vllm.model_executor.models.interfaces_base import VllmModelForPooling, default_pooling_type, is_pooling_model

__all__ = [
    "HasInnerState", "IsAttentionFree", "SupportsCrossEncoding", "SupportsLoRA", "SupportsMultiModal", "SupportsPP",
    "VllmModelForPooling", "default_pooling_type", "has_inner_state", "is_attention_free", "is_pooling_model",
    "supports_cross_encoding", "supports_lora", "supports_multimodal", "supports_pp",
]  # fmt: skip


@runtime_checkable
class SupportsLoRA(Protocol):
    """Adapters can be added to the model's linear layers.

    packed_modules_mapping: fused layer -> the checkpoint's layers in it.   supported_lora_modules: layers by name.
    """

    supports_lora: ClassVar[Literal[True]] = True
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    supported_lora_modules: ClassVar[list[str]] = []
    embedding_modules: ClassVar[dict[str, str]] = {}
    embedding_padding_modules: ClassVar[list[str]] = []


@runtime_checkable
class SupportsMultiModal(Protocol):
    """The model takes images, audio or video beside text."""

    supports_multimodal: ClassVar[Literal[True]] = True


@runtime_checkable
class SupportsPP(Protocol):
    """The model's layers can be dealt to pipeline stages."""

    supports_pp: ClassVar[Literal[True]] = True


@runtime_checkable
class SupportsCrossEncoding(Protocol):
    """The model scores two texts in one prompt."""

    supports_cross_encoding: ClassVar[Literal[True]] = True


@runtime_checkable
class HasInnerState(Protocol):
    """The model keeps recurrent state."""

    has_inner_state: ClassVar[Literal[True]] = True


@runtime_checkable
class IsAttentionFree(Protocol):
    """The model has no attention."""

    is_attention_free: ClassVar[Literal[True]] = True


def supports_lora(model: object) -> bool:
    """Whether a model or class declares SupportsLoRA."""
    return isinstance(model, SupportsLoRA)


def supports_multimodal(model: object) -> bool:
    """Whether a model or class declares SupportsMultiModal."""
    return isinstance(model, SupportsMultiModal)


def supports_pp(model: object) -> bool:
    """Whether a model or class declares SupportsPP."""
    return isinstance(model, SupportsPP)


def supports_cross_encoding(model: object) -> bool:
    """Whether a model or class declares SupportsCrossEncoding."""
    return isinstance(model, SupportsCrossEncoding)


def has_inner_state(model: object) -> bool:
    """Whether a model or class declares HasInnerState."""
    return isinstance(model, HasInnerState)


def is_attention_free(model: object) -> bool:
    """Whether a model or class declares IsAttentionFree."""
    return isinstance(model, IsAttentionFree)
