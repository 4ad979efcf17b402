"""The asynchronous engine with a real core process: same text as offline, aborts, limits, deadlines, drain, metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from tests.server.engines import (
    OPTIONS,
    PROMPTS,
    all_final,
    assert_idle,
    final,
    greedy,
    make,
    running,
    settle,
    stream_text,
)
from vllm import LLM, SamplingParams
from vllm.engine.async_llm_engine import AsyncEngineDeadError, AsyncLLMEngine
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.context import as_api_error
from vllm.exceptions import EngineDeadError, QueueOverflowError, RetryableRequestError, VLLMValidationError
from vllm.metrics.registry import render
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind
from vllm.structured_output import requests
from vllm.structured_output.compiler import GrammarCompiler

LONG = 450


@pytest.fixture(scope="module", autouse=True)
def strict():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_STRICT", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def offline(model_folder) -> dict[str, str]:
    """Prompt -> greedy text of the offline engine."""
    options = {k: v for k, v in OPTIONS.items() if k != "disable_log_requests"}
    with LLM(str(model_folder), **options) as llm:
        return {o.prompt: o.outputs[0].text for o in llm.generate(PROMPTS, greedy(), use_tqdm=False)}


def counters(engine: AsyncLLMEngine) -> dict[str, float]:
    found = {}
    for line in render([engine.metrics]).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def total(engine: AsyncLLMEngine, name: str) -> float:
    return sum(value for key, value in counters(engine).items() if key.startswith(name + "{"))


@pytest.mark.parametrize("separate", [True, False])
async def test_32_at_once_give_the_offline_text(model_folder, offline, separate):
    async with running(model_folder, separate=separate) as engine:
        texts = await all_final(engine, PROMPTS, greedy())
        assert dict(zip(PROMPTS, texts, strict=True)) == offline
        streamed = await asyncio.gather(*(stream_text(engine, p, greedy(), f"s{p}") for p in PROMPTS))
        assert dict(zip(PROMPTS, streamed, strict=True)) == offline
        assert total(engine, "vllm:request_success_total") == 64
        assert total(engine, "vllm:generation_tokens_total") == 64 * 24
        assert total(engine, "vllm:time_to_first_token_seconds_count") == 64
        assert total(engine, "vllm:time_per_output_token_seconds_count") == 64 * 23
        assert total(engine, "vllm:request_generation_tokens_sum") == 64 * 24
        await assert_idle(engine)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("how", ["abort", "leave"])
async def test_a_name_that_is_used_again_at_once_has_the_new_answer(model_folder, offline, separate, how):
    async with running(model_folder, separate=separate) as engine:
        for turn in range(40):
            old = engine.generate("Hello" * (1 + turn % 3), greedy(LONG), "again")
            for _ in range(1 + turn % 4):
                await anext(old)
            if how == "abort":
                await engine.abort("again")
            else:
                await old.aclose()
            assert await stream_text(engine, PROMPTS[0], greedy(), "again") == offline[PROMPTS[0]]
            await old.aclose()
        await assert_idle(engine)


@pytest.mark.parametrize("separate", [True, False])
async def test_long_prompts_logprobs_come_whole_and_beside_others(model_folder, offline, separate):
    """They travel in pieces (7,600 here, of which a message takes 4,096)."""
    options = {**OPTIONS, "max_num_batched_tokens": 512}
    options.pop("disable_log_requests")
    prompt = {"prompt_token_ids": [5 + i * 7 % 290 for i in range(LONG)]}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=16)
    with LLM(str(model_folder), **options) as llm:
        (expected,) = llm.generate([prompt], params, use_tqdm=False)
    async with running(model_folder, separate=separate, max_num_batched_tokens=512) as engine:
        beside = asyncio.ensure_future(all_final(engine, PROMPTS, greedy()))
        found = [output async for output in engine.generate(prompt, params, "long")][-1]
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert len(found.prompt_logprobs) == LONG
        assert found.prompt_logprobs[0] is None
        for mine, theirs in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert list(mine)[0] == list(theirs)[0]
            assert len(mine) == len(theirs)
            assert [p.logprob for p in mine.values()] == pytest.approx([p.logprob for p in theirs.values()], abs=1e-4)
        assert dict(zip(PROMPTS, await beside, strict=True)) == offline
        assert total(engine, "vllm:prompt_tokens_total") == LONG + sum(
            len(engine.input_processor.tokenizer.encode(p)) for p in PROMPTS
        )
        await assert_idle(engine)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_whose_grammar_comes_too_late_is_told_to_try_again(model_folder, monkeypatch, kind):
    """As whoever finds the queue full: nothing has failed."""
    monkeypatch.setattr(requests, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(GrammarCompiler, "compile", lambda self, spec: Future())
    async with running(model_folder, separate=False) as engine:
        form = GuidedDecodingParams(choice=["yes", "no"])
        params = SamplingParams(max_tokens=4, n=2, output_kind=kind, guided_decoding=form)
        with pytest.raises(RetryableRequestError, match="not compiled within .* try again later") as late:
            await final(engine, PROMPTS[0], params, "late")
        answer = as_api_error(late.value)
        assert (answer.status, answer.type) == (503, "ServiceUnavailableError") and "retry-after" in answer.headers
        await assert_idle(engine)


async def test_one_engine_through_its_life(model_folder, offline):
    """Everything that leaves a healthy engine behind, on one engine."""
    async with running(model_folder, max_num_queued_reqs=1000) as engine:
        await leaving_aborts(engine)
        await aborting_by_id(engine)
        await several_sequences(engine)
        await a_slow_reader_finds_everything_merged(engine, offline)
        await errors_of_a_request_are_its_own(engine)
        await deadlines(engine)
        await a_storm_of_leavers(engine)
        await chunks_of_prompts_are_counted(engine)
        await utilities(engine)
        text = (await final(engine, PROMPTS[3], greedy(), "last")).outputs[0].text
        assert text == offline[PROMPTS[3]]
        await assert_idle(engine)


async def leaving_aborts(engine):
    generator = engine.generate("Hello", greedy(LONG), "leaver")
    async for output in generator:
        assert output.outputs[0].token_ids
        break
    start = time.monotonic()
    await generator.aclose()
    await assert_idle(engine)
    assert time.monotonic() - start < 1.0
    task = asyncio.ensure_future(final(engine, "Hello", greedy(LONG), "cancelled"))
    await settle(lambda: "cancelled" in engine.output_processor)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_idle(engine)


async def aborting_by_id(engine):
    task = asyncio.ensure_future(final(engine, "Hello", greedy(LONG), "gone"))
    await settle(lambda: "gone" in engine.output_processor)
    await engine.abort("gone")
    output = await task
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    await engine.abort(["gone", "never there"])
    await assert_idle(engine)


async def several_sequences(engine):
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
    whole = await final(engine, "The capital", params, "four")
    assert [o.index for o in whole.outputs] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    params.output_kind = RequestOutputKind.DELTA
    async for output in engine.generate("The capital", params, "four again"):
        for completion in output.outputs:
            texts[completion.index] += completion.text
    assert texts == {o.index: o.text for o in whole.outputs}
    generator = engine.generate("The capital", SamplingParams(n=4, max_tokens=LONG, ignore_eos=True), "four leave")
    await generator.__anext__()
    await generator.aclose()
    await assert_idle(engine)


async def a_slow_reader_finds_everything_merged(engine, offline):
    params = greedy()
    params.output_kind = RequestOutputKind.DELTA
    outputs = []
    async for output in engine.generate(PROMPTS[0], params, "slow"):
        outputs.append(output)
        await settle(lambda: "slow" not in engine.output_processor)  # all of it has come meanwhile
    assert len(outputs) == 2
    assert "".join(o.outputs[0].text for o in outputs) == offline[PROMPTS[0]]
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 24


async def errors_of_a_request_are_its_own(engine):
    neighbour = asyncio.ensure_future(final(engine, PROMPTS[1], greedy(LONG), "neighbour"))
    for bad, error in [
        ("x" * 100_000, ValueError),
        ({"prompt_token_ids": [10**6]}, ValueError),
        ({"prompt_token_ids": []}, ValueError),
        (17, TypeError),
    ]:
        with pytest.raises(error):
            await final(engine, bad, greedy(), "bad")
    with pytest.raises(ValueError, match="cannot be sent"):
        await final(engine, "Hello", greedy(logits_processors=[lambda ids, logits: logits]), "bad")
    with pytest.raises(KeyError, match="already exists"):
        await final(engine, "Hello", greedy(), "neighbour")
    with pytest.raises(ValueError, match="pooling"):
        async for _ in engine.encode("Hello", PoolingParams(), "pooled"):
            pass
    assert len((await neighbour).outputs[0].token_ids) == LONG


async def deadlines(engine):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        async for _ in engine.generate("Hello", greedy(LONG), "late", timeout=0.02):
            pass
    assert time.monotonic() - start < 0.55
    await assert_idle(engine)


async def a_storm_of_leavers(engine):
    """T06 in small: 200 requests whose consumers leave at every possible moment; some have several sequences."""
    before = total(engine, "vllm:request_success_total")

    async def leave(i: int) -> None:
        params = greedy(40) if i % 3 else SamplingParams(n=3, temperature=1.0, max_tokens=40, ignore_eos=True)
        seen = 0
        async for _ in engine.generate(PROMPTS[i % 32], params, f"storm-{i}"):
            seen += 1
            if seen > i % 7:
                return

    tasks = [asyncio.ensure_future(leave(i)) for i in range(200)]
    for i, task in enumerate(tasks):
        if i % 4 == 0:
            asyncio.get_running_loop().call_later(i * 0.001, task.cancel)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(e) for e in ends} <= {type(None), asyncio.CancelledError}
    await assert_idle(engine)
    accepted = total(engine, "vllm:request_success_total") - before
    cancelled_before_they_began = sum(isinstance(e, asyncio.CancelledError) for e in ends)
    assert 200 - cancelled_before_they_began <= accepted <= 200


async def chunks_of_prompts_are_counted(engine):
    """Steps that compute part of a prompt bring no output, and are counted all the same; aborts count nothing twice."""
    before = total(engine, "vllm:prompt_tokens_total")
    ids = [(7 * i) % 300 + 2 for i in range(230)]  # two steps: max_num_batched_tokens is 128
    await engine.reset_prefix_cache()
    await final(engine, {"prompt_token_ids": ids}, greedy(1), "long")
    await engine.abort("nobody")
    await assert_idle(engine)
    assert total(engine, "vllm:prompt_tokens_total") - before == 230


def blocks_of(worker):
    return worker.count_blocks()


def echo(worker, *values):
    return values


async def utilities(engine):
    assert await engine.reset_prefix_cache()
    assert await engine.collective_rpc("check_health") == [None]
    with pytest.raises(RuntimeError, match="no_such_method"):
        await engine.collective_rpc("no_such_method")
    assert await engine.collective_rpc("count_blocks", timeout=30) == await engine.collective_rpc(blocks_of)
    ((weights, shape),) = await engine.collective_rpc(echo, args=(torch.ones(2, dtype=torch.bfloat16), (1, 2)))
    assert weights.tolist() == [1, 1] and weights.dtype is torch.bfloat16 and shape == (1, 2)
    with pytest.raises(TypeError, match="no name there leads to it"):
        await engine.collective_rpc(lambda worker: worker)
    with pytest.raises(RuntimeError, match="no method"):
        await engine._core.call("shutdown")
    for later in (engine.sleep(), engine.wake_up()):
        with pytest.raises(NotImplementedError, match="later"):
            await later
    with pytest.raises(ValueError, match="LoRA is not enabled"):
        await engine.add_lora(None)
    assert (await engine.get_model_config()).max_model_len == 512
    assert (await engine.get_tokenizer()).encode("Hello")
    assert await engine.is_tracing_enabled() is False
    await engine.do_log_stats()
    engine.add_logger("mine", object())
    with pytest.raises(KeyError):
        engine.add_logger("mine", object())
    engine.remove_logger("mine")
    with pytest.raises(KeyError):
        engine.remove_logger("mine")
    await engine.check_health()


async def test_the_queue_has_bounds(model_folder):
    async with running(
        model_folder, max_num_seqs=2, max_num_queued_reqs=6, max_num_queued_tokens=300, separate=False
    ) as engine:
        tasks = [asyncio.ensure_future(final(engine, "Hello", greedy(60), f"q{i}")) for i in range(20)]
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [e for e in ends if isinstance(e, QueueOverflowError)]
        assert 10 <= len(refused) <= 14
        assert all(re.search("at most [678] may", str(e)) for e in refused)  # two of them in slots
        assert all(not isinstance(e, Exception) or e in refused for e in ends)
        # n counts as n; what is refused leaves nothing behind
        busy = [asyncio.ensure_future(final(engine, "Hello", greedy(LONG), f"b{i}")) for i in range(3)]
        await settle(lambda: engine._admission.waiting == 1)
        large = final(engine, "Hello", SamplingParams(n=9, max_tokens=5), "nine")
        busy.append(asyncio.ensure_future(large))  # the first that has some held back
        await settle(lambda: engine._admission.waiting > 1)
        with pytest.raises(QueueOverflowError):
            await final(engine, "Hello", SamplingParams(n=6, max_tokens=5), "six")
        with pytest.raises(QueueOverflowError, match="prompt tokens"):
            await final(engine, {"prompt_token_ids": [5] * 400}, SamplingParams(n=2, max_tokens=1), "big")
        await asyncio.gather(*busy)
        await assert_idle(engine)


async def test_what_can_run_at_once_does_not_wait_in_the_queue(model_folder):
    async with running(model_folder, max_num_seqs=8, max_num_queued_reqs=1, separate=False) as engine:
        for _ in range(2):
            ends = await asyncio.gather(*(final(engine, "Hello", greedy(9), f"q{i}") for i in range(8)))
            assert all(end.finished for end in ends)
        await assert_idle(engine)


async def test_one_request_has_no_more_than_its_share_of_the_queue(model_folder):
    async with running(model_folder, max_num_seqs=4, max_num_queued_reqs=16, separate=False) as engine:
        share, most = engine._admission.share, 0
        assert share == 4
        enter = engine._admission.enter

        def watched(requests, account=None):
            nonlocal most
            enter(requests, account)
            if account is not None:
                most = max(most, account.waiting)

        engine._admission.enter = watched
        many = asyncio.ensure_future(final(engine, "Hello", SamplingParams(n=60, max_tokens=5, seed=7), "many"))
        await settle(lambda: engine._admission.waiting > 0)
        others = await asyncio.gather(*(final(engine, "Hello", greedy(3), f"o{i}") for i in range(8)))
        assert all(len(o.outputs[0].token_ids) == 3 for o in others)
        whole = await many
        assert most == share
        assert [o.index for o in whole.outputs] == list(range(60))
        assert all(len(o.token_ids) == 5 or o.finish_reason == "stop" for o in whole.outputs)
        alone = [await final(engine, "Hello", SamplingParams(n=3, max_tokens=5, seed=7), "few")]
        assert [o.token_ids for o in alone[0].outputs] == [o.token_ids for o in whole.outputs[:3]]
        await assert_idle(engine)


async def test_prompts_that_are_held_back_are_no_messages_to_the_core(model_folder):
    async with running(model_folder, max_num_seqs=4, separate=False) as engine:
        sent, add = [], engine._core.add

        def watched(requests):
            sent.append(len(requests))
            add(requests)

        engine._core.add = watched
        streams = [await engine.open([5, 6, 7], greedy(2), f"p{i}", account="many") for i in range(40)]
        for stream in streams:
            assert len([o async for o in stream.outputs()][-1].outputs[0].token_ids) == 2
        assert sum(sent) == 40 and 0 not in sent
        await assert_idle(engine)


@pytest.mark.parametrize("how", ["abort", "leave"])
async def test_what_is_held_back_ends_with_its_request(model_folder, how):
    async with running(model_folder, max_num_seqs=4, separate=False) as engine:
        params = SamplingParams(n=200, max_tokens=LONG, ignore_eos=True)
        task = asyncio.ensure_future(final(engine, "Hello", params, "many"))
        await settle(lambda: engine._traffic._account_of)
        await settle(lambda: engine.output_processor.num_unfinished == 1)
        if how == "abort":
            await engine.abort("many")
            assert (await task).finished
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not engine._traffic._accounts and not engine._traffic._account_of
        assert len((await final(engine, "Hello", greedy(2), "next")).outputs[0].token_ids) == 2
        await assert_idle(engine)


async def test_shutdown_lets_running_requests_finish(model_folder, offline):
    """T14: every stream ends with its whole text; new requests are refused; the process ends with status 0."""
    async with running(model_folder) as engine:
        tasks = [asyncio.ensure_future(stream_text(engine, p, greedy(), p)) for p in PROMPTS]
        await settle(lambda: engine.get_num_unfinished_requests() + sum(t.done() for t in tasks) == 32)
        stopping = asyncio.ensure_future(engine.shutdown(30))
        await asyncio.sleep(0)
        with pytest.raises((QueueOverflowError, AsyncEngineDeadError), match="shut"):
            await final(engine, "Hello", greedy(), "too late")
        assert dict(zip(PROMPTS, await asyncio.gather(*tasks), strict=True)) == offline
        await stopping
        assert engine._core._process.returncode == 0
        assert engine.is_stopped
        with pytest.raises(AsyncEngineDeadError):
            await engine.check_health()


async def test_shutdown_lets_answers_be_written_for_as_long_as_it_waits(model_folder):
    async with running(model_folder) as engine:
        gate = threading.Event()
        writing = asyncio.ensure_future(engine.lanes.write(gate.wait, 60))
        stopping = asyncio.ensure_future(engine.shutdown(30))
        await settle(lambda: engine._core._process.returncode is not None)
        queued = asyncio.ensure_future(engine.lanes.join([b"a", b"b"], 1))
        await asyncio.sleep(0)
        gate.set()
        assert await writing and await queued == b"ab"
        await stopping
    async with running(model_folder) as engine:
        gate = threading.Event()
        pieces = (gate.wait(60) and b"a" for _ in range(2))
        writing = asyncio.ensure_future(engine.lanes.join(pieces, 1))
        await asyncio.sleep(0)
        await engine.shutdown(0)
        gate.set()
        with pytest.raises(EngineDeadError):
            await writing


@pytest.mark.parametrize("how", ["timeout", "second call"])
async def test_shutdown_ends_what_takes_too_long(model_folder, how):
    async with running(model_folder) as engine:
        params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
        tasks = [asyncio.ensure_future(stream_text(engine, [5, 6, 7], params, f"r{i}")) for i in range(32)]
        await settle(lambda: engine.metrics.generation_tokens > 0)
        start = time.monotonic()
        if how == "timeout":
            await engine.shutdown(0.05)
        else:
            first = asyncio.ensure_future(engine.shutdown(None))
            await asyncio.sleep(0.05)
            await engine.shutdown()
            await first
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < 3.0
        assert all(isinstance(e, AsyncEngineDeadError) for e in ends), ends


async def test_a_plain_call_of_shutdown_ends_the_engine(model_folder):
    """Older clients neither await it nor know that they could."""
    async with running(model_folder) as engine:
        assert (await final(engine, "Hello", greedy(3), "a")).finished
        engine.shutdown()
        await settle(lambda: engine._core._process.returncode == 0)


def test_shutdown_outside_of_an_event_loop_ends_the_engine(model_folder):
    engine = make(model_folder)
    result = engine.shutdown()
    assert engine.is_stopped

    async def awaited() -> None:
        await result

    asyncio.run(awaited())


@pytest.mark.parametrize("separate", [True, False])
def test_after_its_event_loop_an_engine_says_so(model_folder, separate):
    engine = make(model_folder, separate=separate)
    try:
        asyncio.run(final(engine, PROMPTS[0], greedy(), "first"))
        with pytest.raises(RuntimeError, match=r"The event loop .* is closed.* make another engine"):
            asyncio.run(asyncio.wait_for(final(engine, PROMPTS[0], greedy(), "second"), 5))
    finally:
        engine.shutdown()


async def test_older_keywords_of_generate_are_taken(model_folder, offline, caplog):
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        async with running(model_folder) as engine:
            headers = {"traceparent": "00-1-2-01"}
            stream = engine.generate(inputs=PROMPTS[0], sampling_params=greedy(), request_id="a", trace_headers=headers)
            last = [output async for output in stream][-1]
            assert last.outputs[0].text == offline[PROMPTS[0]]
            cut = {"truncate_prompt_tokens": 2}
            stream = engine.generate(PROMPTS[0], greedy(), "c", tokenization_kwargs=cut)
            assert [len(output.prompt_token_ids) async for output in stream][-1] == 2
            stream = await engine.add_request("d", PROMPTS[0], greedy(), tokenization_kwargs=cut)
            assert [len(output.prompt_token_ids) async for output in stream][-1] == 2
            with pytest.raises(TypeError, match="needs a prompt"):
                await anext(engine.generate(sampling_params=greedy(), request_id="b"))
            assert engine.model_config is await engine.get_model_config()
            assert isinstance(engine.tokenizer, PreTrainedTokenizerBase)
            assert engine.tokenizer.get_lora_tokenizer() is await engine.get_tokenizer()
            assert isinstance(engine, EngineClient)
    finally:
        logger.removeHandler(caplog.handler)
    assert "trace headers of request a are not used" in caplog.text


async def test_background_loop_by_hand(model_folder):
    engine = make(model_folder, separate=False)
    engine._start_automatically = False
    with pytest.raises(AsyncEngineDeadError, match="not running"):
        await final(engine, "Hello", greedy(), "a")
    engine.start_background_loop()
    with pytest.raises(RuntimeError, match="already running"):
        engine.start_background_loop()
    assert (await final(engine, "Hello", greedy(3), "a")).finished
    assert engine.is_running
    engine.shutdown_background_loop()
    assert not engine.is_running
    with pytest.raises(AsyncEngineDeadError):
        await final(engine, "Hello", greedy(), "b")


async def test_sequences_that_wait_leave_the_queue_when_their_request_fails(model_folder) -> None:
    """Else the queue would stay full of requests that are long gone."""
    async with running(model_folder, max_num_seqs=4) as engine:
        engine.output_processor.most_logprobs = 100
        params = SamplingParams(n=24, logprobs=5, max_tokens=50, output_kind=RequestOutputKind.FINAL_ONLY)
        with pytest.raises(VLLMValidationError, match="log probabilities"):
            await final(engine, "Hello", params, "greedy")
        await assert_idle(engine)
