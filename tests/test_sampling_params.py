"""`SamplingParams` and its relatives: what is accepted, what is refused in which words, and what is derived."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from vllm.exceptions import VLLMValidationError
from vllm.model_executor.guided_decoding.guided_fields import GuidedDecodingRequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

NAN, INF = math.nan, math.inf


def make(**arguments: Any) -> SamplingParams:
    """Sampling parameters from values of any type."""
    return SamplingParams(**arguments)


DELTA = RequestOutputKind.DELTA

REFUSED = [
    # The exact words of the API, by field.
    ({"n": "2"}, ValueError, "n must be an int, but is of type <class 'str'>"),
    ({"n": True}, ValueError, "n must be an int, but is of type <class 'bool'>"),
    ({"n": 0}, ValueError, "n must be at least 1, got 0."),
    (
        {"n": 16385},
        ValueError,
        "n must be at most 16384, got 16385. "
        "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable.",
    ),
    ({"best_of": 1.5}, ValueError, "best_of must be an integer, got <class 'float'>"),
    ({"best_of": 0}, ValueError, "best_of must be at least 1, got 0"),
    ({"n": 3, "best_of": 2}, ValueError, "best_of must be greater than or equal to n, got n=3 and best_of=2."),
    ({"presence_penalty": 2.5}, ValueError, "presence_penalty must be in [-2, 2], got 2.5."),
    ({"frequency_penalty": -3}, ValueError, "frequency_penalty must be in [-2, 2], got -3."),
    ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be greater than zero, got 0.0."),
    ({"repetition_penalty": INF}, ValueError, "repetition_penalty must be a finite number, got inf."),
    ({"temperature": -0.5}, ValueError, "temperature must be non-negative, got -0.5."),
    ({"temperature": NAN}, ValueError, "temperature must be a finite number, got nan."),
    ({"top_p": 0.0}, ValueError, "top_p must be in (0, 1], got 0.0."),
    ({"top_p": 1.1}, ValueError, "top_p must be in (0, 1], got 1.1."),
    ({"top_k": -2}, ValueError, "top_k must be -1 (disable), or at least 1, got -2."),
    ({"top_k": 1.5}, TypeError, "top_k must be an integer, got float"),
    ({"min_p": -0.1}, ValueError, "min_p must be in [0, 1], got -0.1."),
    ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0."),
    ({"min_tokens": -1}, ValueError, "min_tokens must be greater than or equal to 0, got -1."),
    (
        {"min_tokens": 17, "max_tokens": 16},
        ValueError,
        "min_tokens must be less than or equal to max_tokens=16, got 17.",
    ),
    ({"logprobs": -2}, ValueError, "logprobs must be non-negative or -1, got -2."),
    ({"prompt_logprobs": -2}, ValueError, "prompt_logprobs must be non-negative or -1, got -2."),
    (
        {"truncate_prompt_tokens": 0},
        ValueError,
        "truncate_prompt_tokens must be >= 1, got 0 (-1: as many tokens as the model takes).",
    ),
    (
        {"truncate_prompt_tokens": -2},
        ValueError,
        "truncate_prompt_tokens must be >= 1, got -2 (-1: as many tokens as the model takes).",
    ),
    ({"stop_token_ids": ["a"]}, ValueError, "stop_token_ids must contain only integers, got ['a']."),
    ({"stop": [""]}, ValueError, "stop cannot contain an empty string."),
    (
        {"stop": "x", "detokenize": False},
        ValueError,
        "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
    ),
    ({"best_of": 2, "output_kind": DELTA}, ValueError, "best_of must equal n to use output_kind=DELTA"),
    ({"n": 2, "temperature": 0}, ValueError, "n must be 1 when using greedy sampling, got 2."),
    ({"best_of": 2, "temperature": 0}, ValueError, "best_of must be 1 when using greedy sampling.Got 2."),
    ({"allowed_token_ids": []}, ValueError, "allowed_token_ids is not None and empty!"),
    (
        {"logit_bias": {"x": 1, "2": 1}},
        ValueError,
        "logit_bias contains key(s) that cannot be converted to integer token IDs: ['x']",
    ),
    ({"bad_words": ["a", ""]}, ValueError, "bad_words cannot contain an empty string. Got bad_words=['a', '']"),
    (
        {"extra_args": {"a": [2**64]}},
        ValueError,
        "extra_args integers must be between -2**63 and 2**64 - 1.",
    ),
    ({"stream_interval": 0}, ValueError, "stream_interval must be at least 1, got 0."),
    # Beam search of the older API.
    (
        {"use_beam_search": True, "temperature": 0},
        ValueError,
        "best_of must be greater than 1 when using beam search. Got 1.",
    ),
    ({"use_beam_search": True, "n": 2}, ValueError, "temperature must be 0 when using beam search."),
    (
        {"use_beam_search": True, "best_of": 1025, "temperature": 0},
        ValueError,
        "best_of must be at most 1024 when using beam search. Got 1025.",
    ),
    (
        {"use_beam_search": True, "n": 2, "temperature": 0, "top_p": 0.5},
        ValueError,
        "top_p must be 1 when using beam search.",
    ),
    (
        {"use_beam_search": True, "n": 2, "temperature": 0, "top_k": 5},
        ValueError,
        "top_k must be -1 when using beam search.",
    ),
    ({"early_stopping": "always"}, ValueError, "early_stopping must be True, False, or 'never', got always."),
    (
        {"early_stopping": True},
        ValueError,
        "early_stopping is not effective and must be False when not using beam search.",
    ),
    (
        {"length_penalty": 2.0},
        ValueError,
        "length_penalty is not effective and must be the default value of 1.0 when not using beam search.",
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), REFUSED)
def test_wrong_value_is_refused_in_the_words_of_the_api(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        make(**arguments)
    assert str(caught.value) == message


FLOATS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
INTEGERS = ("n", "best_of", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "use_beam_search")
NOT_YET = {
    "watermarking": True,
    "prompt_logprob_token_ids": [[1]],
    "prompt_logprob_start": 0,
    "logprob_token_ids": [1],
    "stream_interval": 2,
    "skip_reading_prefix_cache": True,
    "thinking_token_budget": 5,
    "repetition_detection": {"min_count": 2},
    "routed_experts_prompt_start": 1,
    "trace_decode_token_ids": [1],
    "_real_n": 2,
}


@pytest.mark.parametrize("name", [*FLOATS, "length_penalty"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 10**400, True, "0.5", [0.5], {}])
def test_float_field_takes_finite_numbers_only(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [NAN, 1.0, 10**5000, -(10**30), "1", [1], False], ids=lambda v: type(v).__name__)
def test_integer_field_takes_bounded_integers_only(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        make(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None, []])
def test_flag_takes_true_and_false_only(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be True or False"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("value", [[-1], [2**31], [2**63], [True], [1.0], ["1"], 5, "12", {1: 2}])
def test_token_ids_are_a_list_of_ids(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("value", [{-1: 1.0}, {2**31: 1.0}, {1: NAN}, {1: INF}, {1: "2"}, {1: True}, {True: 1}, [1], 3])
def test_logit_bias_maps_ids_to_finite_numbers(value: object) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        make(logit_bias=value)


@pytest.mark.parametrize(("name", "value"), NOT_YET.items())
def test_option_that_is_not_supported_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(VLLMValidationError, match=f"{name}=.* is not supported") as caught:
        make(**{name: value})
    assert caught.value.parameter == name


def test_too_many_strings_are_refused() -> None:
    for name in ("stop", "bad_words"):
        with pytest.raises(ValueError, match=f"{name} must be a list of at most 4096 strings"):
            make(**{name: ["x"] * 4097})


def test_text_that_utf8_cannot_hold_is_refused() -> None:
    for arguments in ({"stop": "\ud800"}, {"bad_words": ["\udfff"]}, {"extra_args": {"a": "\ud800"}}):
        with pytest.raises(ValueError, match="lone surrogate"):
            make(**arguments)


def test_limit_of_n_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "4")
    assert SamplingParams(n=4).n == 4
    with pytest.raises(ValueError, match="n must be at most 4, got 5"):
        SamplingParams(n=5)


def test_requests_of_the_guide_are_accepted() -> None:
    sampled = SamplingParams(n=2, best_of=5, temperature=0.8, top_p=0.95, frequency_penalty=0.1)
    assert (sampled.n, sampled.num_candidates) == (2, 5)
    beams = SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0)
    assert (beams.n, beams.num_candidates, beams.use_beam_search) == (3, 3, True)
    SamplingParams(n=2, use_beam_search=True, temperature=0, early_stopping="never", length_penalty=0.5)
    SamplingParams(temperature=0, top_p=1.0, min_tokens=0, max_tokens=20)


def test_fields_may_be_given_by_position() -> None:
    params = SamplingParams(2, 3, None, 0.5, -0.5, 1.1, 0.7, 0.9, 5, 0.1, 42, ["x"], [7])
    assert (params.n, params.best_of, params.presence_penalty, params.frequency_penalty) == (2, 3, 0.5, -0.5)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.7, 0.9, 5, 0.1, 42)
    assert (params.stop, params.stop_token_ids, params.all_stop_token_ids) == (["x"], [7], {7})


def test_field_names_can_be_listed_as_clients_do() -> None:
    assert set(SamplingParams.__annotations__) == set(SamplingParams().__struct_fields__)
    assert "temperature" in SamplingParams.__annotations__


def test_low_temperature_is_raised_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        assert SamplingParams(temperature=0.001).temperature == 0.01
    finally:
        logger.removeHandler(caplog.handler)
    assert "temperature 0.001 is less than 0.01" in caplog.text
    assert SamplingParams(temperature=0.01).temperature == 0.01


def test_greedy_sampling_resets_what_it_does_not_use() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=10, min_p=0.5)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, -1, 0.0)
    assert params.sampling_type is SamplingType.GREEDY


def test_sampling_type_follows_the_seed() -> None:
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=0).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-1).sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
    with pytest.raises(ValueError, match="seed"):
        SamplingParams(seed=2**64)


def test_short_forms_become_plain_ones() -> None:
    params = make(stop="END", logprobs=True, prompt_logprobs=True)
    assert (params.stop, params.logprobs, params.prompt_logprobs) == (["END"], 1, 1)
    assert make(stop=("a", "b")).stop == ["a", "b"]
    assert SamplingParams(logprobs=-1).logprobs == -1
    assert (SamplingParams(top_k=0).top_k, SamplingParams(top_k=-1).top_k) == (0, -1)
    assert make(logit_bias={"3": 200, 4: -101.5, 5: 1}).logit_bias == {3: 100.0, 4: -100.0, 5: 1.0}


def test_numpy_numbers_become_python_numbers() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_k=np.int32(5), stop_token_ids=[np.int64(3)], seed=np.uint64(9)
    )
    assert [type(v) for v in (params.n, params.temperature, params.top_k, params.seed)] == [int, float, int, int]
    assert params.stop_token_ids == [3]
    assert msgspec.msgpack.encode(params)


def test_stop_strings_hold_back_text_unless_included() -> None:
    assert SamplingParams(stop=["ab", "wxyz"]).output_text_buffer_length == 3
    assert SamplingParams(stop=["ab", "wxyz"], include_stop_str_in_output=True).output_text_buffer_length == 0


def test_changed_fields_are_checked_again_on_request() -> None:
    params = SamplingParams(max_tokens=5)
    params.temperature = NAN
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        params.verify()
    params.temperature = 0
    params.stop_token_ids = [3]
    params.top_p = 0.5
    params.verify()
    assert (params.top_p, params.all_stop_token_ids) == (1.0, {3})


def test_from_optional_takes_none_for_a_default_and_refuses_unknown_names() -> None:
    assert SamplingParams.from_optional(n=None, temperature=0.5, stop=None) == SamplingParams(temperature=0.5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    with pytest.raises(TypeError, match="no field 'temprature'. Did you mean temperature"):
        SamplingParams.from_optional(temprature=0.5)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_repr_shows_what_was_set() -> None:
    text = repr(SamplingParams(n=2, logit_bias={1: 2.0}))
    assert text.startswith("SamplingParams(n=2, ")
    assert "temperature=1.0" in text and "logit_bias={1: 2.0}" in text and "_all_stop" not in text


def test_repr_is_short_whatever_was_set() -> None:
    text = repr(SamplingParams(guided_decoding=GuidedDecodingParams(json={"type": "object", "title": "x" * 10**6})))
    assert len(text) < 5000 and "xxx... (1000" in text


# --- Copies and messages ---


def test_params_survive_a_message() -> None:
    params = SamplingParams(
        n=2,
        best_of=3,
        seed=2**64 - 1,
        stop=["a", "日本"],
        stop_token_ids=[5],
        logit_bias={3: 1.5},
        allowed_token_ids=[1, 2],
        extra_args={"a": [1, {"b": None}], "c": 0.5},
        bad_words=["x"],
        output_kind=RequestOutputKind.FINAL_ONLY,
        guided_decoding=GuidedDecodingParams(json={"type": "object"}),
        truncate_prompt_tokens=10,
    )
    params.update_from_generation_config({"eos_token_id": [2, 7]}, 2)
    data = msgspec.msgpack.encode(params)
    back = msgspec.msgpack.decode(data, type=SamplingParams)
    assert back == params
    assert back.all_stop_token_ids == {2, 5, 7} and back.eos_token_id == 2
    assert msgspec.msgpack.encode(back) == data


def test_structured_outputs_survive_a_message() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert params.structured_outputs is not None
    params.structured_outputs._backend = "xgrammar"
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert back == params and back.structured_outputs is not None
    assert back.structured_outputs._backend == "xgrammar"


def test_beam_search_params_survive_a_message() -> None:
    params = BeamSearchParams(4, 16, length_penalty=0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=BeamSearchParams) == params


def test_defaults_take_few_bytes() -> None:
    assert len(msgspec.msgpack.encode(SamplingParams())) < 64


def test_message_with_a_wrong_value_is_refused() -> None:
    data = msgspec.msgpack.encode({"temperature": -1.0})
    with pytest.raises(msgspec.ValidationError, match="temperature must be non-negative"):
        msgspec.msgpack.decode(data, type=SamplingParams)


def test_clone_is_independent_but_shares_logits_processors() -> None:
    def processor(token_ids: list[int], logits: Any) -> Any:
        return logits

    params = SamplingParams(
        stop=["a"], logit_bias={1: 1.0}, extra_args={"x": [1]}, logits_processors=[processor], stop_token_ids=[1]
    )
    other = params.clone()
    assert other == params
    other.stop.append("b")  # type: ignore[union-attr]
    other.logit_bias[2] = 1.0  # type: ignore[index]
    other.extra_args["x"].append(2)  # type: ignore[index]
    other.all_stop_token_ids.add(9)
    assert params.stop == ["a"] and params.logit_bias == {1: 1.0} and params.extra_args == {"x": [1]}
    assert params.all_stop_token_ids == {1}
    assert other.logits_processors == [processor] and other.logits_processors is not params.logits_processors
    assert copy.deepcopy(SamplingParams(stop=["a"])) == SamplingParams(stop=["a"])


def test_logits_processors_stay_in_their_process() -> None:
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    with pytest.raises(ValueError, match="logits_processors are Python functions .* Remove logits_processors"):
        params.verify_serializable()
    with pytest.raises(TypeError):
        msgspec.msgpack.encode(params)
    SamplingParams().verify_serializable()
    for wrong in (["module.function"], "f", [None], {"qualname": "x"}):
        with pytest.raises(ValueError, match="logits_processors must be a list of functions"):
            SamplingParams(logits_processors=wrong)


# --- What depends on the model ---


def test_generation_config_adds_ends() -> None:
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [2, 5, 3]}, model_eos_token_id=2)
    assert params.stop_token_ids == [3, 5, 9]  # 2 ends the request as eos, without a stop_reason
    assert params.all_stop_token_ids == {2, 3, 5, 9} and params.eos_token_id == 2
    before = copy.deepcopy(params)
    params.update_from_generation_config({"eos_token_id": [2, 5, 3]}, model_eos_token_id=2)
    assert params == before


def test_ignored_eos_ends_nothing() -> None:
    params = SamplingParams(stop_token_ids=[9], ignore_eos=True)
    params.update_from_generation_config({"eos_token_id": [2, 5]}, model_eos_token_id=2)
    assert params.stop_token_ids == [9] and params.eos_token_id is None
    single = SamplingParams()
    single.update_from_generation_config({"eos_token_id": 4})
    assert single.stop_token_ids == [4]
    single.update_from_generation_config({})
    assert single.stop_token_ids == [4]


class WordTokenizer:
    """Each word is a token; a word after a space is another one. Ids may have holes."""

    def __init__(self, words: dict[str, int]) -> None:
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return self.words

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [self.words.get(word, 999) for word in text.replace(" ", "| ").split("|") if word]


def test_bad_words_are_found_at_the_start_and_after_a_space() -> None:
    params = SamplingParams(bad_words=["cat", " dog"])
    params.update_from_tokenizer(WordTokenizer({"cat": 0, " cat": 1, "dog": 2, " dog": 7}))
    assert params.bad_words_token_ids == [[0], [1], [2], [7]]


def test_bad_words_beyond_the_vocabulary_are_refused() -> None:
    params = SamplingParams(bad_words=["cow"])
    with pytest.raises(ValueError) as caught:
        params.update_from_tokenizer(WordTokenizer({"cat": 0, " cat": 5}))
    assert str(caught.value) == (
        "The model vocabulary size is 6, but the following tokens were specified as bad: [999]. "
        "All token id values should be integers satisfying: 0 <= token_id <= 5."
    )
    with pytest.raises(ValueError, match="bad_words entries must tokenize to at least one token."):
        SamplingParams(bad_words=["  "]).update_from_tokenizer(WordTokenizer({"cat": 0}))


def test_ids_are_checked_against_the_width_of_the_logits() -> None:
    SamplingParams(allowed_token_ids=[9], logit_bias={9: 1}, stop_token_ids=[9]).verify_against_model(10, 20)
    cases = [
        ({"allowed_token_ids": [1, 10]}, "allowed_token_ids contains out-of-vocab token id!"),
        (
            {"logit_bias": {10: 1.0, 3: 1.0}},
            "token_id(s) [10] in logit_bias contain out-of-vocab token ids. Vocabulary size: 10",
        ),
        (
            {"stop_token_ids": [10]},
            "token_id(s) [10] in stop_token_ids contain out-of-vocab token ids. Vocabulary size: 10",
        ),
        ({"logprobs": 6}, "Requested sample logprobs of 6, which is greater than max allowed: 5"),
        ({"prompt_logprobs": 6}, "Requested prompt logprobs of 6, which is greater than max allowed: 5"),
        ({"logprobs": -1}, "Requested sample logprobs of 10, which is greater than max allowed: 5"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError) as caught:
            make(**arguments).verify_against_model(10, 5)  # type: ignore[arg-type]
        assert str(caught.value) == message
    SamplingParams(logprobs=-1).verify_against_model(10, -1)
    SamplingParams(logprobs=-1).verify_against_model(10, 10)


# --- Relatives ---


def test_only_one_kind_of_guided_decoding() -> None:
    with pytest.raises(ValueError, match="You can only use one kind of guided decoding but multiple are specified: "):
        GuidedDecodingParams(json={}, regex="a")
    with pytest.raises(ValueError, match="You can only use one kind of guided decoding but multiple are specified: "):
        GuidedDecodingRequest(guided_json={}, guided_choice=["a"])
    assert GuidedDecodingParams.from_optional() is None
    assert GuidedDecodingParams.from_optional(regex="a+") == GuidedDecodingParams(regex="a+")
    request = GuidedDecodingRequest(guided_regex="a+", guided_decoding_backend="outlines")
    assert request.to_params() == GuidedDecodingParams(regex="a+", backend="outlines")


def test_backend_options_in_the_older_spelling() -> None:
    params = GuidedDecodingParams(regex="a", backend="xgrammar:no-fallback,disable-any-whitespace")
    assert (params.backend, params.disable_fallback, params.disable_any_whitespace) == ("xgrammar", True, True)
    assert not params.disable_additional_properties
    with pytest.raises(ValueError, match="Unsupported option 'fast'"):
        GuidedDecodingParams(regex="a", backend="xgrammar:fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "You must use one kind of structured outputs constraint but none are specified: "),
        ({"json": "{}", "regex": "a"}, "You can only use one kind of structured outputs constraint but multiple "),
        ({"choice": []}, r"Choice '\[\]' cannot be an empty list"),
        ({"grammar": ""}, "structured_outputs.grammar cannot be an empty string"),
        ({"json": ""}, "structured_outputs.json cannot be an empty string"),
        ({"structural_tag": ""}, "structured_outputs.structural_tag cannot be an empty string"),
        ({"json_object": False}, "structured_outputs.json_object must be True if set"),
        ({"regex": "a\0"}, "structured_outputs.regex must not contain a NUL character"),
        ({"regex": 5}, "structured_outputs.regex must be a string"),
        ({"json": 5}, "structured_outputs.json must be a dict"),
    ],
)
def test_wrong_structured_outputs_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**arguments)


def test_both_spellings_of_one_option_are_refused() -> None:
    with pytest.raises(ValueError, match="guided_decoding and structured_outputs are two names of one option"):
        SamplingParams(
            guided_decoding=GuidedDecodingParams(regex="a"), structured_outputs=StructuredOutputsParams(regex="a")
        )
    with pytest.raises(ValueError, match="guided_decoding must be a GuidedDecodingParams"):
        SamplingParams(guided_decoding={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width must be at least 1, got 0."),
        ({"beam_width": 10**6, "max_tokens": 1}, "beam_width must be at most 1024"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"beam_width": 2, "max_tokens": 1, "temperature": NAN}, "temperature must be a finite number, got nan."),
        ({"beam_width": 2, "max_tokens": 1, "length_penalty": INF}, "length_penalty must be a finite number, got inf."),
        ({"beam_width": 2, "max_tokens": 1, "ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"beam_width": 2, "max_tokens": 1, "allowed_token_ids": [1]}, "allowed_token_ids=.* is not supported"),
    ],
)
def test_wrong_beam_search_params_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**arguments)


class Matryoshka:
    served_model_name = "m"
    is_matryoshka = True
    matryoshka_dimensions: list[int] | None = [64, 128]
    embedding_width: int | None = 100


def test_pooling_params() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(PoolingParams(64)), type=PoolingParams) == PoolingParams(64)
    PoolingParams(64).verify(Matryoshka())
    with pytest.raises(ValueError, match="Dimensions must be greater than 0"):
        PoolingParams(dimensions=0)
    with pytest.raises(ValueError) as caught:
        PoolingParams(dimensions=65).verify(Matryoshka())
    assert str(caught.value) == (
        'Model "m" only supports [64, 128] matryoshka dimensions, '
        "use other output dimensions will lead to poor results."
    )
    plain = Matryoshka()
    for plain.matryoshka_dimensions in ([128], None):
        with pytest.raises(ValueError, match='Model "m" has embeddings of 100 dimensions, got dimensions=128'):
            PoolingParams(128).verify(plain)
    PoolingParams(100).verify(plain)
    plain.embedding_width = None
    PoolingParams(128).verify(plain)
    plain.is_matryoshka = False
    with pytest.raises(
        ValueError, match='Model "m" does not support matryoshka representation.*Leave dimensions unset'
    ):
        PoolingParams(dimensions=64).verify(plain)
    with pytest.raises(ValueError, match="output_kind of a pooling request must be FINAL_ONLY"):
        PoolingParams(output_kind=DELTA)
