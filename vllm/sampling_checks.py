"""The range of each field of `SamplingParams`, with the wording of its errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.structured_output.params import GuidedDecodingParams, StructuredOutputsParams
from vllm.validation import (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    MAX_LIST_LENGTH,
    UINT64_MAX,
    Check,
    fail,
    finite,
    flag,
    instance_of,
    integer,
    integer_in,
    not_yet,
    number_where,
    plain_dict,
    show,
    string_list,
    text,
    token_ids,
)

logger = init_logger(__name__)

_LOWEST_TEMPERATURE = 1e-2
_LARGEST_BIAS = 100.0
_ID = re.compile(r"0|[1-9][0-9]{0,18}")


def _count_of_sequences(name: str, value: Any) -> int:
    expected = "an integer, got" if name == "best_of" else "an int, but is of type"
    try:
        number = integer(name, value)
    except VLLMValidationError:
        raise VLLMValidationError(f"{name} must be {expected} {type(value)}", parameter=name, value=value) from None
    if number < 1:
        dot = "" if name == "best_of" else "."
        raise VLLMValidationError(f"{name} must be at least 1, got {show(number)}{dot}", parameter=name, value=value)
    largest = envs.VLLM_MAX_N_SEQUENCES
    if number > largest:
        raise VLLMValidationError(
            f"{name} must be at most {largest}, got {show(number)}. "
            "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable.",
            parameter=name,
            value=value,
        )
    return number


def _temperature(name: str, value: Any) -> float:
    temperature = finite(name, value)
    if temperature < 0:
        raise fail(name, value, "must be non-negative")
    if 0 < temperature < _LOWEST_TEMPERATURE:
        logger.warning(
            "temperature %s is less than %s, which may cause numerical errors in tensors. It was raised to %s.",
            temperature,
            _LOWEST_TEMPERATURE,
            _LOWEST_TEMPERATURE,
        )
        return _LOWEST_TEMPERATURE
    return temperature


def _top_k(name: str, value: Any) -> int:
    try:
        number = integer(name, value)
    except VLLMValidationError:
        raise TypeError(f"top_k must be an integer, got {type(value).__name__}") from None
    if number < -1:
        raise fail(name, number, "must be -1 (disable), or at least 1")
    if number > INT32_MAX:
        raise fail(name, number, f"must be at most {INT32_MAX}")
    return number


def _seed(name: str, value: Any) -> int | None:
    number = integer(name, value)
    if not INT64_MIN <= number <= UINT64_MAX:
        raise fail(name, number, "must be between -2**63 and 2**64 - 1")
    return None if number == -1 else number


def _stop(name: str, value: Any) -> list[str]:
    strings = [text(name, value)] if isinstance(value, str) else string_list(name, value)
    if not all(strings):
        raise VLLMValidationError("stop cannot contain an empty string.", parameter=name, value=value)
    return strings


def _bad_words(name: str, value: Any) -> list[str]:
    words = string_list(name, value)
    if not all(words):
        raise VLLMValidationError(
            f"bad_words cannot contain an empty string. Got bad_words={show(value)}", parameter=name, value=value
        )
    return words


_token_count = integer_in(1, INT64_MAX)


def _max_tokens(name: str, value: Any) -> int | None:
    return None if value is None else int(_token_count(name, value))


_logprob_range = integer_in(-1, INT32_MAX, too_low="must be non-negative or -1")


def _logprobs(name: str, value: Any) -> int:
    return 1 if value is True else int(_logprob_range(name, value))


def _truncate(name: str, value: Any) -> int:
    number = integer(name, value)
    if number < 1 and number != -1:
        raise VLLMValidationError(
            f"{name} must be >= 1, got {show(number)} (-1: as many tokens as the model takes).",
            parameter=name,
            value=value,
        )
    return min(number, INT64_MAX)


def _logits_processors(name: str, value: Any) -> list[Callable[..., Any]]:
    if not isinstance(value, (list, tuple)) or not all(callable(item) for item in value):
        raise VLLMValidationError(
            f"{name} must be a list of functions (token_ids, logits) -> logits or "
            f"(prompt_token_ids, token_ids, logits) -> logits, got {show(value)}.",
            parameter=name,
            value=value,
        )
    return list(value)


def _id_in_text(key: str) -> int:
    """The token id that a key of a JSON object is, in the one way to write it: no sign, space, zero in front, mark."""
    if not _ID.fullmatch(key):
        raise ValueError(key)
    return int(key)


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise VLLMValidationError(f"{name} must be a dict, but is of type {type(value)}", parameter=name, value=value)
    if len(value) > MAX_LIST_LENGTH:
        raise fail(name, f"{len(value)} of them", f"must have at most {MAX_LIST_LENGTH} entries")
    biases: dict[int, float] = {}
    wrong_keys = []
    for key, bias in value.items():
        try:
            token_id = _id_in_text(key) if isinstance(key, str) else integer(name, key)
        except ValueError:
            wrong_keys.append(key)
            continue
        if not 0 <= token_id <= INT32_MAX:
            raise fail(name, token_id, f"must have token ids from 0 to {INT32_MAX} as keys")
        biases[token_id] = min(_LARGEST_BIAS, max(-_LARGEST_BIAS, finite(f"{name}[{token_id}]", bias)))
    if wrong_keys:
        raise VLLMValidationError(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {show(wrong_keys)}",
            parameter=name,
            value=value,
        )
    return biases


def _allowed_token_ids(name: str, value: Any) -> list[int]:
    ids = token_ids(name, value)
    if not ids:
        raise VLLMValidationError("allowed_token_ids is not None and empty!", parameter=name, value=value)
    return ids


def _early_stopping(name: str, value: Any) -> bool | str:
    if value is True or value is False or (isinstance(value, str) and value == "never"):
        return value
    raise fail(name, value, "must be True, False, or 'never'")


def _stream_interval(name: str, value: Any) -> Any:
    number = integer(name, value)
    if number < 1:
        raise fail(name, number, "must be at least 1")
    return number if number == 1 else not_yet(None)(name, number)


def _id_set(name: str, value: Any) -> set[int]:
    if not isinstance(value, (set, frozenset, list, tuple)):
        raise VLLMValidationError(f"{name} must be a set, but is of type {type(value)}", parameter=name, value=value)
    return set(token_ids(name, list(value)))


def _id_lists(name: str, value: Any) -> list[list[int]]:
    if not isinstance(value, (list, tuple)):
        raise VLLMValidationError(f"{name} must be a list, but is of type {type(value)}", parameter=name, value=value)
    return [token_ids(name, item) for item in value]


_penalty = number_where(lambda x: -2 <= x <= 2, "must be in [-2, 2]")

FIELD_CHECKS: dict[str, Check] = {
    "n": _count_of_sequences,
    "best_of": _count_of_sequences,
    "_real_n": not_yet(None),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "repetition_penalty": number_where(lambda x: x > 1e-37, "must be greater than zero"),
    "temperature": _temperature,
    "top_p": number_where(lambda x: 0 < x <= 1, "must be in (0, 1]"),
    "top_k": _top_k,
    "min_p": number_where(lambda x: 0 <= x <= 1, "must be in [0, 1]"),
    "seed": _seed,
    "stop": _stop,
    "stop_token_ids": token_ids,
    "ignore_eos": flag,
    "max_tokens": _max_tokens,
    "min_tokens": integer_in(0, INT32_MAX, too_low="must be greater than or equal to 0"),
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "detokenize": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "logits_processors": _logits_processors,
    "include_stop_str_in_output": flag,
    "truncate_prompt_tokens": _truncate,
    "output_text_buffer_length": integer_in(0, INT32_MAX),
    "_all_stop_token_ids": _id_set,
    "guided_decoding": instance_of(GuidedDecodingParams),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "extra_args": plain_dict,
    "bad_words": _bad_words,
    "_bad_words_token_ids": _id_lists,
    "use_beam_search": flag,
    "length_penalty": finite,
    "early_stopping": _early_stopping,
    "structured_outputs": instance_of(StructuredOutputsParams),
    "skip_clone": flag,
    "watermarking": not_yet(None),
    "prompt_logprob_token_ids": not_yet(None),
    "prompt_logprob_start": not_yet(None),
    "logprob_token_ids": not_yet(None),
    "flat_logprobs": flag,
    "stream_interval": _stream_interval,
    "skip_reading_prefix_cache": not_yet(None),
    "thinking_token_budget": not_yet(None),
    "repetition_detection": not_yet(None),
    "routed_experts_prompt_start": not_yet(0),
    "trace_decode_token_ids": not_yet(None),
    "_eos_token_id": integer_in(0, INT32_MAX),
}
