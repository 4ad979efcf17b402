"""Prompts: the forms they come in, and what each says."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from vllm.engine.processed import RequestInput
from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType, is_explicit_encoder_decoder_prompt
from vllm.inputs.parse import parse_singleton_prompt
from vllm.logger import init_logger
from vllm.pooling_params import PoolingParams
from vllm.validation import show

logger = init_logger(__name__)

_FEW = 200  # numbers, whose extremes Python finds sooner than numpy
# What a prompt may say: TextPrompt, TokensPrompt, and what is refused with a reason of its own.
_PROMPT_KEYS = frozenset(
    {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids",
     "token_type_ids", "prompt_embeds"}
)  # fmt: skip


class Parsed(NamedTuple):
    """A prompt whose form is known. Exactly one of text and token ids has to be worked on."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None
    bounds: tuple[int, int] | None = None  # the smallest and the largest of the ids, where they are known
    second_from: int | None = None  # the position from which the ids are those of a pair's second text


def parse(prompt: PromptType, pools: bool) -> Parsed:
    """pools: the model does not generate. Raises ValueError or TypeError for what is no prompt."""
    if type(prompt) is str:
        return Parsed(prompt, None, None)
    if type(prompt) is dict and len(prompt) == 1 and isinstance(ids := prompt.get("prompt_token_ids"), list):
        token_ids, bounds = plain_ids(ids)
        return Parsed(None, token_ids, None, bounds)
    prompt = listed(prompt)
    if isinstance(prompt, (list, tuple)):
        token_ids, bounds = plain_ids(prompt)
        return Parsed(None, token_ids, None, bounds)
    if is_explicit_encoder_decoder_prompt(prompt):
        raise VLLMValidationError("Cannot pass encoder-decoder prompt to decoder-only models", parameter="prompt")
    if isinstance(prompt, Mapping):
        # Older code writes both keys and leaves one of them None.
        prompt = {key: value for key, value in prompt.items() if value is not None}  # type: ignore[assignment]
    found = parse_singleton_prompt(prompt)  # type: ignore[arg-type]
    if found["type"] == "str":
        return Parsed(found["content"], None, None)
    if found["type"] == "embeds":
        raise VLLMValidationError(
            "prompt_embeds are not enabled. Pass a text, or token ids as prompt_token_ids.",
            parameter="prompt_embeds",
        )
    content: Mapping[str, Any] = found["content"]
    refuse_what_needs_other_models(content)
    types = content.get("token_type_ids")
    if types is not None and not pools:
        raise VLLMValidationError(
            "The prompt has token_type_ids, which only cross-encoder models read.", parameter="token_type_ids"
        )
    for name in content.keys() - _PROMPT_KEYS:
        _warn_of_key(show(name))
    salt, text = content.get("cache_salt"), content.get("prompt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise VLLMValidationError(f"cache_salt must be a non-empty string, got {salt!r}.", parameter="cache_salt")
    if text is not None and not isinstance(text, str):
        raise VLLMValidationError(f"prompt must be a string, got {type(text).__name__}.", parameter="prompt")
    if found["type"] == "tokens":
        token_ids, bounds = plain_ids(content["prompt_token_ids"])
        second = None if types is None else _second_from(types, len(token_ids))
        return Parsed(text, token_ids, salt, bounds, second)
    return Parsed(text, None, salt)


def listed(value: Any) -> Any:
    """The list that an array of numpy, torch or pandas holds, or the ids that a tokenizer of transformers has returned
    (`apply_chat_template` returns an encoding, where it returned a list); anything else as it is.
    """
    if isinstance(value, Mapping) and "input_ids" in value:
        value = value["input_ids"]
    return value.tolist() if hasattr(value, "tolist") else value


def token_list(token_ids: Any) -> list[int]:
    """`token_ids` as a list of plain integers; ValueError if it is anything else."""
    return plain_ids(token_ids)[0]


def plain_ids(token_ids: Any) -> tuple[list[int], tuple[int, int] | None]:
    """`token_list`, and the smallest and the largest id if they are known."""
    token_ids = listed(token_ids)
    if not isinstance(token_ids, (list, tuple)):
        raise VLLMValidationError(
            f"prompt_token_ids must be a list of token ids, got {type(token_ids).__name__}.",
            parameter="prompt_token_ids",
        )
    found = _through_an_array(token_ids)
    if found is not None:
        return found
    for position, item in enumerate(token_ids):
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise VLLMValidationError(
                f"prompt_token_ids must contain only integers, got {show(repr(item))} at position {position}.",
                parameter="prompt_token_ids",
                value=item,
            )
    return [int(item) for item in token_ids], None


def _through_an_array(token_ids: list[Any] | tuple[Any, ...]) -> tuple[list[int], tuple[int, int]] | None:
    """`plain_ids` in half the time, for what is certainly a list of integers, else None.

    An array takes nothing but integers, and True and False, which it holds as 1 and 0: where those occur, one must
    look closely.
    """
    try:
        plain = array("i", token_ids)
    except (TypeError, OverflowError):
        return None
    if not plain:
        return None
    if len(plain) < _FEW:
        low, high = int(min(token_ids)), int(max(token_ids))
    else:
        numbers: np.ndarray = np.frombuffer(plain, np.int32)
        low, high = int(numbers.min()), int(numbers.max())
    return (plain.tolist(), (low, high)) if low > 1 or set(map(type, token_ids)) <= {int} else None


def _second_from(types: Any, length: int) -> int | None:
    """Where the second text begins, for the types of a pair's tokens: zeros, then ones. None for zeros only."""
    plain = token_list(types)
    second = plain.index(1) if 1 in plain else length
    if len(plain) != length or any(plain[:second]) or set(plain[second:]) - {1}:
        raise VLLMValidationError(
            "token_type_ids must have one entry per token, zeros for the first text and ones for the second behind it.",
            parameter="token_type_ids",
        )
    return second if second < length else None


def refuse_what_needs_other_models(content: Mapping[str, Any]) -> None:
    for name in ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"):
        if content.get(name):
            raise VLLMValidationError(
                f"The prompt has {name}, but the model is not multimodal: it takes text only.", parameter=name
            )


@lru_cache(maxsize=256)  # once for each name
def _warn_of_key(name: str) -> None:
    logger.warning("The key %r of a prompt is not known and changes nothing; known are %s.", name, sorted(_PROMPT_KEYS))


def tokenization_options(given: Mapping[str, Any] | None, pools: bool = False) -> tuple[bool, int | None]:
    """`add_special_tokens` and `truncate_prompt_tokens` of tokenization_kwargs. Raises ValueError for any other.

    pools: the names of Hugging Face are known, too, `truncation` with `max_length`, which keep a prompt's head, as is
    done for what is pooled.
    """
    options = dict(given or {})
    special = options.pop("add_special_tokens", True)
    truncate = options.pop("truncate_prompt_tokens", None)
    if pools and options.pop("truncation", False):
        length = options.pop("max_length", None)
        truncate = length if truncate is None else truncate
        truncate = -1 if truncate is None else truncate
    if options:
        raise ValueError(
            f"Unknown tokenization_kwargs: {', '.join(map(str, options))}. "
            "There are add_special_tokens and truncate_prompt_tokens."
        )
    return special, truncate


def with_options(params: Any, given: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """Parameters of a request with the truncation of tokenization_kwargs, and its `add_special_tokens`."""
    special, truncate = tokenization_options(given, pools=isinstance(params, PoolingParams))
    if truncate is not None:
        params = params.clone()
        params.truncate_prompt_tokens = truncate
        params.__post_init__()
    return params, special


def first_step(requests: Sequence[RequestInput], max_tokens: int, max_requests: int, block_size: int) -> int:
    """How many of the requests fill a step, if the others can be looked at while it runs; all of them otherwise.

    That is so if all prompts are lists of token ids, and no other prompt begins like one in the step: the plan of a
    step should know of everybody who shares a prefix with it.
    """
    heads: set[tuple[int, ...]] = set()
    tokens = 0
    for i, request in enumerate(requests):
        prompt: Any = request.prompt
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids")
        if not isinstance(prompt, list) or set(map(type, head := tuple(prompt[:block_size]))) != {int}:
            return len(requests)
        if tokens < max_tokens and i < max_requests:
            tokens += len(prompt)
            filled = i + 1
            heads.add(head)
        elif head in heads:
            return len(requests)
    return filled if requests else 0
