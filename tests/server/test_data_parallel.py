"""Copies of the engine in processes: the same answers, and what clients see when one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.engines import OPTIONS, final, greedy, leftovers, running, settle
from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.exceptions import EngineDeadError, EngineGenerateError
from vllm.sampling_params import RequestOutputKind


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def prompts(count: int) -> list[str]:
    return [f"Number {i} says: Hello, my name is {'Ada ' * (i % 7)}" for i in range(count)]


async def while_copies_are_killed(folder: Path, count: int) -> tuple[int, int]:
    """Answer `count` requests while each of two copies is killed once. (answered, ended with an error)."""
    before = leftovers()
    async with running(folder) as engine:
        want = await asyncio.gather(*(final(engine, p, greedy(12 + i % 9), str(i)) for i, p in enumerate(prompts(40))))
    async with running(folder, data_parallel_size=2) as engine:
        fleet: Any = engine._core
        assert len(fleet._replicas) == 2
        outcomes: dict[int, Any] = {}

        async def one(i: int) -> None:
            try:
                outcomes[i] = await final(engine, prompts(40)[i % 40], greedy(12 + i % 40 % 9), f"r{i}")
            except EngineGenerateError as error:
                outcomes[i] = error

        waves, size = [range(first, min(first + 50, count)) for first in range(0, count, 50)], len(range(0, count, 50))
        for turn, wave in enumerate(waves):
            tasks = [asyncio.ensure_future(one(i)) for i in wave]
            if turn in (size // 3, 2 * size // 3):
                victim = fleet._replicas[turn == size // 3]
                while not any(held.begun for held in victim.held.values()):
                    await asyncio.sleep(0)
                os.kill(victim.client.pid, signal.SIGKILL)
            await asyncio.gather(*tasks)
            await settle(lambda: all(r.alive for r in fleet._replicas), 60)
        errors = 0
        for i in range(count):
            outcome = outcomes[i]
            if isinstance(outcome, EngineGenerateError):
                errors += 1
                assert "replica that worked on this request has ended" in str(outcome)
            else:
                assert list(outcome.outputs[0].token_ids) == list(want[i % 40].outputs[0].token_ids)
        assert len(outcomes) == count
        text = {line.split("}")[0] for family in engine.metrics.collect() for line in map(str, family.samples)}
        assert any("'engine': '1'" in line for line in text)
        assert not fleet._owner and not fleet._orphans and engine.get_num_unfinished_requests() == 0
    assert leftovers() == before
    return count - errors, errors


@pytest.mark.timeout(120)
async def test_every_request_is_answered_once_while_copies_are_killed(model_folder: Path) -> None:
    answered, failed = await while_copies_are_killed(model_folder, 100)
    assert answered + failed == 100 and 0 < failed <= 60


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_thousand_requests_while_copies_are_killed(model_folder: Path) -> None:
    answered, failed = await while_copies_are_killed(model_folder, 1000)
    print(f"DP: {answered} of 1000 answered, {failed} ended with an error")
    assert answered + failed == 1000 and 0 < failed <= 100


async def test_what_has_not_begun_moves_when_a_rank_of_its_copy_is_killed(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, num_hidden_layers=2)
    async with running(folder, data_parallel_size=2, pipeline_parallel_size=2, max_num_seqs=2) as engine:
        fleet: Any = engine._core
        tasks = {
            f"r{i}": asyncio.ensure_future(final(engine, text, greedy(60), f"r{i}"))
            for i, text in enumerate(prompts(40))
        }
        victim = fleet._replicas[0]
        while not any(held.begun for held in victim.held.values()):
            await asyncio.sleep(0)
        (rank,) = (p for p in psutil.Process(victim.client.pid).children() if "worker_process" in " ".join(p.cmdline()))
        rank.kill()
        moves = [name for name, held in victim.held.items() if not held.begun]
        outcomes = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        failed = [name for name, outcome in outcomes.items() if isinstance(outcome, BaseException)]
        assert len(moves) > 5 and 0 < len(failed) < 20
        late = set(failed) & set(moves)  # the rank works on for a moment: what begins in it has begun
        assert len(late) <= 4, (late, [str(outcomes[name]) for name in late])
        assert all("Rank" not in str(outcomes[name]) for name in failed)


async def test_a_whole_answer_in_progress_is_computed_again_when_its_copy_is_killed(model_folder: Path) -> None:
    drawn = SamplingParams(n=3, seed=7, max_tokens=300, ignore_eos=True)
    told = SamplingParams(n=2, seed=7, max_tokens=300, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    kinds = [greedy(300), greedy(300, stop=["qqq"]), drawn, told]
    async with running(model_folder, data_parallel_size=2) as engine:
        fleet: Any = engine._core
        for params in kinds:
            params.output_kind = RequestOutputKind.FINAL_ONLY
        want = [await final(engine, "Hello you", params, f"w{i}") for i, params in enumerate(kinds)]
        tasks = [asyncio.ensure_future(final(engine, "Hello you", kinds[i % 4], f"r{i}")) for i in range(8)]
        owners: dict[str, Any] = engine.output_processor._owner
        while "0_r3" not in owners or not all(len(owners[f"{i}_r3"][1].logprobs) > 3 for i in range(2)):
            await asyncio.sleep(0)
        victim = fleet._owner["0_r3"][0]
        assert all(held.begun for held in victim.held.values()) and engine.output_processor._held_logprobs
        os.kill(victim.client.pid, signal.SIGKILL)
        for i, found in enumerate(await asyncio.gather(*tasks)):
            expected = want[i % 4]
            for a, b in zip(found.outputs, expected.outputs, strict=True):
                assert (a.text, list(a.token_ids), a.finish_reason) == (b.text, list(b.token_ids), b.finish_reason)
                assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
                assert_alike(a.logprobs, b.logprobs)
            assert_alike(found.prompt_logprobs, expected.prompt_logprobs)
        assert engine.output_processor._held_logprobs == 0
        await settle(lambda: all(r.alive for r in fleet._replicas), 60)


def assert_alike(found: Any, expected: Any) -> None:
    """The same log probabilities of the same tokens, or none."""
    assert (found is None) == (expected is None)
    for a, b in zip(found or (), expected or (), strict=True):
        values = [None if at is None else {token: at[token].logprob for token in at} for at in (a, b)]
        assert values[0] == (None if b is None else pytest.approx(values[1], abs=1e-4))


@pytest.mark.parametrize("comes_back", [False, True])
async def test_what_was_sent_to_a_frozen_copy_is_answered_by_another(model_folder: Path, comes_back: bool) -> None:
    """comes_back: that one freezes, too, while the first wakes up."""
    params = [greedy(12 + i, logprobs=1 if i % 2 else None) for i in range(8)]
    pairs = list(zip(prompts(8), params, strict=True))
    async with running(model_folder, data_parallel_size=2) as engine:
        fleet: Any = engine._core
        want = [await final(engine, *pair, f"w{i}") for i, pair in enumerate(pairs)]
        first, second = fleet._replicas
        os.kill(first.client.pid, signal.SIGSTOP)
        try:
            tasks = [asyncio.ensure_future(final(engine, *pair, f"r{i}")) for i, pair in enumerate(pairs)]
            await settle(lambda: sum(task.done() for task in tasks) == len(first.held) == 4)
            if comes_back:
                await asyncio.sleep(1.0)
                os.kill(second.client.pid, signal.SIGSTOP)
                await settle(lambda: len(second.held) == 4 and not second.well, 10)
                os.kill(first.client.pid, signal.SIGCONT)
            done, _ = await asyncio.wait(tasks, timeout=5)
            assert len(done) == 8
        finally:
            for replica in fleet._replicas:
                os.kill(replica.client.pid, signal.SIGCONT)
        for found, expected in zip([task.result() for task in tasks], want, strict=True):
            (a,), (b,) = found.outputs, expected.outputs
            assert (a.text, list(a.token_ids), a.finish_reason) == (b.text, list(b.token_ids), b.finish_reason)
            assert_alike(a.logprobs, b.logprobs)
        await settle(lambda: first.well and second.well)
        assert [(await r.client.call("idle_report"))["requests"] for r in fleet._replicas] == [0, 0]


async def test_a_rank_that_hangs_ends_its_engine_and_is_not_left(tmp_path: Path, monkeypatch: Any) -> None:
    """It is alive, and the others wait for it: only the time that a step takes tells."""
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "2")
    async with running(save_llama(tmp_path, intermediate_size=76), tensor_parallel_size=2) as engine:
        await final(engine, "Hello", greedy(4), "before")
        ranks = psutil.Process().children(recursive=True)
        (rank,) = [p for p in ranks if "vllm.executor.worker_process" in p.cmdline()]
        rank.suspend()
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match="has not finished a step for"):
            await final(engine, "Hello", greedy(400), "hung")
        assert time.monotonic() - started < 10
        with pytest.raises(EngineDeadError):
            await engine.check_health()
    await settle(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, 10)


def test_one_process_cannot_be_several_copies(model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data_parallel_size=2: LLM and LLMEngine run one engine in this process"):
        LLM(str(model_folder), data_parallel_size=2)
    config = AsyncEngineArgs(model=str(model_folder), **{**OPTIONS, "data_parallel_size": 2}).create_engine_config()
    with pytest.raises(ValueError, match="--disable-frontend-multiprocessing forbids"):
        AsyncLLMEngine.from_vllm_config(config, disable_frontend_multiprocessing=True)


def test_nobody_starts_a_million_copies(model_folder: Path) -> None:
    """On a CPU nothing else bounds their number, and each is a process."""
    with pytest.raises(ValueError, match="data_parallel_size must be at most 1024, got 1000000"):
        AsyncEngineArgs(str(model_folder), data_parallel_size=1_000_000).create_engine_config()


def test_one_of_several_copies_may_be_run_alone(model_folder: Path) -> None:
    llm = LLM(str(model_folder), data_parallel_size=2, data_parallel_rank=1, dtype="float32", max_model_len=64)
    assert len(llm.generate("Hello", SamplingParams(max_tokens=3), use_tqdm=False)) == 1
    with pytest.raises(ValueError, match="data_parallel_rank=2 must be below data_parallel_size=2"):
        LLM(str(model_folder), data_parallel_size=2, data_parallel_rank=2)
