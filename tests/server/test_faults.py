"""Faults on purpose: the request at fault ends with an error, all others get the same bytes, the engine goes on."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.server.engines import OPTIONS, PROMPTS, all_final, assert_idle, core_pid, final, greedy, running
from vllm import LLM
from vllm.engine.async_llm_engine import AsyncEngineDeadError
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
