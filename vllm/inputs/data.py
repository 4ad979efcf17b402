"""The forms in which a prompt may be given, and helpers for prompts of encoder-decoder models."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union, cast

# Before 3.11 the standard library's TypedDict knows neither NotRequired nor generic dictionaries.
if sys.version_info >= (3, 11):
    from typing import NotRequired, TypedDict
else:
    from typing_extensions import NotRequired, TypedDict

if TYPE_CHECKING:
    import torch

# Modality ("image", "audio", "video") -> one item or a list of them.
MultiModalDataDict = dict[str, Any]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    multi_modal_data: NotRequired[MultiModalDataDict]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `cache_salt`: only requests with the same salt share its cached prefix."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]
    multi_modal_data: NotRequired[MultiModalDataDict]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as embedding vectors, [tokens, hidden]."""

    prompt_embeds: torch.Tensor
    cache_salt: NotRequired[str]


# One prompt of one model part (encoder or decoder).
SingletonPrompt = Union[str, TextPrompt, TokensPrompt, EmbedsPrompt]  # noqa: UP007 (a value, made on Python 3.10 too)

_Encoder = TypeVar("_Encoder")
_Decoder = TypeVar("_Decoder")


class ExplicitEncoderDecoderPrompt(TypedDict, Generic[_Encoder, _Decoder]):
    """Two prompts of an encoder-decoder model; either may be text or tokens. Without a decoder prompt: None."""

    encoder_prompt: _Encoder
    decoder_prompt: _Decoder | None
    mm_processor_kwargs: NotRequired[dict[str, Any]]


# Any prompt. `PromptInputs` is its older name.
PromptType = Union[SingletonPrompt, ExplicitEncoderDecoderPrompt[Any, Any]]  # noqa: UP007
PromptInputs = PromptType


class LLMInputs(TypedDict):
    """A processed prompt, as input processors of models receive and return it."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    multi_modal_data: NotRequired[MultiModalDataDict | None]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]


class EncoderDecoderLLMInputs(LLMInputs):
    """A processed prompt of an encoder-decoder model."""

    encoder_prompt_token_ids: list[int]
    encoder_prompt: NotRequired[str | None]
    encoder_multi_modal_data: NotRequired[MultiModalDataDict | None]


DecoderOnlyInputs = LLMInputs
EncoderDecoderInputs = EncoderDecoderLLMInputs


def build_explicit_enc_dec_prompt(
    encoder_prompt: _Encoder,
    decoder_prompt: _Decoder | None,
    mm_processor_kwargs: dict[str, Any] | None = None,
) -> ExplicitEncoderDecoderPrompt[_Encoder, _Decoder]:
    """One encoder prompt and one decoder prompt as one."""
    return ExplicitEncoderDecoderPrompt(
        encoder_prompt=encoder_prompt,
        decoder_prompt=decoder_prompt,
        mm_processor_kwargs=mm_processor_kwargs if mm_processor_kwargs is not None else {},
    )


def zip_enc_dec_prompts(
    enc_prompts: Iterable[_Encoder],
    dec_prompts: Iterable[_Decoder | None],
    mm_processor_kwargs: Iterable[dict[str, Any]] | dict[str, Any] | None = None,
) -> list[ExplicitEncoderDecoderPrompt[_Encoder, _Decoder]]:
    """Pair encoder prompts with decoder prompts, one by one.

    `mm_processor_kwargs` is one dictionary for all pairs or one per pair. Raises ValueError for unequal lengths.
    """
    encoders, decoders = list(enc_prompts), list(dec_prompts)
    if mm_processor_kwargs is None or isinstance(mm_processor_kwargs, dict):
        kwargs = [dict(mm_processor_kwargs or {}) for _ in encoders]
    else:
        kwargs = list(mm_processor_kwargs)
    if not len(encoders) == len(decoders) == len(kwargs):
        raise ValueError(
            "zip_enc_dec_prompts needs as many encoder prompts as decoder prompts (and mm_processor_kwargs), "
            f"got {len(encoders)}, {len(decoders)} and {len(kwargs)}"
        )
    return [build_explicit_enc_dec_prompt(*parts) for parts in zip(encoders, decoders, kwargs, strict=True)]


def to_enc_dec_tuple_list(
    enc_dec_prompts: Iterable[ExplicitEncoderDecoderPrompt[_Encoder, _Decoder]],
) -> list[tuple[_Encoder, _Decoder | None]]:
    """The pairs (encoder prompt, decoder prompt) of several prompts."""
    return [(prompt["encoder_prompt"], prompt["decoder_prompt"]) for prompt in enc_dec_prompts]


def is_explicit_encoder_decoder_prompt(prompt: object) -> bool:
    return isinstance(prompt, dict) and "encoder_prompt" in prompt


def token_inputs(
    prompt_token_ids: list[int], prompt: str | None = None, multi_modal_data: MultiModalDataDict | None = None
) -> LLMInputs:
    """Processed inputs from token ids."""
    inputs: dict[str, Any] = {"prompt_token_ids": prompt_token_ids}
    if prompt is not None:
        inputs["prompt"] = prompt
    if multi_modal_data is not None:
        inputs["multi_modal_data"] = multi_modal_data
    return cast("LLMInputs", inputs)
