"""Finished outputs satisfy what was asked, with every back end and every way of sampling."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Any

import pytest
from pydantic import BaseModel

from tests.structured_output.corpus import KINDS, cases, json_problem
from tests.structured_output.driver import run
from tests.tiny_llama import assert_idle
from vllm import LLM, SamplingParams
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.model_executor.guided_decoding.guided_fields import GuidedDecodingRequest
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams, StructuredOutputsParams
from vllm.structured_output import excess, requests
from vllm.structured_output.backends.guidance import Guidance, GuidanceGrammar

BACKENDS = ("guidance", "xgrammar", "outlines", "lm-format-enforcer")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}


def text_of(llm: LLM, prompt: str = "Describe a person:", **params: Any) -> str:
    defaults: dict[str, Any] = {"max_tokens": 120, "temperature": 0.0}
    (output,) = llm.generate([prompt], SamplingParams(**{**defaults, **params}), use_tqdm=False)
    assert_idle(llm)
    return output.outputs[0].text


PERSON_NAME = {"type": "object", "properties": {"name": {"enum": ["Ada"]}}, "required": ["name"]}
IN_VAIN: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "uniqueItems": False},
    {**PERSON_NAME, "propertyNames": {"type": "string"}, "dependentRequired": {}, "dependentSchemas": {}},
    {**PERSON_NAME, "unevaluatedProperties": True},
    {"type": "integer", "format": "int32"},
    {"type": ["number", "null"], "format": "double"},
    {"type": "string", "format": "password"},
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_keywords_that_forbid_nothing_are_taken(demo: LLM, backend: str) -> None:
    """They are those of OpenAPI's and other programs' schemas; libraries refuse most by their names."""
    for schema in IN_VAIN:
        form = GuidedDecodingParams(json=schema, backend=f"{backend}:no-fallback")
        text = text_of(demo, guided_decoding=form, max_tokens=250)
        if schema["type"] not in ("array", "string"):  # which the model need not end in time
            assert json_problem(schema, text) is None
    tag = json.dumps({"structures": [{"begin": "<n>", "schema": IN_VAIN[3], "end": "</n>"}], "triggers": ["<n"]})
    if backend in ("guidance", "xgrammar"):
        form = GuidedDecodingParams(structural_tag=tag, backend=f"{backend}:no-fallback")
        assert text_of(demo, guided_decoding=form, max_tokens=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_finished_outputs_are_valid(demo: LLM, tiny: LLM, backend: str) -> None:
    for llm, seed in ((demo, 1), (tiny, 2)):
        # Most of the corpus is beyond some of them.
        corpus = cases(seed, 24) if backend in ("guidance", "xgrammar") else cases(seed, 60, KINDS[:3])
        counts = run(llm, backend, corpus)
        assert counts["valid"] >= 3, counts
        assert_idle(llm)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_finished_outputs_of_a_large_corpus_are_valid(demo: LLM, tiny: LLM, backend: str) -> None:
    for llm, seed in ((demo, 3), (tiny, 4)):
        counts = run(llm, backend, cases(seed, 500))
        print(f"{backend}: {dict(counts)}")
        assert counts["valid"] >= 50, counts
        assert_idle(llm)


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON), Person], ids=["dict", "text", "class"])
@pytest.mark.parametrize("kind", [GuidedDecodingParams, StructuredOutputsParams])
def test_a_schema_may_be_a_dictionary_a_text_or_a_class(demo: LLM, kind: Any, schema: Any) -> None:
    name = "guided_decoding" if kind is GuidedDecodingParams else "structured_outputs"
    Person.model_validate_json(text_of(demo, **{name: kind(json=schema)}))


def test_guided_options_request(demo: LLM) -> None:
    params = SamplingParams(max_tokens=40)
    for options in ({"guided_choice": ["yes", "no"]}, GuidedDecodingRequest(guided_choice=["yes", "no"])):
        (output,) = demo.generate("Is it?", params, guided_options_request=options, use_tqdm=False)
        assert output.outputs[0].text in ("yes", "no")
    options = {"guided_regex": "[0-9]{2}", "guided_decoding_backend": "outlines"}
    (output,) = demo.generate("Is it?", params, guided_options_request=options, use_tqdm=False)
    assert re.fullmatch("[0-9]{2}", output.outputs[0].text)


def test_chats_are_constrained_too(demo: LLM) -> None:
    params = SamplingParams(max_tokens=120, guided_decoding=GuidedDecodingParams(json=PERSON))
    (output,) = demo.chat([{"role": "user", "content": "A person, please."}], params, use_tqdm=False)
    assert json_problem(PERSON, output.outputs[0].text) is None


def test_whitespace(demo: LLM) -> None:
    compact = text_of(demo, guided_decoding=GuidedDecodingParams(json=PERSON, disable_any_whitespace=True))
    assert re.fullmatch(r'\{"name":".*","age":\d+\}', compact)
    wide = text_of(demo, guided_decoding=GuidedDecodingParams(json=PERSON, whitespace_pattern="~~"))
    assert wide.startswith("{~~") or '"name"~~' in wide or wide.startswith('{"name":')
    assert " " not in re.sub('"[^"]*"', "", wide)


def test_a_closed_object_has_no_further_properties(demo: LLM) -> None:
    """`properties` alone closes an object; a schema that wants others says so."""
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for seed in range(8):
        closed = text_of(demo, guided_decoding=GuidedDecodingParams(json=schema), temperature=1.5, seed=seed)
        assert json.loads(closed).keys() == {"a"}
    more = {"patternProperties": {"^[b-d]$": {"type": "boolean"}}, "additionalProperties": False}
    opened = [
        text_of(demo, guided_decoding=GuidedDecodingParams(json={**schema, **more}), temperature=1.5, seed=seed)
        for seed in range(8)
    ]
    assert any(len(json.loads(text)) > 1 for text in opened)


def test_every_sequence_has_a_text_of_its_own(demo: LLM) -> None:
    params = SamplingParams(n=5, seed=3, max_tokens=120, guided_decoding=GuidedDecodingParams(json=PERSON))
    (output,) = demo.generate(["Describe a person:"], params, use_tqdm=False)
    texts = [answer.text for answer in output.outputs]
    assert len(set(texts)) > 1
    assert all(json_problem(PERSON, text) is None for text in texts)
    assert_idle(demo)


def test_a_complete_text_ends_whatever_else_is_said(demo: LLM) -> None:
    choice = GuidedDecodingParams(choice=["yes", "no"])
    assert text_of(demo, guided_decoding=choice, min_tokens=50) in ("yes", "no")
    assert text_of(demo, guided_decoding=choice, ignore_eos=True) in ("yes", "no")


def test_a_text_complete_before_min_tokens_says_so(demo: LLM) -> None:
    choice = GuidedDecodingParams(choice=["yes", "no"])
    for logprobs in (None, 1):  # the token that ends it is forced, or sampled
        asked = [SamplingParams(min_tokens=m, logprobs=logprobs, guided_decoding=choice) for m in (15, 0)]
        outputs = [output.outputs[0] for output in demo.generate(["x", "x"], asked, use_tqdm=False)]
        assert [(o.finish_reason, o.stop_reason) for o in outputs] == [
            ("stop", "complete before min_tokens"),
            ("stop", None),
        ]


def test_min_tokens_and_ignore_eos_make_a_text_longer(demo: LLM) -> None:
    pattern = GuidedDecodingParams(regex="[ab]{1,40}")
    for extra in ({"min_tokens": 12}, {"ignore_eos": True}):
        (output,) = demo.generate(
            ["x"],
            SamplingParams(temperature=1.0, seed=2, max_tokens=60, guided_decoding=pattern, **extra),
            use_tqdm=False,
        )
        (answer,) = output.outputs
        assert answer.finish_reason == "stop"
        assert len(answer.token_ids) > 12
        assert re.fullmatch("[ab]{1,40}", answer.text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_min_tokens_put_off_stop_tokens_that_the_form_allows(demo: LLM, backend: str) -> None:
    pattern = GuidedDecodingParams(regex="[a-d ]{60}", backend=f"{backend}:no-fallback")
    wanted: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 1, "guided_decoding": pattern}
    (free,) = demo.generate(["x"], SamplingParams(**wanted), use_tqdm=False)
    stops = list(free.outputs[0].token_ids[:2])
    asked = [SamplingParams(**wanted, stop_token_ids=stops, min_tokens=m) for m in (0, 9)]
    early, late = (output.outputs[0] for output in demo.generate(["x", "x"], asked, use_tqdm=False))
    assert len(early.token_ids) == 1 and early.stop_reason == stops[0]
    assert len(late.token_ids) > 9 and not set(late.token_ids[:9]) & set(stops)
    assert re.fullmatch("[a-d ]{1,60}", late.text)
    # What nothing else may take the place of ends the answer all the same.
    only = GuidedDecodingParams(regex="z{40}")
    (forced,) = demo.generate(["x"], SamplingParams(guided_decoding=only), use_tqdm=False)
    ends = list(set(forced.outputs[0].token_ids))
    asking = SamplingParams(guided_decoding=GuidedDecodingParams(regex="z"), min_tokens=5, stop_token_ids=ends)
    (output,) = demo.generate(["x"], asking, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"


def test_stop_strings_and_stop_tokens(demo: LLM) -> None:
    pattern = GuidedDecodingParams(regex="(abc){30}")
    assert text_of(demo, guided_decoding=pattern, stop=["cab"]) == "ab"
    assert text_of(demo, guided_decoding=pattern, max_tokens=3) != ""


def test_logprobs_are_of_the_model_itself(demo: LLM) -> None:
    """As with every other constraint, they are raw: masked tokens have theirs."""
    params = SamplingParams(max_tokens=20, logprobs=3, guided_decoding=GuidedDecodingParams(choice=["zebra"]))
    (output,) = demo.generate(["The capital of France is"], params, use_tqdm=False)
    (answer,) = output.outputs
    assert answer.text == "zebra"
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token in entries and len(entries) in (3, 4)
        assert all(entry.logprob > float("-inf") for entry in entries.values())


def test_biases_work_within_the_grammar(demo: LLM) -> None:
    first = {word: demo.get_tokenizer().encode(word, add_special_tokens=False)[0] for word in ("yes", "no")}
    choice = GuidedDecodingParams(choice=["yes", "no"])
    for word, token in first.items():
        assert text_of(demo, guided_decoding=choice, logit_bias={token: 100.0}) == word
    assert text_of(demo, guided_decoding=choice, bad_words=["n", "no"]) == "yes"


def test_a_request_without_a_possible_token_fails_alone(demo: LLM) -> None:
    ids = demo.get_tokenizer().encode("z", add_special_tokens=False)
    params = SamplingParams(allowed_token_ids=ids, guided_decoding=GuidedDecodingParams(choice=["yes", "no"]))
    with pytest.raises(GenerationError, match="No token is possible: a grammar"):
        demo.generate(["x", "y"], [params, SamplingParams(max_tokens=4)], use_tqdm=False)
    assert_idle(demo)


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "starved"])
def test_a_request_whose_masks_take_too_long_fails_alone(
    demo: LLM, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """Unless it is only that no processor is free for them."""
    fill_all = Guidance.fill_all

    def slow(self: Guidance, matchers: Any, tokens: Any, bits: Any) -> Any:
        seconds = 0.03 * sum(matcher.slow for matcher in matchers)
        end = time.thread_time() + seconds
        while is_busy and time.thread_time() < end:
            pass
        time.sleep(0 if is_busy else seconds)
        return fill_all(self, matchers, tokens, bits)

    def start(self: GuidanceGrammar) -> Any:
        matcher = begin(self)
        matcher.slow = self.nbytes > (1 << 16) + 64 * len(quick)  # type: ignore[attr-defined]
        return matcher

    quick, long = "[a-f]{20}", "[a-f]{20}|" + "[g-k]{20}" * 3
    begin = GuidanceGrammar.start
    monkeypatch.setattr(Guidance, "fill_all", slow)
    monkeypatch.setattr(GuidanceGrammar, "start", start)
    monkeypatch.setattr(requests, "MASK_SECONDS", 0.01)
    monkeypatch.setattr(excess, "EXCESS_SECONDS", 0.05)
    params = [
        SamplingParams(max_tokens=60, guided_decoding=GuidedDecodingParams(regex=pattern)) for pattern in (long, quick)
    ]
    fails = pytest.raises(GenerationError, match="the grammar is too complex")
    with fails if is_busy else contextlib.nullcontext():
        demo.generate(["x", "y"], params, use_tqdm=False)
    assert_idle(demo)
    (output,) = demo.generate(["y"], params[1], use_tqdm=False)
    assert re.fullmatch(quick, output.outputs[0].text)


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every mask takes far longer than it may, and ten of them too long; how many were computed in each call."""
    fill_all, calls = Guidance.fill_all, []

    def slow(self: Guidance, matchers: Any, tokens: Any, bits: Any) -> Any:
        calls.append(len(matchers))
        end = time.thread_time() + 0.03 * len(matchers)
        while time.thread_time() < end:
            pass
        return fill_all(self, matchers, tokens, bits)

    monkeypatch.setattr(Guidance, "fill_all", slow)
    monkeypatch.setattr(requests, "MASK_SECONDS", 0.01)
    monkeypatch.setattr(requests, "MASKS_AT_ONCE", 4)
    monkeypatch.setattr(excess, "EXCESS_SECONDS", 0.2)
    return calls


@pytest.mark.parametrize("alike", [True, False])
def test_masks_that_take_too_long_are_added_up_over_requests(demo: LLM, slow_masks: list[int], alike: bool) -> None:
    """As many as one request asks for take no more from others than one, nor do different ones together."""
    patterns = [f"[a-{chr(ord('f') + (0 if alike else i))}]{{200}}" for i in range(12)]
    params = [
        SamplingParams(max_tokens=100, temperature=2.0, seed=i, guided_decoding=GuidedDecodingParams(regex=pattern))
        for i, pattern in enumerate(patterns)
    ]
    with pytest.raises(GenerationError, match="the grammar is too complex"):
        demo.generate(["x"] * 12, params, use_tqdm=False)
    assert_idle(demo)
    # Requests that are alike are over together; of grammars of their own one after the other is.
    assert max(slow_masks) <= 4
    assert sum(slow_masks) < (40 if alike else 70)


def test_tokens_that_must_follow_hold_nobody_up(demo: LLM, slow_masks: list[int]) -> None:
    """Their masks are computed for as long as one mask may take."""
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(excess, "EXCESS_SECONDS", 1e9)
        patch.setattr(requests, "MASK_SECONDS", 0.1)
        taken: list[float] = []
        advance = requests.GrammarRequests.advance

        def timed(*args: Any) -> Any:
            begun = time.thread_time()
            found = advance(*args)
            taken.append(time.thread_time() - begun)
            return found

        patch.setattr(requests.GrammarRequests, "advance", timed)
        params = SamplingParams(max_tokens=100, guided_decoding=GuidedDecodingParams(regex="(\u00e9){40}"))
        (output,) = demo.generate(["x"], params, use_tqdm=False)
    assert output.outputs[0].text == "\u00e9" * 40
    assert max(taken) < 0.5  # of 80 masks of 0.03 s


def test_free_requests_beside_them_are_what_they_are_alone(demo: LLM) -> None:
    prompts = [f"The capital of country {i} is" for i in range(6)]
    free = SamplingParams(max_tokens=24, temperature=0.8, seed=5)
    alone = [o.outputs[0].token_ids for o in demo.generate(prompts, free, use_tqdm=False)]
    guided = SamplingParams(max_tokens=60, guided_decoding=GuidedDecodingParams(json=PERSON))
    mixed = demo.generate([p for p in prompts for _ in range(2)], [free, guided] * len(prompts), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in mixed[::2]] == alone
    constrained = [output.outputs[0] for output in mixed[1::2]]
    assert all(json_problem(PERSON, a.text) is None for a in constrained if a.finish_reason == "stop")


def test_preemption_changes_nothing(tiny: LLM) -> None:
    """With room for a few requests only, each is preempted and computed again, and its grammar goes on."""
    params = SamplingParams(
        max_tokens=120, temperature=1.0, seed=4, guided_decoding=GuidedDecodingParams(regex="([ab]{1,9};){20,40}")
    )
    prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(6)]
    expected = [o.outputs[0].token_ids for o in tiny.generate(prompts, params, use_tqdm=False)]
    folder = tiny.llm_engine.vllm_config.model_config.model
    with LLM(folder, dtype="float32", max_model_len=160, num_gpu_blocks_override=24, block_size=16) as small:
        outputs = small.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert small.llm_engine.core.core.scheduler.stats().num_preemptions > 0
        assert_idle(small)


def test_beams_are_refused_by_name(demo: LLM) -> None:
    with pytest.raises(ValueError, match="guided_decoding"):
        demo.generate(
            "x",
            SamplingParams(
                use_beam_search=True, best_of=2, temperature=0, guided_decoding=GuidedDecodingParams(choice=["a"])
            ),
            use_tqdm=False,
        )
    assert "guided_decoding" not in BeamSearchParams.__struct_fields__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"json": {"type": "array", "uniqueItems": True}}, "guidance has no uniqueItems; xgrammar has no uniqueItems"),
        ({"json": {"type": "frog"}}, "type must be one or several of array"),
        ({"json": {"properties": [1]}}, "properties must be an object whose values are schemas"),
        ({"json": {"$ref": "#/$defs/x"}}, "leads nowhere"),
        ({"json": {"$ref": "https://example.com/x"}}, "another document"),
        ({"json": {"type": "string", "pattern": "a\\"}}, "pattern must be a regular expression"),
        ({"json": {"type": "string", "pattern": "^(?!x)a$"}}, "invalid pattern ^(?!x)a$: look-around"),
        ({"json": {"type": "string", "format": "iri"}}, "guidance has no format 'iri'; xgrammar has no format 'iri'"),
        ({"json": {"type": "array", "minItems": 3, "maxItems": 1}}, "minItems"),
        ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf whose branches may overlap"),
        ({"json": "{"}, "is not valid JSON"),
        ({"json": '["a"]'}, "must be a JSON schema, which is an object"),
        ({"grammar": "start: missing_rule"}, "missing_rule"),
        ({"grammar": "start: start"}, "no text of the grammar ever ends"),
        ({"grammar": 'root ::= "a" b\nb ::= "c" b | "d" b'}, "no text of the grammar ever ends"),
        (
            {"json": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}},
            "no text of it ever ends",
        ),
        ({"grammar": 'root ::= "a" other'}, "other"),
        ({"structural_tag": "{}"}, "structural tag"),
        ({"structural_tag": '{"structures": [{"begin": "<a>"}], "triggers": ["<"]}'}, "structures"),
        ({"regex": "(" * 2000 + ")" * 2000}, "nested too deeply"),
        ({"regex": "a" * 70_000}, "at most 65536"),
        ({"choice": ["a"], "backend": "magic"}, "Unknown guided decoding backend 'magic'"),
        ({"grammar": "start: /a/", "backend": "outlines:no-fallback"}, "outlines has no grammars"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is for JSON"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(demo: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=re.escape(message)):
        text_of(demo, guided_decoding=GuidedDecodingParams(**arguments))
    assert_idle(demo)
    assert text_of(demo, guided_decoding=GuidedDecodingParams(choice=["yes"])) == "yes"


def test_a_named_back_end_gives_way_to_one_that_has_the_feature(demo: LLM) -> None:
    params = GuidedDecodingParams(grammar='start: "yes" | "no"', backend="outlines")
    assert text_of(demo, guided_decoding=params) in ("yes", "no")


def test_without_a_tokenizer_there_is_no_grammar(tiny: LLM) -> None:
    folder = tiny.llm_engine.vllm_config.model_config.model
    with (
        LLM(folder, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=40) as llm,
        pytest.raises(ValueError, match="skip_tokenizer_init"),
    ):
        llm.generate(
            {"prompt_token_ids": [5]},
            SamplingParams(guided_decoding=GuidedDecodingParams(regex="a"), detokenize=False),
            use_tqdm=False,
        )
