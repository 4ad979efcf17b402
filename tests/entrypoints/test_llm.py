"""`LLM` on a tiny model: tokens against Hugging Face, every form of prompt, every kind of error."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from tests.tiny_llama import MAX_MODEL_LEN, assert_idle, make_llm
from vllm import LLM, SamplingParams
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind, StructuredOutputsParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram

PROMPTS = ["The capital of France is", "def f(x):", "こんにちは", "it's", "emoji 😀 and"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def hf_greedy(hf_model, ids, count):
    with torch.no_grad():
        out = hf_model.generate(
            torch.tensor([ids]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            temperature=None,
        )
    return out[0, len(ids) :].tolist()


def test_greedy_tokens_equal_hugging_face(llm, hf_model):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert [o.prompt for o in outputs] == PROMPTS
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_token_ids == tokenizer.encode(prompt)
        completion = output.outputs[0]
        assert completion.token_ids == hf_greedy(hf_model, output.prompt_token_ids, 12)
        whole = tokenizer.decode(output.prompt_token_ids + completion.token_ids, skip_special_tokens=True)
        assert prompt + completion.text == whole
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.cumulative_logprob is None
        assert completion.logprobs is None
        assert output.finished
        times = output.metrics
        assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time
    assert_idle(llm)


def test_every_form_of_prompt(llm):
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms = [
        PROMPTS[0],
        {"prompt": PROMPTS[0]},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": tuple(ids), "prompt": PROMPTS[0]},
        {"prompt": None, "prompt_token_ids": np.array(ids)},
        ids,
        np.array(ids),
    ]
    tokens = {tuple(o.outputs[0].token_ids) for o in llm.generate(forms, GREEDY, use_tqdm=False)}
    assert len(tokens) == 1
    for form in forms:
        (output,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert tuple(output.outputs[0].token_ids) in tokens
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_legacy_arguments_still_work_and_warn(llm):
    ids = [llm.get_tokenizer().encode(p) for p in PROMPTS[:2]]
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)]
    with pytest.warns(DeprecationWarning, match="prompt_token_ids is deprecated") as warned:
        outputs = llm.generate(None, GREEDY, ids, use_tqdm=False)
    assert warned[0].filename == __file__, "it names the line of the caller"
    assert [o.outputs[0].token_ids for o in outputs] == expected
    with pytest.warns(DeprecationWarning):
        outputs = llm.generate(PROMPTS[0], GREEDY, prompt_token_ids=ids[0], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected[:1]
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match="^The lengths of prompts and prompt_token_ids"),
    ):
        llm.generate(PROMPTS, GREEDY, ids)
    with pytest.raises(ValueError, match="^Either prompts or prompt_token_ids must be provided.$"):
        llm.generate(sampling_params=GREEDY)


BAD_CALLS = [
    ({"prompts": ""}, ValueError, "^The decoder prompt cannot be empty$"),
    ({"prompts": {"prompt_token_ids": []}}, ValueError, "^The decoder prompt cannot be empty$"),
    ({"prompts": [[5, 10**6]]}, ValueError, "^Token id 1000000 is out of vocabulary$"),
    ({"prompts": [[5, 403]]}, ValueError, "^Token id 403 is out of vocabulary$"),
    ({"prompts": [[-1, 5]]}, ValueError, "^Token id -1 is out of vocabulary$"),
    ({"prompts": [{"prompt_token_ids": [True]}]}, ValueError, "only integers, got True at position 0"),
    ({"prompts": [{"prompt_token_ids": [5, 1.0]}]}, ValueError, "only integers, got 1.0 at position 1"),
    ({"prompts": [{"prompt_token_ids": "ab"}]}, ValueError, "must be a list of token ids, got str"),
    (
        {"prompts": "a", "sampling_params": {"temperature": 0}},
        TypeError,
        "sampling_params must be SamplingParams, got dict",
    ),
    ({"prompts": [{"prompt_token_ids": [2**70]}]}, ValueError, "is out of vocabulary"),
    (
        {"prompts": [[5] * (MAX_MODEL_LEN + 1)]},
        ValueError,
        r"^The decoder prompt \(length 97\) is longer than the maximum model length of 96\.",
    ),
    ({"prompts": [None]}, TypeError, "^inputs must be a string, TextPrompt, or TokensPrompt, got NoneType"),
    ({"prompts": [{"text": "x"}]}, TypeError, r"TextPrompt, or TokensPrompt, got a dict with the keys \['text'\]"),
    ({"prompts": (p for p in "ab")}, TypeError, "or TokensPrompt, got generator. Several prompts make a list"),
    ({"prompts": "a", "priority": 0}, TypeError, "priority must be a list with one integer per prompt, got int"),
    ({"prompts": [{"prompt": 5}]}, ValueError, "prompt must be a string, got int"),
    ({"prompts": "a\ud800"}, ValueError, "lone surrogate"),
    (
        {"prompts": {"encoder_prompt": "a", "decoder_prompt": "b"}},
        ValueError,
        "^Cannot pass encoder-decoder prompt to decoder-only models$",
    ),
    ({"prompts": {"prompt": "a", "multi_modal_data": {"image": 1}}}, ValueError, "not multimodal"),
    ({"prompts": {"prompt": "a", "cache_salt": 5}}, ValueError, "cache_salt must be a non-empty string"),
    ({"prompts": {"prompt_embeds": torch.zeros(1, 1)}}, ValueError, "prompt_embeds are not enabled"),
    (
        {"prompts": "a", "sampling_params": [GREEDY] * 2},
        ValueError,
        "^The lengths of prompts and params must be the same.$",
    ),
    ({"prompts": "a", "sampling_params": 5}, TypeError, "must be SamplingParams|not iterable"),
    ({"prompts": "a", "priority": [1]}, ValueError, "^Got priority 1 but Priority scheduling is not enabled.$"),
    ({"prompts": "a", "priority": [1, 2]}, ValueError, "lengths of prompts and priority"),
    (
        {"prompts": "a", "lora_request": LoRARequest("x", 1, "/x")},
        ValueError,
        "^Got lora_request .* but LoRA is not enabled!$",
    ),
    ({"prompts": "a", "lora_request": "x"}, TypeError, "^lora_request must be a LoRARequest, or .*, got 'x'.$"),
    (
        {"prompts": "a", "lora_request": [None, None]},
        ValueError,
        "^The lengths of prompts and lora_request must be the same.$",
    ),
    (
        {"prompts": "a", "tokenization_kwargs": {"x": 1}},
        ValueError,
        "Unknown tokenization_kwargs: x. There are add_special",
    ),
    (
        {"prompts": "a", "guided_options_request": {"guided_regex": "("}},
        ValueError,
        "cannot be compiled: invalid regex",
    ),
    (
        {"prompts": "a", "guided_options_request": {"guided_regex": "a", "guided_json": "{}"}},
        ValueError,
        "^You can only use one guided decoding but multiple is specified: ",
    ),
    (
        {"prompts": "a", "guided_options_request": [{"guided_regex": "a"}]},
        TypeError,
        "must be one dictionary or GuidedDecodingRequest for all prompts, got list; sampling_params may be a list",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD_CALLS, ids=lambda v: str(v)[:40])
def test_bad_calls_change_nothing(llm, call, error, text):
    """Alone, and as one of several prompts: the call fails, nothing is left behind, the next call works."""
    with pytest.raises(error, match=text):
        llm.generate(**{"sampling_params": GREEDY, **call}, use_tqdm=False)
    assert_idle(llm)
    prompts = call["prompts"]
    if isinstance(prompts, list) and set(call) == {"prompts"}:
        with pytest.raises(error, match=text):
            llm.generate(["fine", *prompts, "fine too"], GREEDY, use_tqdm=False)
        assert_idle(llm)
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"logprobs": 21}, "^Requested sample logprobs of 21, which is greater than max allowed: 20$"),
        ({"prompt_logprobs": 21}, "^Requested prompt logprobs of 21, which is greater than max allowed: 20$"),
        ({"allowed_token_ids": [403]}, "^allowed_token_ids contains out-of-vocab token id!$"),
        (
            {"logit_bias": {403: 1.0}},
            r"^token_id\(s\) \[403\] in logit_bias contain out-of-vocab token ids. Vocabulary size: 403$",
        ),
        ({"stop_token_ids": [403], "min_tokens": 1}, "in stop_token_ids contain out-of-vocab token ids"),
        ({"bad_words": ["", "x"]}, "bad_words"),
    ],
)
def test_bad_parameters_are_found_before_anything_runs(llm, params, text):
    with pytest.raises(ValueError, match=text):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(**params)], use_tqdm=False)
    assert_idle(llm)


def test_longest_prompt_is_accepted(llm):
    (output,) = llm.generate([[5] * MAX_MODEL_LEN], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    (output,) = llm.generate(
        [[5] * (MAX_MODEL_LEN - 3)], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].finish_reason == "length"


def test_text_that_is_far_too_long_is_refused_without_tokenizing_it(llm, monkeypatch):
    tokenizer = llm.llm_engine.own_tokenizer
    monkeypatch.setattr(tokenizer, "encode", lambda *a: pytest.fail("tokenized"))
    with pytest.raises(ValueError, match=r"\(length \d+ or more\) is longer than the maximum model length of 96\."):
        llm.generate("x" * 1_000_000, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    (output,) = llm.generate("x" * 50_000, GREEDY, tokenization_kwargs={"truncate_prompt_tokens": 9}, use_tqdm=False)
    assert len(output.prompt_token_ids) == 9


def test_truncate_prompt_tokens_keeps_the_end(llm):
    ids = list(range(10, 60))
    params = SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=7)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    assert output.prompt_token_ids == ids[-7:]
    (output,) = llm.generate([ids], GREEDY, tokenization_kwargs={"truncate_prompt_tokens": 5}, use_tqdm=False)
    assert output.prompt_token_ids == ids[-5:]
    for long in (list(range(10, 200)), "ab " * 900):
        (output,) = llm.generate([long], GREEDY, tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
        assert len(output.prompt_token_ids) == MAX_MODEL_LEN
    (output,) = llm.generate([ids], SamplingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert output.prompt_token_ids == ids


def test_users_parameters_are_not_changed(llm):
    params = SamplingParams(temperature=0, max_tokens=2, stop=["zz"], bad_words=["fox"])
    before = repr(params)
    llm.generate(["a", "b"], params, use_tqdm=False)
    assert repr(params) == before
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_default_parameters_are_the_models(llm):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5)
    assert len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_end_of_sequence_ids_of_tokenizer_and_generation_config(llm):
    """eos (1) ends silently, the further one (3) is named; the text has neither, the tokens have them."""
    for token, reason in [(1, None), (3, 3)]:
        params = SamplingParams(max_tokens=5, allowed_token_ids=[token])
        completion = llm.generate("a", params, use_tqdm=False)[0].outputs[0]
        assert (completion.token_ids, completion.text) == ([token], "")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)
        params = SamplingParams(max_tokens=5, allowed_token_ids=[token], ignore_eos=True)
        assert llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids == [token] * 5
        params = SamplingParams(max_tokens=5, allowed_token_ids=[token, 50], min_tokens=3)
        assert len(llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids) >= 3


@pytest.mark.parametrize("skip_tokenizer_init", [False, True])
def test_without_a_generation_config_the_ids_of_config_json_end_a_text(
    model_folder, hf_model, tmp_path, skip_tokenizer_init
):
    from transformers import LlamaForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "generation_config.json").unlink()
    ids = [50, 60, 70]
    free = hf_greedy(hf_model, ids, 12)
    end = next(token for token in free[2:] if token not in free[:2])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, end]}))
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    with make_llm(folder, skip_tokenizer_init=skip_tokenizer_init) as llm:
        completion = llm.generate([ids], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == expected == free[: free.index(end) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", end)


def test_stop_strings(llm):
    (free,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[3:6]
    for include in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, stop=[stop], include_stop_str_in_output=include
        )
        completion = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
        end = text.index(stop)
        assert completion.text == text[: end + len(stop) if include else end]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == free.outputs[0].token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) < 12
    assert_idle(llm)


def test_logprobs_follow_the_contract(llm, hf_model):
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    completion = output.outputs[0]
    ids = output.prompt_token_ids + completion.token_ids
    with torch.no_grad():
        expected = hf_model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert len(completion.logprobs) == 6
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    for position, entry in enumerate(entries):
        row, token = expected[position], ids[position + 1]
        k = 2 if position < len(output.prompt_token_ids) - 1 else 3
        assert next(iter(entry)) == token
        assert entry[token].rank == int((row > row[token]).sum()) + 1
        top = row.topk(k).indices.tolist()
        assert list(entry) == [token, *[t for t in top if t != token]]
        for t, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[t]), abs=1e-4)
            assert logprob.decoded_token == llm.llm_engine.own_tokenizer.token_text(t)
        assert [entry[t].rank for t in top] == list(range(1, k + 1))
    total = sum(entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_logprobs_zero_and_all(llm):
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0, detokenize=False)
    completion = llm.generate("a", params, use_tqdm=False)[0].outputs[0]
    assert [len(entry) for entry in completion.logprobs] == [1, 1]
    assert all(
        entry[t].decoded_token is None for entry, t in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    assert completion.text == ""


def test_several_sequences_share_their_prompt_and_differ(llm):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    single = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    (alone,) = llm.generate(PROMPTS[0], single, use_tqdm=False)
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    (again,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]
    assert_idle(llm)


def test_best_of_returns_the_likeliest(llm):
    common = {"temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    everything = llm.generate("a", SamplingParams(n=6, logprobs=0, **common), use_tqdm=False)[0].outputs
    best = llm.generate("a", SamplingParams(n=2, best_of=6, **common), use_tqdm=False)[0].outputs
    ranked = sorted(everything, key=lambda c: -c.cumulative_logprob)[:2]
    assert [c.token_ids for c in best] == [c.token_ids for c in ranked]
    assert [c.index for c in best] == [0, 1]
    assert best[0].logprobs is None


def test_unseeded_requests_differ_but_repeat_with_the_engine(model_folder, llm):
    params = SamplingParams(temperature=1.0, max_tokens=8)
    tokens = [o.outputs[0].token_ids for o in llm.generate(["a"] * 3, params, use_tqdm=False)]
    assert len({tuple(t) for t in tokens}) == 3
    runs = []
    for _ in range(2):
        with make_llm(model_folder, seed=11) as other:
            with pytest.raises(ValueError):
                other.generate(["a", ""], params, use_tqdm=False)
            runs.append([o.outputs[0].token_ids for o in other.generate(["a"] * 2, params, use_tqdm=False)])
    assert runs[0] == runs[1]


def test_priority_needs_its_policy_and_orders_requests(model_folder):
    with make_llm(model_folder, scheduling_policy="priority", max_num_seqs=1) as llm:
        outputs = llm.generate(["a", "b", "c"], GREEDY, priority=[5, 0, 2], use_tqdm=False)
        order = sorted(range(3), key=lambda i: outputs[i].metrics.first_scheduled_time)
        assert order == [1, 2, 0]
        params = deque([GREEDY] * 3)
        outputs = llm.generate(["a", "b", "c"], params, priority=np.array([2, 1, 0]), use_tqdm=False)
        order = sorted(range(3), key=lambda i: outputs[i].metrics.first_scheduled_time)
        assert order == [2, 1, 0]


def test_chat(llm):
    conversation = [{"role": "user", "content": "Hello"}]
    rendered = "<|bos|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    (one,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert one.prompt == rendered
    assert one.prompt_token_ids == llm.get_tokenizer().encode(rendered, add_special_tokens=False)
    two = llm.chat(
        [conversation, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]], GREEDY, use_tqdm=False
    )
    assert two[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert "Hi<|im_end|>" in two[1].prompt
    (tools,) = llm.chat(conversation, GREEDY, use_tqdm=False, tools=[{"a": 1}])
    assert '[{"a": 1}]' in tools.prompt
    (custom,) = llm.chat(conversation, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}?")
    assert custom.prompt == "Hello?"
    last = [*conversation, {"role": "assistant", "content": "I am"}]
    (continued,) = llm.chat(last, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert continued.prompt.endswith("I am")
    with pytest.raises(ValueError, match="Cannot set both"):
        llm.chat(last, GREEDY, continue_final_message=True)
    with pytest.raises(NotImplementedError, match="Unknown part type: x"):
        llm.chat([{"role": "user", "content": [{"type": "x"}]}], GREEDY)
    assert_idle(llm)


def test_the_form_of_an_answer_that_is_gone_on_with_begins_at_once():
    """Behind a reasoning parser whose models think even without the opening tag, unless they speak already."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    conversations = [
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": begun}]
        for begun in ("It is", "<think>Well</think>It is", "<think>It is")
    ]
    older, newer = GuidedDecodingParams(json=schema), StructuredOutputsParams(json=schema)
    options = {"add_generation_prompt": False, "continue_final_message": True, "use_tqdm": False}
    with LLM("demo", reasoning_parser="deepseek_r1", max_model_len=512, num_gpu_blocks_override=100) as llm:
        for form in ({"guided_decoding": older}, {"structured_outputs": newer}):
            params = SamplingParams(temperature=0.0, max_tokens=40, **form)
            found = llm.chat(conversations, params, **options)
            llm.enqueue_chat(conversations, params, **options)
            for outputs in (found, llm.wait_for_completion(use_tqdm=False)):
                speaking, spoke, thinking = (output.outputs[0].text for output in outputs)
                assert json.loads(speaking) == json.loads(spoke) == {"a": 1}
                assert thinking and "{" not in thinking
        assert_idle(llm)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tools": "weather"}, TypeError, "tools must be a list of dictionaries that describe functions, got weather"),
        ({"tools": [5]}, TypeError, "tools must be a list of dictionaries"),
        ({"chat_template_kwargs": 5}, TypeError, "chat_template_kwargs must be a dictionary, got int"),
        ({"chat_template_kwargs": {"messages": []}}, ValueError, "own variables; messages is none of them"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, ValueError, "add_generation_prompt is none of"),
    ],
)
def test_wrong_options_of_chat(llm, options, error, text):
    for call in (llm.chat, llm.enqueue_chat):
        with pytest.raises(error, match=text):
            call([{"role": "user", "content": "Hello"}], GREEDY, **options)


def test_queued_chats_take_the_options_of_chat(llm):
    conversation = [{"role": "user", "content": "Hello"}]
    options = {
        "chat_template": "{{ documents[0].text }}{{ messages[0].content[0].text }}{{ mood }}",
        "chat_template_content_format": "openai",
        "chat_template_kwargs": {"mood": "!" * 30, "documents": [{"text": "a"}]},
        "tokenization_kwargs": {"truncate_prompt_tokens": 9},
    }
    (now,) = llm.chat(conversation, GREEDY, use_tqdm=False, **options)
    assert len(now.prompt_token_ids) == 9
    llm.enqueue_chat(conversation, GREEDY, **options)
    (later,) = llm.wait_for_completion(use_tqdm=False)
    assert (later.prompt, later.prompt_token_ids) == (now.prompt, now.prompt_token_ids)
    with pytest.raises(TypeError, match="^enqueue_chat has no argument 'temperature'; it takes those of chat.$"):
        llm.enqueue_chat(conversation, GREEDY, temperature=0)


def test_a_missing_chat_template_is_found_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="nothing.jinja. appears path-like, but doesn't exist"):
        LLM("no-such-model", chat_template=str(tmp_path / "nothing.jinja"))


def test_queue_now_and_wait_later(llm):
    ids = llm.enqueue(PROMPTS[:2], GREEDY, use_tqdm=False)
    chat_ids = llm.enqueue_chat([{"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False)
    direct = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    waited = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [o.request_id for o in waited] == ids + chat_ids
    assert waited[0].outputs[0].token_ids == llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert direct[0].prompt == PROMPTS[2]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_request_ids_count_up(llm):
    first = int(llm.generate("a", GREEDY, use_tqdm=False)[0].request_id)
    assert [o.request_id for o in llm.generate(["a", "b"], GREEDY, use_tqdm=False)] == [str(first + 1), str(first + 2)]


def test_prefix_cache_is_used_and_reset(llm):
    ids = list(range(20, 60))
    llm.generate([ids], GREEDY, use_tqdm=False)
    (warm,) = llm.generate([ids], GREEDY, use_tqdm=False)
    assert warm.num_cached_tokens == 32  # whole blocks, and the last token is always computed
    (salted,) = llm.generate({"prompt_token_ids": ids, "cache_salt": "s"}, GREEDY, use_tqdm=False)
    assert salted.num_cached_tokens == 0
    assert llm.reset_prefix_cache() is True
    (cold,) = llm.generate([ids], GREEDY, use_tqdm=False)
    assert cold.num_cached_tokens == 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids == salted.outputs[0].token_ids


def test_logits_processor_that_raises_fails_its_request_alone(llm):
    def broken(token_ids, logits):
        raise RuntimeError("my own mistake")

    good = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=4, logits_processors=[broken])]
    with pytest.raises(GenerationError, match="my own mistake"):
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert_idle(llm)
    again = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in good]


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_may_bar_tokens_and_force_one_by_any_large_number(llm, temperature, logprobs):
    """-inf and the least finite number bar a token, +inf picks one; nothing left, or a NaN, fails the request alone."""

    def only(logits, value):
        kept = logits[42].clone()
        logits[:] = value
        logits[42] = kept
        return logits

    def force(logits):
        logits[42] = torch.inf
        return logits

    def spoil(logits):
        logits[3] = torch.nan
        return logits

    def tokens(change):
        params = SamplingParams(
            temperature=temperature, max_tokens=2, logprobs=logprobs, ignore_eos=True,
            logits_processors=[lambda ids, logits: change(logits)],
        )  # fmt: skip
        return llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids

    for change in (lambda x: only(x, -torch.inf), lambda x: only(x, torch.finfo(x.dtype).min), force):
        assert tokens(change) == [42, 42]
    for change in (lambda logits: logits.fill_(-torch.inf), spoil):
        with pytest.raises(GenerationError, match="No token is possible"):
            tokens(change)
    assert_idle(llm)


@pytest.mark.parametrize("heals", [True, False])
def test_failing_steps_do_not_end_the_engine(llm, monkeypatch, heals):
    """A failure that passes is not even seen; one that stays ends its requests, and the next ones work."""
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    executor = llm.llm_engine.core.core._executor
    submit = executor.submit
    steps = []

    def failing(plan):
        steps.append(plan)
        if len(steps) == 3 or (len(steps) > 3 and not heals):
            raise RuntimeError("the device said no")
        submit(plan)

    monkeypatch.setattr(executor, "submit", failing)
    if heals:
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert found == expected
    else:
        with pytest.raises(GenerationError, match="the device said no"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert_idle(llm)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected


@pytest.mark.parametrize("where", ["between steps", "inside a step"])
def test_interrupt_leaves_the_engine_usable(llm, monkeypatch, where):
    executor = llm.llm_engine.core.core._executor
    submit = executor.submit
    calls = []

    def interrupting(plan):
        calls.append(plan)
        if len(calls) == 3:
            if where == "inside a step":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)
        submit(plan)

    monkeypatch.setattr(executor, "submit", interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
    assert_idle(llm)


def test_works_in_another_thread(llm):
    found = []
    thread = threading.Thread(target=lambda: found.append(llm.generate("a", GREEDY, use_tqdm=False)))
    thread.start()
    thread.join()
    assert len(found[0][0].outputs[0].token_ids) == 12


def test_calls_from_several_threads_run_one_after_another(llm):
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    found = {}

    def call(i):
        found[i] = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[i:], GREEDY, use_tqdm=False)]

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {i: expected[i:] for i in range(4)}
    assert_idle(llm)


def test_requests_are_added_and_aborted_while_another_thread_steps(llm):
    engine = llm.llm_engine
    stop = threading.Event()
    finished = {}

    def step():
        while not stop.is_set() or engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output.outputs[0].token_ids

    (expected,) = llm.generate("a", GREEDY, use_tqdm=False)
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    for i in range(40):
        engine.add_request(f"t{i}", "a", GREEDY)
        if i % 4 == 0:
            engine.abort_request(f"t{i}")
    stop.set()
    thread.join(timeout=60)
    kept = [f"t{i}" for i in range(40) if i % 4]
    assert all(finished[name] == expected.outputs[0].token_ids for name in kept)
    assert_idle(llm)


def test_a_call_inside_another_is_refused(llm):
    def inner(token_ids, logits):
        llm.generate("b", GREEDY, use_tqdm=False)
        return logits

    with pytest.raises(GenerationError, match="in the middle of another call of the same thread"):
        llm.generate("a", SamplingParams(max_tokens=3, logits_processors=[inner]), use_tqdm=False)
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
    assert_idle(llm)


def test_a_request_that_somebody_aborts_does_not_hold_its_call(llm, monkeypatch):
    engine = llm.llm_engine
    step = engine.step

    def stepping():
        outputs = step()
        engine.abort_request(list(engine.output_processor._requests)[:1])
        return outputs

    monkeypatch.setattr(engine, "step", stepping)
    with pytest.raises(GenerationError, match="was aborted before it had finished"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert_idle(llm)


def test_a_closed_engine_says_so(model_folder):
    with make_llm(model_folder) as llm:
        pass
    for call in (lambda: llm.generate("a", GREEDY), lambda: llm.chat([{"role": "user", "content": "a"}])):
        with pytest.raises(RuntimeError, match="^This engine has been shut down .* Make a new one.$"):
            call()


def test_steps_in_flight_change_nothing(llm, monkeypatch):
    """Planning a step before the last one's tokens are known, as on a GPU: same outputs, whatever ends them."""
    prompts = ["The", "def f(x):", "it's", "こんにちは", "a", "b"]
    stop = llm.generate("The", GREEDY, use_tqdm=False)[0].outputs[0].text[4:6]
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop], logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=1, max_tokens=9, n=3),
        SamplingParams(temperature=1.0, seed=2, max_tokens=5, n=1, best_of=3),
        SamplingParams(temperature=0.7, seed=3, max_tokens=14, repetition_penalty=1.3, min_tokens=3),
        SamplingParams(temperature=0, max_tokens=6, use_beam_search=True, best_of=3, n=2),
        SamplingParams(temperature=1.0, seed=4, max_tokens=7, bad_words=["fox"], min_p=0.1, logit_bias={60: 5.0}),
    ]

    def outputs():
        llm.reset_prefix_cache()
        return [o.outputs for o in llm.generate(prompts, params, use_tqdm=False)]

    expected = outputs()
    monkeypatch.setattr(llm.llm_engine.core.core._executor, "max_in_flight", 2)
    found = outputs()
    monkeypatch.undo()
    for before, after in zip(expected, found, strict=True):
        assert [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in after] == [
            (c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in before
        ]
        if before[0].logprobs is not None:
            assert [list(entry) for entry in after[0].logprobs] == [list(entry) for entry in before[0].logprobs]
    assert expected[0][0].stop_reason == stop
    assert_idle(llm)


def test_prompts_are_looked_at_while_the_first_step_runs(llm, monkeypatch):
    engine, core = llm.llm_engine, llm.llm_engine.core.core
    prompts = [{"prompt_token_ids": [10 + i] * (40 + i)} for i in range(30)]
    llm.reset_prefix_cache()
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    begun = []
    monkeypatch.setattr(core._executor, "max_in_flight", 2)
    begin = core.begin
    monkeypatch.setattr(core, "begin", lambda: (begun.append(engine.get_num_unfinished_requests()), begin()))
    llm.reset_prefix_cache()
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected
    assert begun == [4], "more than the 128 tokens of a step"

    with pytest.raises(ValueError, match="99999999"):
        llm.generate([*prompts, {"prompt_token_ids": [99999999]}], GREEDY, use_tqdm=False)
    assert engine.get_num_unfinished_requests() == 0, "all or none"
    monkeypatch.undo()
    assert [o.outputs[0].token_ids for o in llm.generate(prompts[:3], GREEDY, use_tqdm=False)] == expected[:3]
    assert_idle(llm)


def test_what_only_other_models_or_versions_do_says_so(llm):
    for call, error, text in [
        (
            lambda: llm.embed("a"),
            ValueError,
            "^Embedding API is only enabled for `--task embed`; this model is for: generate. Load it with task='embed'",
        ),
        (lambda: llm.classify("a"), ValueError, "^Classification API is only enabled for `--task classify`; "),
        (lambda: llm.score("a", "b"), ValueError, "^Score API is only enabled for `--task embed or --task score`; "),
        (lambda: llm.encode("a"), ValueError, "only enabled for pooling models"),
        (lambda: llm.sleep(), NotImplementedError, "Sleep mode is not available"),
        (lambda: llm.wake_up(), NotImplementedError, "Sleep mode is not available"),
    ]:
        with pytest.raises(error, match=text):
            call()


def test_model_can_be_reached(llm, model_folder):
    from transformers import AutoModelForCausalLM

    published = AutoModelForCausalLM.from_pretrained(model_folder)
    (count,) = llm.apply_model(lambda model: sum(p.numel() for n, p in model.named_parameters() if "blocks." in n))
    assert count == sum(p.numel() for n, p in published.named_parameters() if ".layers." in n)
    (ranks,) = llm.collective_rpc(lambda worker: (worker.rank, worker.local_rank, worker.vllm_config.model_config))
    assert ranks == (0, 0, llm.llm_engine.model_config)
    assert llm.collective_rpc(lambda worker: worker.model_runner.model is worker.get_model()) == [True]
    (name,) = llm.collective_rpc(lambda worker: type(worker).__name__)
    assert name == "Worker"
    with pytest.raises(ValueError, match="no public method"):
        llm.collective_rpc("_load")


def test_weights_changed_through_the_model_are_used(llm):
    params = SamplingParams(temperature=0, max_tokens=8)

    def scale_head(model, factor):
        for name, parameter in model.named_parameters():
            if "blocks.0" in name and parameter.dim() == 2:
                parameter.data.mul_(factor)

    before = llm.generate("Hello my name", params)[0].outputs[0].token_ids
    llm.apply_model(lambda model: scale_head(model, -4.0))
    llm.reset_prefix_cache()
    changed = llm.generate("Hello my name", params)[0].outputs[0].token_ids
    llm.apply_model(lambda model: scale_head(model, -0.25))
    llm.reset_prefix_cache()
    assert llm.generate("Hello my name", params)[0].outputs[0].token_ids == before != changed


def test_tokenizer_can_be_replaced(model_folder):
    from transformers import AutoTokenizer

    with make_llm(model_folder) as llm:
        other = AutoTokenizer.from_pretrained(model_folder)
        other.add_tokens(["France"])
        llm.set_tokenizer(other)
        assert llm.get_tokenizer() is other
        (output,) = llm.generate("France", GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == other.encode("France")
        for wrong in ("a name", None):
            with pytest.raises(TypeError, match="must be a tokenizer of transformers, got"):
                llm.set_tokenizer(wrong)
        assert llm.get_tokenizer() is other


def test_without_a_tokenizer(model_folder):
    with make_llm(model_folder, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate(
            {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 3
        assert output.outputs[0].text == ""
        with pytest.raises(ValueError, match="^You cannot pass text prompts when `skip_tokenizer_init` is True$"):
            llm.generate("a", GREEDY)
        with pytest.raises(ValueError, match="stop needs a tokenizer"):
            llm.generate({"prompt_token_ids": [5]}, SamplingParams(stop="x"))


def test_positional_arguments_behind_the_model_warn(model_folder):
    with pytest.warns(DeprecationWarning, match="Positional arguments"), pytest.raises(ValueError):
        LLM(str(model_folder), None, "no such mode")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        with pytest.raises(TypeError, match="max_model_length.*max_model_len"):
            LLM(str(model_folder), max_model_length=5)


def test_deleting_frees_the_model(model_folder):
    llm = make_llm(model_folder)
    model = weakref.ref(llm.llm_engine.core.core._executor.worker.model)
    engine = weakref.ref(llm.llm_engine)
    llm.generate("a", GREEDY, use_tqdm=False)
    gc.disable()  # the next model needs the room now
    try:
        del llm
    finally:
        gc.enable()
    assert engine() is None
    assert model() is None


def test_script_ends_quietly(model_folder):
    code = (
        "from vllm import LLM, SamplingParams\n"
        f"llm = LLM({str(model_folder)!r}, max_model_len=64, num_gpu_blocks_override=40)\n"
        "print(len(llm.generate('hi', SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))\n"
    )
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "3\n"
    assert done.returncode == 0
    assert "Processed prompts: 100%" in done.stderr
    assert "output: " in done.stderr
    assert not [line for line in done.stderr.splitlines() if "rocessed prompts" not in line and line.strip()]


def test_validation_errors_name_the_parameter(llm):
    with pytest.raises(VLLMValidationError) as caught:
        llm.generate([[10**6]], GREEDY, use_tqdm=False)
    assert caught.value.parameter == "prompt_token_ids"


@pytest.mark.parametrize(
    "convert",
    [
        list, tuple, np.array, torch.tensor, lambda ids: [np.int64(i) for i in ids],
        lambda ids: BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids)}),
    ],
    ids=["list", "tuple", "numpy", "torch", "numpy integers", "encoding"],
)  # fmt: skip
def test_token_ids_in_any_container(llm, convert):
    ids = llm.get_tokenizer().encode("The capital of France is")
    (expected,) = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = [
            llm.generate(convert(ids), GREEDY, use_tqdm=False),
            llm.generate([convert(ids)], GREEDY, use_tqdm=False),
            llm.generate([{"prompt_token_ids": convert(ids)}], GREEDY, use_tqdm=False),
            llm.generate(prompt_token_ids=convert(ids), sampling_params=GREEDY, use_tqdm=False),
            llm.generate(None, GREEDY, [convert(ids)], use_tqdm=False),
        ]
    for (output,) in found:
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.prompt_token_ids == ids


def test_arrays_hold_several_prompts(llm):
    texts = ["def f(x):", "it's"]
    expected = [o.outputs[0].text for o in llm.generate(texts, GREEDY, use_tqdm=False)]
    assert [o.outputs[0].text for o in llm.generate(np.array(texts), GREEDY, use_tqdm=False)] == expected
    outputs = llm.generate(torch.tensor([[5, 6, 7], [8, 9, 10]]), GREEDY, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [[5, 6, 7], [8, 9, 10]]


def test_what_older_and_newer_programs_look_up(llm):
    engine = llm.llm_engine
    assert llm.model_config is engine.model_config and llm.supported_tasks == ("generate",)
    tokenizer = llm.get_tokenizer()  # the other is one of transformers and a group of tokenizers
    assert isinstance(engine.tokenizer, type(tokenizer)) and engine.tokenizer("it's") == tokenizer("it's")
    assert engine.tokenizer.tokenizer is engine.tokenizer.get_lora_tokenizer() is tokenizer
    assert engine.cache_config.num_gpu_blocks == engine.core.describe()["num_blocks"]
    assert engine.cache_config.num_cpu_blocks == 0
    assert engine.device_config.device_type == "cpu"
    assert engine.decoding_config.backend == "auto"
    assert engine.load_config is engine.vllm_config.load_config
    assert engine.observability_config is engine.vllm_config.observability_config
    assert [engine.lora_config, engine.speculative_config, engine.prompt_adapter_config] == [None, None, None]


def test_older_arguments_are_deprecated_within_a_block(llm, monkeypatch):
    def asked():
        return llm.generate(prompt_token_ids=[[5, 6]], sampling_params=GREEDY, use_tqdm=False)

    monkeypatch.setattr(LLM, "DEPRECATE_LEGACY", False)
    with LLM.deprecate_legacy_api(), pytest.warns(DeprecationWarning, match="prompt_token_ids"):
        (inside,) = asked()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert asked()[0].outputs[0].token_ids == inside.outputs[0].token_ids


def test_chats_that_the_tokenizer_writes_are_not_tokenized_again(llm, monkeypatch):
    tokenizer = llm.llm_engine.own_tokenizer
    monkeypatch.setattr(tokenizer, "writes_chats", True)
    monkeypatch.setattr(tokenizer, "chat", lambda *arguments: ("some text", [5, 6, 7]), raising=False)
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("some text", [5, 6, 7])


def test_newer_arguments_of_older_methods(llm):
    for pooling in (llm.encode, llm.embed, llm.classify):
        with pytest.raises(ValueError, match="pooling models|only enabled for `--task"):
            pooling(prompts=["a"], pooling_params=None, tokenization_kwargs={})
    with pytest.raises(ValueError, match="only enabled for `--task"):
        llm.score("a", "b", chat_template=None)
    with pytest.raises(NotImplementedError, match="Sleep mode is not available"):
        llm.sleep(level=1, mode="abort")
    with pytest.raises(ValueError, match="profile_prefix is not available"):
        llm.start_profile("x")
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    llm.enqueue("it's", GREEDY)
    with pytest.raises(ValueError, match="reset_running_requests is not available"):
        llm.reset_prefix_cache(reset_running_requests=True)
    assert len(llm.wait_for_completion(RequestOutput, use_tqdm=False)) == 1


def test_metrics_are_read_as_objects(llm, model_folder):
    with pytest.raises(ValueError, match="Pass disable_log_stats=False"):
        llm.get_metrics()
    with make_llm(model_folder, disable_log_stats=False) as counting:
        counting.generate(["it's", "def"], GREEDY, use_tqdm=False)
        found = {metric.name: metric for metric in counting.get_metrics() if "finished_reason" not in metric.labels}
    labels = {"model_name": str(model_folder), "engine": "0"}
    assert found["vllm:generation_tokens"] == Counter("vllm:generation_tokens", labels, 24)
    assert found["vllm:num_requests_running"] == Gauge("vllm:num_requests_running", labels, 0.0)
    lengths = found["vllm:request_generation_tokens"]
    assert isinstance(lengths, Histogram) and (lengths.count, lengths.sum) == (2, 24)
    assert lengths.buckets["10.0"] == 0 and lengths.buckets["20.0"] == lengths.buckets["+Inf"] == 2
