"""Faults on purpose: the request at fault ends with an error, all others get the same bytes, the engine goes on."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.server.engines import OPTIONS, PROMPTS, all_final, assert_idle, core_pid, final, greedy, running
from vllm import LLM, SamplingParams
from vllm.engine.async_llm_engine import AsyncEngineDeadError, AsyncLLMEngine
from vllm.exceptions import EngineGenerateError
from vllm.faults import Faults, InjectedFault

VICTIM = 13
LONG = 100


@pytest.fixture(scope="module", autouse=True)
def strict():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_STRICT", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def offline(model_folder) -> list[str]:
    """The texts that an undisturbed engine gives, request by request."""
    options = {k: v for k, v in OPTIONS.items() if k != "disable_log_requests"}
    with LLM(str(model_folder), **options) as llm:
        return [o.outputs[0].text for o in llm.generate(PROMPTS, greedy(LONG), use_tqdm=False)]


def check_one_failed(texts, offline, victim: int = VICTIM) -> None:
    assert isinstance(texts[victim], EngineGenerateError), texts[victim]
    assert "injected" in str(texts[victim])
    others = [i for i in range(32) if i != victim]
    assert [texts[i] for i in others] == [offline[i] for i in others]


@pytest.mark.parametrize("separate", [True, False])
async def test_faults_of_one_request_stay_its_own(model_folder, offline, monkeypatch, separate):
    """T16: sampler, detokenizer and tokenizer raise for 1 of 32, several times in a row; the core's process stays."""
    points = ["sampler.raise@s-13-", "detok.raise@d-13-", "tokenizer.raise@t-13-"]
    monkeypatch.setenv("VLLM_FAULTS", ",".join(points))
    async with running(model_folder, separate=separate) as engine:
        pid = core_pid(engine) if separate else 0
        for round_ in range(3):
            check_one_failed(await all_final(engine, PROMPTS, greedy(LONG), "s"), offline)
            check_one_failed(await all_final(engine, PROMPTS, greedy(LONG), "d"), offline)
            texts = await all_final(engine, PROMPTS, greedy(LONG), "t")
            assert isinstance(texts[VICTIM], InjectedFault), round_
            assert [t for i, t in enumerate(texts) if i != VICTIM] == [t for i, t in enumerate(offline) if i != VICTIM]
            await assert_idle(engine)
        assert await all_final(engine, PROMPTS, greedy(LONG), "ok") == offline
        if separate:
            assert core_pid(engine) == pid
        assert engine.metrics.finished["error"] == 6
        await engine.check_health()


async def test_failing_steps_cost_nothing(model_folder, offline, monkeypatch):
    """T16, T18: steps that fail once (an exception, no memory) are repeated request by request; every text is whole."""
    monkeypatch.setenv("VLLM_FAULTS", "forward.raise@5,alloc.oom@60,forward.raise@130")
    async with running(model_folder) as engine:
        assert await all_final(engine, PROMPTS, greedy(LONG)) == offline
        await assert_idle(engine)
        assert await all_final(engine, PROMPTS, greedy(LONG), "again") == offline
        await assert_idle(engine)


async def test_nan_in_one_row_ends_one_request(model_folder, offline, monkeypatch):
    """T17: the request whose logits are NaN ends with an error, the others do not notice."""
    monkeypatch.setenv("VLLM_FAULTS", "forward.nan_row@7,forward.nan_row@20")
    async with running(model_folder) as engine:
        texts = await all_final(engine, PROMPTS, greedy(LONG))
        failed = [i for i, t in enumerate(texts) if isinstance(t, EngineGenerateError)]
        assert len(failed) == 2
        assert all("not finite" in str(texts[i]) for i in failed)
        assert all(texts[i] == offline[i] for i in range(32) if i not in failed)
        await assert_idle(engine)
        assert await all_final(engine, PROMPTS, greedy(LONG), "again") == offline


# Batches of 32 whose tokens are chosen by different code: the maximum; drawn; everything that changes logits, several
# sequences, logprobs and beams side by side.
ALL_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {5: 3.0}},
    {"temperature": 1.0, "seed": 5, "n": 3, "min_tokens": 5, "bad_words": ["the"]},
    {"temperature": 1.0, "seed": 6, "top_k": 7, "min_p": 0.05, "allowed_token_ids": list(range(5, 200))},
    {"temperature": 0.0, "n": 2, "use_beam_search": True},
    {"temperature": 0.0, "logprobs": 3, "stop_token_ids": [1]},
)
BATCHES: dict[str, list[SamplingParams]] = {
    "greedy": [greedy(LONG)] * 32,
    "drawn": [SamplingParams(temperature=0.8, seed=i, max_tokens=LONG, ignore_eos=True) for i in range(32)],
    "all kinds": [SamplingParams(**ALL_KINDS[i % 7], max_tokens=LONG, ignore_eos=True) for i in range(32)],
}
NOT_FINITE = ("forward.logits@{}:nan", "forward.logits@{}:inf", "forward.logits@{}:-inf")
NOT_FINITE += ("forward.logit@{}:nan", "forward.logit@{}:inf")  # one -inf is a token that the model bars


async def texts_of(engine: AsyncLLMEngine, batch: list[SamplingParams], tag: str) -> list[Any]:
    """The texts of a batch, a tuple for each request, or its exception."""

    async def one(i: int) -> tuple[str, ...]:
        return tuple(o.text for o in (await final(engine, PROMPTS[i], batch[i], f"{tag}-{i}")).outputs)

    return await asyncio.gather(*(one(i) for i in range(32)), return_exceptions=True)


async def whole_steps_without_a_finite_number(folder: Path, separate: bool, rounds: int) -> tuple[int, int]:
    """T17: steps whose rows are all NaN, inf or -inf, or have one NaN or inf each, in three kinds of batches. Every
    request ends with the error, later ones are exact. Returns how many ended, and how many were exact after it all.
    """
    patch = pytest.MonkeyPatch()
    patch.delenv("VLLM_FAULTS", raising=False)
    async with running(folder, max_num_seqs=96, separate=separate) as engine:
        want = {name: await texts_of(engine, batch, name) for name, batch in BATCHES.items()}
        assert not [t for texts in want.values() for t in texts if isinstance(t, BaseException)]
    # Every 60 steps: long after all requests of a batch have begun, long before the first has ended. Five steps in a
    # row, for a beam search that is between two of its own; what is left of them may strike the next batch's prompts.
    kinds = [(point, name) for _ in range(rounds) for point in NOT_FINITE for name in BATCHES]
    faults = [point.format(60 * (i + 1) + step) for i, (point, _) in enumerate(kinds) for step in range(5)]
    patch.setenv("VLLM_FAULTS", ",".join(faults))
    ended = exact = 0
    try:
        async with running(folder, max_num_seqs=96, separate=separate) as engine:
            for i, (point, name) in enumerate(kinds):
                found = await texts_of(engine, BATCHES[name], f"{i}")
                wrong = [t for t in found if not isinstance(t, EngineGenerateError) or "not finite" not in str(t)]
                assert not wrong, (point, name, wrong)
                ended += len(found)
                await assert_idle(engine)
            await engine.check_health()
            for i in range(5):  # nothing of the last five is left
                await asyncio.gather(final(engine, "Hello", greedy(1), f"last-{i}"), return_exceptions=True)
            for name, batch in BATCHES.items():
                exact += sum(a == b for a, b in zip(await texts_of(engine, batch, name), want[name], strict=True))
            await assert_idle(engine)
    finally:
        patch.undo()
    return ended, exact


async def test_steps_without_a_finite_number_end_all_their_requests(model_folder):
    ended, exact = await whole_steps_without_a_finite_number(model_folder, separate=False, rounds=1)
    print(f"T17: whole steps: {ended} of 480 ended with the error, {exact} of 96 after them exact")
    assert (ended, exact) == (480, 96)


def damage(source: Path, folder: Path, tokens: list[int]) -> Path:
    """Copy the model and make the embeddings of these tokens NaN, inf and -inf by turns."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for i, token in enumerate(tokens):
        tensors["model.embed_tokens.weight"][token] = float(("nan", "inf", "-inf")[i % 3])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("separate", [True, False])
async def test_damaged_weights_hurt_only_who_uses_them(model_folder, tmp_path, separate):
    """T17 without a fault point: requests with damaged tokens leave NaN in blocks of the cache that others get next."""
    rng = random.Random(17)
    prompts = [[rng.randrange(5, 300) for _ in range(rng.randint(1, 60))] for _ in range(32)]
    with LLM(str(model_folder), **{k: v for k, v in OPTIONS.items() if k != "disable_log_requests"}) as llm:
        good = [{"prompt_token_ids": p} for p in prompts]
        outputs = [o.outputs[0] for o in llm.generate(good, greedy(30), use_tqdm=False)]
    want = [o.text for o in outputs]
    used = {5, *(t for p in prompts for t in p), *(t for o in outputs for t in o.token_ids)}
    tokens = [t for t in range(5, 320) if t not in used][:3]
    damaged = damage(model_folder, tmp_path / "model", tokens)
    bad = [{"prompt_token_ids": [*p[: i % 40], tokens[i % 3], *p[i % 40 :]]} for i, p in enumerate(prompts)]
    # Room for about ten requests at once, so that blocks go round.
    ended = exact = 0
    async with running(damaged, num_gpu_blocks_override=120, max_num_seqs=10, separate=separate) as engine:
        for round_ in range(3):
            mixed = [p for pair in zip(bad, good, strict=True) for p in pair]
            found = await all_final(engine, mixed, greedy(30), f"{round_}")
            ended += sum(isinstance(t, EngineGenerateError) and "not finite" in str(t) for t in found[::2])
            after = await all_final(engine, good, greedy(30), f"after {round_}")
            exact += sum(a == b for a, b in zip([*found[1::2], *after], [*want, *want], strict=True))
            await assert_idle(engine)
    assert (ended, exact) == (96, 192)
    print(f"T17: damaged weights: {ended} of 96 requests ended with the error, {exact} of 192 others exact")


async def test_slow_tokenizer_holds_up_nobody_else(model_folder, offline, monkeypatch):
    """T19: one request takes 3 s to tokenize; the loop stays awake and the others are done long before."""
    monkeypatch.setenv("VLLM_FAULTS", "tokenizer.sleep@z-13-:3")
    async with running(model_folder) as engine:
        lags = []

        async def measure() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                lags.append(time.monotonic() - before - 0.01)

        measuring = asyncio.ensure_future(measure())
        start = time.monotonic()
        slow = asyncio.ensure_future(final(engine, PROMPTS[VICTIM], greedy(LONG), "z-13-"))
        await asyncio.sleep(0)
        texts = await all_final(engine, PROMPTS, greedy(LONG), "quick")
        assert time.monotonic() - start < 2.8
        assert texts == offline
        with pytest.raises(TimeoutError):
            async for _ in engine.generate(PROMPTS[0], greedy(), "z-13-too", timeout=0.1):
                pass
        assert (await slow).outputs[0].text == offline[VICTIM]
        measuring.cancel()
        assert sorted(lags)[int(len(lags) * 0.99)] < 0.1
        await assert_idle(engine)


async def test_core_that_vanishes(model_folder, monkeypatch):
    """The core ends without a word in the middle of its messages."""
    monkeypatch.setenv("VLLM_FAULTS", "ipc.drop@6")
    async with running(model_folder) as engine:
        ends = await asyncio.wait_for(all_final(engine, PROMPTS, greedy(LONG)), 5.0)
        assert all(isinstance(e, AsyncEngineDeadError) for e in ends)
        assert engine.errored


@pytest.mark.parametrize("text", ["forward.raise", "forward.raise@x", "nothing@3", "sampler.raise@", "@", "a"])
def test_points_that_do_not_exist_are_refused(monkeypatch, text):
    monkeypatch.setenv("VLLM_FAULTS", text)
    with pytest.raises(ValueError, match="VLLM_FAULTS"):
        Faults.from_env()


def test_faults_are_off_without_the_variable(monkeypatch):
    monkeypatch.delenv("VLLM_FAULTS", raising=False)
    assert not Faults.from_env()


def test_a_step_point_strikes_once(monkeypatch):
    monkeypatch.setenv("VLLM_FAULTS", "forward.raise@3")
    faults = Faults.from_env()
    faults.before_forward()
    faults.before_forward()
    with pytest.raises(InjectedFault):
        faults.before_forward()
    faults.before_forward()
