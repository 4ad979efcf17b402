"""What users see of a step: whole outputs or differences, stop strings, log probabilities, several sequences, times."""

from __future__ import annotations

import random
import time

import pytest

from tests.engine import tokenizer_makers as make
from vllm import SamplingParams
from vllm.engine.output_processor import OutputProcessor
from vllm.engine.positions import logprob_dict
from vllm.engine.processed import ProcessedRequest, core_request
from vllm.engine.request_state import Delay, Refusal
from vllm.engine.tokenizer import FastTokenizer
from vllm.logprobs import FlatLogprobs
from vllm.metrics.registry import EngineMetrics
from vllm.outputs import failure_of
from vllm.sampling_params import RequestOutputKind
from vllm.step.messages import CoreOutput
from vllm.step.result import TokenLogprobs

TOKENIZER = FastTokenizer(make.byte_level(), {}, None, load_hf=lambda: None)
TEXT = "The quick brown fox jumps over the lazy dog 😀!"
IDS = TOKENIZER.encode(TEXT)
CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def make_request(request_id="r", kind=CUMULATIVE, prompt=(5, 6), **params) -> ProcessedRequest:
    resolved = SamplingParams(output_kind=kind, **{"max_tokens": 100, **params})
    made = ProcessedRequest(request_id, "hi", list(prompt), resolved, (), resolved.n, time.time(), 0)
    count = resolved.num_candidates
    ids = [request_id] if count == 1 else [f"{i}_{request_id}" for i in range(count)]
    children = tuple(core_request(made, core_id, resolved) for core_id in ids)
    return ProcessedRequest(request_id, "hi", list(prompt), resolved, children, resolved.n, made.arrival_time, 0)


def new_processor(metrics=None) -> OutputProcessor:
    return OutputProcessor(TOKENIZER, 600, 1000, metrics)


def run(processor, request_id, chunks, reason="length", stop_reason=None):
    """Feed chunks of tokens, the last with `reason`. Returns all outputs and all aborts."""
    outputs, aborts = [], []
    for i, chunk in enumerate(chunks):
        last = i == len(chunks) - 1
        message = CoreOutput(request_id, list(chunk), reason if last else None, stop_reason if last else None)
        found = processor.process([message])
        outputs += found.outputs
        aborts += found.aborts
    return outputs, aborts


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("stop", [[], ["never said"]])
def test_three_kinds_of_output_agree(size, stop):
    chunks = [IDS[i : i + size] for i in range(0, len(IDS), size)]
    found = {}
    for kind in (CUMULATIVE, DELTA, FINAL):
        processor = new_processor()
        processor.add(make_request(kind=kind, stop=stop))
        found[kind], aborts = run(processor, "r", chunks)
        assert aborts == []
        assert processor.num_unfinished == 0
        assert [o.finished for o in found[kind]] == [False] * (len(found[kind]) - 1) + [True]
    assert len(found[FINAL]) == 1
    final = found[FINAL][0].outputs[0]
    assert (final.text, final.token_ids, final.finish_reason) == (TEXT, IDS, "length")
    assert found[CUMULATIVE][-1].outputs[0] == final
    growing = [o.outputs[0].text for o in found[CUMULATIVE]]
    assert all(later.startswith(earlier) for earlier, later in zip(growing, growing[1:], strict=False))
    assert len(found[CUMULATIVE][0].outputs[0].token_ids) == size  # an output handed out does not change afterwards
    assert "".join(o.outputs[0].text for o in found[DELTA]) == TEXT
    assert [t for o in found[DELTA] for t in o.outputs[0].token_ids] == IDS


def test_plain_stream_has_the_deltas_of_any_other():
    """The short way of streams without extras against the general one, which a request for logprobs takes."""
    rng = random.Random(5)
    for _ in range(50):
        ids = [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
        cuts = sorted(rng.choices(range(1, len(ids) + 1), k=rng.randrange(0, 12)))
        chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        prompt = [rng.randrange(300) for _ in range(3)]
        seen = []
        for logprobs in (None, 0):
            metrics = EngineMetrics("m", 1000, {})
            processor = new_processor(metrics)
            processor.add(make_request(kind=DELTA, prompt=prompt, logprobs=logprobs))
            outputs, _ = run(processor, "r", chunks)
            assert len(outputs) == len([c for c in chunks if c]) + (not chunks[-1])
            times = metrics.time_per_output_token
            counts = (sum(times.counts), sum(metrics.time_to_first_token.counts), metrics.finished)
            seen.append([(o.outputs[0].text, o.outputs[0].token_ids, o.finished) for o in outputs] + [counts])
        assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
@pytest.mark.parametrize("include", [True, False])
def test_stop_string_ends_the_sequence_in_the_core_too(kind, include):
    processor = new_processor()
    processor.add(make_request(kind=kind, stop=["fox"], include_stop_str_in_output=include, logprobs=0))
    step = TokenLogprobs([1], [-0.5], 1)
    outputs, aborts = [], []
    for i in range(0, len(IDS), 4):
        tokens = IDS[i : i + 4]
        logprobs = [step._replace(token_ids=[t]) for t in tokens]
        found = processor.process([CoreOutput("r", tokens, logprobs=logprobs)])
        outputs += found.outputs
        aborts += found.aborts
        if found.aborts:
            break
    assert aborts == ["r"]
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "fox")
    expected = "The quick brown " + ("fox" if include else "")
    text = "".join(o.outputs[0].text for o in outputs) if kind is DELTA else last.text
    tokens = [t for o in outputs for t in o.outputs[0].token_ids] if kind is DELTA else last.token_ids
    assert text == expected
    shortest = next(n for n in range(len(IDS)) if "fox" in TOKENIZER.decode(IDS[:n]))
    assert tokens == IDS[:shortest]
    assert last.cumulative_logprob == pytest.approx(-0.5 * shortest)
    assert sum(len(o.outputs[0].logprobs) for o in (outputs if kind is DELTA else outputs[-1:])) == shortest
    assert processor.process([CoreOutput("r", [7])]).outputs == []  # a token that was under way


def positions_of(ids, top, seed):
    """What the core says about each token: itself, then the `top` most likely ones, maybe itself among them."""
    rng = random.Random(seed)
    found = []
    for token in ids:
        likely = rng.sample(range(600), top)
        if top and rng.random() < 0.5:
            likely[rng.randrange(top)] = token
        values = sorted((-rng.random() for _ in range(top)), reverse=True)
        own = values[likely.index(token)] if token in likely else -3.0
        found.append(
            TokenLogprobs([token, *likely], [own, *values], likely.index(token) + 1 if token in likely else 99)
        )
    return found


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
@pytest.mark.parametrize("stop", [[], ["fox"]])
@pytest.mark.parametrize("top", [0, 5])
def test_flat_logprobs_say_what_lists_say(kind, stop, top):
    """Of prompts and outputs, also where a stop string takes tokens back."""
    of_prompt, of_output = positions_of([6, 7], top, 1), positions_of(IDS, top, 2)
    seen = []
    for is_flat in (False, True):
        processor = new_processor()
        wanted = {"logprobs": top, "prompt_logprobs": top, "flat_logprobs": is_flat}
        processor.add(make_request(kind=kind, prompt=[5, 6, 7], stop=stop, **wanted))
        outputs = processor.process([CoreOutput("r", [], prompt_logprobs=of_prompt)]).outputs
        for i in range(0, len(IDS), 3):
            last = "length" if i + 3 >= len(IDS) else None
            message = CoreOutput("r", IDS[i : i + 3], last, logprobs=of_output[i : i + 3])
            outputs += processor.process([message]).outputs
        seen.append([(o.prompt_logprobs, o.outputs[0].logprobs, o.outputs[0].cumulative_logprob) for o in outputs])
        assert all(isinstance(o.outputs[0].logprobs, FlatLogprobs) == is_flat for o in outputs)
    assert seen[0] == seen[1]
    whole = sum((part for _, part, _ in seen[0]), []) if kind is DELTA else seen[0][-1][1]
    assert [next(iter(position)) for position in whole] == IDS[: len(whole)]
    assert whole[0] == logprob_dict(of_output[0], TOKENIZER)


def test_who_keeps_most_logprobs_fails_when_there_are_too_many():
    """Nobody else does, and what was kept is free again."""
    processor = new_processor()
    processor.most_logprobs = 1000
    sizes = {"small": 20, "large": 60, "stream": 60}
    for key, top in sizes.items():
        kind = DELTA if key == "stream" else FINAL
        processor.add(make_request(key, kind=kind, logprobs=top, flat_logprobs=True, n=2))
    refused = []
    for _ in range(20):
        for key, top in sizes.items():
            message = CoreOutput(f"0_{key}", [IDS[0]], logprobs=positions_of([IDS[0]], top, 0))
            found = processor.process([message])
            refused += [(o.request_id, o.outputs[0].stop_reason, found.aborts) for o in found.outputs if o.finished]
    ((key, text, aborts),) = refused
    assert (key, aborts) == ("large", ["0_large", "1_large"])
    assert isinstance(text, Refusal) and text.parameter == "logprobs"
    assert "more than" in text and "log probabilities" in text
    assert sorted(processor.request_ids) == ["small", "stream"]
    processor.abort(["small", "stream"])
    assert processor._held_logprobs == 0


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("stop", [[], ["never said"]])
def test_what_begins_again_has_nothing_of_the_first_time(flat, stop):
    """One of two sequences, or both, in the middle of the prompt's log probabilities or of the answer."""
    asked = {"logprobs": 3, "prompt_logprobs": 2, "flat_logprobs": flat, "stop": stop, "n": 2, "prompt": IDS[:5]}
    prompt = positions_of(IDS[1:5], 2, 1)

    def feed(processor, name, start, end, seed, cached=None):
        found = positions_of(IDS, 3, seed)[start:end]
        reason = "length" if end == len(IDS) else None
        output = CoreOutput(name, IDS[start:end], reason, logprobs=found, num_cached_tokens=cached)
        return processor.process([output]).outputs

    def answers(processor):
        """Both, as if nothing had happened before."""
        processor.process([CoreOutput("0_r", [], prompt_logprobs=prompt[:2])])
        processor.process([CoreOutput("0_r", [], prompt_logprobs=prompt[2:])])
        assert feed(processor, "0_r", 0, 7, 2, cached=3) == feed(processor, "0_r", 7, len(IDS), 2) == []
        (output,) = feed(processor, "1_r", 0, len(IDS), 3, cached=4)
        return output

    undisturbed = new_processor()
    undisturbed.add(make_request(kind=FINAL, **asked))
    want = answers(undisturbed)
    for tokens in (0, 5):
        processor = new_processor()
        processor.most_logprobs = 10_000
        processor.add(make_request(kind=FINAL, **asked))
        processor.add(make_request("other", kind=FINAL, logprobs=3))
        feed(processor, "other", 0, 2, 7)
        others = processor._held_logprobs
        processor.process([CoreOutput("0_r", [], prompt_logprobs=positions_of(IDS[1:4], 2, 5))])
        if tokens:
            feed(processor, "0_r", 0, tokens, 6, cached=1)
            feed(processor, "1_r", 0, tokens, 6)
        assert processor._held_logprobs > others
        assert not processor.process([CoreOutput(f"{i}_r", [], again=True) for i in range(2)]).outputs
        assert processor._held_logprobs == others
        found = answers(processor)
        for a, b in zip(found.outputs, want.outputs, strict=True):
            assert a == b and a.text == TEXT and len(a.logprobs) == len(IDS)
        assert found.prompt_logprobs == want.prompt_logprobs and len(found.prompt_logprobs) == 5
        assert found.num_cached_tokens == want.num_cached_tokens == 3
        assert found.metrics.num_generation_tokens == want.metrics.num_generation_tokens == 2 * len(IDS)
        assert processor._held_logprobs == others


def test_a_second_sequence_that_begins_again_leaves_what_is_known_of_the_prompt():
    processor = new_processor()
    processor.add(make_request(kind=FINAL, logprobs=0, prompt_logprobs=0, n=2, prompt=IDS[:3]))
    step = TokenLogprobs([1], [-0.5], 1)
    first = CoreOutput("0_r", [1], "length", logprobs=[step], prompt_logprobs=[step, step], num_cached_tokens=2)
    processor.process([first, CoreOutput("1_r", [1], logprobs=[step], num_cached_tokens=1)])
    processor.process([CoreOutput("1_r", [], again=True)])
    (found,) = processor.process([CoreOutput("1_r", [1], "length", logprobs=[step], num_cached_tokens=0)]).outputs
    assert len(found.prompt_logprobs) == 3 and found.num_cached_tokens == 2
    assert [(o.token_ids, o.cumulative_logprob, len(o.logprobs)) for o in found.outputs] == [([1], -0.5, 1)] * 2
    assert processor._held_logprobs == 0


def test_stop_token_is_in_the_tokens_but_not_in_the_text():
    for include in (True, False):
        processor = new_processor()
        processor.add(make_request(include_stop_str_in_output=include))
        outputs, _ = run(processor, "r", [[t] for t in IDS], "stop", stop_reason=IDS[-1])
        last = outputs[-1].outputs[0]
        assert last.token_ids == IDS
        assert last.stop_reason == IDS[-1]
        assert last.text == (TEXT if include else TEXT[:-1])


def test_prompt_logprobs_arrive_in_chunks():
    for kind in (CUMULATIVE, DELTA, FINAL):
        processor = new_processor()
        processor.add(make_request(kind=kind, prompt=(5, 6, 7, 8), prompt_logprobs=1))
        chunk = [TokenLogprobs([6, 9], [-2.0, -0.1], 4), TokenLogprobs([7, 7], [-0.3, -0.3], 1)]
        assert processor.process([CoreOutput("r", [], prompt_logprobs=chunk)]).outputs == []
        rest = [TokenLogprobs([8, 5], [-1.0, -0.2], 2)]
        found = processor.process([CoreOutput("r", [10], prompt_logprobs=rest)]).outputs
        found += processor.process([CoreOutput("r", [11], "length")]).outputs
        logprobs = found[0].prompt_logprobs
        assert logprobs[0] is None
        assert [list(entry) for entry in logprobs[1:]] == [[6, 9], [7], [8, 5]]
        assert (logprobs[1][6].rank, logprobs[1][9].rank) == (4, 1)
        assert (found[-1].prompt_logprobs is None) == (kind is DELTA)


def test_sequences_of_one_request():
    for kind in (CUMULATIVE, DELTA, FINAL):
        processor = new_processor()
        assert [m.request_id for m in processor.add(make_request(kind=kind, n=2))] == ["0_r", "1_r"]
        first = processor.process([CoreOutput("0_r", [IDS[0]]), CoreOutput("1_r", [IDS[1]])]).outputs
        assert len(first) == (0 if kind is FINAL else 1)
        second = processor.process([CoreOutput("1_r", [IDS[2]], "length")]).outputs
        third = processor.process([CoreOutput("0_r", [IDS[3]], "length")]).outputs
        assert third[0].finished
        assert not any(o.finished for o in second)
        if kind is DELTA:
            assert [c.index for c in second[0].outputs] == [1]
            assert [c.token_ids for c in third[0].outputs] == [[IDS[3]]]
        else:
            assert [c.token_ids for c in third[0].outputs] == [[IDS[0], IDS[3]], [IDS[1], IDS[2]]]


def test_best_of_ranks_by_cumulative_logprob():
    request = make_request(kind=FINAL, n=1, best_of=3)
    for child in request.children:
        child.params.logprobs = 0
    processor = new_processor()
    processor.add(request)
    for i, logprob in enumerate([-3.0, -1.0, -2.0]):
        step = TokenLogprobs([IDS[i]], [logprob], 1)
        found = processor.process([CoreOutput(f"{i}_r", [IDS[i]], "length", logprobs=[step])])
    (completion,) = found.outputs[0].outputs
    assert (completion.index, completion.token_ids, completion.cumulative_logprob) == (0, [IDS[1]], -1.0)


def test_abort_gives_a_last_output_and_frees_the_id():
    for kind in (CUMULATIVE, DELTA, FINAL):
        processor = new_processor()
        processor.add(make_request(kind=kind, n=2))
        processor.process([CoreOutput("0_r", IDS[:2], "length"), CoreOutput("1_r", IDS[:3])])
        with pytest.raises(ValueError, match="^Request r already exists.$"):
            processor.add(make_request())
        core_ids, outputs = processor.abort(["unknown", "r"])
        assert core_ids == ["1_r"]
        assert outputs[0].finished
        assert [c.finish_reason for c in outputs[0].outputs] == ["length", "abort"]
        if kind is FINAL:
            assert [c.text for c in outputs[0].outputs] == [TOKENIZER.decode(IDS[:2]), TOKENIZER.decode(IDS[:3])]
        processor.add(make_request())


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_an_error_of_one_sequence_ends_the_whole_request(kind):
    """Else a stream would go on and end as if nothing had happened."""
    processor = new_processor()
    processor.add(make_request(kind=kind, n=3, seed=1))
    processor.process([CoreOutput("0_r", IDS[:2]), CoreOutput("2_r", IDS[:1], "length")])
    found = processor.process([CoreOutput("0_r", [], "error", error="no memory"), CoreOutput("1_r", IDS[:1])])
    (last,) = found.outputs
    assert last.finished and failure_of(last) == "no memory"
    assert found.aborts == ["1_r"] and processor.num_unfinished == 0 and not processor._owner
    assert not processor.process([CoreOutput("1_r", IDS[:1], "length")]).outputs


def test_error_ends_the_request_with_its_text():
    processor = new_processor()
    processor.add(make_request())
    found = processor.process([CoreOutput("r", [], "error", error="out of luck")])
    assert found.outputs[0].finished
    assert (found.outputs[0].outputs[0].finish_reason, found.outputs[0].outputs[0].stop_reason) == (
        "error",
        "out of luck",
    )


@pytest.mark.parametrize(("said", "kind"), [({}, str), ({"refused": True}, Refusal), ({"late": True}, Delay)])
def test_an_error_says_whether_the_request_is_at_fault_or_came_at_a_bad_time(said, kind):
    processor = new_processor()
    processor.add(make_request(n=2))
    ends = [CoreOutput(f"{i}_r", [], "error", error="why", **said) for i in range(2)]
    (output,) = processor.process(ends).outputs
    assert output.finished and type(failure_of(output)) is kind


def test_metrics_are_counted():
    metrics = EngineMetrics("m", 1000, {})
    processor = new_processor(metrics)
    processor.add(make_request("a", n=2))
    processor.add(make_request("b", kind=FINAL))
    for i in range(3):
        reason = "length" if i == 2 else None
        processor.process(
            [CoreOutput(r, [IDS[i]], reason, first_scheduled_time=time.time()) for r in ("0_a", "1_a", "b")]
        )
    assert metrics.finished["length"] == 2
    assert sum(metrics.time_to_first_token.counts) == 2, "one for each request"
    assert sum(metrics.time_per_output_token.counts) == 6
    assert metrics.request_generation_tokens.total == 9
    processor.add(make_request("c"))
    processor.abort(["c"])
    assert metrics.finished["abort"] == 1


@pytest.mark.parametrize(("kind", "limit"), [(FINAL, 5e-6), (DELTA, 25e-6)])
def test_cost_per_token(kind, limit):
    """A guard against accidents, several times above what it costs."""
    processor = new_processor()
    names = [f"r{i}" for i in range(100)]
    for name in names:
        processor.add(make_request(name, kind=kind))
    best = float("inf")
    for token in IDS * 3:
        step = [CoreOutput(name, [token]) for name in names]
        start = time.perf_counter()
        processor.process(step)
        best = min(best, (time.perf_counter() - start) / len(names))
    assert best < limit
