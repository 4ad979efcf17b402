"""Outputs of requests, prompts, adapters' requests and beams: the types that users receive and give."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from vllm.beam_search import BeamSearchSequence, create_sort_beams_key_function, get_beam_search_score
from vllm.inputs import (
    INPUT_REGISTRY,
    ExplicitEncoderDecoderPrompt,
    InputContext,
    InputRegistry,
    LLMInputs,
    TextPrompt,
    TokensPrompt,
    build_explicit_enc_dec_prompt,
    parse_and_batch_prompt,
    parse_singleton_prompt,
    to_enc_dec_tuple_list,
    zip_enc_dec_prompts,
)
from vllm.lora.request import LoRARequest
from vllm.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.sequence import Logprob, RequestMetrics


def completion(index: int, text: str, ids: list[int], **more: Any) -> CompletionOutput:
    logprobs = more.pop("logprobs", None)
    return CompletionOutput(index, text, ids, more.pop("cumulative_logprob", None), logprobs, **more)


def output(*completions: CompletionOutput, finished: bool = False, **more: Any) -> RequestOutput:
    return RequestOutput("0", "p", [1, 2], more.pop("prompt_logprobs", None), list(completions), finished, **more)


def test_deltas_add_up_to_the_whole() -> None:
    whole = output(completion(0, "Hel", [1], cumulative_logprob=-1.0, logprobs=[{1: Logprob(-1.0)}]))
    whole.add(
        output(
            completion(1, "Wor", [9]),
            completion(0, "lo", [2, 3], cumulative_logprob=-3.0, logprobs=[{2: Logprob(-1.0)}, {3: Logprob(-1.0)}]),
        )
    )
    whole.add(output(completion(1, "ld", [8], finish_reason="stop", stop_reason="d"), finished=True))
    first, second = whole.outputs
    assert (first.index, first.text, list(first.token_ids), first.cumulative_logprob) == (0, "Hello", [1, 2, 3], -3.0)
    assert first.logprobs == [{1: Logprob(-1.0)}, {2: Logprob(-1.0)}, {3: Logprob(-1.0)}]
    assert (second.text, list(second.token_ids), second.finish_reason, second.stop_reason) == (
        "World",
        [9, 8],
        "stop",
        "d",
    )
    assert whole.finished and second.finished() and not first.finished()


def test_cumulative_outputs_replace_each_other() -> None:
    whole = output(completion(0, "Hel", [1]))
    whole.add(output(completion(0, "Hello", [1, 2]), finished=True, num_cached_tokens=1), aggregate=False)
    assert [(c.text, c.token_ids) for c in whole.outputs] == [("Hello", [1, 2])]
    assert whole.finished and whole.num_cached_tokens == 1


def test_outputs_print_what_they_hold() -> None:
    text = repr(output(completion(0, 'a"b', [1], finish_reason="stop"), num_cached_tokens=3))
    assert text.startswith("RequestOutput(request_id=0, prompt='p', prompt_token_ids=[1, 2], ")
    assert "CompletionOutput(index=0, text='a\"b', token_ids=[1], " in text and "num_cached_tokens=3" in text


def test_clients_can_turn_outputs_into_dictionaries() -> None:
    metrics = RequestMetrics(0.0, 1.0, 0.1, 0.2, 0.1)
    assert dataclasses.asdict(metrics)["first_token_time"] == 0.2
    assert dataclasses.asdict(completion(0, "a", [1]))["text"] == "a"
    assert dataclasses.asdict(Logprob(-0.5, 2, "x")) == {"logprob": -0.5, "rank": 2, "decoded_token": "x"}


# The forms of pooled data need `ndim`, `tolist`, `squeeze` and `item`, which numpy has as torch does.


def pooled(data: Any) -> PoolingRequestOutput[PoolingOutput]:
    return PoolingRequestOutput("7", PoolingOutput(np.asarray(data)), [1, 2], True)  # type: ignore[arg-type]


def test_pooled_data_becomes_embedding_classes_or_score() -> None:
    embedding = EmbeddingRequestOutput.from_base(pooled([0.5, 1.5]))
    assert (embedding.outputs.embedding, embedding.outputs.hidden_size) == ([0.5, 1.5], 2)
    assert (embedding.request_id, embedding.prompt_token_ids, embedding.finished) == ("7", [1, 2], True)
    classes = ClassificationRequestOutput.from_base(pooled([0.25, 0.75]))
    assert (classes.outputs.probs, classes.outputs.num_classes) == ([0.25, 0.75], 2)
    assert ScoringRequestOutput.from_base(pooled([[0.5]])).outputs.score == 0.5
    assert repr(embedding) == (
        "EmbeddingRequestOutput(request_id='7', outputs=EmbeddingOutput(hidden_size=2), "
        "prompt_token_ids=[1, 2], finished=True)"
    )


@pytest.mark.parametrize("kind", [EmbeddingRequestOutput, ClassificationRequestOutput])
def test_pooled_data_of_another_shape_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="should be a 1-D .* vector, got 2 dimensions"):
        kind.from_base(pooled([[1.0], [2.0]]))
    with pytest.raises(ValueError, match=r"should be a scalar score, got shape \(2,\)"):
        ScoringRequestOutput.from_base(pooled([1.0, 2.0]))


def test_pooling_outputs_compare_by_data() -> None:
    assert PoolingOutput(np.array([1.0, 2.0])) == PoolingOutput(np.array([1.0, 2.0]))  # type: ignore[arg-type]
    assert PoolingOutput(np.array([1.0, 2.0])) != PoolingOutput(np.array([1.0, 3.0]))  # type: ignore[arg-type]


# --- Adapters ---


def test_lora_requests_are_equal_by_name() -> None:
    request = LoRARequest("sql", 1, "/adapters/sql")
    assert (request.name, request.adapter_id, request.path) == ("sql", 1, "/adapters/sql")
    assert request == LoRARequest("sql", 2, "/elsewhere") and hash(request) == hash(LoRARequest("sql", 3, "/x"))
    assert request != LoRARequest("other", 1, "/adapters/sql")
    assert len({request, LoRARequest("sql", 9, "/y")}) == 1
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=LoRARequest)
    assert (back.lora_name, back.lora_int_id, back.lora_path) == ("sql", 1, "/adapters/sql")


def test_old_name_of_the_adapter_folder_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="Please use 'lora_path' instead"):
        assert LoRARequest("sql", 1, lora_local_path="/old").path == "/old"


def test_adapter_option_that_is_not_supported_is_refused() -> None:
    options = {"tensorizer_config_dict": {}, "load_inplace": True, "is_3d_lora_weight": True}
    for name, value in options.items():
        with pytest.raises(ValueError, match=f"{name}=.* is not supported"):
            LoRARequest("sql", 1, "/p", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", 0, "/p"), "id must be > 0, got 0"),
        (("a", -1, "/p"), "id must be > 0, got -1"),
        (("a", True, "/p"), "lora_int_id must be an int"),
        (("a", 2**70, "/p"), "lora_int_id must be at most"),
        ((5, 1, "/p"), "lora_name must be a string"),
        (("a", 1), "lora_path cannot be empty"),
        (("a", 1, 5), "lora_path must be a string"),
    ],
)
def test_wrong_lora_request_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRARequest(*arguments)


def test_prompt_adapter_requests_are_equal_by_id() -> None:
    request = PromptAdapterRequest("tweets", 1, "/adapters/tweets", 8)
    assert request == PromptAdapterRequest("other", 1, "/x", 4) and request != PromptAdapterRequest(
        "tweets", 2, "/x", 8
    )
    assert (request.name, request.adapter_id, request.local_path) == ("tweets", 1, "/adapters/tweets")
    with pytest.raises(ValueError, match="id must be > 0, got 0"):
        PromptAdapterRequest("tweets", 0, "/x", 8)


# --- Beams ---


def test_beam_score_is_the_length_normalised_log_probability() -> None:
    assert get_beam_search_score([5, 6, 7], -6.0, eos_token_id=2) == -2.0
    assert get_beam_search_score([5, 6, 7, 2], -6.0, eos_token_id=2) == -2.0  # the end itself is not counted
    assert math.isclose(get_beam_search_score([5, 6, 7, 8], -6.0, 2, length_penalty=0.5), -3.0)
    assert get_beam_search_score([5, 6], -6.0, 2, length_penalty=0.0) == -6.0
    assert get_beam_search_score([2], -1.0, eos_token_id=2) == -1.0


def test_beams_sort_by_score() -> None:
    beams = [BeamSearchSequence([1, 2], [], cum_logprob=-4.0), BeamSearchSequence([1, 2, 3], [], cum_logprob=-4.5)]
    ordered = sorted(beams, key=create_sort_beams_key_function(0, 1.0), reverse=True)
    assert [beam.tokens for beam in ordered] == [[1, 2, 3], [1, 2]]


# --- Prompts ---


def test_encoder_and_decoder_prompts_pair_up() -> None:
    pairs = zip_enc_dec_prompts(["An encoder prompt", "Another"], ["A decoder prompt", None])
    assert pairs == [
        ExplicitEncoderDecoderPrompt(
            encoder_prompt="An encoder prompt", decoder_prompt="A decoder prompt", mm_processor_kwargs={}
        ),
        ExplicitEncoderDecoderPrompt(encoder_prompt="Another", decoder_prompt=None, mm_processor_kwargs={}),
    ]
    assert to_enc_dec_tuple_list(pairs) == [("An encoder prompt", "A decoder prompt"), ("Another", None)]
    both = zip_enc_dec_prompts(["a"], ["b"], mm_processor_kwargs={"k": 1})
    assert both == [build_explicit_enc_dec_prompt("a", "b", {"k": 1})]
    with pytest.raises(ValueError, match="got 2, 1 and 2"):
        zip_enc_dec_prompts(["a", "b"], ["c"])


def test_prompt_types_are_dictionaries() -> None:
    assert TextPrompt(prompt="x") == {"prompt": "x"}
    assert TokensPrompt(prompt_token_ids=[1], cache_salt="s") == {"prompt_token_ids": [1], "cache_salt": "s"}


def test_batches_of_prompts_are_told_apart() -> None:
    assert parse_and_batch_prompt("a") == [{"content": "a", "is_tokens": False}]
    assert parse_and_batch_prompt(["a", "b"]) == [
        {"content": "a", "is_tokens": False},
        {"content": "b", "is_tokens": False},
    ]
    assert parse_and_batch_prompt([1, 2]) == [{"content": [1, 2], "is_tokens": True}]
    assert parse_and_batch_prompt([[1], [2, 3]]) == [
        {"content": [1], "is_tokens": True},
        {"content": [2, 3], "is_tokens": True},
    ]


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []]])
def test_no_prompt_is_a_value_error(prompt: Any) -> None:
    with pytest.raises(ValueError, match="please provide at least one prompt"):
        parse_and_batch_prompt(prompt)


@pytest.mark.parametrize("prompt", [5, None, {}, ["a", 1], [1, "a"], [True], [[1], "a"], [["a"]], [1.0], [[True]]])
def test_anything_else_is_a_type_error(prompt: Any) -> None:
    with pytest.raises(TypeError, match="prompt must be a string, array of strings, array of tokens, or array of"):
        parse_and_batch_prompt(prompt)


def test_single_prompts_are_told_apart() -> None:
    assert parse_singleton_prompt("a") == {"type": "str", "content": "a"}
    assert parse_singleton_prompt({"prompt": "a"}) == {"type": "text", "content": {"prompt": "a"}}
    assert parse_singleton_prompt({"prompt_token_ids": [1], "prompt": "a"})["type"] == "tokens"
    for wrong in (5, [1, 2], {}, {"text": "a"}, None):
        with pytest.raises(TypeError, match="inputs must be a string, TextPrompt, or TokensPrompt"):
            parse_singleton_prompt(wrong)  # type: ignore[arg-type]


def test_input_hooks_belong_to_a_class_and_its_subclasses() -> None:
    registry = InputRegistry()

    def double(context: InputContext, inputs: LLMInputs) -> LLMInputs:
        return LLMInputs(prompt_token_ids=inputs["prompt_token_ids"] * 2)

    def dummy(ctx: InputContext, seq_len: int, mm_counts: Any, **kwargs: Any) -> list[int]:
        return [0] * seq_len

    @registry.register_input_processor(double)
    @registry.register_dummy_data(dummy)
    class Model:
        pass

    class Finetuned(Model):
        pass

    assert registry.input_processor_of(Finetuned) is double and registry.dummy_data_factory_of(Model) is dummy
    assert registry.input_processor_of(int) is None and INPUT_REGISTRY.input_processor_of(Model) is None


def test_arguments_of_later_versions_are_named_and_have_no_effect(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    made = RequestOutput("r", "p", [1], None, [], True, of_tomorrow=1)  # type: ignore[call-arg]
    assert made.request_id == "r" and not hasattr(made, "of_tomorrow")
    assert "of_tomorrow" in caplog.text
