"""What becomes of a user's request: resolved parameters, fan-out, seeds; and nothing but clear errors for nonsense."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiny_llama import MAX_MODEL_LEN
from vllm import SamplingParams
from vllm.engine import input_processor
from vllm.engine.input_processor import MAX_KNOWN_FORM, InputProcessor
from vllm.engine.processed import RequestInput, child_seed
from vllm.engine.prompts import first_step
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams, StructuredOutputsParams
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.support import resolve

WIDTH = 403


@pytest.fixture
def processor(llm) -> InputProcessor:
    return InputProcessor(llm.llm_engine.vllm_config, llm.llm_engine.own_tokenizer)


def test_everything_is_resolved(processor):
    params = SamplingParams(max_tokens=None, logprobs=0, seed=-5, stop_token_ids=[7])
    request = processor.process(RequestInput("r", "The fox", params, arrival_time=3.0))
    (child,) = request.children
    assert child.request_id == "r"
    assert child.params is not params
    assert child.params.max_tokens == MAX_MODEL_LEN - len(child.prompt_token_ids)
    assert child.seed == 2**64 - 5
    assert child.eos_token_id == 1
    assert set(child.stop_token_ids) == {1, 3, 7}
    assert (child.arrival_time, child.fork_of) == (3.0, None)
    assert params.max_tokens is None
    ignoring = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    (child,) = processor.process(RequestInput("r", "The fox", ignoring)).children
    assert (child.eos_token_id, child.stop_token_ids) == (None, (7,))


def test_the_back_end_of_a_form_is_looked_for_once(processor, monkeypatch):
    asked = []
    monkeypatch.setattr(input_processor, "resolve", lambda *a: asked.append(a[0].text) or resolve(*a))

    def grammars(pattern: str) -> set[GrammarSpec | None]:
        older = {"guided_decoding": GuidedDecodingParams(regex=pattern)}
        newer = {"structured_outputs": StructuredOutputsParams(regex=pattern)}
        params = [SamplingParams(**form) for form in (older, newer) for _ in range(2)]
        return {processor.process(RequestInput("r", "x", given)).grammar for given in params}

    assert len(grammars("[ab]")) == 1 and len(asked) == 2  # once for each spelling, which errors name
    assert grammars("[abc]") != grammars("[ab]") and len(asked) == 4
    grammars("a" * (MAX_KNOWN_FORM + 1))
    assert len(asked) == 8  # what is long is not kept
    for _ in range(2):
        with pytest.raises(ValueError, match="Unknown guided decoding backend"):
            form = GuidedDecodingParams(regex="a", backend="magic")
            processor.process(RequestInput("r", "x", SamplingParams(guided_decoding=form)))


def test_parameters_that_are_given_away_are_used_as_they_are(processor):
    def made() -> SamplingParams:
        return SamplingParams(max_tokens=None, logprobs=2, seed=5, stop_token_ids=[7], bad_words=["fox"])

    given = made()
    copied = processor.process(RequestInput("r", "The fox", made(), arrival_time=3.0))
    taken = processor.process(RequestInput("r", "The fox", given, arrival_time=3.0, owns_params=True))
    assert taken.params is given
    assert taken == copied
    with pytest.raises(ValueError, match="out-of-vocab"):
        processor.process(RequestInput("r", "The fox", SamplingParams(stop_token_ids=[WIDTH]), owns_params=True))


def test_ends_that_the_model_cannot_produce_are_left_out(llm):
    config = llm.llm_engine.vllm_config
    model = dataclasses.replace(config.model_config, generation_config={"eos_token_id": [-1, 3, WIDTH]})
    processor = InputProcessor(dataclasses.replace(config, model_config=model), llm.llm_engine.own_tokenizer)
    (child,) = processor.process(RequestInput("r", "The fox", SamplingParams())).children
    assert child.stop_token_ids == (1, 3)


@pytest.mark.parametrize("token", [-1, WIDTH, 2**40])
def test_ids_that_are_cut_off_are_checked_too(processor, token):
    params = SamplingParams(truncate_prompt_tokens=2)
    with pytest.raises(ValueError, match="out of vocabulary"):
        processor.process(RequestInput("r", {"prompt_token_ids": [token, 5, 6]}, params))
    request = processor.process(RequestInput("r", {"prompt_token_ids": [WIDTH - 1, 5, 6]}, params))
    assert request.prompt_token_ids == [5, 6]


def test_fan_out(processor):
    params = SamplingParams(n=2, best_of=4, seed=9, prompt_logprobs=1)
    request = processor.process(RequestInput("r", "The fox", params))
    assert [c.request_id for c in request.children] == ["0_r", "1_r", "2_r", "3_r"]
    assert [c.fork_of for c in request.children] == [None, "0_r", "0_r", "0_r"]
    assert [c.params.prompt_logprobs for c in request.children] == [1, None, None, None]
    assert [c.params.logprobs for c in request.children] == [0, 0, 0, 0]  # to know which are best
    assert request.params.logprobs is None
    assert request.returned == 2
    seeds = [c.seed for c in request.children]
    assert seeds == [child_seed(9, i) for i in range(4)]
    assert seeds[0] == 9
    assert len({child_seed(seed, i) for seed in range(50) for i in range(50)}) > 2400


def test_seeds_of_unseeded_requests_come_from_the_engines(llm):
    def seeds(count: int) -> list[int]:
        processor = InputProcessor(llm.llm_engine.vllm_config, llm.llm_engine.own_tokenizer)
        batch = [RequestInput(str(i), "a", SamplingParams()) for i in range(count)]
        with pytest.raises(ValueError):
            processor.process_batch([*batch, RequestInput("bad", "", SamplingParams())])
        return [request.children[0].seed for request in processor.process_batch(batch)]

    assert seeds(3) == seeds(5)[:3]
    assert len(set(seeds(5))) == 5


def test_two_spellings_of_a_beam_search(processor):
    older = SamplingParams(use_beam_search=True, best_of=3, n=2, temperature=0, max_tokens=5, length_penalty=2.0)
    newer = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=2.0)
    found = [processor.process(RequestInput("r", "The fox", params)) for params in (older, newer)]
    assert [request.beams for request in found] == [newer, newer]
    assert [request.children for request in found] == [(), ()]
    assert [request.returned for request in found] == [2, 1]


def test_texts_are_tokenized_with_or_without_special_tokens(processor, llm):
    def ids(text: str) -> list[int]:
        return llm.llm_engine.own_tokenizer.encode(text, add_special_tokens=False)

    batch = [
        RequestInput(str(i), text, SamplingParams(), add_special_tokens=bool(i % 2)) for i, text in enumerate("abcd")
    ]
    assert [request.prompt_token_ids for request in processor.process_batch(batch)] == [ids(text) for text in "abcd"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
prompt_keys = st.sampled_from(
    [
        "prompt",
        "prompt_token_ids",
        "cache_salt",
        "encoder_prompt",
        "multi_modal_data",
        "prompt_embeds",
        "token_type_ids",
    ]
)


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompt=json_values | st.dictionaries(prompt_keys, json_values, max_size=3) | st.lists(st.integers(-3, WIDTH + 3))
)
def test_nonsense_gives_an_error_or_a_request(processor, prompt):
    try:
        request = processor.process(RequestInput("r", prompt, SamplingParams()))
    except (TypeError, ValueError) as error:
        assert str(error)
        return
    assert request.prompt_token_ids
    assert all(type(i) is int and 0 <= i < WIDTH for i in request.prompt_token_ids)


def inputs(*prompts: Any) -> list[RequestInput]:
    return [RequestInput(str(i), prompt, SamplingParams()) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ([], 0),
        ([[1, 2, 3]], 1),
        ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 2),
        ([{"prompt_token_ids": [1, 2, 3, 4, 5]}, {"prompt_token_ids": [2]}], 1),
        ([[1], [2], [3], [4]], 3),
        ([[1, 2, 3], [4, 5, 6], [1, 2, 9]], 3),
        ([[1, 2, 3], [4, 5, 6], [1, 7, 9]], 2),
        ([[1, 2, 3], [4, 5, 6], "text"], 3),
        ([[1, 2, 3], [4, 5, 6], []], 3),
        ([[1, 2, 3], [4, 5, 6], [[1], 2]], 3),
        ([[1, 2, 3], [4, 5, 6], {"prompt": "text"}], 3),
        ([[1, 2, 3], [4, 5, 6], None], 3),
    ],
)
def test_the_first_step_is_cut_off_only_where_the_rest_has_nothing_to_do_with_it(prompts, count):
    assert first_step(inputs(*prompts), max_tokens=5, max_requests=3, block_size=2) == count


def test_unknown_keys_of_a_prompt_are_named_once(processor, caplog):
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        for _ in range(3):
            processor.process(RequestInput("r", {"prompt": "The fox", "promt_token_ids": [1]}, SamplingParams()))
        processor.process(RequestInput("r", {"prompt": "The fox", "cache_salt": "a"}, SamplingParams()))
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.text.count("'promt_token_ids' of a prompt is not known") == 1
    assert "cache_salt' of" not in caplog.text


def test_what_a_call_has_in_common_is_checked_once(processor, monkeypatch):
    form = GuidedDecodingParams(regex="a+")
    params = SamplingParams(max_tokens=None, bad_words=["fox"], min_tokens=1, guided_decoding=form)
    checked = processor.check(params)
    assert checked.params is params and checked.grammar.text == "a+" and params.bad_words_token_ids
    for name in ("_adapt", "_check_that_a_token_is_left"):
        monkeypatch.setattr(processor, name, lambda *_: pytest.fail("checked again"))
    short, long = (
        processor.process(RequestInput(f"{i}", {"prompt_token_ids": [5] * (i + 1)}, params, checked=checked))
        for i in range(2)
    )
    limit = processor._model.max_model_len
    assert (short.params.max_tokens, long.params.max_tokens, params.max_tokens) == (limit - 1, limit - 2, None)
    assert short.params.bad_words_token_ids is params.bad_words_token_ids
    assert [request.children[0].grammar for request in (short, long)] == [checked.grammar] * 2


def test_a_check_of_what_a_call_has_in_common_refuses_what_does_not_fit(processor):
    with pytest.raises(ValueError, match="out-of-vocab"):
        processor.check(SamplingParams(stop_token_ids=[WIDTH]))
    with pytest.raises(ValueError, match="No token may be sampled"):
        processor.check(SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2))
