"""How a request is sampled: `SamplingParams` and `BeamSearchParams`.

Fields and defaults are those of three ages of the API together; a value that is not supported is refused, not ignored.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable
from enum import Enum, IntEnum
from typing import Annotated, Any, Protocol

import msgspec

from vllm.exceptions import VLLMValidationError
from vllm.sampling_checks import FIELD_CHECKS
from vllm.structured_output.params import GuidedDecodingParams, StructuredOutputsParams
from vllm.validation import INT64_MAX, fail, instance_of, integer_in, not_yet, shorten, show

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]

_GREEDY_BELOW = 1e-5
# Each step of a beam search compares 2 * width continuations of width beams, on the host.
MAX_BEAM_WIDTH = 1024
_MAX_SHOWN, _MAX_SHOWN_CHARACTERS = 128, 4096


class SamplingType(IntEnum):
    """How the next token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(Enum):
    """What each `RequestOutput` of a running request holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # nothing before the request has finished


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that `update_from_tokenizer` needs."""

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def get_vocab(self) -> dict[str, int]: ...


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True, tag="sampling"):
    """Sampling parameters of one request.

    n: number of sequences to return, 1 to VLLM_MAX_N_SEQUENCES.
    best_of: number of sequences to generate, of which the n with the highest cumulative log probability are returned;
        at least n, default n. The beam width when `use_beam_search` is on.
    presence_penalty, frequency_penalty: in [-2, 2]; above 0 they make tokens that occur in the output less likely.
    repetition_penalty: above 0; above 1 it makes tokens that occur in prompt or output less likely.
    temperature: 0 or more; 0 takes the most likely token. Values below 0.01 are raised to 0.01.
    top_p: in (0, 1]; keep the most likely tokens up to this probability mass.
    top_k: keep the k most likely tokens; -1 and 0 keep all.
    min_p: in [0, 1]; drop tokens less likely than this times the most likely one.
    seed: integer of at most 64 bits; the same seed gives the same tokens. -1 and None: a random one.
    stop, stop_token_ids: strings and token ids that end the output. `include_stop_str_in_output` keeps the string.
    ignore_eos: go on after the model's end-of-sequence token.
    max_tokens: most tokens to generate, 1 or more; None: as many as fit. min_tokens: no end before that many.
    logprobs, prompt_logprobs: how many of the most likely tokens to report per position; 0: the token itself, -1: all.
    detokenize, skip_special_tokens, spaces_between_special_tokens: how token ids become text.
    logits_processors: functions that change the logits, in this process only.
    truncate_prompt_tokens: keep only that many of the prompt's last tokens; -1: as many as the model takes.
    output_kind: what the outputs of a running request hold.
    guided_decoding, structured_outputs: the form of the output, older and newer spelling.
    logit_bias: token id -> value in [-100, 100] added to its logit (values beyond are clamped).
    allowed_token_ids: no other token is sampled. bad_words: the output contains none of these.
    stream_interval: 1 makes each token of a stream an event by itself, also for a reader that is behind.
    extra_args: plain data for plugins.
    use_beam_search, length_penalty, early_stopping: beam search of the older API.

    Raises ValueError or TypeError, naming the field, for every value out of range.
    """

    n: int = 1
    best_of: int | None = None
    _real_n: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: Any | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    output_text_buffer_length: int = 0
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    guided_decoding: GuidedDecodingParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    # Names of the older API.
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    # Names of the newer API.
    structured_outputs: StructuredOutputsParams | None = None
    skip_clone: bool = False
    watermarking: bool | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    stream_interval: int | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    _eos_token_id: int | None = None

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Parameters from values of which each may be None, which means its default."""
        for name in values:
            if name not in _DEFAULTS:
                near = difflib.get_close_matches(name, _DEFAULTS, n=3)
                hint = f" Did you mean {', '.join(near)}?" if near else ""
                raise TypeError(f"SamplingParams has no field {name!r}.{hint}")
        # None is a value of its own for max_tokens ("as many as fit"), whose default is a number.
        given = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        return cls(**given)

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check every field, and put values in their plain form. Call it again after changing fields."""
        for name, default, check in _RULES:
            value = getattr(self, name)
            if value is not default:
                setattr(self, name, check(name, value))
        if self.stop is None:
            self.stop = []
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.bad_words is None:
            self.bad_words = []
        self._all_stop_token_ids.update(self.stop_token_ids)
        self._verify_lengths()
        self._verify_constraints()
        if self.best_of is not None:
            self._verify_best_of(self.best_of)
        if self.use_beam_search:
            self._verify_beam_search()
        else:
            self._verify_no_beam_search()
        if self.temperature < _GREEDY_BELOW:
            if not self.use_beam_search:
                self._verify_greedy_sampling()
            # Greedy: these change nothing, and at their defaults the fast path applies.
            self.top_p = 1.0
            self.top_k = -1
            self.min_p = 0.0

    def _verify_lengths(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise fail("min_tokens", self.min_tokens, f"must be less than or equal to max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise VLLMValidationError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
                parameter="stop",
            )
        if self.stop and not self.include_stop_str_in_output:
            # A stop string that has begun must not reach the user before it is known to be one.
            self.output_text_buffer_length = max(len(string) for string in self.stop) - 1

    def _verify_constraints(self) -> None:
        if self.guided_decoding is not None and self.structured_outputs is not None:
            raise VLLMValidationError(
                "guided_decoding and structured_outputs are two names of one option; set only one of them.",
                parameter="structured_outputs",
            )

    def _verify_best_of(self, best_of: int) -> None:
        if best_of < self.n:
            raise VLLMValidationError(
                f"best_of must be greater than or equal to n, got n={self.n} and best_of={best_of}.",
                parameter="best_of",
                value=best_of,
            )
        if best_of != self.n and self.output_kind is RequestOutputKind.DELTA:
            raise VLLMValidationError("best_of must equal n to use output_kind=DELTA", parameter="best_of")

    def _verify_beam_search(self) -> None:
        wrong = ""
        if self.num_candidates <= 1:
            wrong = f"best_of must be greater than 1 when using beam search. Got {self.num_candidates}."
        elif self.num_candidates > MAX_BEAM_WIDTH:
            wrong = f"best_of must be at most {MAX_BEAM_WIDTH} when using beam search. Got {self.num_candidates}."
        elif self.temperature >= _GREEDY_BELOW:
            wrong = "temperature must be 0 when using beam search."
        elif self.top_p < 1 - _GREEDY_BELOW:
            wrong = "top_p must be 1 when using beam search."
        elif self.top_k > 0:
            wrong = "top_k must be -1 when using beam search."
        if wrong:
            raise VLLMValidationError(wrong, parameter=wrong.partition(" ")[0])

    def _verify_no_beam_search(self) -> None:
        if self.early_stopping is not False:
            raise VLLMValidationError(
                "early_stopping is not effective and must be False when not using beam search.",
                parameter="early_stopping",
            )
        if not 1 - _GREEDY_BELOW <= self.length_penalty <= 1 + _GREEDY_BELOW:
            raise VLLMValidationError(
                "length_penalty is not effective and must be the default value of 1.0 when not using beam search.",
                parameter="length_penalty",
            )

    def _verify_greedy_sampling(self) -> None:
        if self.n > 1:
            raise VLLMValidationError(
                f"n must be 1 when using greedy sampling, got {self.n}.", parameter="n", value=self.n
            )
        if self.num_candidates > 1:
            raise VLLMValidationError(
                f"best_of must be 1 when using greedy sampling.Got {self.best_of}.",
                parameter="best_of",
                value=self.best_of,
            )

    def verify_against_model(self, logits_width: int, max_logprobs: int) -> None:
        """Check what depends on the model: token ids below `logits_width`, logprobs up to `max_logprobs`.

        A limit of -1 is no limit; `logprobs=-1` asks for all of them. Call `update_from_tokenizer` before.
        """
        for wanted, kind in ((self.logprobs, "sample"), (self.prompt_logprobs, "prompt")):
            count = logits_width if wanted == -1 else wanted
            if count is not None and max_logprobs != -1 and count > max_logprobs:
                raise VLLMValidationError(
                    f"Requested {kind} logprobs of {count}, which is greater than max allowed: {max_logprobs}",
                    parameter="logprobs" if kind == "sample" else "prompt_logprobs",
                    value=wanted,
                )
        if self.allowed_token_ids is not None and max(self.allowed_token_ids) >= logits_width:
            raise VLLMValidationError(
                "allowed_token_ids contains out-of-vocab token id!", parameter="allowed_token_ids"
            )
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            invalid = [token_id for token_id in ids or () if token_id >= logits_width]
            if invalid:
                raise VLLMValidationError(
                    f"token_id(s) {show(invalid)} in {name} contain out-of-vocab token ids. "
                    f"Vocabulary size: {logits_width}",
                    parameter=name,
                    value=invalid,
                )
        invalid = [i for ids in self._bad_words_token_ids or () for i in ids if i >= logits_width]
        if invalid:
            raise _bad_words_out_of_vocabulary(logits_width - 1, invalid)

    def update_from_generation_config(
        self, generation_config: dict[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Add the end-of-sequence ids of the model to those that stop this request (unless `ignore_eos`).

        `generation_config` is the model's generation_config.json; its `eos_token_id` may be one id or several.
        """
        if model_eos_token_id is not None:
            self._eos_token_id = model_eos_token_id
            self._all_stop_token_ids.add(model_eos_token_id)
        more = generation_config.get("eos_token_id")
        if more is None:
            return
        further = {more} if isinstance(more, int) else set(more)
        further.discard(model_eos_token_id)  # handled as eos, which reports no stop_reason
        if further:
            self._all_stop_token_ids.update(further)
            if not self.ignore_eos:
                self.stop_token_ids = sorted(further.union(self.stop_token_ids or ()))

    def update_from_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Turn `bad_words` into token ids: each word as it begins a text and as it follows a space."""
        if self.bad_words:
            self._bad_words_token_ids = token_ids_of_words(tokenizer, self.bad_words)

    def forget_tokenizer(self) -> None:
        """Undo `update_from_tokenizer`: the words may have been changed since, or the tokenizer was another."""
        if self.bad_words:
            self._bad_words_token_ids = None

    def set_bad_words_token_ids(self, ids: list[list[int]]) -> None:
        """Instead of `update_from_tokenizer`: what `token_ids_of_words` has found for `bad_words`."""
        self._bad_words_token_ids = ids

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """A copy with another length that shares everything else, for parameters that many prompts have in common."""
        other = copy.copy(self)
        other.max_tokens = max_tokens
        other._verify_lengths()
        return other

    @property
    def num_candidates(self) -> int:
        """How many sequences are generated (the beam width in beam search); `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature < _GREEDY_BELOW:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every id that may end the output; none of them is sampled before `min_tokens`."""
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """Token ids of the bad words, once `update_from_tokenizer` has run."""
        return self._bad_words_token_ids

    @property
    def eos_token_id(self) -> int | None:
        """The model's end-of-sequence id if it ends this request, else None."""
        return None if self.ignore_eos else self._eos_token_id

    def verify_serializable(self) -> None:
        """Refuse what cannot be sent to another process."""
        if self.logits_processors:
            raise VLLMValidationError(
                "logits_processors are Python functions and work only where the engine runs in the caller's process "
                "(LLM, LLMEngine); they cannot be sent to another process. Remove logits_processors.",
                parameter="logits_processors",
            )

    def clone(self) -> SamplingParams:
        """An independent copy; logits processors, which may be large, are shared with the original."""
        other = copy.copy(self)
        if not self.skip_clone:
            for name in _FLAT_FIELDS:
                value = getattr(self, name)
                if value is not None:
                    setattr(other, name, copy.copy(value))
            for name in _NESTED_FIELDS:
                value = getattr(self, name)
                if value is not None:
                    setattr(other, name, copy.deepcopy(value))
        if self.logits_processors is not None:
            other.logits_processors = list(self.logits_processors)
        return other

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={_shown(getattr(self, name))}"
            for name, default in _DEFAULTS.items()
            if name in _ALWAYS_SHOWN or (not name.startswith("_") and getattr(self, name) not in (default, []))
        )
        return f"SamplingParams({shorten(shown, _MAX_SHOWN_CHARACTERS)})"  # a schema can have megabytes


def token_ids_of_words(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The token ids of each word as it begins a text and as it follows a space, without repetitions."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for spelling in (bare, " " + bare):
            ids = tuple(tokenizer.encode(spelling, add_special_tokens=False)) if spelling else ()
            if not ids and spelling == bare:
                raise VLLMValidationError(
                    "bad_words entries must tokenize to at least one token.", parameter="bad_words", value=word
                )
            if ids:
                found[ids] = None
    used = {token_id for ids in found for token_id in ids}
    if used and (max(used) >= len(tokenizer) or min(used) < 0):
        # Vocabularies may have holes, so that ids reach beyond their number.
        largest = max(tokenizer.get_vocab().values())
        invalid = sorted(token_id for token_id in used if not 0 <= token_id <= largest)
        if invalid:
            raise _bad_words_out_of_vocabulary(largest, invalid)
    return [list(ids) for ids in found]


def _bad_words_out_of_vocabulary(largest: int, invalid: list[int]) -> VLLMValidationError:
    return VLLMValidationError(
        f"The model vocabulary size is {largest + 1}, but the following tokens were specified as bad: {show(invalid)}. "
        f"All token id values should be integers satisfying: 0 <= token_id <= {largest}.",
        parameter="bad_words",
        value=invalid,
    )


def _shown(value: Any) -> str:
    """For a log line: of a long list or object, how long it is."""
    is_long = isinstance(value, (list, dict, set)) and len(value) > _MAX_SHOWN
    return f"<{len(value)} values>" if is_long else repr(value)


_DEFAULTS: dict[str, Any] = {
    item.name: set() if item.default is msgspec.NODEFAULT else item.default
    for item in msgspec.structs.fields(SamplingParams)
}
_CHECKS = {**FIELD_CHECKS, "output_kind": instance_of(RequestOutputKind)}
_RULES = tuple((name, default, _CHECKS[name]) for name, default in _DEFAULTS.items())
# Containers of plain values (they may be as long as the vocabulary), and containers of containers.
_FLAT_FIELDS = ("stop", "stop_token_ids", "_all_stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words")
_NESTED_FIELDS = ("guided_decoding", "structured_outputs", "extra_args", "_bad_words_token_ids")
_ALWAYS_SHOWN = frozenset({"n", "temperature", "top_p", "top_k", "seed", "stop", "max_tokens"})


class BeamSearchParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Beam search: keep the `beam_width` best sequences at each step, for at most `max_tokens` steps.

    beam_width: 1 to MAX_BEAM_WIDTH (1024). max_tokens: 1 or more.
    A sequence's score is its cumulative log probability divided by length ** length_penalty.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not _BEAM_DEFAULTS[name]:
                setattr(self, name, _BEAM_CHECKS[name](name, value))


_BEAM_DEFAULTS = {item.name: item.default for item in msgspec.structs.fields(BeamSearchParams)}
_BEAM_CHECKS = {
    **FIELD_CHECKS,
    "beam_width": integer_in(1, MAX_BEAM_WIDTH),
    "max_tokens": integer_in(1, INT64_MAX),
    "structured_outputs": not_yet(None),
    "allowed_token_ids": not_yet(None),
}
