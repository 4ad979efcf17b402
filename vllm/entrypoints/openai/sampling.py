"""From a request's fields to `SamplingParams`: server defaults, limits, names of the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.guided import FORM_FIELDS, form_values
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from vllm.sampling_params import RequestOutputKind, SamplingParams

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of what one request may ask for. Checked before any work."""

    max_prompts: int = 1024
    max_inputs: int = 2048  # texts that are pooled; clients send no more at once
    max_pair_tokens: int = 1 << 22  # of one text paired with several, which it is sent once for
    # Numbers that come of the texts of one request, of all that is pooled; of all requests together twice as many.
    max_pooled_numbers: int = 1 << 25
    max_sequences: int = 16384  # prompts times n
    max_beam_width: int = 64  # a step of a beam search sorts all beams at once
    max_messages: int = 2048
    max_tokenized_characters: int = 1_000_000  # of /tokenize, which no context length bounds
    max_tools: int = 1024
    max_documents: int = 1024
    max_detokenized: int = 1_000_000  # tokens, of /detokenize
    max_stop_strings: int = 64
    max_stop_length: int = 1024
    max_bad_words: int = 4096
    max_bad_word_characters: int = 100_000  # of all bad words together
    max_list_length: int = 100_000  # logit_bias, allowed_token_ids, stop_token_ids
    # Each sequence has these lists for itself when it is computed: entries of all of them, times sequences.
    max_entries: int = 2_000_000
    # Log probabilities that are kept, for all answers that are given as a whole; more if a prompt may be very long.
    max_kept_logprobs: int = 8_000_000


BAD_WORD_COST = 16  # entries of another list: it is several tokens, in two spellings
LISTS = ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words")


def check_sizes(request: CompletionRequest | ChatCompletionRequest, limits: RequestLimits, prompts: int = 1) -> None:
    """Raise if a list or string of the request is longer than its limit, or the request asks for too much in all."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > limits.max_stop_strings:
        raise bad_request(f"At most {limits.max_stop_strings} stop strings may be given, got {len(stops)}.", "stop")
    if any(len(s) > limits.max_stop_length for s in stops):
        raise bad_request(f"A stop string may have at most {limits.max_stop_length} characters.", "stop")
    width = max(request.n or 1, request.best_of or 1)
    if request.use_beam_search and width > limits.max_beam_width:
        raise bad_request(f"A beam search may have at most {limits.max_beam_width} beams.", "best_of")
    entries = 0
    for name in LISTS:
        value = getattr(request, name)
        most = limits.max_bad_words if name == "bad_words" else limits.max_list_length
        if value is not None and len(value) > most:
            raise bad_request(f"{name} may have at most {most} entries, got {len(value)}.", name)
        entries += len(value or ()) * (BAD_WORD_COST if name == "bad_words" else 1)
    if sum(map(len, request.bad_words or ())) > limits.max_bad_word_characters:
        most = limits.max_bad_word_characters
        raise bad_request(f"bad_words may have at most {most} characters in all.", "bad_words")
    sequences = prompts * max(request.n or 1, request.best_of or 1)
    if sequences > limits.max_sequences:
        raise bad_request(f"At most {limits.max_sequences} sequences (prompts times n) may be asked for.", "n")
    if sequences * entries > limits.max_entries:
        raise bad_request(
            f"{sequences} sequences with {entries} entries each in {', '.join(LISTS)} (a bad word counts for "
            f"{BAD_WORD_COST}) are too much for one request: at most {limits.max_entries} in all. Send fewer "
            "sequences, or shorter lists."
        )


ENTRIES_OF_A_SCHEMA = 100  # enough for a thread of its own


def entries_of(request: CompletionRequest | ChatCompletionRequest) -> int:
    """How many entries its lists have: what it costs to check and copy them. A schema counts as a long list."""
    schema = 0 if FORM_FIELDS.isdisjoint(request.model_fields_set) else ENTRIES_OF_A_SCHEMA
    return schema + sum(len(getattr(request, name) or ()) for name in LISTS)


def to_sampling_params(
    request: CompletionRequest | ChatCompletionRequest,
    *,
    default: dict[str, Any],
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters of a request; `default` is the model's recommendation. Raises as SamplingParams does."""
    if request.use_beam_search:  # searches for the most likely: what a model recommends for drawing does not apply
        default = {"temperature": 0.0}
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    if request.is_decided_at_end:
        kind = RequestOutputKind.FINAL_ONLY
    values: dict[str, Any] = {}
    for name, neutral in NEUTRAL.items():
        given = getattr(request, name)
        values[name] = given if given is not None else default.get(name, neutral)
    interval = request.stream_interval
    if interval is None and logprobs is not None and kind is RequestOutputKind.DELTA:
        interval = 1  # clients take what is known of an event's only token for what is known of its text
    return SamplingParams.from_optional(
        **values,
        n=request.n,
        best_of=request.best_of,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        flat_logprobs=True,  # objects would take twenty times the memory, and every collection of garbage a look at all
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        logit_bias=request.logit_bias or None,
        allowed_token_ids=request.allowed_token_ids,
        bad_words=request.bad_words,
        use_beam_search=request.use_beam_search,
        length_penalty=request.length_penalty,
        early_stopping=request.early_stopping,
        stream_interval=interval,
        output_kind=kind,
        **form_values(request),
    )


def kept_tokens(
    request: CompletionRequest | ChatCompletionRequest, max_model_len: int, max_tokens: int | None
) -> int | None:
    """How many of a prompt's last tokens `truncate_prompt_tokens` keeps; None for all. -1: all that leave room for the
    `max_tokens` that are asked for, or for one.
    """
    limit = request.truncate_prompt_tokens
    if limit == -1:
        return max(1, max_model_len - max(1, max_tokens or 1))
    return limit if limit is not None and limit >= 1 else None  # SamplingParams refuses what is no limit


def resolve_max_tokens(
    asked: int | None, prompt_tokens: int, max_model_len: int, default: dict[str, Any], field: str = "messages"
) -> int:
    """How many tokens may be generated: what is asked, else what is left; never more than the model's own cap.

    field: that holds the prompt.

    Raises a 400 that names the numbers if prompt and answer do not fit.
    """
    if prompt_tokens >= max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {prompt_tokens} "
            "tokens in the messages, Please reduce the length of the messages.",
            field,
        )
    left = max_model_len - prompt_tokens
    if asked is None:
        return min(left, default.get("max_tokens") or left)
    if asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    if asked > left:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + asked} tokens ({prompt_tokens} in the messages, {asked} in the completion). Please "
            "reduce the length of the messages or completion.",
            field,
        )
    return min(asked, default.get("max_tokens") or asked)
