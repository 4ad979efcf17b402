"""Beam search against one that computes every distribution with Hugging Face's model, from the start, each time."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.tiny_llama import assert_idle, make_llm
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

PROMPT = [10, 40, 60, 25]


def oracle(hf_model, prompt, width, steps, ends, penalty=1.0, temperature=1.0):
    """[(output tokens, cumulative logprob, score)], best first: the definition, without any shortcut."""
    live, ended = [([], 0.0)], []
    for _ in range(steps):
        candidates = []
        for tokens, total in live:
            with torch.no_grad():
                logits = hf_model(torch.tensor([prompt + tokens])).logits[0, -1]
            logprobs = (logits / temperature).log_softmax(-1)
            values, ids = logprobs.topk(2 * width)
            for value, token in zip(values.tolist(), ids.tolist(), strict=True):
                new = (tokens + [token], total + value)
                (ended if token in ends else candidates).append(new)
        live = sorted(candidates, key=lambda c: -c[1] / (len(prompt) + len(c[0])) ** penalty)[:width]
    finished = [(t, p, p / (len(prompt) + len(t) - 1) ** penalty) for t, p in ended]
    finished += [(t, p, p / (len(prompt) + len(t)) ** penalty) for t, p in live]
    return sorted(finished, key=lambda c: -c[2])[:width]


@pytest.fixture(scope="module")
def likely_end(hf_model):
    """Tokens that occur in a beam search from PROMPT."""
    best = oracle(hf_model, PROMPT, 4, 6, ends=())
    return [best[0][0][3], best[1][0][5], best[2][0][2]]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -1.0])
def test_beams_equal_the_definition(llm, hf_model, width, penalty):
    params = BeamSearchParams(beam_width=width, max_tokens=7, length_penalty=penalty, ignore_eos=True)
    (found,) = llm.beam_search([{"prompt_token_ids": PROMPT}], params)
    expected = oracle(hf_model, PROMPT, width, 7, ends=(), penalty=penalty)
    assert [s.tokens for s in found.sequences] == [PROMPT + tokens for tokens, _, _ in expected]
    for sequence, (tokens, total, _) in zip(found.sequences, expected, strict=True):
        assert sequence.cum_logprob == pytest.approx(total, abs=1e-3)
        assert sequence.finish_reason == "length"
        assert sequence.text == llm.get_tokenizer().decode(sequence.tokens, skip_special_tokens=True)
        assert [next(iter(step)) for step in sequence.logprobs] == tokens
        assert sum(step[t].logprob for step, t in zip(sequence.logprobs, tokens, strict=True)) == pytest.approx(
            total, abs=1e-3
        )
    assert_idle(llm)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
def test_ends_of_beams_equal_the_definition(llm, hf_model, likely_end, penalty):
    """Stop tokens end beams at different lengths; the search may stop early, which must not change the answer."""
    params = SamplingParams(
        use_beam_search=True,
        n=3,
        best_of=3,
        temperature=0,
        max_tokens=12,
        length_penalty=penalty,
        stop_token_ids=likely_end,
    )
    engine = llm.llm_engine
    engine.add_request("beams", {"prompt_token_ids": PROMPT}, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs) == 1
    expected = oracle(hf_model, PROMPT, 3, 12, ends={1, 3, *likely_end}, penalty=penalty)
    assert [c.token_ids for c in outputs[0].outputs] == [tokens for tokens, _, _ in expected]
    assert penalty > 1 or any(c.finish_reason == "stop" for c in outputs[0].outputs)
    for completion in outputs[0].outputs:
        if completion.finish_reason == "stop":
            assert completion.stop_reason == completion.token_ids[-1]
    assert_idle(llm)


def test_end_of_sequence_token_is_in_the_tokens_of_beams_but_not_in_their_text(
    model_folder, hf_model, likely_end, tmp_path
):
    folder = shutil.copytree(model_folder, tmp_path / "other-eos")
    (folder / "generation_config.json").write_text("{}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    with make_llm(folder, skip_tokenizer_init=False) as llm:
        settings["eos_token"] = llm.llm_engine.own_tokenizer.id_to_token(likely_end[0])
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = oracle(hf_model, PROMPT, 3, 8, ends={likely_end[0]})
    with make_llm(folder) as llm:
        assert llm.llm_engine.own_tokenizer.eos_token_id == likely_end[0]
        for include in (False, True):
            params = BeamSearchParams(beam_width=3, max_tokens=8, include_stop_str_in_output=include)
            (found,) = llm.beam_search([{"prompt_token_ids": PROMPT}], params)
            ended = [s for s in found.sequences if s.finish_reason == "stop"]
            assert ended
            assert [s.tokens[len(PROMPT) :] for s in found.sequences] == [t for t, _, _ in expected]
            for sequence, (tokens, _, _) in zip(found.sequences, expected, strict=True):
                shown = tokens[:-1] if tokens[-1] == likely_end[0] and not include else tokens
                assert sequence.text == llm.llm_engine.own_tokenizer.decode(PROMPT + shown)


def test_temperature_scales_the_distribution(llm, hf_model):
    params = BeamSearchParams(beam_width=3, max_tokens=4, temperature=2.5, ignore_eos=True)
    (found,) = llm.beam_search([{"prompt_token_ids": PROMPT}], params)
    expected = oracle(hf_model, PROMPT, 3, 4, ends=(), temperature=2.5)
    assert [s.tokens for s in found.sequences] == [PROMPT + tokens for tokens, _, _ in expected]
    assert [s.cum_logprob for s in found.sequences] == pytest.approx([p for _, p, _ in expected], abs=1e-3)


def test_parameters_of_sampling_are_refused(llm):
    with pytest.raises(TypeError, match="params must be BeamSearchParams, got SamplingParams"):
        llm.beam_search([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=2))
    assert_idle(llm)


def test_several_prompts_and_the_end_of_the_context(llm, hf_model):
    long = [5 + i % 90 for i in range(93)]
    params = BeamSearchParams(beam_width=2, max_tokens=10, ignore_eos=True)
    found = llm.beam_search([{"prompt_token_ids": PROMPT}, {"prompt_token_ids": long}], params)
    assert [len(s.tokens) for s in found[0].sequences] == [len(PROMPT) + 10] * 2
    assert [len(s.tokens) for s in found[1].sequences] == [97] * 2  # the last token needs no room in the cache
    expected = oracle(hf_model, long, 2, 4, ends=())
    assert [s.tokens[93:] for s in found[1].sequences] == [tokens for tokens, _, _ in expected]
    assert_idle(llm)


def test_children_share_their_parents_blocks(llm):
    """A step of a beam computes one token per beam, not the prompt again."""
    llm.reset_prefix_cache()
    prompt = [7 + i % 80 for i in range(61)]
    computed = []
    step = llm.llm_engine.core.core.step
    llm.llm_engine.core.stats()  # forget what was computed before

    def counting():
        outputs = step()
        stats = llm.llm_engine.core.stats()
        computed.append(stats.prompt_tokens + stats.generation_tokens)
        return outputs

    llm.llm_engine.core.core.step = counting
    try:
        llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    finally:
        del llm.llm_engine.core.core.step
    assert computed[0] == 61 + 1  # the prompt, and the token sampled after it
    # Four children, each with a token sampled, and up to two tokens of each of the parents that lend their cache.
    assert max(computed[1:]) <= 4 * 4
    assert_idle(llm)
